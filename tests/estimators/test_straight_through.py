"""Straight-through: exact where it is exact, and only in the multilinear form."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, base_table_lookup, gradient, joint
from xorflow import LatentFlow, ModelError
from xorflow.estimators import StraightThrough, relaxed_states
from xorflow.estimators.relaxed_states import RelaxedPoint
from xorflow.flows import GREEDY
from xorflow.flows.choices import outcomes

CLOSED = zoo.names(zoo.closed_form)
BINARY = [name for name in CLOSED if zoo.binary(zoo.make(name))]


def network_parameters(flow: LatentFlow) -> list[Tensor]:
    return [p for layer in flow.layers for p in layer.conditioner.parameters()]


def straight_through(flow: LatentFlow, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """The gradient of what is maximised, summed over the rows."""
    loss = StraightThrough()(flow, x, zoo.rows_of_context(flow, len(x)))
    return -len(x) * gradient(loss.surrogate, parameters)


def rows(flow: LatentFlow) -> Tensor:
    """A few states: summed over all of them, the bound depends on the base alone."""
    return all_states(flow.states.sizes)[::3]


@pytest.mark.parametrize("name", CLOSED)
def test_at_depth_one_it_is_the_gradient_of_the_bound(name):
    """Against autograd of the bound as a plain sum over all u."""
    flow = zoo.make(name)
    everything = joint(flow)
    chosen = (everything.x[:, None] == rows(flow)[None]).all(-1).any(1)
    parameters = network_parameters(flow)
    expected = gradient(everything.bound[chosen].sum(), parameters)
    found = straight_through(flow, rows(flow), parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert flow.features == 1 or float(found.abs().max()) > 1e-3


@pytest.mark.parametrize("name", BINARY)
def test_at_depth_one_in_float32(name):
    flow = zoo.make(name).float()
    parameters = network_parameters(flow)
    context = zoo.context(flow)
    choices, rewards = flow.last_choices(flow.start(rows(flow), context))
    expected = gradient(choices.expectation(rewards).sum(), parameters)
    found = straight_through(flow, rows(flow), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", zoo.names(lambda flow: not any(c.autoregressive_in_u for c in flow.layers)))
def test_its_value_is_the_greedy_likelihood(name):
    flow, x = zoo.make(name), all_states(zoo.make(name).states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    loss = StraightThrough()(flow, x, context)
    expected = flow.greedy().log_likelihood(x, context).mean()
    torch.testing.assert_close(loss.bound, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.surrogate.detach(), -loss.bound, rtol=0, atol=0)
    assert loss.control is None


def modulo(x: Tensor, u: Tensor) -> Tensor:
    return (x + u) % 2


def distance(x: Tensor, u: Tensor) -> Tensor:
    return (x - u).abs()


def multilinear(x: Tensor, u: Tensor) -> Tensor:
    return x + u - 2 * x * u


def textbook(flow: LatentFlow, x: Tensor, xor, parameters: list[Tensor]) -> Tensor:
    """Straight-through at depth 1 written out, with a given way to compute xor."""
    state = x
    probability = torch.sigmoid(
        flow.layers[0].conditioner(dict.fromkeys(flow.layers[0].conditioner.sees, state))
    )
    u = probability + ((probability > 0.5).double() - probability).detach()
    y = xor(state, u)
    low, high = flow.base.log_table()[0].unbind(-1)
    return gradient((y * high + (1 - y) * low).sum(), parameters)


@pytest.mark.parametrize("name", ["D2", "D4 random", "D5 explicit, two hidden layers", "D4 direct"])
def test_other_ways_to_write_xor_are_wrong(name):
    flow = zoo.make(name)
    parameters, x = network_parameters(flow), rows(flow)
    exact = straight_through(flow, x, parameters)
    torch.testing.assert_close(textbook(flow, x, multilinear, parameters), exact, rtol=0, atol=1e-12)
    for wrong in (modulo, distance):
        assert float((textbook(flow, x, wrong, parameters) - exact).abs().max()) > 1e-3


LAST = zoo.names(lambda flow: flow.depth > 1 and not any(c.autoregressive_in_u for c in flow.layers))


@pytest.mark.parametrize("name", LAST)
def test_the_last_layer_is_exact_given_the_greedy_choices_before(name):
    flow, x = zoo.make(name), rows(zoo.make(name))
    context = zoo.rows_of_context(flow, len(x))
    parameters = list(flow.layers[-1].conditioner.parameters())
    with torch.no_grad():
        before = flow.run(flow.start(x, context), draws=GREEDY, stop=flow.depth - 1).end
    layer, total = flow.layers[-1], 0.0
    for u in all_states(layer.transform.choices.sizes):  # E[R given the greedy state], choice by choice
        trace = flow.run(before, draws=u.expand(len(x), 1, -1))
        y = layer.transform.to_base(before.state.expand_as(x), u.expand_as(x))
        total = total + (trace.log_p().sum((-1, -2)).exp() * base_table_lookup(flow, y).sum(-1)).sum()
    expected = gradient(total, parameters)
    torch.testing.assert_close(straight_through(flow, x, parameters), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "D3 depth 2 reversed",
        "D4 depth 2 random",
        "K3 depth 2",
        "D2 depth 3 one order",
        "chain depth 2 relative posterior",
        "chain depth 3 posterior sees state",
    ],
)
def test_earlier_layers_are_biased(name):
    """The negative control: at depth 2 and 3 the first layer's gradient is not that of the bound."""
    flow = zoo.make(name)
    everything = joint(flow)
    chosen = (everything.x[:, None] == rows(flow)[None]).all(-1).any(1)
    parameters = list(flow.layers[0].conditioner.parameters())
    exact = gradient(everything.bound[chosen].sum(), parameters)
    assert float((straight_through(flow, rows(flow), parameters) - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["D3 learned base", "K3 context, learned base", "D3 depth 2 learned base"])
def test_the_base_gets_the_gradient_of_the_greedy_likelihood(name):
    flow, x = zoo.make(name), rows(zoo.make(name))
    context = zoo.rows_of_context(flow, len(x))
    expected = gradient(flow.greedy().log_likelihood(x, context).sum(), [flow.base.logits])
    found = straight_through(flow, x, [flow.base.logits])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_separate_choices_of_location_and_scale_would_be_biased():
    """Why the choice is joint: with a one-hot for each, the reward is bilinear, the gradient wrong."""
    flow = zoo.make("affine K5")
    layer, x = flow.layers[0], rows(flow)
    choices = layer.generator_choices(flow.start(x))
    logits = choices.logits.detach().reshape(len(x), 2, 4, 5)  # scale, location
    parts = [logits.mean(-1).requires_grad_(), logits.mean(-2).requires_grad_()]
    scale, location = (p.softmax(-1) for p in parts)
    table = outcomes(layer.transform, flow.base, x)[0].reshape(len(x), 2, 4, 5)
    exact = gradient(torch.einsum("nds,ndm,ndsm->", scale, location, table), parts)
    hard = [
        p + (torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]) - p).detach() for p in (scale, location)
    ]
    found = gradient(torch.einsum("nds,ndm,ndsm->", *hard, table), parts)
    assert float((found - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["D4 own", "D3 depth 2 own first", "chain D3 depth 2"])
def test_layers_that_see_their_own_choices_are_refused(name):
    flow = zoo.make(name)
    with pytest.raises(
        ModelError, match=r"StraightThrough takes gradients .* sees its own u; use score-function"
    ):
        StraightThrough()(flow, all_states(flow.states.sizes))


def test_relaxed_states_stay_integers():
    """o + (h - o) is exactly h, also in float32, so that later layers see real states."""
    for name in ("D3 depth 3", "K 2, 3 depth 3", "affine K3 depth 2"):
        flow = zoo.make(name).float()
        point = RelaxedPoint.of(flow, flow.start(all_states(flow.states.sizes)))
        for layer in flow.layers:
            choices = layer.generator_choices(point.seen())
            u = relaxed_states.straight_through(choices.mode(), choices.mean, layer.layout)
            point = point.after(flow, u)
            for relaxed, layout in ((u, layer.layout), (point.state, flow.base.layout)):
                assert torch.equal(relaxed.values, layout.corners(relaxed.integers, flow.dtype))
