"""Groups of runs that are trained as one: files, interruptions, failures, and which jobs make a group."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_runs import DEEP, StopAt, assert_same_run, read, rows_file, tiny_options, weights_of
from xorflow.errors import TrainingError
from xorflow.training import (
    Interrupted,
    Job,
    Options,
    Progress,
    Trainer,
    jobs,
    resume_run,
    run_jobs,
    train_run,
)
from xorflow.training.build import build_estimator, build_flow
from xorflow.training.engine import Feed
from xorflow.training.ensemble import PRECISIONS, Apart, Ensemble
from xorflow.training.lockstep import train_together
from xorflow.training.metrics import read_metrics
from xorflow.training.run import begin_run, finish_run, reopen_run

SEEDS = 3


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return tiny_options(rows_file(tmp_path / "rows.npy"), epochs=3, **DEEP)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs form groups on the CPU too."""
    monkeypatch.setattr(jobs, "_can_stack", lambda options: options.precision in PRECISIONS)


def begin(options: Options, folder: Path, observers: Sequence[Any] = (None,) * SEEDS) -> list[Trainer]:
    data = jobs.build_data(options)
    return [
        begin_run(options.replace(seed=seed), folder / str(seed), observer, dataset=data)
        for seed, observer in enumerate(observers)
    ]


def finish(trainers: Sequence[Trainer], errors: Sequence[Exception | None]) -> None:
    assert list(errors) == [None] * len(trainers)
    for trainer in trainers:
        finish_run(trainer)


def assert_close_runs(found: Path, expected: Path) -> None:
    weights = weights_of(found)
    for name, tensor in weights_of(expected).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)
    records, others = (read_metrics(run / "metrics.jsonl") for run in (found, expected))
    assert [r.keys() for r in records] == [r.keys() for r in others]
    for one, other in zip(records, others, strict=True):
        for key in one.keys() - {"seconds"}:
            assert one[key] == pytest.approx(other[key], abs=1e-4), key


class Watch(StopAt):
    """Counts, and at some step does something."""

    def __init__(self, step: int, act: Any) -> None:
        super().__init__(())
        self.step, self.act = step, act

    def on_step(self, step: int) -> None:
        super().on_step(step)
        if step == self.step:
            self.act()


def test_a_group_is_the_runs_alone(options: Options, tmp_path: Path) -> None:
    watches = [StopAt(()) for _ in range(SEEDS)]
    group = begin(options, tmp_path / "together", watches)
    finish(group, train_together(group))
    for seed, watch in enumerate(watches):
        train_run(options.replace(seed=seed), tmp_path / "alone" / str(seed))
        assert_close_runs(tmp_path / "together" / str(seed), tmp_path / "alone" / str(seed))
        assert watch.seen == list(range(1, 16))
        assert watch.started == (15, 0)
        assert read(tmp_path / "together" / str(seed) / "result.json")["together"] == SEEDS
        assert read(tmp_path / "alone" / str(seed) / "result.json")["together"] == 1
        assert not (tmp_path / "together" / str(seed) / "checkpoints").exists()


def _interrupt(options: Options, folder: Path, step: int) -> None:
    """Train a group until `step`, and let it save."""
    stop = threading.Event()
    data = jobs.build_data(options)
    group = [
        begin_run(
            options.replace(seed=seed),
            folder / str(seed),
            Watch(step, stop.set) if seed == 1 else None,
            dataset=data,
            stop=stop,
        )
        for seed in range(SEEDS)
    ]
    errors = train_together(group)
    assert [type(error) for error in errors] == [Interrupted] * SEEDS


@pytest.mark.parametrize("step", [1, 5, 7, 14])
def test_an_interrupted_group_goes_on_to_the_same_weights(
    options: Options, tmp_path: Path, step: int
) -> None:
    whole = begin(options, tmp_path / "whole")
    finish(whole, train_together(whole))
    _interrupt(options, tmp_path / "parts", step)
    data = jobs.build_data(options)
    group = [reopen_run(tmp_path / "parts" / str(seed), {}, dataset=data) for seed in range(SEEDS)]
    finish(group, train_together(group))
    for seed in range(SEEDS):
        assert_same_run(tmp_path / "parts" / str(seed), tmp_path / "whole" / str(seed))


def test_a_run_of_an_interrupted_group_goes_on_alone_too(options: Options, tmp_path: Path) -> None:
    _interrupt(options, tmp_path / "parts", 7)
    resume_run(tmp_path / "parts" / "2", {})
    train_run(options.replace(seed=2), tmp_path / "whole")
    assert_close_runs(tmp_path / "parts" / "2", tmp_path / "whole")


def test_interrupted_runs_that_turn_out_to_be_no_group_go_on_alone(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count their steps for themselves: the state of their optimisers was not shared."""
    whole = begin(options, tmp_path / "whole")
    finish(whole, train_together(whole))
    _interrupt(options, tmp_path / "parts", 7)
    data = jobs.build_data(options)
    group = [reopen_run(tmp_path / "parts" / str(seed), {}, dataset=data) for seed in range(SEEDS)]

    def broken(ensemble: Ensemble, feed: Feed) -> dict[str, torch.Tensor]:
        raise RuntimeError("no rule for this")

    with monkeypatch.context() as patch:
        patch.setattr(Ensemble, "_losses", broken)
        with pytest.raises(Apart, match="cannot be stacked: no rule for this"):
            train_together(group)
    for seed, trainer in enumerate(group):
        trainer.train()
        finish_run(trainer)
        assert_close_runs(tmp_path / "parts" / str(seed), tmp_path / "whole" / str(seed))


def test_runs_at_different_steps_are_no_group(options: Options, tmp_path: Path) -> None:
    _interrupt(options, tmp_path / "parts", 7)
    data = jobs.build_data(options)
    late = reopen_run(tmp_path / "parts" / "0", {}, dataset=data)
    early = begin_run(options.replace(seed=5), tmp_path / "new", dataset=data)
    with pytest.raises(Apart, match="different steps: 0, 7"):
        train_together([late, early])
    for trainer in (late, early):  # each can still be trained alone
        trainer.train()


@pytest.mark.parametrize(
    ("layer", "changes", "words"),
    [
        (0, {}, "a weight is not finite"),
        (1, {}, "the validation likelihood is not finite"),
        (1, {"checkpoint_seconds": 0.0}, "a weight is not finite"),
    ],
)
def test_a_failing_run_harms_no_other(
    options: Options, tmp_path: Path, layer: int, changes: dict[str, Any], words: str
) -> None:
    """Its weights are spoilt after step 5, the last of an epoch."""
    flow: list[torch.nn.Module] = []
    spoil = Watch(5, lambda: next(flow[0].parameters()).data.fill_(torch.nan))
    last = StopAt(())
    group = begin(options.replace(**changes, average=0.0), tmp_path / "found", [None, spoil, last])
    flow.append(group[1].flow.layers[layer])
    errors = train_together(group)
    assert isinstance(errors[1], TrainingError)
    assert words in str(errors[1])
    assert errors[0] is errors[2] is None
    assert spoil.seen[-1] == 5
    assert last.seen[-1] == 15
    for seed in (0, 2):
        finish_run(group[seed])
        train_run(options.replace(seed=seed, average=0.0), tmp_path / "alone" / str(seed))
        assert_close_runs(tmp_path / "found" / str(seed), tmp_path / "alone" / str(seed))


def test_a_group_whose_runs_have_all_failed_ends(options: Options, tmp_path: Path) -> None:
    wild = options.replace(optimiser="sgd", lr=1e30, schedule="constant", average=0.0)
    errors = train_together(begin(wild, tmp_path))
    assert all(isinstance(error, TrainingError) and "step 5" in str(error) for error in errors)


# ---- jobs ----


def _jobs(options: Options, folder: Path, seeds: int = SEEDS) -> list[Job]:
    return [Job(options.replace(seed=seed), folder / str(seed)) for seed in range(seeds)]


def _groups(listed: Sequence[Job], workers: int) -> list[list[str]]:
    crew = jobs._Crew(listed, workers, None, None)
    return [[job.out.name for job in group] for group in crew.groups()]


@pytest.mark.usefixtures("stacked")
def test_which_jobs_make_a_group(options: Options, tmp_path: Path) -> None:
    seven = _jobs(options, tmp_path, 7)
    assert _groups(seven, 3) == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert _groups(seven, 1) == [[str(seed)] for seed in range(7)]
    other = [Job(options.replace(seed=seed, lr=0.5), tmp_path / f"lr-{seed}") for seed in range(2)]
    mixed = [seven[0], other[0], seven[1], other[1]]
    assert _groups(mixed, 4) == [["0", "1"], ["lr-0", "lr-1"]]
    half = [Job(job.options.replace(precision="bf16-mixed"), job.out) for job in seven[:2]]
    assert _groups(half, 4) == [["0"], ["1"]]
    model = [Job(job.options, job.out, model={"depth": n}) for n, job in enumerate(seven[:2])]
    assert _groups(model, 4) == [["0"], ["1"]]


def test_without_a_gpu_no_jobs_make_a_group(options: Options, tmp_path: Path) -> None:
    assert _groups(_jobs(options, tmp_path), 3) == [["0"], ["1"], ["2"]]


@pytest.mark.usefixtures("stacked")
def test_begun_and_finished_runs_in_groups(options: Options, tmp_path: Path) -> None:
    _interrupt(options, tmp_path / "runs", 7)
    assert _groups(_jobs(options, tmp_path / "runs", 5), 5) == [["0", "1", "2"], ["3", "4"]]
    resume_run(tmp_path / "runs" / "0", {})
    assert _groups(_jobs(options, tmp_path / "runs", 5), 5) == [["0"], ["1", "2"], ["3", "4"]]
    (tmp_path / "runs/1/checkpoints/latest.json").write_text("{", encoding="utf-8")
    assert _groups(_jobs(options, tmp_path / "runs", 5), 5) == [["0"], ["1"], ["2"], ["3", "4"]]


@pytest.mark.usefixtures("stacked")
def test_jobs_train_groups(options: Options, tmp_path: Path) -> None:
    told: list[int] = []

    class Watcher:
        def on_outcome(self, outcome: jobs.Outcome, done: int, total: int) -> None:
            assert outcome.result is not None
            told.append(outcome.result["seed"])

        def on_stop(self) -> None: ...

    listed = _jobs(options, tmp_path / "found")
    finished: list[Path] = []
    outcomes = run_jobs(listed, SEEDS, Watcher(), finish=lambda job: finished.append(job.out))
    assert [outcome.job for outcome in outcomes] == listed
    assert [outcome.error for outcome in outcomes] == [None] * SEEDS
    assert [outcome.result["together"] for outcome in outcomes if outcome.result] == [SEEDS] * SEEDS
    assert sorted(told) == list(range(SEEDS))
    assert sorted(finished) == [job.out for job in listed]
    for seed in range(SEEDS):
        train_run(options.replace(seed=seed), tmp_path / "alone" / str(seed))
        assert_close_runs(tmp_path / "found" / str(seed), tmp_path / "alone" / str(seed))
    assert [o.result for o in run_jobs(listed, SEEDS)] == [o.result for o in outcomes]


@pytest.mark.usefixtures("stacked")
def test_a_job_that_cannot_be_made_harms_no_other_of_its_group(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run = jobs.begin_run

    def faulty(options: Options, *args: Any, **named: Any) -> Trainer:
        if options.seed == 1:
            raise OSError("no\nroom")
        return begin_run(options, *args, **named)

    monkeypatch.setattr(jobs, "begin_run", faulty)
    outcomes = run_jobs(_jobs(options, tmp_path / "runs"), SEEDS)
    assert [outcome.error for outcome in outcomes] == [None, "OSError: no room", None]
    assert [outcome.result["together"] for outcome in outcomes if outcome.result] == [2, 2]


@pytest.mark.usefixtures("stacked")
def test_what_cannot_be_trained_as_one_is_trained_side_by_side(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(trainers: Sequence[Trainer]) -> list[Exception | None]:
        raise Apart("of a reason")

    monkeypatch.setattr(jobs, "train_together", refuse)
    outcomes = run_jobs(_jobs(options, tmp_path / "runs"), SEEDS)
    for seed, outcome in enumerate(outcomes):
        assert outcome.result is not None
        assert (outcome.result["together"], outcome.result["apart"]) == (1, "of a reason")
        expected = tmp_path / "alone" / str(seed)
        train_run(options.replace(seed=seed), expected)
        assert all(torch.equal(t, weights_of(expected)[n]) for n, t in weights_of(outcome.job.out).items())


@pytest.mark.usefixtures("stacked")
def test_an_error_of_the_whole_group_is_every_run_s(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(trainers: Sequence[Trainer]) -> list[Exception | None]:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(jobs, "train_together", broken)
    for outcome in run_jobs(_jobs(options, tmp_path / "runs"), SEEDS):
        assert outcome.error is not None
        assert outcome.error.startswith("out of memory; lower --batch-size or --hidden, or --jobs")


def test_the_order_of_the_next_epoch_is_ready_before_it_begins(options: Options) -> None:
    asked: list[int] = []
    data = jobs.build_data(options)
    trainer = Trainer(build_flow(options, data), build_estimator(options.estimator), data, options)
    order = trainer.row_order
    trainer.row_order = lambda epoch: asked.append(epoch) or order(epoch)  # pyright: ignore[reportAttributeAccessIssue]
    ends: list[tuple[int, list[int]]] = []

    class Record(StopAt):
        def on_start(self, total_steps: int, progress: Progress) -> None: ...
        def on_epoch(self, record: dict[str, Any]) -> None:
            ends.append((record["epoch"], list(asked)))

    trainer.observer = Record(())
    trainer.train()
    assert ends == [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2])]
