"""The recipe for tables: a distribution, the same every time, that is as good as what it is made of; trees of columns."""

import itertools
import json
import time

import pytest
import torch

from enumeration import all_states
from xorflow import ConfigError, LatentFlow, Mixture
from xorflow.conditioners import Stacked
from xorflow.data import Dataset, Split
from xorflow.evaluate import exact
from xorflow.training import auto
from xorflow.training.auto import auto_fit
from xorflow.training.auto_weights import Weighing
from xorflow.training.chow_liu import ChowLiu, chow_liu
from xorflow.training.registry import flow_to_spec
from xorflow.training.results import independent_nll
from xorflow.training.spec import flow_from_spec

SIZES = (3, 2, 40, 2, 4)


def table(rows: int = 600) -> Dataset:
    """Columns that depend on those before; one has more values than trees are fitted for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, len(SIZES), generator=generator).mul(torch.tensor(SIZES)).long()
    wide = torch.rand(rows, generator=generator) < 0.8
    x[wide, 2] = 13 * x[wide, 0] + x[wide, 2] % 2
    for d in (1, 3, 4):
        kept = torch.rand(rows, generator=generator) < 0.8
        x[kept, d] = (x[kept, d - 1] // 2) % SIZES[d]
    train, validation, test = x.to(torch.uint8).tensor_split([rows * 2 // 3, rows * 5 // 6])
    return Dataset("table", Split(train), Split(validation), Split(test), SIZES)


@pytest.fixture(scope="module")
def found():
    return auto_fit(table(), orderings=2, seed=3)


def test_it_sums_to_one(found):
    with torch.no_grad():
        total = torch.logsumexp(found.model.log_likelihood(all_states(SIZES)), 0)
    assert abs(float(total)) < 1e-4  # in float32


def test_it_is_better_than_each_unit_and_than_a_tree(found):
    data = table()
    assert all(found.record["validation_nll"] < unit["validation_nll"] for unit in found.record["units"])
    nll = exact(found.model, data.test).nll
    tree = chow_liu(data.train.values, SIZES)
    assert nll < -float(tree.log_prob(data.test.values).mean())
    assert nll < independent_nll(data, data.test) - 0.5


def test_what_it_records_is_json_and_says_what_was_made(found):
    record = found.record
    assert json.loads(json.dumps(record)) == record
    assert record["orderings"] == 2
    assert record["ends"] == "so many orderings were asked for"
    assert [*record["weights"]] == ["natural", "random:25"]
    assert sum(record["weights"].values()) == pytest.approx(1, abs=1e-3)
    assert {unit["kind"] for unit in record["units"]} == set(record["kinds"])
    assert any("and not network" in reason for reason in record["reasons"])


def test_the_validation_likelihood_is_that_of_the_model(found):
    assert exact(found.model, table().validation).nll == pytest.approx(
        found.record["validation_nll"], abs=1e-3
    )


def test_its_model_is_built_again_from_its_configuration(found):
    again = flow_from_spec(json.loads(json.dumps(flow_to_spec(found.model))))
    again.load_state_dict(found.model.state_dict())
    x = table().test.values
    with torch.no_grad():
        assert torch.equal(again.eval().log_likelihood(x), found.model.log_likelihood(x))


def test_columns_with_too_many_values_are_left_to_the_network(found):
    assert isinstance(found.model, Mixture)
    net = found.model.flows[0].layers[0].conditioner
    assert isinstance(net, Stacked)
    kinds = [*found.record["kinds"]]
    weights = net.weights().detach()
    trees = weights[kinds.index("trees")]
    assert float(trees[2]) < float(trees[0])
    assert float(weights[:, 2].max()) > 0.8


def test_threads_and_repetition_change_nothing(found):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = auto_fit(table(), orderings=2, seed=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    weights = found.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model.state_dict().items())


class Watching:
    def __init__(self) -> None:
        self.kinds, self.orderings = [], []

    def on_ordering(self, number, seconds):
        self.orderings.append((number, seconds))

    def on_unit(self, record):
        self.kinds.append(record["kind"])


def test_the_clock_decides_only_whether_another_ordering_is_begun(monkeypatch):
    watching = Watching()
    model = auto_fit(table(), minutes=0, observer=watching)
    assert isinstance(model.model, LatentFlow)
    assert model.record["ends"] == "another ordering would not have ended in time"
    assert model.record["orderings"] == 1
    assert watching.kinds == ["trees", "network", "network with dropout"]
    assert watching.orderings == [(1, 0)]
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    again = auto_fit(table(), orderings=1)
    weights = again.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.model.state_dict().items())


def test_rows_and_trees_bound_the_orderings(monkeypatch):
    assert auto_fit(table(300), minutes=9).record["orderings"] == 2  # 200 rows train
    monkeypatch.setattr(auto, "_TREES_A_COLUMN", 1)
    found = auto_fit(table(300), minutes=9)
    assert found.record["orderings"] == 1
    assert found.record["ends"] == "more trees would make scores slow"


def test_without_trees_there_are_networks(monkeypatch):
    monkeypatch.setattr(auto, "available", lambda: False)
    found = auto_fit(table(300), orderings=1)
    assert "trees" not in found.record["kinds"]
    assert found.record["reasons"][0] == "no boosted trees: pip install 'xorflow[trees]'"


def test_what_it_cannot_do_is_said():
    data = table(60)
    with pytest.raises(ConfigError, match="chooses by validation rows, and there are none: keep some back"):
        auto_fit(Dataset("all train", data.train, None, None, SIZES))
    with pytest.raises(ConfigError, match="has 1 to 8 orderings; got 9"):
        auto_fit(data, orderings=9)


# ---- the best tree of columns: a distribution, and no other tree is better on the rows that it was made of ----


TREE_SIZES = (2, 3, 2, 4)


def rows(count: int = 500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 4, generator=generator).mul(torch.tensor(TREE_SIZES)).long()
    x[:, 3] = torch.where(torch.rand(count, generator=generator) < 0.7, x[:, 1], x[:, 3])
    x[:, 2] = torch.where(torch.rand(count, generator=generator) < 0.6, x[:, 3] % 2, x[:, 2])
    return x


def test_a_tree_sums_to_one():
    tree = chow_liu(rows(), TREE_SIZES)
    assert abs(float(tree.log_prob(all_states(TREE_SIZES)).exp().sum()) - 1) < 1e-12


def test_no_other_tree_is_better():
    x = rows()
    tree = chow_liu(x, TREE_SIZES)
    best = tree.log_prob(x).mean()
    for parents in itertools.product(range(4), repeat=3):
        whole = torch.tensor([0, *parents])
        above = whole.clone()
        for _ in range(4):
            above = whole[above]
        if bool((above == 0).all()):  # all lead to the root
            assert ChowLiu(whole, tree.log_p, tree.offsets).log_prob(x).mean() <= best + 1e-12
    assert {int(tree.parents[3]), int(tree.parents[1]), int(tree.parents[2])} >= {1, 3} or tree.parents[
        1
    ] == 3


def test_too_many_values_have_none():
    assert chow_liu(torch.zeros(3, 2), (9000, 2)) is None


def test_weights_are_those_of_all_rows_however_many_are_passed_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, (500, 6), generator=generator).to(torch.uint8)
    logits = [[torch.randn(500, 18, generator=generator) for _ in range(2)] for _ in range(3)]
    weighing = Weighing(Split(x), (3,) * 6, most=2)
    whole = weighing.fit(logits)
    weighing.rows = 77
    cut = weighing.fit(logits)
    assert cut.nll == pytest.approx(whole.nll, abs=1e-5)
    torch.testing.assert_close(cut.mixture, whole.mixture, atol=1e-3, rtol=0)
