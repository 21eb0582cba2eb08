"""The loop: what it records, which weights it keeps, what it leaves on disk."""

import math
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.util import tensor_util
from torch import Tensor

from tiny_runs import (
    StopAt,
    assert_same_run,
    continue_run,
    read,
    rows_file,
    tiny_dataset,
    tiny_flow,
    tiny_options,
    train_run,
    weights_of,
)
from xorflow import LatentFlow, evaluate, fit
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.estimators import MaximumLikelihood
from xorflow.training import Interrupted, Options, Trainer, load, open_run
from xorflow.training.folder import read_metrics
from xorflow.training.optimiser import learning_rate


def trainer(flow: LatentFlow, data: Dataset, run: Path | None = None, **options: object) -> Trainer:
    usual = {"epochs": 3, "batch_size": 40, "device": "cpu", "lr": 0.01}
    return Trainer(flow, MaximumLikelihood(), data, Options(**(usual | options)), run)  # pyright: ignore[reportArgumentType]


def test_one_record_an_epoch_with_its_rate_step_and_likelihoods(tmp_path: Path) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), epochs=3, warmup=2)
    watch = StopAt(())
    train_run(options, tmp_path / "run", watch)
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert records == watch.records
    assert [r["epoch"] for r in records] == [1, 2, 3]
    assert [r["step"] for r in records] == [5, 10, 15]  # 160 rows train, 32 a step
    assert watch.seen == list(range(1, 16))
    assert watch.started == (15, 0)
    assert [r["lr"] for r in records] == [learning_rate(options, step - 1, 15) for step in (5, 10, 15)]
    assert all(math.isfinite(r["train_nll"]) and math.isfinite(r["validation_nll"]) for r in records)


def test_training_learns(tmp_path: Path) -> None:
    """The copied feature is worth log 3 nats, which independent features cannot have."""
    options = tiny_options(rows_file(tmp_path / "rows.npy", rows=400), epochs=40, lr=0.02)
    result = train_run(options, tmp_path / "run")
    assert result["test"]["nll"] < result["independent_nll"] - 0.8


def test_the_best_weights_on_validation_are_kept(tmp_path: Path) -> None:
    """On few rows a high rate overfits: the last epoch is not the best."""
    options = tiny_options(
        rows_file(tmp_path / "rows.npy", rows=60),
        epochs=30,
        lr=0.1,
        conditioner="made:hidden=64",
        schedule="constant",
    )
    result = train_run(options, tmp_path / "run")
    nlls = [r["validation_nll"] for r in read_metrics(tmp_path / "run/metrics.jsonl")]
    best = int(np.argmin(nlls))
    assert best < 29
    assert result["best_epoch"] == best + 1
    assert result["weights"] == "best on validation"
    opened = open_run(tmp_path / "run")
    validation = opened.data().validation
    assert validation is not None
    assert evaluate.exact(opened.flow, validation).nll == nlls[best]
    assert result["validation"]["nll"] == nlls[best]


def test_validate_every_skips_epochs_but_never_the_last(tmp_path: Path) -> None:
    train_run(tiny_options(rows_file(tmp_path / "rows.npy"), epochs=5, validate_every=2), tmp_path / "run")
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [r["epoch"] for r in records if "validation_nll" in r] == [2, 4, 5]


def test_patience_stops_after_so_many_validations_without_better_weights(tmp_path: Path) -> None:
    """The same epochs as without it, the best among them kept; a resumed run stops at the same one."""
    data = rows_file(tmp_path / "rows.npy", rows=60)
    given = {"lr": 0.1, "conditioner": "made:hidden=64", "schedule": "constant", "validate_every": 2}
    long = tiny_options(data, epochs=40, **given)
    train_run(long, tmp_path / "long")
    records = read_metrics(tmp_path / "long/metrics.jsonl")
    nlls = [r["validation_nll"] for r in records if "validation_nll" in r]
    best = 2 * next(i for i, nll in enumerate(nlls, 1) if min(nlls[i : i + 3]) >= nll)

    options = long.replace(patience=3)
    result = train_run(options, tmp_path / "run")
    assert (result["best_epoch"], result["epochs"]) == (best, best + 6)
    assert result["epochs"] < 40
    assert [r["train_nll"] for r in read_metrics(tmp_path / "run/metrics.jsonl")] == [
        r["train_nll"] for r in records[: best + 6]
    ]

    class StopAtTheEnd(StopAt):
        """After the last epoch, whose checkpoint is then what is resumed."""

        def on_epoch(self, record: dict[str, Any]) -> None:
            if record["epoch"] == best + 6:
                signal.raise_signal(signal.SIGINT)

    for name, watch in (("middle", StopAt({best + 5})), ("end", StopAtTheEnd(()))):
        with pytest.raises(Interrupted):
            train_run(options, tmp_path / name, watch)
        continue_run(tmp_path / name, {})
        assert_same_run(tmp_path / name, tmp_path / "run")


def test_patience_without_validation_is_refused(tmp_path: Path) -> None:
    data, words = rows_file(tmp_path / "rows.npy"), "if validation is not 0; got patience=3 with validation=0"
    with pytest.raises(ConfigError, match=words):
        tiny_options(data, validation=0, patience=3)
    with pytest.raises(ConfigError, match=words):
        fit(tiny_flow(), tiny_dataset(validation=False), patience=3, device="cpu")


def _flow_weights(flow: LatentFlow) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in flow.state_dict().items()}


def test_the_average_of_weights_is_what_is_evaluated_and_kept() -> None:
    """Recomputed by hand from the weights after every step; it does not disturb the training itself."""
    data, decay, path = tiny_dataset(validation=False), 0.8, []

    class Record(StopAt):
        def on_step(self, step: int) -> None:
            path.append(_flow_weights(plain))

    plain, averaged = tiny_flow(), tiny_flow()
    start = _flow_weights(plain)
    by_hand = trainer(plain, data)
    by_hand.observer = Record(())
    by_hand.train()
    run = trainer(averaged, data, average=decay)
    run.train()
    expected = start
    for step, weights in enumerate(path):
        weight = max(1 - decay, 1 / (step + 2))
        expected = {name: t + weight * (weights[name] - t) for name, t in expected.items()}
    for name, tensor in averaged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])
        assert "logits" in name or not tensor.numel() or not torch.equal(tensor, path[-1][name]), name


def test_the_average_reaches_the_file(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    result = train_run(tiny_options(data, average=0.9, lr=0.05, epochs=4), tmp_path / "run")
    assert result["weights"] == "average"
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert result["validation"]["nll"] == min(r["validation_nll"] for r in records)


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
def test_every_optimiser_lowers_the_loss(optimiser: str) -> None:
    run = trainer(tiny_flow(), tiny_dataset(), epochs=15, optimiser=optimiser, lr=0.02, weight_decay=1e-4)
    watch = StopAt(())
    run.observer = watch
    run.train()
    assert watch.records[-1]["train_nll"] < watch.records[0]["train_nll"]


def events(file: Path) -> list[Any]:
    """What TensorBoard reads of the events of a run."""
    return list(event_file_loader.EventFileLoader(str(file)).Load())


def test_the_time_and_the_host_are_nowhere_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-some-name")
    options = tiny_options(rows_file(tmp_path / "rows.npy"), tensorboard=True)
    began = int(time.time())
    train_run(options, tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    stamps = {str(second)[:8] for second in (began, int(time.time()))}
    for path in files:
        text = path.name.encode() + path.read_bytes()
        assert not any(word.encode() in text for word in {"a-host-of-some-name", *stamps}), path
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    assert all(event.wall_time < 1000 for event in events(file))


def test_tensorboard_events_are_written_when_asked_for(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    train_run(tiny_options(data, tensorboard=True), tmp_path / "run")
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    shown = {(event.step, value.tag): value for event in events(file) for value in event.summary.value}
    for record in read_metrics(tmp_path / "run/metrics.jsonl"):
        for name in record.keys() - {"epoch", "step"}:
            number = tensor_util.make_ndarray(shown.pop((record["step"], name)).tensor)
            assert float(number) == pytest.approx(record[name], rel=1e-6)
    assert not shown
    train_run(tiny_options(data), tmp_path / "plain")
    assert not (tmp_path / "plain/tensorboard").exists()


def test_the_run_folder(tmp_path: Path) -> None:
    train_run(tiny_options(rows_file(tmp_path / "rows.npy")), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json",
        "weights.index.json",
        "weights.safetensors",
        "metrics.jsonl",
        "result.json",
    }
    result = read(tmp_path / "run/result.json")
    for part in ("test", "validation"):
        assert result[part].keys() >= {
            "nll", "kind", "stderr", "greedy_nll", "refit_nll", "floor", "bits_per_dim"
        }  # fmt: skip
        assert result[part]["kind"] == "exact"
        assert result[part]["floor"] <= result[part]["nll"]
    assert result.keys() >= {"seed", "epochs", "parameters", "seconds", "data", "independent_nll"}
    assert result["data"]["sizes"] == {"train": 160, "validation": 20, "test": 20}
    assert result["parameters"] == sum(t.numel() for t in weights_of(tmp_path / "run").values())


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_train_and_load(tmp_path: Path, precision: str) -> None:
    result = train_run(tiny_options(rows_file(tmp_path / "rows.npy"), precision=precision), tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert opened.flow.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    test = opened.data().test
    assert test is not None
    assert evaluate.exact(opened.flow, test).nll == pytest.approx(result["test"]["nll"], abs=1e-9)


def test_seeds_name_runs(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_run(tiny_options(data, seed=seed, layers=2), tmp_path / name)
    a, b, c = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_training_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    train_run(tiny_options(rows_file(tmp_path / "rows.npy"), layers=2), tmp_path / "run")
    load(tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_order_of_the_next_epoch_is_ready_before_it_begins() -> None:
    asked: list[int] = []
    ends: list[tuple[int, list[int]]] = []
    run = trainer(tiny_flow(), tiny_dataset())
    order = run.row_order
    run.row_order = lambda epoch: asked.append(epoch) or order(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    class Record(StopAt):
        def on_epoch(self, record: dict[str, Any]) -> None:
            ends.append((record["epoch"], list(asked)))

    run.observer = Record(())
    run.train()
    assert ends == [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2])]
