"""Boosted trees: those of LightGBM, read as tensors, which see no more than they declare."""

import sys

import lightgbm
import pytest
import torch
from torch import Tensor

from xorflow import CheckpointError, ConfigError, DataError, FactorisedBase, LatentFlow, Layer, ModelError
from xorflow.conditioners import BoostedTrees, Boosting, Source
from xorflow.training.registry import flow_to_spec
from xorflow.training.spec import flow_from_spec

SIZES = (3, 2, 5, 4, 2)


def rows(count: int = 400, seed: int = 0) -> Tensor:
    """Columns that depend on those before: sums of them, and noise in a fifth of the cells."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(60, (count, len(SIZES)), generator=generator) % torch.tensor(SIZES)
    for d in range(1, len(SIZES)):
        kept = torch.rand(count, generator=generator) < 0.8
        x[kept, d] = x[kept, :d].sum(-1) % SIZES[d]
    return x


def fitted(x: Tensor | None = None, order="natural", **settings) -> BoostedTrees:
    net = BoostedTrees(len(SIZES), categories=SIZES, order=order, ordered=(2,))
    x = rows() if x is None else x
    return net.fit(x, rows(200, seed=1), Boosting(**settings)).double()


def logits(net: BoostedTrees, x: Tensor) -> Tensor:
    return net({Source.STATE: x})


@pytest.mark.parametrize("order", ["natural", (3, 1, 4, 2, 0)])
def test_they_are_the_trees_of_lightgbm(order, monkeypatch):
    boosters, train = [], lightgbm.train
    monkeypatch.setattr(lightgbm, "train", lambda *a, **k: boosters.append(train(*a, **k)) or boosters[-1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = fitted(order=order)
    finally:
        torch.set_num_threads(threads)
    x = rows(100, seed=2)
    found, levels = logits(net, x), net.levels.expand(len(x), -1)
    for rank, booster in enumerate(boosters, 1):
        places = net.states.positions([net.order[rank]])
        expected = torch.from_numpy(booster.predict(x[:, list(net.order[:rank])].numpy(), raw_score=True))
        added = found[:, places] - levels[:, places]
        torch.testing.assert_close(added, expected.reshape(added.shape), rtol=0, atol=1e-5)
    assert len(boosters) == len(SIZES) - 1
    assert sum(net.trees) > 50


def test_each_column_ends_where_its_validation_rows_say():
    draws = torch.rand(6000, 5, generator=torch.Generator().manual_seed(3))
    noise = draws.mul(torch.tensor(SIZES)).long()
    net = BoostedTrees(5, categories=SIZES).fit(noise[:1000], noise[1000:])
    assert sum(net.trees) < sum(fitted().trees) / 4
    with_one = fitted(rounds=1)
    assert max(with_one.trees) == 1
    assert with_one.trees[with_one.states.first_logits[0]] == 0  # nothing is visited before


def test_wide_columns_keep_the_frequencies_of_their_values():
    net, x = fitted(most=3), rows()
    (place,) = {net.states.first_logits[d] for d in range(5) if SIZES[d] == 5}
    assert not any(net.trees[place : place + 5])
    found = net.levels[place : place + 5].softmax(0)
    torch.testing.assert_close(found, torch.bincount(x[:, 2]) / len(x), rtol=0, atol=1e-2, check_dtype=False)
    assert any(net.trees)


@pytest.mark.parametrize("order", ["natural", (3, 1, 4, 2, 0)])
def test_of_many_columns_trees_look_at_those_that_tell_most(order):
    x = rows()
    x[:, 3] = x[:, 2] % SIZES[3]  # of all columns, the one before it in both orderings or after it
    net = BoostedTrees(len(SIZES), categories=SIZES, order=order).fit(x, x, Boosting(seen=1))
    x = rows(50, seed=2)
    before = logits(net, x)
    for changed in range(len(SIZES)):
        other = x.clone()
        other[:, changed] = (x[:, changed] + 1) % SIZES[changed]
        places = net.states.positions([3 if order == "natural" else 2])
        moved = bool((logits(net, other)[:, places] != before[:, places]).any())
        assert moved == (changed == (2 if order == "natural" else 3))


def test_columns_of_one_value_are_no_trouble():
    x = rows()
    x[:, 1], x[:, 4] = 1, 0
    net = fitted(x)
    assert not any(net.trees[net.states.first_logits[d]] for d in (1, 4))
    assert float(logits(net, x)[:, net.states.first_logits[1]].min()) > 5


def test_threads_and_repetition_change_nothing():
    threads, nets = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        nets.append(fitted())
    torch.set_num_threads(threads)
    one, other = (net.state_dict() for net in nets)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_needs_no_library_of_trees(monkeypatch):
    flow = LatentFlow([Layer(fitted(order="random:1"))], FactorisedBase(5, 0.99, categories=SIZES)).double()
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    again = flow_from_spec(flow_to_spec(flow)).double()
    again.load_state_dict(flow.state_dict())
    x = rows(50)
    assert torch.equal(again().log_prob(x), flow().log_prob(x))
    with pytest.raises(
        ConfigError, match=r"fitted by LightGBM, which is not installed; pip install 'xorflow\[trees"
    ):
        BoostedTrees(2).fit(x[:, :2], x[:, :2])


@pytest.mark.parametrize("change", [lambda s: s, lambda s: s - 9999, lambda s: s * 0 + 2**30])
def test_trees_that_would_see_too_much_are_not_loaded(change):
    net = fitted()
    weights = net.state_dict()
    last = (
        len(net.split_features) - 1
    )  # of the last feature that any tree sees, as no tree of the second does
    weights["nodes"][0] = change(torch.tensor(last, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="these see more, so they would give no likelihood"):
        net.load_state_dict(weights)


def test_what_cannot_be_is_refused():
    with pytest.raises(ModelError, match=r"ordered names some of the features 0..2"):
        BoostedTrees(3, ordered=(3,))
    with pytest.raises(ModelError, match="trees are counted for each of 3 logits"):
        BoostedTrees(3, trees=(1, 2), splits=(1, 1, 1))
    with pytest.raises(DataError, match=r"rows of 3 features, and got shape \(4, 2\)"):
        BoostedTrees(3).fit(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64))
