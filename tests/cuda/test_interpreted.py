"""The Triton kernels, interpreted on CPU tensors, against their plain counterparts."""

from typing import Any

import numpy as np
import pytest
import torch

from xorflow import MADE, FactorisedBase, LatentFlow, Layer
from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._cuda.steps import FusedAdam
from xorflow._math import philox_uniforms
from xorflow._states import Alphabet, Layout
from xorflow.conditioners import Source
from xorflow.data import Split
from xorflow.flows.choices import Choices

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (7, 33), (150, 20)])
def test_marginal_matches_float64_autograd(rows: int, features: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, features, generator=generator)
    x = torch.randint(2, (rows, features), generator=generator).float()
    base = 3 * torch.randn(features, generator=generator)
    weights = torch.randn(rows, generator=generator)

    def plain(phi: torch.Tensor, state: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        at_one, at_zero = torch.nn.functional.logsigmoid(b), torch.nn.functional.logsigmoid(-b)
        low = state * at_one + (1 - state) * at_zero
        choices = Choices(phi, Layout(Alphabet([2] * phi.shape[-1])))
        return choices.log_mixture([torch.stack((low, at_one + at_zero - low), -1)]).sum(-1)

    def outcomes(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        phi, b = (t.clone().to(dtype).requires_grad_() for t in (logits, base))
        value = function(phi, x.to(dtype), b)
        (value * weights.to(dtype)).sum().backward()
        assert phi.grad is not None
        assert b.grad is not None
        return [t.detach().double() for t in (value, phi.grad, b.grad)]

    pairs = zip(outcomes(kernels.marginal_total, torch.float32), outcomes(plain, torch.float64), strict=True)
    for ours, reference in pairs:
        assert float((ours - reference).norm() / reference.norm()) < 1e-6


@pytest.mark.parametrize("start", [0, 7, 8, 2**33 + 5])
def test_philox_is_numpys(start: int) -> None:
    for seed, stride, windows, count in [(0, 0, 1, 1), (2**40 + 1, 17, 3, 100)]:
        ours = kernels.philox_uniforms(seed, 4, (start, stride), windows, count, CPU)
        for w in range(windows):
            expected = torch.from_numpy(philox_uniforms(seed, 4, start + w * stride, count))
            assert torch.equal(ours[w], expected)


@pytest.mark.parametrize(("shape", "seed"), [((1, 1), 0), ((3, 7), 2**40 + 3)])
def test_a_frozen_draw_is_the_same(
    shape: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed % 97))
    ours = [Split(grey, stochastic=True).frozen(seed, stream).values for stream in (0, 2)]
    monkeypatch.setattr(devices, "TYPES", ())
    plain = [Split(grey, stochastic=True).frozen(seed, stream).values for stream in (0, 2)]
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("likelihood", ["latent", "greedy"])
@pytest.mark.parametrize(("features", "hidden", "batch"), [(5, 7, 3), (12, 20, 9)])
def test_sampling_is_one_pass_for_each_feature(
    features: int, hidden: int, batch: int, likelihood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    decode = kernels.decode_made
    monkeypatch.setattr(kernels, "decode_made", lambda *args: launched.append(args) or decode(*args))
    torch.manual_seed(0)
    latent = LatentFlow(
        [Layer(MADE(features, (hidden,), order="random:3"))], FactorisedBase(features, p0=0.7)
    )
    for parameter in latent.layers.parameters():
        parameter.data.mul_(3)
    noise = latent.draw_noise(batch, torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = (latent if likelihood == "latent" else latent.greedy()).sample_with(noise)
        y = latent.base.sample(noise.base).long()
        x = torch.zeros_like(y)
        for d in latent.layers[0].conditioner.order:
            logit = latent.layers[0].conditioner({Source.STATE: x})[:, d]
            u = (noise.layers[:, 0, d] > torch.sigmoid(-logit)) if likelihood == "latent" else logit > 0
            x[:, d] = y[:, d] ^ u.long()
    assert launched
    assert torch.equal(found, x)


@pytest.mark.parametrize("shape", [(1, 1), (40, 33), (150, 7)])
def test_column_sums(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kernels.column_sums(values), values.sum(-2), rtol=1e-6, atol=1e-6)


def _prefixes(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.randint(0, width + 1, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    seen[-1] = width
    return seen, (torch.arange(width) < seen[:, None]).float()


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 33)])
def test_what_lies_beyond_is_zero_and_the_rest_untouched(rows: int, width: int) -> None:
    seen, mask = _prefixes(rows, width)
    values = torch.randn(rows, width)
    assert torch.equal(kernels.zero_beyond(values.clone(), seen), values * mask)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_adam_is_torchs(decoupled: bool, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    seen, mask = _prefixes(6, 33)
    mask = mask if masked else torch.ones_like(mask)
    weight, bias = torch.randn(6, 33, generator=generator) * mask, torch.randn(5, generator=generator)
    ours, theirs = (
        [t.clone().to(d).requires_grad_() for t in (weight, bias)] for d in (torch.float32, torch.float64)
    )
    known = {ours[0]: seen} if masked else None
    fused = FusedAdam(
        [{"params": ours, "weight_decay": 0.1}], lr=torch.tensor(1e-2), decoupled=decoupled, seen=known
    )
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([{"params": theirs, "weight_decay": 0.1}], lr=1e-2)
    for step in range(4):
        for a, b, m in zip(ours, theirs, (mask, 1), strict=True):
            b.grad = torch.randn(b.shape, generator=generator).double() * m * 10 ** (step - 2)
            a.grad = b.grad.float()
        fused.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.detach().double() - b.detach()).abs().max()) < 1e-5


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


@pytest.mark.parametrize("width", [1, 21])
@pytest.mark.parametrize("seed", [0, 5, 2**39 + 7])
def test_drawn_rows_are_a_function_of_seed_step_and_place(seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    grey = torch.randint(0, 256, (30, width), dtype=torch.uint8, generator=generator)
    rows = torch.randint(30, (5,), generator=generator)
    counter, ahead = torch.tensor([2**32 + 3]), 4
    found = kernels.draw_rows(grey, rows, torch.tensor([seed]), counter, ahead).numpy()
    step, quads = int(counter) + ahead, np.arange(-(-width // 4))
    for line, row in enumerate(rows.tolist()):
        words = [quads, *(np.full_like(quads, n) for n in (line, step & 0xFFFFFFFF, step >> 32))]
        drawn = _philox4x32(words, seed).reshape(-1)[:width]
        values = grey[row].numpy().astype(np.uint64)
        expected = (values > 0) & (drawn <= values * np.uint64(0x01010101))
        assert np.array_equal(found[line] == 1, expected)
