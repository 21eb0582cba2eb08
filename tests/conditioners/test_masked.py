"""Masked linear layers: masks that stay, gradients of every order, and products cut into bands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

import zoo
from enumeration import all_states, gradient
from xorflow.conditioners import MaskedLinear
from xorflow.conditioners.linear import prefix_lengths, staircase_bands
from xorflow.estimators import MaximumLikelihood

SCATTERED = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 0]]).bool()
STAIRCASE = torch.arange(9) < torch.tensor([0, 0, 1, 3, 3, 4, 4, 7, 7, 8, 9])[:, None]
THRESHOLD = "xorflow.conditioners.linear._WORTH_CUTTING"


@pytest.fixture(params=["whole", "cut"])
def masked(request, monkeypatch) -> MaskedLinear:
    """The same layer, multiplied whole or in bands."""
    monkeypatch.setattr(THRESHOLD, 0 if request.param == "cut" else 2**60)
    torch.manual_seed(0)
    layer = MaskedLinear(STAIRCASE).double()
    assert (layer.bands is not None) == (request.param == "cut")
    return layer


def reference(layer: MaskedLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output by an explicit mask, and the weight that its graph leads to."""
    weight = layer.weight.detach().clone().requires_grad_()
    return linear(x, weight * layer.mask, layer.bias), weight


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, 9, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("shape", [(5,), (), (2, 3), (1,)])
def test_it_is_a_linear_map_with_a_mask(masked, shape):
    x = rows(*shape)
    out, weight = reference(masked, x)
    torch.testing.assert_close(masked(x), out, rtol=0, atol=1e-14)
    found = torch.autograd.grad(masked(x).sin().sum(), [x, masked.weight, masked.bias])
    expected = torch.autograd.grad(out.sin().sum(), [x, weight, masked.bias])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert bool((found[1][~STAIRCASE] == 0).all())


def test_rectified_it_is_followed_by_a_relu(masked):
    x = rows(2, 5)
    out, weight = reference(masked, x)
    assert torch.equal(masked(x, rectify=True), masked(x).relu())
    found = torch.autograd.grad(masked(x, rectify=True).sin().sum(), [x, masked.weight, masked.bias])
    expected = torch.autograd.grad(out.relu().sin().sum(), [x, weight, masked.bias])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    both = (masked(x, rectify=True), reference(masked, x)[0].relu())
    twice = [torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)[0] for y in both]
    slopes = [torch.autograd.grad(slope.pow(2).sum(), x)[0] for slope in twice]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(masked, frozen):
    getattr(masked, frozen).requires_grad_(False)
    masked(rows(5)).sum().backward()
    assert getattr(masked, frozen).grad is None


def test_second_derivatives_pass_through(masked):
    x = rows(5)

    def penalty(out: Tensor, parameter: Tensor):
        (slope,) = torch.autograd.grad(out.pow(3).sum(), parameter, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), [x, parameter])

    for a, b in zip(penalty(masked(x), masked.weight), penalty(*reference(masked, x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("same_x", [False, True])
def test_several_weights_by_vmap(masked, shape, same_x):
    """One after the other, with the values and gradients of each alone."""
    torch.manual_seed(2)
    weight = (torch.randn(3, *masked.weight.shape, dtype=torch.float64) * masked.mask).requires_grad_()
    bias = torch.randn(3, *masked.bias.shape, dtype=torch.float64, requires_grad=True)
    x = rows(*shape) if same_x else rows(3, *shape)

    def one(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(masked, {"weight": weight, "bias": bias}, (x,))

    found = torch.vmap(one, (0, 0, None if same_x else 0))(weight, bias, x)
    each = [one(weight[k], bias[k], x if same_x else x[k]) for k in range(3)]
    torch.testing.assert_close(found, torch.stack(each), rtol=0, atol=1e-13)
    gradients = torch.autograd.grad(found.sin().sum(), [weight, bias, x])
    expected = torch.autograd.grad(torch.stack(each).sin().sum(), [weight, bias, x])
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert bool((gradients[0][:, ~STAIRCASE] == 0).all())


def test_gradients_of_single_examples():
    layer = MaskedLinear(SCATTERED).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def loss(weight, row):
        return torch.func.functional_call(layer, {"weight": weight}, (row,)).sin().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(layer.weight.detach(), x)
    assert each.shape == (5, 4, 3)
    (whole,) = torch.autograd.grad(layer(x).sin().sum(), layer.weight)
    torch.testing.assert_close(each.sum(0), whole, rtol=0, atol=1e-12)
    assert bool((each[:, ~SCATTERED] == 0).all())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(1, 9))
def test_bands_cover_a_staircase(lengths, blocks):
    mask = torch.arange(6) < torch.tensor(sorted(lengths))[:, None]
    bands = staircase_bands(prefix_lengths(mask), blocks)
    assert bands is not None
    assert [row for band in bands for row in range(band.first, band.last)] == list(range(len(mask)))
    for band in bands:
        part = mask[band.first : band.last]
        assert bool(part[:, : band.full].all())
        assert not bool(part[:, band.seen :].any())


@pytest.mark.parametrize("mask", [SCATTERED, STAIRCASE.flip(0), STAIRCASE.flip(1)])
def test_what_is_no_staircase_is_not_cut(mask):
    assert staircase_bands(prefix_lengths(mask)) is None


@pytest.mark.parametrize("name", zoo.names(zoo.summable))
def test_members_of_the_zoo_are_the_same_when_cut(name, monkeypatch):
    whole = zoo.make(name)
    monkeypatch.setattr(THRESHOLD, 0)
    cut = zoo.make(name)
    x = all_states(whole.states.sizes)
    context = zoo.rows_of_context(whole, len(x))
    draws = MaximumLikelihood().draw(whole, len(x), torch.Generator().manual_seed(0))
    losses = [MaximumLikelihood()(flow, x, context, draws=draws).surrogate for flow in (whole, cut)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)
    slopes = [
        gradient(loss, list(flow.layers.parameters()))
        for loss, flow in zip(losses, (whole, cut), strict=True)
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def test_every_layer_of_a_made_is_a_staircase(monkeypatch):
    monkeypatch.setattr(THRESHOLD, 0)
    flow = zoo.make("D5 explicit, two hidden layers")
    assert all(m.bands is not None for m in flow.modules() if isinstance(m, MaskedLinear))
    large = MaskedLinear(torch.ones(600, 600).tril().bool())
    assert large.bands is not None
