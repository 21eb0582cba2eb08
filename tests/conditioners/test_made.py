"""MADE: masks that stay, where it starts, what it refuses, and what it gives block by block."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo
from xorflow import MADE, ModelError
from xorflow.conditioners import MaskedLinear, Source
from xorflow.conditioners.linear import Table
from xorflow.estimators import MaximumLikelihood


def masked_layers(module: nn.Module) -> list[MaskedLinear | Table]:
    return [m for m in module.modules() if isinstance(m, MaskedLinear | Table) and m.mask is not None]


def assert_masked(module: nn.Module) -> None:
    layers = masked_layers(module)
    assert any(bool((layer.mask == 0).any()) for layer in layers)
    for layer in layers:
        assert bool((layer.weight[layer.mask == 0] == 0).all())


def train(flow, optimiser: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randint(12, (16, flow.features), generator=generator) % torch.tensor(flow.categories)
        optimiser.zero_grad()
        MaximumLikelihood()(flow, x, generator=generator).surrogate.backward()
        optimiser.step()


OPTIMISERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam, decay, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


TRAINED = [
    "D4 direct",
    "D3 depth 3",
    "D5 explicit, two hidden layers",
    "K 3, 2, 4 direct",
    "K 2, 3, 2, 4 linear",
]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_training_keeps_the_masks(name, optimiser):
    flow = zoo.make(name)
    before = [p.detach().clone() for p in flow.layers.parameters()]
    train(flow, OPTIMISERS[optimiser](flow.layers.parameters()))
    assert_masked(flow)
    assert any(not torch.equal(a, b) for a, b in zip(before, flow.layers.parameters(), strict=True))


def test_a_copy_trains_by_itself_and_keeps_the_masks():
    flow = zoo.make("D4 direct")
    twin = copy.deepcopy(flow)
    train(twin, torch.optim.AdamW(twin.layers.parameters(), lr=0.1))
    assert_masked(twin)
    fresh = zoo.make("D4 direct")
    assert all(torch.equal(a, b) for a, b in zip(flow.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("name", ["D4 direct", "K 3, 2, 4 direct"])
def test_loaded_weights_are_masked(name):
    flow = zoo.make(name)
    leaky = {name: torch.randn_like(value) for name, value in flow.state_dict().items()}
    flow.load_state_dict(leaky)
    assert_masked(flow)


def test_masks_are_no_weights_and_follow_the_dtype():
    net = MADE(4, (8,), categories=(2, 3, 2, 4))
    assert not any("mask" in name for name in net.state_dict())
    assert {p.dtype for p in net.double().parameters()} == {torch.float64}
    assert all(layer.mask.dtype == torch.float64 for layer in masked_layers(net))


@pytest.mark.parametrize("hidden", [(), (8,), (8, 8)])
@pytest.mark.parametrize("options", [{}, {"direct": True}, {"categories": 3}, {"categories": (2, 3, 4)}])
def test_it_starts_where_it_is_told(hidden, options):
    net = MADE(3, hidden, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0)
    logits = torch.randn(net.choices.flat)
    net.start_at(logits)
    zero = torch.zeros(2, 3, dtype=torch.int64)
    torch.testing.assert_close(net({Source.STATE: zero}), logits.expand(2, -1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": (0,)}, r"hidden widths are at least 1, and got \(0,\)"),
        ({"hidden": (4, -1)}, "at least 1"),
        ({"order": "sideways"}, "'natural', 'reversed'.*'sideways'"),
        ({"order": (0, 1, 1)}, r"each of the features 0\.\.2 once, and got \[0, 1, 1\]"),
        ({"order": (0, 1)}, "once"),
        ({"order": "random:x"}, "whole number, and got 'x'"),
        ({"categories": (2, 3)}, "one for each of the 3 features, and has 2"),
        ({"categories": 0}, "at least 1"),
        ({"choices": (2, 2, 0)}, "at least 1"),
        ({"sees": {"state": "after"}}, "'before', 'up to', 'all'.*after"),
        ({"sees": {"future": "before"}}, "'state', 'previous', 'own', 'x'.*future"),
        ({"sees": {"state": "coupled"}}, "use Coupling"),
        ({"features": 0}, "at least one feature"),
    ],
)
def test_what_it_refuses(options, words):
    with pytest.raises(ModelError, match=words):
        MADE(**({"features": 3, "hidden": (4,)} | options))


@pytest.mark.parametrize(("built", "came"), [(0, 2), (2, 0), (2, 3)])
def test_a_context_of_the_wrong_width_is_refused(built, came):
    net = MADE(2, (4,), context=built)
    with pytest.raises(ModelError, match=rf"made for {built} context features, and got {came}.*context="):
        net({Source.STATE: torch.zeros(1, 2, dtype=torch.int64)}, torch.zeros(1, came) if came else None)


@pytest.mark.parametrize("categories", [2, (2, 3, 4, 2)])
def test_dropout_is_of_training_alone_and_leaves_no_leak(categories):
    torch.manual_seed(0)
    plain, net = (
        MADE(4, (64,), order=(2, 0, 3, 1), categories=categories, direct=True, **options).double()
        for options in ({}, {"dropout": 0.5, "input_dropout": 0.3})
    )
    net.load_state_dict(plain.state_dict())
    x = torch.ones(3, 4, dtype=torch.int64)

    def in_training(x):
        torch.manual_seed(1)
        return net({Source.STATE: x})

    with torch.no_grad():
        assert torch.equal(net({Source.STATE: x}), plain({Source.STATE: x}))
    first = in_training(x)
    assert not torch.allclose(first, plain({Source.STATE: x}))
    for place, feature in enumerate(net.order):
        changed = x.clone()
        changed[:, feature] = 0
        unseen = torch.isin(net.states.logit_features, torch.tensor(net.order[: place + 1]))
        after = in_training(changed)
        assert torch.equal(after[:, unseen], first[:, unseen])
    with pytest.raises(ModelError, match="dropout is a share of at least 0 and below 1, and got 1"):
        MADE(3, dropout=1.0)


# ---- evaluated block by block it gives what a whole pass gives ----


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
