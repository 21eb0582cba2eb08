"""The marginal in closed form is what the transform's outcomes and the choices' mixture give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from enumeration import base_of
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, Xor
from xorflow._states import Alphabet, Layout
from xorflow.flows import Choices
from xorflow.flows.choices import log_marginal


def marginal_total(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    features = x.shape[-1]
    choices = Choices(logits, Layout(Alphabet([2] * features)))
    return log_marginal(choices, Xor(features), base_of(base_logits), x).sum(-1)


def closed(flow: LatentFlow, x: Tensor) -> Tensor:
    return flow.log_marginal_total(flow.start(x))


def by_mixture(flow: LatentFlow, x: Tensor) -> Tensor:
    choices, outcomes = flow.last_choices(flow.start(x), None)
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


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    logits, base = torch.randn(3, 4).double().requires_grad_(), torch.randn(4).double().requires_grad_()
    x = torch.randint(2, (3, 4)).double()
    assert torch.autograd.gradcheck(lambda a, b: marginal_total(a, x, b), (logits, base))


def test_under_vmap_it_is_one_after_the_other():
    torch.manual_seed(0)
    logits, base = torch.randn(2, 3, 4).double(), torch.randn(2, 4).double()
    x = torch.randint(2, (3, 4)).double()

    def gradients(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(lambda a, b: marginal_total(a, x, b).sum(), argnums=(0, 1))(a, b)

    together = torch.vmap(gradients)(logits, base)
    for run in range(2):
        alone = gradients(logits[run], base[run])
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(all_of_them[run], one, rtol=0, atol=1e-14)
