"""Networks on integers: what they see, by changing it, and that relaxed states in the corners are the integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zoo
from networks import networks
from slopes import allowed
from xorflow._states import Layout
from xorflow.conditioners import Conditioner, Source

ROWS = 12


def given_to(net: Conditioner, seed: int = 0) -> tuple[dict[Source, Tensor], Tensor | None]:
    """Integers for each source, and a context."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for source in net.sees:
        sizes = torch.tensor(net.alphabet(source).sizes)
        inputs[source] = torch.randint(60, (ROWS, net.features), generator=generator) % sizes
    context = torch.randn(ROWS, net.context_features, generator=generator, dtype=torch.float64)
    return inputs, context if net.context_features else None


def assert_corners(net: Conditioner) -> None:
    """Each source relaxed by itself, and all; in float64, to the rounding of sums in another order."""
    inputs, context = given_to(net)
    expected = net(inputs, context)
    assert expected.shape[-1] == net.choices.flat
    relaxed = {s: Layout(net.alphabet(s)).corners(x, torch.float64) for s, x in inputs.items()}
    for some in (*([source] for source in net.sees), list(net.sees)):
        mixed = inputs | {source: relaxed[source] for source in some}
        torch.testing.assert_close(net(mixed, context), expected, rtol=0, atol=1e-12)


def assert_legal(net: Conditioner) -> None:
    """A value is changed to every other: logits that must not see it stay what they are, to the last bit."""
    inputs, context = given_to(net)
    with torch.no_grad():
        before = net(inputs, context)
        for source, dependence in net.sees.items():
            seen = (
                net.mask.expand(net.features, -1) & ~net.mask[:, None]
                if net.mask is not None
                else allowed(net, dependence)
            )
            for e, size in enumerate(net.alphabet(source).sizes):
                hidden = ~seen[net.choices.logit_features, e]
                for step in range(1, size):
                    changed = inputs[source].clone()
                    changed[:, e] = (changed[:, e] + step) % size
                    after = net(inputs | {source: changed}, context)
                    assert torch.equal(after[:, hidden], before[:, hidden])


def networks_of(name: str) -> list[Conditioner]:
    return [
        n for layer in zoo.make(name).layers for n in (layer.conditioner, layer.posterior) if n is not None
    ]


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_corners_are_integers_in_the_zoo(name):
    for net in networks_of(name):
        assert_corners(net)


@given(networks())
def test_corners_are_integers(net):
    assert_corners(net)


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_integers_that_must_not_be_seen_change_nothing_in_the_zoo(name):
    for net in networks_of(name):
        assert_legal(net)


@given(networks())
def test_integers_that_must_not_be_seen_change_nothing(net):
    assert_legal(net)


@given(networks(), st.sampled_from([torch.uint8, torch.int16, torch.int32]))
def test_integers_of_any_type_are_the_same(net, dtype):
    inputs, context = given_to(net)
    found = net({source: x.to(dtype) for source, x in inputs.items()}, context)
    assert torch.equal(found, net(inputs, context))


@given(networks())
def test_integers_of_any_leading_shape(net):
    inputs, context = given_to(net)
    expected = net(inputs, context)
    shaped = {source: x.reshape(3, 4, -1) for source, x in inputs.items()}
    found = net(shaped, None if context is None else context.reshape(3, 4, -1))
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=0, atol=1e-12)
