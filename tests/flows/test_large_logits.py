"""float32 at log-odds of any size is float64, rounded: values, sums over x, and gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from enumeration import base_of
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, Xor
from xorflow._math import enumerate_states
from xorflow._states import Alphabet, Layout
from xorflow.conditioners import Conditioner
from xorflow.flows import Choices
from xorflow.flows.choices import log_marginal, log_marginal_of_bits

SIZES = [0.0, 0.5, 3.0, 20.0, 1e3, 1e4, 1e6, math.inf]
LOGITS = torch.tensor([sign * size for size in SIZES for sign in (-1.0, 1.0)])
BASES = torch.tensor([-7.0, -2.2, 0.3, 5.0])


def cases() -> tuple[Tensor, Tensor, Tensor]:
    """Each log-odds with each base and each state, one feature each, as rows: logits, x and base logits, (N,)."""
    logits, bases, x = torch.cartesian_prod(LOGITS, BASES, torch.tensor([0.0, 1.0])).T
    return logits.contiguous(), x.contiguous(), bases.contiguous()


def bits(logits: Tensor) -> Choices:
    return Choices(logits, Layout(Alphabet([2] * logits.shape[-1])))


class Given(Conditioner):
    """Logits that are given, and see nothing."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(len(logits), sees={})
        self.logits = logits

    def forward(self, inputs, context=None):
        return self.logits

    def start_at(self, logits):
        raise NotImplementedError


def mixed(logits: Tensor, x: Tensor, bases: Tensor) -> Tensor:
    """By the choices' mixture of what each leads to."""
    zero, one = (-bases).sigmoid().log(), bases.sigmoid().log()
    outcomes = torch.stack((torch.lerp(zero, one, x), torch.lerp(one, zero, x)), -1)
    return bits(logits).log_mixture([outcomes])


def summed_out(logits: Tensor, x: Tensor, bases: Tensor) -> Tensor:
    return log_marginal(bits(logits), Xor(len(x)), base_of(bases), x)


def expected(logits: Tensor, x: Tensor, bases: Tensor) -> Tensor:
    """Where each target is certain."""
    flows = [LatentFlow([Layer(Given(logits[i, None]))], base_of(bases[i, None])) for i in range(len(x))]
    rows = x[:, None, None]
    return torch.cat(
        [flow.expected_log_marginal(flow.start(row), row) for flow, row in zip(flows, rows, strict=True)]
    )


def total_of_one(logits: Tensor, x: Tensor, bases: Tensor) -> Tensor:
    """Of each feature alone, as training sums them."""
    return torch.stack(
        [log_marginal_of_bits(logits[i, None], x[i, None], bases[i, None]) for i in range(len(x))]
    )


MARGINALS = pytest.mark.parametrize("marginal", [mixed, summed_out, expected, total_of_one])


def exact(logits: Tensor, x: Tensor, bases: Tensor) -> Tensor:
    """log((1 - f) p(x) + f p(1 - x)) as it is written, in float64."""
    f, rest, one, zero = (t.double().sigmoid() for t in (logits, -logits, bases, -bases))
    at, other = torch.where(x > 0, one, zero), torch.where(x > 0, zero, one)
    return (rest * at + f * other).log()


@MARGINALS
def test_float32_is_float64_rounded(marginal) -> None:
    logits, x, bases = cases()
    torch.testing.assert_close(
        marginal(logits, x, bases).double(), exact(logits, x, bases), rtol=1e-6, atol=5e-7
    )


@MARGINALS
def test_both_states_together_have_probability_one(marginal) -> None:
    p = marginal(*cases()).exp().reshape(-1, 2).sum(-1)
    torch.testing.assert_close(p, torch.ones_like(p), rtol=0, atol=2e-6)


@MARGINALS
def test_gradients_are_those_of_float64_and_finite(marginal) -> None:
    logits, x, bases = cases()
    found = gradients(marginal, logits, x, bases)
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    finite = logits.isfinite()
    assert not bool(found[0][~finite].any())
    wanted = gradients(exact, logits[finite].double(), x[finite], bases[finite].double())
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[finite].double(), reference, rtol=1e-5, atol=1e-6)


@MARGINALS
def test_a_gradient_keeps_its_digits_on_either_side(marginal) -> None:
    """At f near 1 as near 0: the gradient of the logits is tiny, and neither zero nor noise."""
    logits = torch.tensor([-30.0, 30.0, -18.0, 18.0, 0.0])
    x, bases = torch.zeros(5), torch.full((5,), -2.0)
    found, _ = gradients(marginal, logits, x, bases)
    wanted, _ = gradients(marginal, logits.double(), x.double(), bases.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    assert bool((found != 0).all())


def gradients(marginal, *arguments: Tensor) -> list[Tensor]:
    logits, x, bases = (t.clone() for t in arguments)
    logits.requires_grad_()
    bases.requires_grad_()
    return list(torch.autograd.grad(marginal(logits, x, bases).sum(), [logits, bases]))


@pytest.mark.parametrize("size", [1e3, 1e4, 1e6, math.inf])
def test_a_flow_sums_to_one(size: float) -> None:
    """A whole flow in float32, each feature's log-odds being one of the two."""
    flow = LatentFlow([Layer(MADE(6, hidden=(4,)))], FactorisedBase(6))
    bias = size * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    flow.layers[0].conditioner.start_at(bias)
    x = enumerate_states([2] * 6)
    assert abs(float(flow().log_prob(x).detach().exp().sum()) - 1) < 2e-6


@pytest.mark.parametrize("ours", [-1e6, -1e3, 2.0, 20.0, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("theirs", [-20.123, 0.1, 20.123, 1e3])
def test_the_divergence_of_two_choices(ours: float, theirs: float) -> None:
    q, p = torch.tensor([ours]), torch.tensor([theirs])
    found, wanted = bits(q).kl(bits(p)), bits(q.double()).kl(bits(p.double()))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


# ---- the marginal in closed form is what the transform's outcomes and the choices' mixture give ----


def marginal_total(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    features = x.shape[-1]
    choices = Choices(logits, Layout(Alphabet([2] * features)))
    return log_marginal(choices, Xor(features), base_of(base_logits), x).sum(-1)


def closed(flow: LatentFlow, x: Tensor) -> Tensor:
    return flow.log_marginal_total(flow.start(x))


def by_mixture(flow: LatentFlow, x: Tensor) -> Tensor:
    choices, outcomes = flow.last_choices(flow.start(x))
    return choices.log_mixture(outcomes).sum(-1)


def value_and_gradients(way: Callable[..., Tensor], flow: LatentFlow, x: Tensor) -> list[Tensor]:
    flow.zero_grad()
    value = way(flow, x).mean()
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in flow.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 784)])
def test_it_is_the_plain_path(shape, learned, dtype):
    torch.manual_seed(0)
    rows, features = shape
    base = FactorisedBase(features, learned=learned)
    flow = LatentFlow([Layer(MADE(features, hidden=(8,)))], base).to(dtype)
    x = torch.rand(rows, features) < 0.3
    found, expected = (value_and_gradients(way, flow, x) for way in (closed, by_mixture))
    assert len(found) == len(expected) == 5 + learned
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, **close)


TOTALS = pytest.mark.parametrize("total", [marginal_total, log_marginal_of_bits])


@TOTALS
def test_gradients_are_those_of_finite_differences(total):
    torch.manual_seed(0)
    logits, base = torch.randn(3, 4).double().requires_grad_(), torch.randn(4).double().requires_grad_()
    x = torch.randint(2, (3, 4)).double()
    assert torch.autograd.gradcheck(lambda a, b: total(a, x, b), (logits, base))
    assert torch.autograd.gradgradcheck(lambda a, b: total(a, x, b), (logits, base))


@TOTALS
def test_under_vmap_it_is_one_after_the_other(total):
    torch.manual_seed(0)
    logits, base = torch.randn(2, 3, 4).double(), torch.randn(2, 4).double()
    x = torch.randint(2, (3, 4)).double()

    def gradients(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(lambda a, b: total(a, x, b).sum(), argnums=(0, 1))(a, b)

    together = torch.vmap(gradients)(logits, base)
    for run in range(2):
        alone = gradients(logits[run], base[run])
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(all_of_them[run], one, rtol=0, atol=1e-14)


def test_the_total_keeps_its_digits_on_a_base_that_is_nearly_certain():
    base, x, logits = torch.full((784,), 50.0), torch.ones(2, 784), torch.full((2, 784), -60.0)
    exact_total = log_marginal_of_bits(logits.double(), x, base.double())
    torch.testing.assert_close(log_marginal_of_bits(logits, x, base).double(), exact_total, rtol=1e-5, atol=0)
