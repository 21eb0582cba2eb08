"""The rules of legality against their reason: a model is normalised if it can be scheduled."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from enumeration import joint
from xorflow import ModelError
from xorflow.conditioners import Dependence, Source
from xorflow.flows.flow import check_normalised

BY_ORDER = (None, "before", "up to", "all")


def declared(order, mask=None, **sees) -> SimpleNamespace:
    """All that the rules read of a conditioner."""
    found = {Source(s): Dependence(d) for s, d in sees.items() if d is not None}
    return SimpleNamespace(sees=found, order=order, mask=mask)


def coupled(mask) -> SimpleNamespace:
    return declared(None, mask, state="coupled")


def accepted(generators) -> bool:
    try:
        check_normalised(generators)
    except ModelError:
        return False
    return True


def seen_entries(net, dependence: Dependence, d: int, features: int) -> list[int]:
    """The entries of an input that the choice of feature d depends on."""
    if dependence is Dependence.ALL:
        return list(range(features))
    if dependence is Dependence.COUPLED:
        return [] if net.mask[d] else [e for e in range(features) if net.mask[e]]
    place = net.order.index(d)
    return list(net.order[: place + (dependence is Dependence.UP_TO)])


def needs(generators, layer: int, d: int, features: int, *, generative: bool) -> set[tuple[int, int]]:
    """The choices (layer, feature) that must be drawn before this one, from y or from x."""
    depth, found = len(generators), set()
    for source, dependence in generators[layer].sees.items():
        for e in seen_entries(generators[layer], dependence, d, features):
            if source is Source.OWN:
                found.add((layer, e))
            elif source is Source.PREVIOUS and layer > 0:
                found.add((layer - 1, e))
            else:  # a state x^(m): from y it takes all later choices at e, from x all earlier ones
                m = layer if source is Source.STATE else 0
                found |= {(k, e) for k in (range(m, depth) if generative else range(m))}
    return found


def schedulable(generators, features: int, *, generative: bool) -> bool:
    """Whether all choices can be drawn in some order; greedy, since a drawn choice never blocks another."""
    missing = {
        (layer, d): needs(generators, layer, d, features, generative=generative)
        for layer in range(len(generators))
        for d in range(features)
    }
    while ready := [node for node, parents in missing.items() if not parents & missing.keys()]:
        for node in ready:
            del missing[node]
    return not missing


def both_ways(generators, features: int) -> bool:
    return all(schedulable(generators, features, generative=way) for way in (True, False))


def every_declaration(features: int) -> list[SimpleNamespace]:
    sets = itertools.product(BY_ORDER, repeat=4)
    named = [dict(zip(("state", "previous", "own", "x"), chosen, strict=True)) for chosen in sets]
    orders = list(itertools.permutations(range(features)))
    masks = [m for m in itertools.product((True, False), repeat=features) if any(m) and not all(m)]
    return [declared(o, **sees) for sees in named for o in orders] + [coupled(m) for m in masks]


@pytest.mark.parametrize("features", [1, 2, 3])
def test_at_depth_one_exactly_the_schedulable_sets_are_accepted(features):
    for net in every_declaration(features):
        expected = both_ways([net], features) and Source.PREVIOUS not in net.sees
        assert accepted([net]) == expected, net


def test_every_accepted_pair_of_layers_is_schedulable():
    pairs = itertools.product(every_declaration(2), repeat=2)
    found = [pair for pair in pairs if accepted(pair)]
    assert len(found) > 100
    assert all(both_ways(pair, 2) for pair in found)


LEGAL = {
    "state": (None, "before"),
    "previous": (None, "before", "up to"),
    "own": (None, "before"),
    "x": (None, "before"),
}


@st.composite
def stacks(draw, features: int, strict: bool):
    """Layers whose sets are mostly legal one by one, in one ordering or several."""
    depth = draw(st.integers(1, 3))
    shared = draw(st.booleans())
    first = tuple(draw(st.permutations(range(features))))
    found = []
    for index in range(depth):
        order = first if shared else tuple(draw(st.permutations(range(features))))
        options = LEGAL if strict or draw(st.integers(0, 5)) else dict.fromkeys(LEGAL, BY_ORDER)
        sees = {s: draw(st.sampled_from(options[s])) for s in LEGAL if index or s != "previous"}
        found.append((order, {s: d for s, d in sees.items() if d} or {"state": "before"}))
    return found


@given(st.data(), st.integers(2, 3))
@settings(max_examples=1500)
def test_every_accepted_stack_is_schedulable(data, features):
    generators = [declared(order, **sees) for order, sees in data.draw(stacks(features, strict=False))]
    if accepted(generators):
        assert both_ways(generators, features)


@given(stacks(2, strict=True))
@settings(max_examples=60)
def test_every_accepted_stack_of_networks_sums_to_one(drawn):
    torch.manual_seed(0)
    layers = [zoo.made(2, order, (6,), sees=sees) for order, sees in drawn]
    try:
        flow = zoo.sharpen(zoo.flow(*layers)).double()
    except ModelError:
        assert not accepted([declared(order, **sees) for order, sees in drawn])
        return
    with torch.no_grad():
        assert abs(joint(flow).total - 1) < 1e-10


NATURAL, REVERSED = (0, 1, 2), (2, 1, 0)
NAMED_LEGAL = {
    "depth 1": [declared(NATURAL, x="before")],
    "depth 1, own u": [declared(REVERSED, x="before", own="before")],
    "chain, previous u before d": [declared(NATURAL, x="before"), declared(NATURAL, previous="before")],
    "chain, previous u up to d": [declared(NATURAL, x="before"), declared(NATURAL, previous="up to")],
    "chain, own u too": [
        declared(REVERSED, x="before", own="before"),
        *(declared(REVERSED, previous="up to", own="before") for _ in range(2)),
    ],
    "chain, the largest set": [
        declared(NATURAL, x="before", own="before"),
        declared(NATURAL, x="before", state="before", previous="up to", own="before"),
    ],
    "running state, any orderings": [declared(NATURAL, state="before"), declared(REVERSED, state="before")],
    "running state, own u": [
        declared(NATURAL, state="before", own="before"),
        declared(REVERSED, state="before", own="before"),
    ],
    "coupling": [coupled((True, False, False)), coupled((False, True, True))],
    "coupling and an ordering": [declared(REVERSED, state="before"), coupled((True, False, True))],
}


@pytest.mark.parametrize("name", NAMED_LEGAL)
def test_the_named_legal_sets_are_accepted(name):
    assert accepted(NAMED_LEGAL[name])
    assert both_ways(NAMED_LEGAL[name], 3)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([declared(NATURAL, x="all")], ["layer 1", "'x' 'before'", "declares 'all'", "not be normalised"]),
        ([declared(NATURAL, state="up to")], ["'state' 'before'", "declares 'up to'"]),
        ([declared(NATURAL, previous="before")], ["layer 1", "no layer before", "'x' or 'state'"]),
        (
            [declared(NATURAL, x="before"), declared(NATURAL, previous="all")],
            ["layer 2", "'before' or 'up to'", "declares 'all'"],
        ),
        (
            [declared(NATURAL, x="before"), declared(REVERSED, previous="up to")],
            ["share one ordering", "not normalised", "same order"],
        ),
        ([declared(NATURAL, x="before"), declared(REVERSED, x="before")], ["share one ordering"]),
    ],
)
def test_a_refusal_names_the_rule(layers, words):
    with pytest.raises(ModelError) as caught:
        check_normalised(layers)
    message = " ".join(str(caught.value).split())
    assert all(word in message for word in words), message
