"""An interrupted run goes on to the weights, bit for bit, of one that was not."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny_runs import (
    DEEP,
    StopAt,
    assert_same_run,
    continue_run,
    read,
    rows_file,
    tiny_flow,
    tiny_options,
    train_run,
    weights_of,
)
from xorflow import LatentFlow
from xorflow._files import write_json
from xorflow.errors import CheckpointError, ConfigError
from xorflow.training import Interrupted, Options, build_data, create_run, flow_to_spec, open_run
from xorflow.training.checkpoint import load_snapshot, load_tensors, save_tensors
from xorflow.training.run import untrained


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, Path]:
    """Three epochs of five steps, never interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    options = tiny_options(rows_file(folder / "rows.npy"), epochs=3, **DEEP)
    train_run(options, folder / "run")
    return options, folder / "run"


@pytest.fixture
def interrupted(reference: tuple[Options, Path], tmp_path: Path) -> Path:
    with pytest.raises(Interrupted):
        train_run(reference[0], tmp_path / "run", StopAt({7}))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "steps", [{1}, {3, 4, 9}, {5}, {5, 6}, {10, 11, 14}, {15}, set(range(1, 16))], ids=str
)
def test_interrupted_at_any_step(reference: tuple[Options, Path], tmp_path: Path, steps: set[int]) -> None:
    options, expected = reference
    run, watch = tmp_path / "run", StopAt(steps)
    with pytest.raises(Interrupted):
        train_run(options, run, watch)
    for _ in range(len(steps) - 1):
        with pytest.raises(Interrupted):
            continue_run(run, {}, watch)
    continue_run(run, {}, watch)
    assert watch.seen == list(range(1, 16))  # no step twice, none left out
    assert_same_run(run, expected)
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    "changes", [{"optimiser": "sgd", "clip": 0.1}, {"optimiser": "adamw", "weight_decay": 0.1}]
)
def test_other_optimisers_resume_too(tmp_path: Path, changes: dict[str, object]) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), lr=0.05, warmup=3, validate_every=2, **changes)
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "cut", StopAt({6}))
    continue_run(tmp_path / "cut", {})
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "estimator": "score-function:objective=bound,entropy=0.5,anneal=0.2,standardise=feature",
            "select": "greedy",
        },
        {
            "estimator": "score-function:objective=elbo,standardise=one",
            "posterior": "mlp:hidden=16",
            "variant": "chain",
            "own": True,
        },
        {"estimator": "straight-through:entropy=1.0,anneal=0.0"},
    ],
    ids=lambda changes: changes["estimator"],
)
def test_the_state_of_an_estimator_is_resumed(tmp_path: Path, changes: dict[str, object]) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), lr=0.05, layers=2, **changes)
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "cut", StopAt({6}))
    snapshot = load_snapshot(tmp_path / "cut")
    assert snapshot is not None
    assert any(name.startswith("estimator.") for name in snapshot.tensors)
    continue_run(tmp_path / "cut", {})
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_every_step_changes_nothing(reference: tuple[Options, Path], tmp_path: Path) -> None:
    options, expected = reference
    with pytest.raises(Interrupted):
        train_run(options.replace(checkpoint_seconds=0), tmp_path / "run", StopAt({5}))
    continue_run(tmp_path / "run", {})
    assert_same_run(tmp_path / "run", expected)


def test_a_run_that_never_reached_a_checkpoint_begins_anew(
    reference: tuple[Options, Path], tmp_path: Path
) -> None:
    class Crash(StopAt):
        def on_step(self, step: int) -> None:
            if step == 8:
                raise RuntimeError("a crash")

    options, expected = reference
    with pytest.raises(RuntimeError, match="a crash"):
        train_run(options, tmp_path / "run", Crash(()))
    assert load_snapshot(tmp_path / "run") is None
    continue_run(tmp_path / "run", {})
    assert_same_run(tmp_path / "run", expected)


def test_a_finished_run_returns_its_result_untouched(reference: tuple[Options, Path]) -> None:
    run = reference[1]
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert continue_run(run, {}) == read(run / "result.json")
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.5), ("epochs", 9), ("conditioner", "made:hidden=8"), ("seed", 4)]
)
def test_a_changed_option_is_named_with_both_values(interrupted: Path, name: str, value: object) -> None:
    before = sorted(path.name for path in interrupted.rglob("*"))
    with pytest.raises(ConfigError) as error:
        continue_run(interrupted, {name: value})
    kept = read(interrupted / "config.json")[name]
    assert f"{name} is {kept!r} in {interrupted} and {value!r} here" in str(error.value)
    assert sorted(path.name for path in interrupted.rglob("*")) == before


def test_harmless_options_may_change(interrupted: Path, reference: tuple[Options, Path]) -> None:
    continue_run(interrupted, {"checkpoint_seconds": 0.0, "device": "auto", "tensorboard": True, "lr": 0.001})
    assert_same_run(interrupted, reference[1])
    assert list((interrupted / "tensorboard").iterdir())


def _changed(path: Path, row: int) -> None:
    x = np.load(path)
    x[row, 0] = (x[row, 0] + 1) % 3
    np.save(path, x)


def test_changed_data_are_noticed_wherever_they_changed(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy", rows=40)
    options = tiny_options(data, batch_size=8)
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "run", StopAt({2}))
    original = data.read_bytes()
    for row in range(40):
        _changed(data, row)
        with pytest.raises(
            ConfigError, match=r"needs the data it was trained on, and the .* part of .*rows\.npy"
        ):
            continue_run(tmp_path / "run", {})
        data.write_bytes(original)
    continue_run(tmp_path / "run", {})
    _changed(data, 3)
    with pytest.raises(ConfigError, match="different now"):
        open_run(tmp_path / "run").data()


def test_other_numbers_of_rows_are_named(interrupted: Path, tmp_path: Path) -> None:
    data = Path(read(interrupted / "config.json")["data"])
    original = data.read_bytes()
    np.save(data, np.load(data)[:100])
    with pytest.raises(ConfigError, match="the sizes of"):
        continue_run(interrupted, {})
    data.write_bytes(original)


def test_an_unfinished_run_is_not_opened(interrupted: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"not finished; continue it with: xorflow train --out .*run --resume"
    ):
        open_run(interrupted)


@pytest.mark.parametrize(
    ("pointer", "words"),
    [
        ('{"version": 9}', "version 9"),
        ('{"version": 3}', "its progress is None"),
        ("{", "no readable JSON"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(interrupted: Path, pointer: str, words: str) -> None:
    (interrupted / "checkpoints/latest.json").write_text(pointer, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        continue_run(interrupted, {})


def test_files_of_a_killed_writer_are_swept_up(interrupted: Path) -> None:
    half = ".weights.safetensors.0a1b2c3d.tmp"
    for folder in (interrupted, interrupted / "checkpoints"):
        (folder / half).write_bytes(b"half")
    with pytest.raises(Interrupted):
        continue_run(interrupted, {}, StopAt({8}))
    assert not list(interrupted.rglob(".*"))


def _no_moments(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("exp_avg_sq")]:
        del tensors[name]


def _no_generator(tensors: dict[str, Tensor]) -> None:
    tensors["random.generator"].fill_(255)


def _another_parameter(tensors: dict[str, Tensor]) -> None:
    tensors["optimiser.99.step"] = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_moments, r"the optimiser's tensors in the checkpoint .*exp_avg_sq is nothing"),
        (_another_parameter, r"the optimiser's tensors in the checkpoint .*99\.step"),
        (_no_generator, "is damaged: .* state"),
    ],
)
def test_the_tensors_of_a_foreign_checkpoint_fit_or_are_refused(
    interrupted: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    (folder,) = (interrupted / "checkpoints").glob("step-*")
    tensors = load_tensors(folder, "state")
    change(tensors)
    save_tensors(folder, "state", tensors)
    with pytest.raises(CheckpointError, match=words):
        continue_run(interrupted, {})


@pytest.mark.parametrize("changes", [{"step": 10**9}, {"epoch": 99}, {"step": 1005, "batch": 1000}], ids=str)
def test_a_checkpoint_of_a_step_that_the_run_does_not_have_is_refused(
    interrupted: Path, changes: dict[str, int]
) -> None:
    pointer = read(interrupted / "checkpoints/latest.json")
    pointer["progress"] |= changes
    write_json(interrupted / "checkpoints/latest.json", pointer)
    with pytest.raises(CheckpointError, match="is not of this run, which has 15 steps: it was made at step"):
        continue_run(interrupted, {})


@pytest.mark.parametrize(
    "line",
    [
        "[" * 10**5,
        '{"epoch": NaN}',
        '{"epoch": 1, "step": 1e300}',
        '{"epoch": 1, "x": []}',
        f'{{"epoch": {"9" * 30}}}',
    ],
    ids=["deep", "no number", "no step", "no metric", "huge"],
)
def test_lines_that_are_no_metrics_are_dropped(
    interrupted: Path, reference: tuple[Options, Path], line: str
) -> None:
    path = interrupted / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    continue_run(interrupted, {"tensorboard": True})
    assert_same_run(interrupted, reference[1])


def test_a_pipe_in_the_place_of_metrics_is_refused_and_not_waited_for(interrupted: Path) -> None:
    (interrupted / "metrics.jsonl").unlink()
    os.mkfifo(interrupted / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics cannot be read: .*: it is no plain file"):
        continue_run(interrupted, {})


def _frozen_first(seed: int) -> LatentFlow:
    flow = tiny_flow(layers=2, seed=seed)
    flow.layers[0].requires_grad_(False)
    return flow


def test_a_model_built_in_python_is_resumed_with_its_own_weights_and_what_it_freezes(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    options = tiny_options(data).replace(layers=None, conditioner="made")
    flow = _frozen_first(7)
    before = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    create_run(options, tmp_path / "prepared", model=flow, dataset=build_data(options))
    continue_run(tmp_path / "prepared", {})
    trained = weights_of(tmp_path / "prepared")
    kept = [
        torch.equal(trained[name], tensor) for name, tensor in before.items() if name.startswith("layers.0.")
    ]
    learned = [
        torch.equal(trained[name], tensor)
        for name, tensor in before.items()
        if "layers.1.conditioner" in name
    ]
    assert all(kept)
    assert not all(learned)
    begun = untrained(open_run(tmp_path / "prepared")).state_dict()
    assert all(torch.equal(begun[name], tensor) for name, tensor in before.items())

    train_run(options, tmp_path / "other", model=flow_to_spec(_frozen_first(0)))
    assert (
        open_run(tmp_path / "other").latent.layers[0].conditioner.net.layers[0].weight.requires_grad is False
    )
