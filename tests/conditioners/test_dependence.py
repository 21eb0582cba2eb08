"""What a network sees, by differentiation: exactly zero where it must not look."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from slopes import allowed, jacobian
from xorflow import MADE, MLP, Coupling
from xorflow.conditioners import Source


def positive(net: nn.Module) -> None:
    """Positive weights and biases: then nothing cancels, no unit is dead, and every path shows."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
            parameter.add_((parameter > 0) * 0.1)


@st.composite
def networks(draw, wide: bool = False, by_order: tuple[str, ...] = ("before", "up to", "all")):
    features = draw(st.integers(1, 6))
    widths = st.integers(features if wide else 1, 12)
    categories = draw(
        st.one_of(st.integers(2, 4), st.lists(st.integers(1, 4), min_size=features, max_size=features))
    )
    sources = draw(
        st.lists(st.sampled_from(["state", "previous", "own", "x"]), min_size=1, max_size=3, unique=True)
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    return MADE(
        features,
        draw(st.lists(widths, max_size=2)),
        order=tuple(draw(st.permutations(range(features)))),
        categories=categories,
        choices=draw(st.sampled_from([None, 2, 6])),
        sees={source: draw(st.sampled_from(by_order)) for source in sources},
        direct=draw(st.booleans()),
        context=draw(st.integers(0, 2)),
    ).double()


@given(networks())
def test_nothing_else_is_seen(net):
    for source, dependence in net.sees.items():
        found = jacobian(net, source)
        assert bool((found[~allowed(net, dependence)] == 0).all())


@given(networks(wide=True))
def test_all_that_is_allowed_is_seen_if_the_network_is_wide(net):
    positive(net)
    for source, dependence in net.sees.items():
        assert torch.equal(jacobian(net, source) > 0, allowed(net, dependence))


@given(networks(by_order=("before",)))
@settings(max_examples=30)
def test_every_feature_sees_the_context(net):
    if not net.context_features:
        return
    positive(net)
    inputs = {
        s: torch.zeros(1, net.features, dtype=torch.float64)
        if net.alphabet(s).binary
        else torch.zeros(1, net.features, net.alphabet(s).width, dtype=torch.float64)
        for s in net.sees
    }
    context = torch.ones(1, net.context_features, dtype=torch.float64, requires_grad=True)
    logits = net(inputs, context).reshape(1, net.features, -1)
    for d in range(net.features):
        (slope,) = torch.autograd.grad(logits[:, d].sum(), context, retain_graph=True)
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
