"""Several runs at once: in order, none harmed by another, and each the run that it would be alone."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import DEEP, assert_same_run, read, rows_file, tiny_flow, tiny_options, train_run
from xorflow.errors import CheckpointError, ConfigError
from xorflow.training import Interrupted, Job, Options, Outcome, flow_to_spec, jobs, run_jobs

DIVERGES = {"optimiser": "sgd", "lr": 1e30}
LONG = {"epochs": 60, "checkpoint_seconds": 0.0, **DEEP}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return tiny_options(rows_file(tmp_path / "rows.npy"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with noise and averaging that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    data = rows_file(folder / "rows.npy")
    train_run(tiny_options(data, **(LONG | {"checkpoint_seconds": 1000})), folder / "run")
    return folder / "run"


def long_options(whole: Path) -> Options:
    return tiny_options(read(whole / "config.json")["data"], **LONG)


class Watch:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.stopped = 0

    def on_outcome(self, outcome: Outcome) -> None:
        self.told.append(outcome.job.out.name)

    def on_stop(self) -> None:
        self.stopped += 1


def after_a_checkpoint(run: Path, act: Any) -> threading.Thread:
    """Act once the run has saved for the first time."""

    def wait() -> None:
        limit = time.monotonic() + 60
        while not (run / "checkpoints/latest.json").exists() and time.monotonic() < limit:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_processes_that_fail_or_are_killed_harm_no_other(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Job, Any]] = []
    begin = jobs._begin

    def record(job: Job, threads: int, processes: Any) -> None:
        begin(job, threads, processes)
        started.append([*processes.values()][-1])

    monkeypatch.setattr(jobs, "_begin", record)
    options, killed, watch = long_options(whole), tmp_path / "killed", Watch()
    made = [
        Job(options, killed),
        Job(options.replace(layers=1, estimator="maximum-likelihood", **DIVERGES), tmp_path / "diverges"),
        Job(options.replace(seed=1, epochs=2), tmp_path / "good"),
    ]

    def kill() -> None:
        next(process for job, process in started if job.out == killed).kill()

    killer = after_a_checkpoint(killed, kill)
    first, second, third = run_jobs(made, 2, watch)
    killer.join()
    assert [outcome.job for outcome in (first, second, third)] == made
    assert first.error == (
        "its process was ended by signal 9 (by hand, or for want of memory); continue it with --resume"
    )
    assert second.error is not None
    assert "not finite at step" in second.error
    assert third.error is None
    assert third.result == read(tmp_path / "good/result.json")
    assert sorted(watch.told) == ["diverges", "good", "killed"]

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "good").rglob("*")}
    started.clear()
    again = [Job(options.replace(checkpoint_seconds=1000), killed), made[2]]
    assert [outcome.error for outcome in run_jobs(again, 2)] == [None, None]
    assert len(started) == 1  # what is finished is read
    assert_same_run(killed, whole)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "good").rglob("*")} == before


def to_the_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def to_another_thread(number: signal.Signals) -> None:
    """As some systems do: it does not wake the one that waits."""
    signal.pthread_kill(threading.get_ident(), number)


@pytest.mark.parametrize("send", [to_the_process, to_another_thread])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_all_save_and_later_go_on(
    whole: Path, tmp_path: Path, number: signal.Signals, send: Callable[[signal.Signals], None]
) -> None:
    options, watch = long_options(whole), Watch()
    made = [Job(options, tmp_path / "first"), Job(options.replace(epochs=1), tmp_path / "second")]
    presser = after_a_checkpoint(tmp_path / "first", lambda: send(number))
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted):
        run_jobs(made, 1, watch)
    presser.join()
    assert (watch.told, watch.stopped) == ([], 1)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (tmp_path / "first/checkpoints/latest.json").exists()
    assert not (tmp_path / "second").exists()
    made[0] = Job(options.replace(checkpoint_seconds=1000), tmp_path / "first")
    assert [outcome.error for outcome in run_jobs(made, 1, watch)] == [None, None]
    assert watch.told == ["first", "second"]
    assert_same_run(tmp_path / "first", whole)


def test_a_fault_of_ours_in_one_run_is_told_in_one_line_and_its_traceback_kept(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = jobs.make_run

    def faulty(job: Job, *dataset: Any) -> dict[str, Any]:
        if job.out.name == "a":
            raise RuntimeError("two\nlines")
        return make(job, *dataset)

    monkeypatch.setattr(jobs, "make_run", faulty)
    first, second = run_jobs([Job(options, tmp_path / "a"), Job(options, tmp_path / "b")], 1)
    assert first.error == "RuntimeError: two lines"
    assert "Traceback" in caplog.text
    assert "in faulty" in caplog.text
    assert second.error is None


def test_what_belongs_to_a_finished_run_is_added_and_its_error_is_the_run_s(
    options: Options, tmp_path: Path
) -> None:
    seen: list[str] = []

    def finish(job: Job) -> None:
        seen.append(job.out.name)
        if job.out.name == "b":
            raise CheckpointError("no room")

    made = [Job(options.replace(seed=n), tmp_path / name) for n, name in enumerate("ab")]
    for _ in range(2):  # made, and read
        assert [outcome.error for outcome in run_jobs(made, 1, finish=finish)] == [None, "no room"]
    assert seen == ["a", "b", "a", "b"]
    assert (tmp_path / "b/result.json").exists()


def test_an_explicit_model_is_trained_too(options: Options, tmp_path: Path) -> None:
    model = flow_to_spec(tiny_flow())
    job = Job(options.without_model().replace(init="random"), tmp_path / "run", model=model)
    assert pickle.loads(pickle.dumps(job)) == job
    assert run_jobs([job], 1)[0].error is None
    assert read(tmp_path / "run/config.json")["model"] == model
    other = flow_to_spec(tiny_flow(layers=2))
    with pytest.raises(ConfigError, match=r"model is another in .* and this here"):
        run_jobs([Job(job.options, job.out, model=other)], 1)


def test_no_jobs_are_no_work() -> None:
    assert run_jobs([], 4) == []


# ---- what is refused before any run begins ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"estimator": "double-cv", "accumulate": 2}, "run 'b': estimator 'double-cv' learns from"),
        ({"device": "cuda:63"}, "run 'b': device 'cuda:63' is not there"),
        ({"data": "none.npy"}, r"run 'b': .*none\.npy"),
        ({"order": "natural,reversed"}, "run 'b': order names 2 orderings"),
    ],
)
def test_a_job_that_cannot_be_made_stops_all_before_they_begin(
    options: Options, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    wrong = options.replace(**changes)
    made = [
        Job(options, tmp_path / "a", "a"),
        Job(wrong, tmp_path / "b", "b"),
        Job(wrong, tmp_path / "c", "c"),
    ]
    with pytest.raises(ConfigError, match=words):
        run_jobs(made, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_every_job_that_is_wrong_is_named(options: Options, tmp_path: Path) -> None:
    made = [Job(options.replace(order=name), tmp_path / name, name) for name in ("natural", "magic", "more")]
    with pytest.raises(
        ConfigError, match=r"run 'magic': an ordering is .*; there are problems in run 'more' too$"
    ):
        run_jobs(made, 1)


def test_numbers_and_folders_that_mean_nothing(options: Options, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jobs is at least 1; got 0"):
        run_jobs([Job(options, tmp_path / "a")], 0)
    with pytest.raises(ConfigError, match="a folder of its own"):
        run_jobs([Job(options, tmp_path / "a"), Job(options.replace(seed=1), tmp_path / "a")], 1)
    with pytest.raises(ConfigError, match="cannot be written: Not a directory; choose another folder"):
        run_jobs([Job(options, tmp_path / "rows.npy/a")], 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"mine is not empty: choose another --out"):
        run_jobs([Job(options, tmp_path / "mine")], 1)


def test_other_options_than_a_run_began_with(options: Options, tmp_path: Path) -> None:
    job = Job(options, tmp_path / "a", "a")
    run_jobs([job], 1)
    for name, value in (("lr", 0.5), ("seed", 3), ("conditioner", "made:hidden=8")):
        changed = Job(options.replace(**{name: value}), job.out, "a")
        before = repr(options.to_json()[name])
        with pytest.raises(ConfigError, match=f"run 'a': .* {name} is {before} in {job.out} and .* here"):
            run_jobs([changed], 1)
    harmless = Job(options.replace(checkpoint_seconds=1, evaluation_samples=9), job.out, "a")
    assert run_jobs([harmless], 1)[0].error is None


def test_a_folder_that_a_killed_process_had_only_made_is_taken_over(options: Options, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in (".lock", ".config.json.0a1b2c3d.tmp"):
        (tmp_path / "a" / name).touch()
    assert run_jobs([Job(options, tmp_path / "a")], 1)[0].error is None
    assert not list((tmp_path / "a").glob(".*"))


# ---- processes, played by short scripts ----


def ends_with(*arguments: Any) -> None:
    """In place of `_work`: what is said when a process ends so."""
    job = arguments[0]
    code = int(job.name)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def test_a_process_that_is_killed_while_it_sends_is_told_of(options: Options, tmp_path: Path) -> None:
    class Killed:
        exitcode = -9

        def join(self) -> None: ...

    receiver, sender = multiprocessing.Pipe(duplex=False)
    os.write(sender.fileno(), b"\0\0\1\0half of it")
    sender.close()
    said = jobs._received(Job(options, tmp_path / "a"), Killed(), receiver)  # pyright: ignore[reportArgumentType]
    assert said.error is not None
    assert said.error.startswith("its process was ended by signal 9 (by hand")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (130, "its process was told to stop; continue it with --resume"),
        (-signal.SIGTERM, "its process was told to stop; continue it with --resume"),
        (-signal.SIGSEGV, "its process was ended by signal 11; continue it with --resume"),
        (3, "its process ended with code 3; continue it with --resume"),
    ],
)
def test_how_a_process_ended_is_said(
    code: int, words: str, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_work", ends_with)
    made = [Job(options, tmp_path / name, str(int(code))) for name in "ab"]
    assert [outcome.error for outcome in run_jobs(made, 2)] == [words, words]


def test_processes_are_told_to_stop_save_and_are_waited_for(whole: Path, tmp_path: Path) -> None:
    options, watch = long_options(whole).replace(epochs=2000), Watch()
    made = [Job(options.replace(seed=seed), tmp_path / str(seed)) for seed in range(2)]
    presser = after_a_checkpoint(tmp_path / "0", lambda: to_another_thread(signal.SIGINT))
    with pytest.raises(Interrupted):
        run_jobs(made, 2, watch)
    presser.join()
    assert (watch.told, watch.stopped) == ([], 1)
    assert (tmp_path / "0/checkpoints/latest.json").exists()
    assert not (tmp_path / "0/result.json").exists()
