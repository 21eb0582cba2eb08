"""Python's way in and out: fit and load."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xorflow as xf
from tiny_runs import StopAt, read, tiny_dataset, tiny_flow
from xorflow.errors import CheckpointError, ConfigError, DataError, ModelError
from xorflow.training import Interrupted

SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 64, "device": "cpu", "lr": 0.01}


def log_prob(flow: xf.LatentFlow, context: Tensor | None = None) -> Tensor:
    test = tiny_dataset(context=context is not None).test
    assert test is not None
    return flow(context).log_prob(test.values.long()).detach()


def test_without_a_folder_nothing_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flow = tiny_flow()
    before = log_prob(flow)
    result = xf.fit(flow, tiny_dataset(), **SHORT)
    assert os.listdir(tmp_path) == []
    assert log_prob(flow).mean() > before.mean()
    assert result["test"]["nll"] == pytest.approx(-float(log_prob(flow).double().mean()), abs=1e-5)


def test_with_a_folder_it_loads_back_to_the_same_likelihood(tmp_path: Path) -> None:
    flow = tiny_flow()
    result = xf.fit(flow, tiny_dataset(), out=tmp_path / "run", **SHORT)
    assert read(tmp_path / "run/result.json") == result
    loaded = xf.load(tmp_path / "run")
    assert torch.equal(log_prob(loaded), log_prob(flow))
    assert not loaded.training


def test_deep_flows_with_a_posterior_load_back(tmp_path: Path) -> None:
    layers = [
        xf.Layer(xf.MADE(6, (16,), categories=3, order=order), posterior=xf.MLP(6, (8,), categories=3))
        for order in ("natural", "random:3")
    ]
    flow = xf.LatentFlow(layers, xf.FactorisedBase(6, categories=3))
    xf.fit(flow, tiny_dataset(), out=tmp_path / "run", evaluation_samples=4, **SHORT)
    loaded = xf.load(tmp_path / "run")
    assert loaded.has_posterior
    for name, tensor in flow.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_part_that_is_used_twice(tmp_path: Path) -> None:
    shared = xf.MADE(6, (16,), categories=3)
    flow = xf.LatentFlow([xf.Layer(shared), xf.Layer(shared)], xf.FactorisedBase(6, categories=3))
    xf.fit(flow, tiny_dataset(), out=tmp_path / "run", evaluation_samples=4, **SHORT)
    x = tiny_dataset().train.values[:5]
    loaded = xf.load(tmp_path / "run")
    assert torch.equal(xf.evaluate.greedy(loaded, x).values, xf.evaluate.greedy(flow, x).values)


def test_without_validation_the_last_weights_stay(tmp_path: Path) -> None:
    flow = tiny_flow()
    result = xf.fit(flow, tiny_dataset(validation=False), out=tmp_path / "run", **SHORT)
    assert result["weights"] == "last"
    assert result["best_epoch"] is None
    assert "validation" not in result
    assert torch.equal(log_prob(xf.load(tmp_path / "run")), log_prob(flow))


def test_without_any_held_out_data_there_is_no_likelihood() -> None:
    train = tiny_dataset().train
    data = xf.data.Dataset("in memory", train, None, None, categories=(3,) * 6)
    result = xf.fit(tiny_flow(), data, **SHORT)
    assert result["independent_nll"] is None
    assert not result.keys() & {"test", "validation"}


def test_a_context_is_learned_from(tmp_path: Path) -> None:
    """The context says what the first feature is: about log 3 nats better with it than without."""
    data = tiny_dataset(context=True)
    assert data.test is not None
    slow = SHORT | {"epochs": 40, "lr": 0.03}
    without = xf.fit(tiny_flow(), data, **slow)
    flow = tiny_flow(context=3)
    result = xf.fit(flow, data, out=tmp_path / "run", **slow)
    assert result["test"]["nll"] < without["test"]["nll"] - 0.7
    loaded = xf.load(tmp_path / "run")
    assert torch.equal(log_prob(loaded, data.test.context), log_prob(flow, data.test.context))


class Table(xf.Conditioner):
    """A conditioner of one's own: logits that depend on nothing."""

    def __init__(self, features: int, categories: int, scale: float = 1.0) -> None:
        super().__init__(features, categories=categories, choices=None, sees={}, order=None, context=0)
        self.scale = scale
        self.logits = torch.nn.Parameter(torch.zeros(features * categories))

    def forward(self, inputs: Any, context: Tensor | None = None) -> Tensor:
        return self.scale * self.logits

    def start_at(self, logits: Tensor) -> None:
        self.logits.data.copy_(logits / self.scale)

    def config(self) -> dict[str, Any]:
        return {"features": self.features, "categories": 3, "scale": self.scale}


def test_a_conditioner_of_ones_own_is_named_when_loading(tmp_path: Path) -> None:
    flow = xf.LatentFlow([xf.Layer(Table(6, 3, scale=2.0))], xf.FactorisedBase(6, categories=3))
    xf.fit(flow, tiny_dataset(), out=tmp_path / "run", **SHORT)
    with pytest.raises(CheckpointError, match=r"a part named 'Table'.*classes=\{'Table': YourClass\}"):
        xf.load(tmp_path / "run")
    loaded = xf.load(tmp_path / "run", classes={"Table": Table})
    assert torch.equal(log_prob(loaded), log_prob(flow))


def test_start_at_the_data_is_near_independent_features() -> None:
    flow = tiny_flow()
    result = xf.fit(flow, tiny_dataset(), init="data", epochs=1, lr=1e-9, batch_size=64, device="cpu")
    assert abs(result["test"]["nll"] - result["independent_nll"]) < 1.0


@pytest.mark.parametrize("name", ["layers", "conditioner", "order", "label", "validation"])
def test_options_of_models_and_data_mean_nothing_here(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} means nothing here"):
        xf.fit(tiny_flow(), tiny_dataset(), **{name: 3})


def test_what_cannot_be_trained_leaves_no_folder(tmp_path: Path) -> None:
    own = xf.MADE(6, (8,), categories=3, sees={"own": "before", "state": "before"})
    flow = xf.LatentFlow([xf.Layer(own)], xf.FactorisedBase(6, categories=3))
    with pytest.raises(ModelError, match="must not see its own u"):
        xf.fit(flow, tiny_dataset(), out=tmp_path / "run", **SHORT)
    with pytest.raises(ConfigError, match="not there"):
        xf.fit(tiny_flow(), tiny_dataset(), out=tmp_path / "run", device="cuda:63")
    with pytest.raises(ConfigError, match="precision is one of"):
        xf.fit(tiny_flow(), tiny_dataset(), out=tmp_path / "run", device="cpu", precision="16-mixed")
    with pytest.raises(ConfigError, match="no option 'epoch'"):
        xf.fit(tiny_flow(), tiny_dataset(), out=tmp_path / "run", epoch=3)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty: choose another"):
        xf.fit(tiny_flow(), tiny_dataset(), out=tmp_path, **SHORT)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_ctrl_c_in_python_raises_interrupted() -> None:
    with pytest.raises(Interrupted):
        xf.fit(tiny_flow(), tiny_dataset(), observer=StopAt({1}), **SHORT)


def held_out(train: xf.data.Split, what: str, categories: int) -> xf.data.Dataset:
    validation, test = (train if part in what else None for part in ("validation", "test"))
    return xf.data.Dataset("own", train, validation, test, categories=(categories,) * 6)


@pytest.mark.parametrize("what", ["", "validation", "test", "validation and test"])
def test_a_flow_of_fewer_categories_than_the_data_is_refused_before_any_work(
    what: str, tmp_path: Path
) -> None:
    flow = xf.LatentFlow([xf.Layer(xf.MADE(6, (8,)))], xf.FactorisedBase(6))
    before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    data = held_out(tiny_dataset().train, what, 3)
    with pytest.raises(
        ModelError, match=r"K = 2 at feature 0 .* own has 3; build .* categories=data.categories"
    ):
        xf.fit(flow, data, out=tmp_path / "run", init="data", **SHORT)
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(before[name], tensor) for name, tensor in flow.state_dict().items())


@pytest.mark.parametrize("what", ["", "validation", "test"])
def test_values_beyond_the_stated_categories_are_refused(what: str) -> None:
    flow = xf.LatentFlow([xf.Layer(xf.MADE(6, (8,)))], xf.FactorisedBase(6))
    with pytest.raises(DataError, match=r"row 0, feature 2 .* holds 2 where K = 2"):
        xf.fit(flow, held_out(tiny_dataset().train, what, 2), **SHORT)


def test_a_flow_of_more_categories_than_the_data_is_trained() -> None:
    flow = xf.LatentFlow([xf.Layer(xf.MADE(6, (8,), categories=4))], xf.FactorisedBase(6, categories=4))
    xf.fit(flow, held_out(tiny_dataset().train, "test", 3), **SHORT)


def test_other_features_or_another_context_are_refused_before_any_work(tmp_path: Path) -> None:
    data = tiny_dataset()
    base = xf.FactorisedBase(6, categories=3)
    narrow = xf.LatentFlow([xf.Layer(xf.MADE(5, (8,)))], xf.FactorisedBase(5))
    with pytest.raises(ModelError, match=r"this one has D = 5, and .* has 6; build it with features=6"):
        xf.fit(narrow, data, out=tmp_path / "run", **SHORT)
    seeing = xf.LatentFlow([xf.Layer(xf.MADE(6, (8,), categories=3, context=2))], base)
    with pytest.raises(ModelError, match=r"takes 2 context features, and .* has 0"):
        xf.fit(seeing, data, out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_an_estimator_may_be_named() -> None:
    result = xf.fit(
        tiny_flow(), tiny_dataset(rows=100), "score-function:baseline=none", epochs=1, device="cpu"
    )
    assert result["epochs"] == 1
    with pytest.raises(ConfigError, match="estimator"):
        xf.fit(tiny_flow(), tiny_dataset(rows=100), "magic", epochs=1)
