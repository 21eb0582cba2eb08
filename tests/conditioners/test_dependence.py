"""What a network sees, by differentiation: exactly zero where it must not look."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from networks import mades
from slopes import allowed, jacobian
from xorflow import MADE, MLP, Coupling
from xorflow.conditioners import Source


def positive(net: nn.Module) -> None:
    """Positive weights and biases: then nothing cancels, no unit is dead, and every path shows."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
            parameter.add_((parameter > 0) * 0.1)


@given(mades())
def test_nothing_else_is_seen(net):
    for source, dependence in net.sees.items():
        found = jacobian(net, source)
        assert bool((found[~allowed(net, dependence)] == 0).all())


@given(mades(wide=True))
def test_all_that_is_allowed_is_seen_if_the_network_is_wide(net):
    positive(net)
    for source, dependence in net.sees.items():
        assert torch.equal(jacobian(net, source) > 0, allowed(net, dependence))


@given(mades(by_order=("before",)))
@settings(max_examples=30)
def test_every_feature_sees_the_context(net):
    if not net.context_features:
        return
    positive(net)
    inputs = {s: torch.zeros(1, net.features, dtype=torch.int64) for s in net.sees}
    context = torch.ones(1, net.context_features, dtype=torch.float64, requires_grad=True)
    logits = net(inputs, context)
    for d in range(net.features):
        of_feature = logits[:, net.choices.logit_features == d]
        (slope,) = torch.autograd.grad(of_feature.sum(), context, retain_graph=True)
        assert bool((slope > 0).all())


@pytest.mark.parametrize("order", ["natural", "reversed", "random:3", (2, 4, 0, 1, 3)])
def test_named_orderings_are_kept(order):
    torch.manual_seed(0)
    net = MADE(5, (32, 32), order=order).double()
    seen = jacobian(net, Source.STATE) > 0
    for place, d in enumerate(net.order):
        assert not bool(seen[d, list(net.order[place:])].any())


@given(st.integers(2, 6), st.integers(2, 3), st.data())
def test_a_coupling_layer_sees_its_mask_alone(features, categories, data):
    mask = data.draw(
        st.lists(st.booleans(), min_size=features, max_size=features).filter(lambda m: 0 < sum(m) < len(m))
    )
    net = Coupling(features, (5,), mask=mask, flip=data.draw(st.booleans()), categories=categories).double()
    positive(net)
    seen = net.mask
    expected = ~seen[:, None] & seen[None]
    assert torch.equal(jacobian(net, Source.STATE) > 0, expected)


def test_a_perceptron_sees_everything():
    net = MLP(4, (8,), sees=("x", "state", "previous"), categories=3).double()
    positive(net)
    for source in net.sees:
        assert bool((jacobian(net, source) > 0).all())


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.depth > 1))
def test_members_of_the_zoo_declare_what_they_see(name):
    for layer in zoo.make(name).layers:
        net = layer.conditioner
        for source, dependence in net.sees.items():
            found = jacobian(net, source)
            may = ~net.mask[:, None] & net.mask[None] if net.mask is not None else allowed(net, dependence)
            assert bool((found[~may] == 0).all())
