"""A MADE evaluated block by block gives what a whole pass gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xorflow import MADE
from xorflow.conditioners import Source


@st.composite
def networks(draw):
    features = draw(st.integers(1, 9))
    sizes = st.lists(st.integers(1, 4), min_size=features, max_size=features)
    torch.manual_seed(draw(st.integers(0, 99)))
    return MADE(
        features,
        draw(st.lists(st.integers(1, 12), max_size=3)),
        order=tuple(draw(st.permutations(range(features)))),
        categories=draw(st.one_of(st.integers(2, 4), sizes)),
        choices=draw(st.sampled_from([None, 2, 6])),
        sees={draw(st.sampled_from(["state", "x"])): "before"},
        direct=draw(st.booleans()),
        context=draw(st.integers(0, 2)),
    ).double()


@given(networks(), st.integers(1, 10))
def test_decoding_along_the_order_gives_the_logits_of_a_whole_pass(net, size):
    generator = torch.Generator().manual_seed(0)
    (source,) = net.sees
    x = torch.randint(12, (5, net.features), generator=generator) % torch.tensor(net.states.sizes)
    context = None
    if net.context_features:
        context = torch.rand(5, net.context_features, generator=generator, dtype=torch.float64)
    expected, visited = net({source: x}, context), x[:, list(net.order)]
    with torch.no_grad():
        decoder = net.incremental(5, context, size)
        for block in decoder.blocks:
            part, places = (
                visited[:, block],
                net.choices.positions(net.order[block]),
            )
            torch.testing.assert_close(decoder.logits(block, part), expected[:, places], rtol=0, atol=1e-12)
            decoder.update(block, part)
    assert [d for block in decoder.blocks for d in range(block.start, block.stop)] == list(
        range(net.features)
    )


@pytest.mark.parametrize(
    "sees", [{"state": "up to"}, {"own": "before"}, {"state": "before", "own": "before"}]
)
def test_what_sees_more_makes_whole_passes(sees):
    assert MADE(3, (4,), sees=sees).incremental(1, None, 2) is None


def test_trial_values_change_nothing():
    """Only `update` is for good: any trials before it leave no trace."""
    torch.manual_seed(0)
    net = MADE(6, (8, 8)).double()
    x = torch.randint(2, (3, 6))
    with torch.no_grad():
        decoder = net.incremental(3, None, 2)
        for block in decoder.blocks:
            for trial in range(3):
                decoder.logits(block, torch.full((3, 2), trial % 2))
            found = decoder.logits(block, x[:, block])
            whole = net({Source.STATE: x})[:, block]
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
            decoder.update(block, x[:, block])
