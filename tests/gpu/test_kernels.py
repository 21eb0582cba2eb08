"""The Triton kernels against their plain counterparts, on random input."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xorflow import MADE, FactorisedBase, LatentFlow, Layer
from xorflow._cuda import kernels
from xorflow._cuda.steps import FusedAdam
from xorflow._math import philox_uniforms
from xorflow._states import Alphabet, Layout
from xorflow.conditioners import Source
from xorflow.data import Split
from xorflow.flows.choices import Choices

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (7, 33), (256, 784), (300, 1000)])
def test_marginal_matches_float64_autograd(rows: int, features: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, features, generator=generator)).to(CUDA)
    x = torch.randint(2, (rows, features), generator=generator).float().to(CUDA)
    base = (3 * torch.randn(features, generator=generator)).to(CUDA)
    weights = torch.randn(rows, generator=generator).to(CUDA)

    def plain(phi: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        at_one, at_zero = torch.nn.functional.logsigmoid(b), torch.nn.functional.logsigmoid(-b)
        low = x.double() * at_one + (1 - x.double()) * at_zero
        choices = Choices(phi, Layout(Alphabet([2] * phi.shape[-1])))
        return choices.log_mixture([torch.stack((low, at_one + at_zero - low), -1)]).sum(-1)

    found, expected = [], []
    for store, function, dtype in (
        (found, lambda p, b: kernels.marginal_total(p, x, b), torch.float32),
        (expected, plain, torch.float64),
    ):
        phi, b = (t.detach().clone().to(dtype).requires_grad_() for t in (logits, base))
        value = function(phi, b)
        (value * weights.to(dtype)).sum().backward()
        store += [value.detach().double(), phi.grad.double(), b.grad.double()]
    for ours, reference in zip(found, expected, strict=True):
        assert float((ours - reference).norm() / reference.norm()) < 1e-5


@pytest.mark.parametrize("base_logit", [-7.0, 0.3])
def test_marginal_at_large_logits(base_logit: float) -> None:
    sizes = torch.tensor([0.5, 20.0, 1e3, 1e4, 1e6, torch.inf])
    rows = torch.cartesian_prod(torch.cat([-sizes, sizes]), torch.tensor([0.0, 1.0]))
    logits, x = (column[:, None].contiguous().to(CUDA) for column in rows.T)
    base = torch.tensor([base_logit], device=CUDA)
    phi, b = logits.clone().requires_grad_(), base.clone().requires_grad_()
    value = kernels.marginal_total(phi, x, b)
    value.sum().backward()
    f, one = logits.double().sigmoid(), base.double().sigmoid()
    p = torch.where(x > 0, one, 1 - one)
    wanted = ((1 - f) * p + f * (1 - p)).log().squeeze(-1)
    torch.testing.assert_close(value.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    for gradient in (phi.grad, b.grad):
        assert gradient is not None
        assert bool(gradient.isfinite().all())
    assert phi.grad is not None
    exact = f * (1 - f) * (1 - 2 * p) / wanted.exp()[:, None]
    torch.testing.assert_close(phi.grad.double(), exact, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("start", [0, 1, 7, 8, 1_000_003, 2**33 + 5])
def test_philox_is_numpys(start: int) -> None:
    for seed, stride, windows, count in [(0, 0, 1, 1), (5, 17, 3, 100), (2**40 + 1, 10_000, 4, 4097)]:
        ours = kernels.philox_uniforms(seed, 4, (start, stride), windows, count, CUDA).cpu()
        for w in range(windows):
            expected = torch.from_numpy(philox_uniforms(seed, 4, start + w * stride, count))
            assert torch.equal(ours[w], expected)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_torchs(decoupled: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(300, 257, device=CUDA), torch.randn(5, device=CUDA)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours = [t.clone().requires_grad_() for t in start]
    theirs = [t.clone().double().requires_grad_() for t in start]
    rate = torch.tensor(1e-2, device=CUDA)
    fused = FusedAdam([{"params": ours, "weight_decay": 0.1}], lr=rate, decoupled=decoupled)
    reference = kind([{"params": theirs, "weight_decay": 0.1}], lr=1e-2)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            b.grad = torch.randn_like(b) * 10 ** (step - 2)
            a.grad = b.grad.float()
        fused.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.detach().double() - b.detach()).abs().max()) < 1e-5


def test_binarised_rows_are_the_plain_ones() -> None:
    split = Split(torch.randint(0, 256, (50, 784), dtype=torch.uint8), stochastic=True)
    rows, noise = torch.randint(50, (64,)), torch.rand(64, 784)
    plain = split.gather(rows, noise).x
    assert torch.equal(split.to("cuda").gather(rows.cuda(), noise.cuda()).x.cpu(), plain)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (256, 784), (1000, 33)])
def test_column_sums(rows: int, width: int) -> None:
    values = torch.randn(rows, width, device=CUDA)
    torch.testing.assert_close(kernels.column_sums(values), values.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("features", "hidden", "batch"), [(5, 7, 3), (64, 100, 300), (784, 1024, 64)])
@pytest.mark.parametrize("likelihood", ["latent", "greedy"])
def test_sampling_is_one_pass_for_each_feature(
    features: int, hidden: int, batch: int, likelihood: str
) -> None:
    torch.manual_seed(0)
    order = "random:3"
    latent = LatentFlow([Layer(MADE(features, (hidden,), order=order))], FactorisedBase(features)).to(CUDA)
    for parameter in latent.layers.parameters():
        parameter.data.mul_(3)
    noise = latent.draw_noise(batch, torch.Generator(CUDA).manual_seed(1))
    flow = latent if likelihood == "latent" else latent.greedy()
    found = flow.sample_with(noise)
    y = latent.base.sample(noise.base).long()
    x = torch.zeros_like(y)
    with torch.no_grad():
        for d in latent.layers[0].conditioner.order:
            logit = latent.layers[0].conditioner({Source.STATE: x})[:, d]
            u = (noise.layers[:, 0, d] > torch.sigmoid(-logit)) if likelihood == "latent" else logit > 0
            x[:, d] = y[:, d] ^ u.long()
    assert torch.equal(found, x)


@pytest.mark.parametrize(("shape", "seed"), [((1, 1), 0), ((3, 7), 5), ((500, 784), 2**40 + 3)])
def test_a_frozen_draw_is_the_same_on_every_device(shape: tuple[int, int], seed: int) -> None:
    grey = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed % 97))
    split = Split(grey, stochastic=True)
    for stream in (0, 2):
        assert torch.equal(
            split.to("cuda").frozen(seed, stream).values.cpu(), split.frozen(seed, stream).values
        )


def _philox4x32(counter: list[np.ndarray], seed: int) -> np.ndarray:
    """Ten rounds on the counter's four words, (..., 4), in plain 64-bit integers."""
    low = np.uint64(0xFFFFFFFF)
    words = [word.astype(np.uint64) for word in counter]
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ keys[0],
            second & low,
            (first >> np.uint64(32)) ^ words[3] ^ keys[1],
            first & low,
        ]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(words, -1)


@pytest.mark.parametrize("width", [1, 21, 784, 1500])
@pytest.mark.parametrize("seed", [0, 5, 2**39 + 7])
def test_drawn_rows_are_a_function_of_seed_step_and_place(seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    grey = torch.randint(0, 256, (30, width), dtype=torch.uint8, generator=generator)
    rows = torch.randint(30, (5,), generator=generator)
    seeds, counter, ahead = torch.tensor([seed], device=CUDA), torch.tensor([2**32 + 3]), 4
    found = kernels.draw_rows(grey.cuda(), rows.cuda(), seeds, counter.cuda(), ahead).cpu().numpy()
    step, quads = int(counter) + ahead, np.arange(-(-width // 4))
    for line, row in enumerate(rows.tolist()):
        words = [quads, *(np.full_like(quads, n) for n in (line, step & 0xFFFFFFFF, step >> 32))]
        drawn = _philox4x32(words, seed).reshape(-1)[:width]
        values = grey[row].numpy().astype(np.uint64)
        expected = (values > 0) & (drawn <= values * np.uint64(0x01010101))
        assert np.array_equal(found[line] == 1, expected)


def test_drawn_rows_have_the_law_of_their_intensities() -> None:
    grey = torch.arange(256, dtype=torch.uint8).repeat(4, 1).cuda()
    rows, seeds = (
        torch.zeros(4096, dtype=torch.int64, device=CUDA),
        torch.zeros(1, dtype=torch.int64, device=CUDA),
    )
    steps = [kernels.draw_rows(grey, rows, seeds, torch.tensor([s], device=CUDA), 0) for s in range(16)]
    means, p = torch.cat(steps).double().mean(0).cpu(), torch.arange(256).double() / 255
    assert bool(((means - p).abs() <= 5 * (p * (1 - p) / (16 * 4096)).sqrt()).all())  # 5 standard errors


@pytest.mark.parametrize(("runs", "rows", "features"), [(1, 1, 1), (3, 7, 33), (2, 300, 1000)])
def test_the_marginal_under_vmap_is_the_plain_one(runs: int, rows: int, features: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(runs, rows, features, generator=generator)).to(CUDA)
    x = torch.randint(2, (runs, rows, features), generator=generator).float().to(CUDA)
    base = (3 * torch.randn(runs, features, generator=generator)).to(CUDA)
    weights = torch.randn(runs, rows, generator=generator).to(CUDA)

    def plain(phi: Tensor, state: Tensor, b: Tensor) -> Tensor:
        at_one, at_zero = torch.nn.functional.logsigmoid(b), torch.nn.functional.logsigmoid(-b)
        low = state * at_one + (1 - state) * at_zero
        choices = Choices(phi, Layout(Alphabet([2] * phi.shape[-1])))
        return choices.log_mixture([torch.stack((low, at_one + at_zero - low), -1)]).sum(-1)

    found, expected = [], []
    for store, function, dtype in (
        (found, kernels.marginal_total, torch.float32),
        (expected, plain, torch.float64),
    ):
        phi, b = (t.detach().clone().to(dtype).requires_grad_() for t in (logits, base))
        value = torch.vmap(function)(phi, x.to(dtype), b)
        (value * weights.to(dtype)).sum().backward()
        store += [value.detach().double(), phi.grad.double(), b.grad.double()]
    for ours, reference in zip(found, expected, strict=True):
        assert float((ours - reference).norm() / reference.norm()) < 1e-5


SHAPES = [(1, 1), (5, 33), (64, 16), (1024, 784), (3, 2500)]


def _prefixes(rows: int, width: int) -> tuple[Tensor, Tensor]:
    seen = torch.randint(0, width + 1, (rows,), dtype=torch.int32, device=CUDA)
    seen[-1] = width
    return seen, (torch.arange(width, device=CUDA) < seen[:, None]).float()


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_what_lies_beyond_is_zero_and_the_rest_untouched(rows: int, width: int) -> None:
    seen, mask = _prefixes(rows, width)
    values = torch.randn(rows, width, device=CUDA)
    assert torch.equal(kernels.zero_beyond(values.clone(), seen), values * mask)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_passes_over_masked_weights(rows: int, width: int, decoupled: bool) -> None:
    seen, mask = _prefixes(rows, width)
    start = [torch.randn(rows, width, device=CUDA) * mask for _ in range(3)]
    square = torch.rand(rows, width, device=CUDA) * mask
    results = []
    for known in (None, seen):
        p, g, m = (t.clone() for t in start)
        v = square.clone()
        rate, step = torch.tensor(1e-2, device=CUDA), torch.tensor(3.0, device=CUDA)
        settings: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        kernels.adam(p, g, (m, v), rate, step, decoupled=decoupled, seen=known, **settings)
        results.append((p, m, v))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
        assert not bool((ours * (1 - mask)).any())
