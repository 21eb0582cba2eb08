"""Several runs at once: results are files, what is finished is kept, and one run's failure harms no other.

One at a time, runs are made in this process; several at a time, each is a process of its own with its share of the cores.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from xorflow.data import Dataset
from xorflow.errors import ConfigError, UserError, in_one_line
from xorflow.training.auto_run import AutoRun, begin_auto, check_auto, resume_auto
from xorflow.training.build import build_data
from xorflow.training.config import OF_DATA, Options
from xorflow.training.folder import read_config_file, reported_part, require_free
from xorflow.training.run import (
    check_run,
    create_run,
    finish_run,
    finished_result,
    options_of_run,
    resume_run,
)
from xorflow.training.trainer import Interrupted, Trainer, handled_signals


@dataclass(frozen=True)
class Job:
    """A run to be made.

    Attributes:
        options: all of them.
        out: its folder; a run that was begun there is continued.
        name: what it is called; runs that differ in their seed alone share it.
        model: the flow of options without layers, as `config.json` holds it.
    """

    options: Options
    out: Path
    name: str = ""
    model: dict[str, Any] | None = None

    @property
    def begun(self) -> bool:
        return os.path.exists(self.out / "config.json")


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its result, or why there is none, and whether that is a fault of xorflow itself."""

    job: Job
    result: dict[str, Any] | None
    error: str | None
    fault: bool = False


class JobObserver(Protocol):
    """What watches many runs: it is told of one outcome at a time, and when the runs are told to stop."""

    def on_outcome(self, outcome: Outcome) -> None: ...
    def on_stop(self) -> None: ...


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    observer: JobObserver | None = None,
    *,
    finish: Callable[[Job], object] | None = None,
) -> list[Outcome]:
    """Make all runs, at most `workers` at a time; finished ones are read, interrupted ones continued.

    Args:
        jobs: in the order in which they begin.
        workers: how many at once.
        observer: is told what becomes of them.
        finish: what else belongs to a run with a result, such as samples; one at a time, and its error is the run's.

    Returns:
        What became of each job, in the order of `jobs`.

    Raises:
        ConfigError: before any job begins, if one of them cannot be made, or would not continue what its folder holds.
        Interrupted: after Ctrl-C or SIGTERM, once all runs under way have saved.
        KeyboardInterrupt: after another Ctrl-C while processes save, at once.
    """
    if workers < 1:
        raise ConfigError(f"--jobs is at least 1; got {workers}")
    load = functools.lru_cache(maxsize=1)(build_data)  # jobs on the same data mostly follow each other
    _check(jobs, load)
    processes: _Processes = {}
    if min(workers, len(jobs)) > 1:
        load.cache_clear()  # each process loads its own
        made = _made_in_processes(jobs, workers, processes)
    else:
        made = _made_here(jobs, load)
    outcomes: dict[Path, Outcome] = {}
    with handled_signals({signal.SIGTERM: signal.default_int_handler}):
        try:
            for outcome in made:
                if finish is not None and outcome.error is None:
                    _, error, fault = attempted(finish, outcome.job)
                    outcome = Outcome(outcome.job, None if error else outcome.result, error, fault)
                outcomes[outcome.job.out] = outcome
                if observer is not None:
                    observer.on_outcome(outcome)
        except (Interrupted, KeyboardInterrupt) as stop:
            if observer is not None:
                observer.on_stop()
            raise Interrupted from stop
        finally:
            _stop([process for _, process in processes.values()])
    return [outcomes[job.out] for job in jobs]


def begin_job(job: Job, observer: Any = None, dataset: Dataset | None = None) -> Trainer | AutoRun | None:
    """What `finish_job` makes of a job, which is begun, or gone on with as its folder has it; None if it is finished.

    Args:
        job: the run.
        observer: an `Observer`, or an `AutoObserver` of the recipe auto.
        dataset: its data, if they are loaded already.
    """
    if job.begun:
        resume = resume_auto if job.options.is_auto else resume_run
        return resume(job.out, job.options.to_json(), observer, dataset=dataset)
    if job.options.is_auto:
        return begin_auto(job.options, job.out, observer, dataset)
    return create_run(job.options, job.out, observer, model=job.model, dataset=dataset)


def finish_job(job: Job, left: Trainer | AutoRun | None) -> dict[str, Any]:
    """The result of a job, once what `begin_job` left of it is made."""
    if left is None:
        return finished_result(job.out)
    return left.make() if isinstance(left, AutoRun) else finish_run(left)


def make_run(job: Job, dataset: Dataset | None = None) -> dict[str, Any]:
    """The result of a job; `dataset` is its data, if loaded."""
    return finish_job(job, begin_job(job, dataset=dataset))


def attempted(make: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None, bool]:
    """What a call returns, or else, in one line, why it failed, and whether by a fault of ours."""
    try:
        return make(*arguments), None, False
    except Interrupted:
        raise
    except UserError as error:
        return None, in_one_line(str(error)), False
    except Exception as error:  # a bug in one run must not take the others with it; nor is it hidden
        logging.getLogger("xorflow").exception("a fault of xorflow itself:")
        return None, in_one_line(f"{type(error).__name__}: {error}"), True


def _data_options(options: Options) -> Options:
    return Options(**{name: getattr(options, name) for name in OF_DATA})


def _made_here(jobs: Iterable[Job], load: Callable[[Options], Dataset]) -> Iterator[Outcome]:
    """One run after the other."""
    for job in jobs:
        dataset = None if job.begun else load(_data_options(job.options))
        yield Outcome(job, *attempted(make_run, job, dataset))


# ---- processes ----

_Processes = dict[Any, tuple[Job, SpawnProcess]]
"""Those under way, by what they send their outcome through."""

_POLL_SECONDS = 0.1
"""A signal that another thread takes does not wake the one that waits."""
INTERRUPTED = 130
"""The code with which a process ends that was told to stop, and has saved."""
_ENDINGS = dict.fromkeys((INTERRUPTED, -signal.SIGINT, -signal.SIGTERM), "was told to stop")
_ENDINGS[-9] = "was ended by signal 9 (by hand, or for want of memory)"


def _made_in_processes(jobs: Iterable[Job], workers: int, processes: _Processes) -> Iterator[Outcome]:
    """At most so many runs at a time."""
    waiting = [*jobs][::-1]
    threads = max(1, (os.cpu_count() or 1) // workers)
    while waiting or processes:
        while waiting and len(processes) < workers:
            job = waiting.pop()
            if os.path.exists(job.out / "result.json"):
                yield Outcome(job, *attempted(make_run, job))
            else:
                _begin(job, threads, processes)
        for receiver in wait(list(processes), _POLL_SECONDS):
            job, process = processes.pop(receiver)
            yield _received(job, process, receiver)


def _begin(job: Job, threads: int, processes: _Processes) -> None:
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, sender, threads))
    with handled_signals({signal.SIGINT: signal.SIG_IGN}):  # inherited: Ctrl-C in a terminal is for us alone
        process.start()
    sender.close()  # once the process has ended, too, there is no more to come
    processes[receiver] = job, process


def _received(job: Job, process: SpawnProcess, receiver: Any) -> Outcome:
    """What a process sent, or else how it ended."""
    try:
        result, error, fault = receiver.recv()
    except (EOFError, OSError):  # of what was sent in part, too
        process.join()
        how = how_ended(process.exitcode or 0)
        result, error, fault = None, f"its process {how}; continue it with --resume", False
    process.join()
    return Outcome(job, result, error, fault)


def how_ended(code: int) -> str:
    """How a process ended, from its code."""
    how = "ended with code" if code > 0 else "was ended by signal"
    return _ENDINGS.get(code, f"{how} {abs(code)}")


def _stop(processes: Sequence[SpawnProcess]) -> None:
    """Let the runs under way save; Ctrl-C meanwhile kills them, and what they saved before is kept."""
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def _work(job: Job, sender: Any, threads: int) -> None:
    """Make a run in a process of its own."""
    begin_child(threads)
    with handled_signals({signal.SIGTERM: signal.default_int_handler}):
        try:
            sender.send(attempted(make_run, job))
        except (Interrupted, KeyboardInterrupt):
            sys.exit(INTERRUPTED)


def begin_child(threads: int) -> None:
    """What a process that was begun here does first: it takes its share of the cores, and ends with its parent."""
    _set_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within this block torch has so many threads, as in one process of several."""
    before = torch.get_num_threads()
    _set_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_threads(count: int) -> None:
    """A process's share of the cores, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count)


def _end_with_parent() -> None:
    """End this process once its parent has: one that was killed can tell its own nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


# ---- what is refused before any run begins ----


def _check(jobs: Sequence[Job], load: Callable[[Options], Dataset]) -> None:
    """Find every problem that can be found."""
    if len({job.out for job in jobs}) < len(jobs):
        raise ConfigError("every run needs a folder of its own, and two have the same")
    problems: dict[str, str] = {}
    checked: set[tuple[Options, int]] = set()
    for job in jobs:
        kind = (job.options.replace(seed=0), id(job.model))
        try:
            if job.begun:
                _require_unchanged(job)
                continue
            require_free(job.out)
            if kind not in checked:
                checked.add(kind)
                if job.options.is_auto:
                    check_auto(job.options)
                    continue
                check_run(job.options, load(_data_options(job.options)), model=job.model)
        except UserError as error:
            problems.setdefault(f"run {job.name!r}" if job.name else "", str(error))
    if problems:
        raise ConfigError(first_problem(problems))


def first_problem(problems: Mapping[str, str]) -> str:
    """One line about many problems, by where they are: the first of them, and where else to look."""
    (where, text), *others = problems.items()
    line = f"{where}: {text}" if where else text
    return line + (f"; there are problems in {', '.join(name for name, _ in others)} too" if others else "")


def _require_unchanged(job: Job) -> None:
    options_of_run(job.out, job.options.to_json())
    if job.options.layers is None and job.model not in (None, read_config_file(job.out)["model"]):
        raise ConfigError(
            f"--resume continues a run as it was configured: model is another in {job.out} and this here; give it back, or "
            "begin anew with another --out"
        )


# ---- what became of them ----

SUMMARY_VERSION = 1


def summarise(root: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `summary.json` holds: a row for each job, and for each name the mean and the spread over its seeds."""
    of_job = {outcome.job.out: outcome for outcome in outcomes}
    rows = [_row(root, job, of_job.get(job.out)) for job in jobs]
    names = dict.fromkeys(row["name"] for row in rows)
    groups = [_group(name, [row for row in rows if row["name"] == name]) for name in names]
    return {"version": SUMMARY_VERSION, "runs": rows, "groups": groups}


def _row(root: Path, job: Job, outcome: Outcome | None) -> dict[str, Any]:
    result = (outcome.result if outcome else None) or {}
    part = reported_part(result)
    figures: Mapping[str, Any] = result[part] if part else {}
    unfinished = "interrupted" if job.begun else "not begun"
    return {
        "name": job.name or root.absolute().name,
        "seed": job.options.seed,
        "folder": job.out.relative_to(root).as_posix(),
        "part": part,
        **{key: figures.get(key) for key in ("nll", "kind", "stderr", "refit_nll")},
        "seconds": result.get("seconds"),
        "error": unfinished if outcome is None else outcome.error,
    }


def _group(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["error"] is None]
    return {
        "name": name,
        "n": len(good),
        "failed": len(rows) - len(good),
        "kind": good[0]["kind"] if good else None,
        **{key: spread([row[key] for row in good]) for key in ("nll", "refit_nll")},
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Mean, standard deviation (of the sample, so None for one value), least and greatest; None without values.

    >>> spread([1.0, 2.0, 3.0])
    {'mean': 2.0, 'std': 1.0, 'min': 1.0, 'max': 3.0}
    """
    import statistics  # with fractions, which take a twentieth of the time of importing torch

    known = [value for value in values if value is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "std": std, "min": min(known), "max": max(known)}
