"""Several runs at once: results are files, what is finished is kept, and one run's failure harms no other.

On the CPU each run is a process with its share of the cores. On a CUDA device, runs that differ in their seed alone are trained
as one, with stacked weights (`Ensemble`): a run then equals the run alone to rounding, and its `result.json` says how many were
`together`. The others are threads of one process, each with a stream of its own, so that their captured steps share the device,
which processes would only take turns on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from xorflow.data import Dataset
from xorflow.errors import ConfigError, UserError
from xorflow.training.build import build_data
from xorflow.training.checkpoint import saved_step
from xorflow.training.devices import (
    MOST_THREADS,
    out_of_memory_as_error,
    own_stream,
    resolve_device,
    stream_of_thread,
)
from xorflow.training.ensemble import PRECISIONS, Apart
from xorflow.training.folder import read_config_file, read_result, require_free
from xorflow.training.lockstep import train_together
from xorflow.training.loop import Interrupted, Trainer
from xorflow.training.options import HARMLESS, OF_DATA, Options, from_json, options_of_config
from xorflow.training.processes import Child
from xorflow.training.run import (
    begin_run,
    check_run,
    complete_run,
    finish_run,
    remedy_for,
    reopen_run,
    resume_run,
    train_run,
)
from xorflow.training.storage import TEMPORARY


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


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its result, or why there is none."""

    job: Job
    result: dict[str, Any] | None
    error: str | None


class JobObserver(Protocol):
    """What watches many runs: it is told of one outcome at a time, and when the runs are told to stop."""

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None: ...
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
        KeyboardInterrupt: after a second Ctrl-C, at once.
    """
    if workers < 1:
        raise ConfigError(f"--jobs is at least 1; got {workers}")
    crew = _Crew(jobs, workers, observer, finish)
    crew.check()
    pool = ThreadPoolExecutor(crew.threads())
    try:
        with _sigterm_as_ctrl_c():
            futures = [pool.submit(crew.run, group) for group in crew.groups()]
            _wait_for(futures)
            outcomes = {outcome.job.out: outcome for future in futures for outcome in future.result()}
            return [outcomes[job.out] for job in jobs]
    except BaseException as error:
        crew.stop.set()
        with crew.abandoned_on_ctrl_c():
            if observer is not None:
                observer.on_stop()
            pool.shutdown(cancel_futures=True)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted from None
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_LONGEST_WAIT = 0.5
"""Seconds without a look around: a signal that the system hands to another thread ends no wait of this one."""


def _wait_for(futures: Sequence[Future[Any]]) -> None:
    """Until all are done, or one has failed."""
    while True:
        done, left = wait(futures, timeout=_LONGEST_WAIT, return_when=FIRST_EXCEPTION)
        if not left or any(future.exception() is not None for future in done):
            return


def make_run(
    job: Job, *, dataset: Dataset | None = None, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Begin a job's run, or go on with the one in its folder; `dataset` is the data of its options, if loaded."""
    if _is_begun(job):
        return resume_run(job.out, job.options.to_json(), stop=stop)
    return train_run(job.options, job.out, model=job.model, dataset=dataset, stop=stop)


class _Crew:
    def __init__(
        self,
        jobs: Sequence[Job],
        workers: int,
        observer: JobObserver | None,
        finish: Callable[[Job], object] | None,
    ) -> None:
        self.stop = threading.Event()
        self.workers = max(1, min(workers, len(jobs)))
        self._jobs = jobs
        self._observer = observer
        self._finish = finish
        self._done = 0
        self._telling = threading.Lock()
        self._finishing = threading.Lock()
        self._loading = threading.Lock()
        self._queue, self._places = threading.Lock(), threading.Semaphore(self.workers)
        self._datasets: dict[tuple[Any, ...], Dataset] = {}
        self._children: set[Child] = set()

    # ---- before the first run ----

    def check(self) -> None:
        """Find every problem that can be found before any run begins."""
        folders = {job.out for job in self._jobs}
        if len(folders) < len(self._jobs):
            raise ConfigError("every run needs a folder of its own, and two have the same")
        problems: dict[str, str] = {}
        seen: set[tuple[Options, int]] = set()
        for job in self._jobs:
            try:
                _check_folder(job)
                kind = (job.options.replace(seed=0), id(job.model))
                if not _is_begun(job) and kind not in seen:
                    seen.add(kind)
                    device = resolve_device(job.options.device)
                    check_run(job.options, self._dataset(job.options, torch.device("cpu")), model=job.model)
                    if self._in_processes(device):
                        self._datasets.clear()  # each process loads its own
            except UserError as error:
                problems.setdefault(f"run {job.name!r}" if job.name else "", str(error))
        if problems:
            raise ConfigError(first_problem(problems))

    def groups(self) -> list[list[Job]]:
        """The jobs in the order in which they begin; those that can be trained as one, at most `workers`, are one group."""
        found: list[list[Job]] = []
        open_groups: dict[object, list[Job]] = {}
        for job in self._jobs:
            kind = self._kind(job)
            group = open_groups.get(kind)
            if kind is None or group is None or len(group) == self.workers:
                group = []
                found.append(group)
                open_groups[kind] = group
            group.append(job)
        return found

    def threads(self) -> int:
        """How many groups at once; what waits in a process of its own needs no stream."""
        streams = any(resolve_device(job.options.device).type == "cuda" for job in self._jobs)
        return min(self.workers, MOST_THREADS) if streams else self.workers

    def _kind(self, job: Job) -> object:
        """What runs must have in common to be trained as one; None for a run that is not."""
        if self.workers == 1 or not _can_stack(job.options) or (job.out / "result.json").exists():
            return None
        try:
            step = saved_step(job.out)
        except UserError:  # a damaged checkpoint, which is that run's own affair
            return None
        return job.options.alike(), json.dumps(job.model, sort_keys=True), step

    # ---- runs ----

    def run(self, group: Sequence[Job]) -> list[Outcome]:
        with self._queue:  # one at a time takes places: two groups with some each would wait for ever
            for _ in group:
                self._places.acquire()
        try:
            return self._together(group) if len(group) > 1 else [self._outcome(group[0], self._result)]
        finally:
            self._places.release(len(group))

    def _outcome(self, job: Job, make: Callable[[Job], dict[str, Any]]) -> Outcome:
        try:
            outcome = Outcome(job, make(job), None)
            if self._finish is not None:
                with self._finishing:
                    self._finish(job)
        except Interrupted:
            return Outcome(job, None, "interrupted")
        except UserError as error:
            outcome = Outcome(job, None, _in_one_line(str(error)))
        except Exception as error:  # a bug in one run must not take the others with it
            outcome = Outcome(job, None, _in_one_line(f"{type(error).__name__}: {error}"))
        with self._telling:
            self._done += 1
            if self._observer is not None:
                self._observer.on_outcome(outcome, self._done, len(self._jobs))
        return outcome

    def _result(self, job: Job) -> dict[str, Any]:
        if self.stop.is_set():
            raise Interrupted
        device = resolve_device(job.options.device)
        finished = (job.out / "result.json").exists()
        in_process = self._in_processes(device) and not finished
        return self._in_process(job) if in_process else self._in_thread(job, device)

    def _in_processes(self, device: torch.device) -> bool:
        return self.workers > 1 and device.type != "cuda"

    def _together(self, group: Sequence[Job]) -> list[Outcome]:
        """Train a group as one, or, where that turns out to be impossible, its runs side by side."""
        device = resolve_device(group[0].options.device)
        trainers: dict[Path, Trainer] = {}
        ends: dict[Path, Exception | None] = {}
        finish = finish_run
        with own_stream(device):
            for job in group:
                try:
                    trainers[job.out] = self._trainer(job, device)
                except Exception as error:
                    ends[job.out] = error
            try:
                with out_of_memory_as_error(f"{remedy_for(group[0].options)}, or --jobs"):
                    ends |= zip(trainers, train_together(list(trainers.values())), strict=True)
            except Apart as reason:
                finish = complete_run
                for trainer in trainers.values():
                    trainer.apart = str(reason)
            except Exception as error:
                ends |= dict.fromkeys(trainers, error)

        def result(job: Job) -> dict[str, Any]:
            error = ends.get(job.out)
            if error is not None:
                raise error
            return finish(trainers[job.out])

        if finish is complete_run:
            return self._side_by_side(group, result, device)
        with own_stream(
            device
        ):  # short pieces of work, which threads would only get in each other's way with
            return [self._outcome(job, result) for job in group]

    def _side_by_side(
        self, group: Sequence[Job], make: Callable[[Job], dict[str, Any]], device: torch.device
    ) -> list[Outcome]:
        if device.type == "cuda":
            stream_of_thread(device, "main").synchronize()  # each goes on in a stream of its own

        def one(job: Job) -> Outcome:
            with own_stream(device):
                return self._outcome(job, make)

        with ThreadPoolExecutor(min(len(group), MOST_THREADS)) as pool:
            return list(pool.map(one, group))

    def _trainer(self, job: Job, device: torch.device) -> Trainer:
        if self.stop.is_set():
            raise Interrupted
        dataset = self._dataset(job.options, device)
        if _is_begun(job):
            trainer = reopen_run(job.out, job.options.to_json(), dataset=dataset, stop=self.stop)
        else:
            trainer = begin_run(job.options, job.out, model=job.model, dataset=dataset, stop=self.stop)
        trainer.restore()
        return trainer

    def _in_thread(self, job: Job, device: torch.device) -> dict[str, Any]:
        with own_stream(device) if self.workers > 1 else nullcontext():
            dataset = None if _is_begun(job) else self._dataset(job.options, device)
            return make_run(job, dataset=dataset, stop=self.stop)

    def _dataset(self, options: Options, device: torch.device) -> Dataset:
        """The data of a job, loaded once for all jobs on the same."""
        key = tuple(getattr(options, name) for name in OF_DATA)
        with self._loading:
            if key not in self._datasets:
                self._datasets[key] = build_data(options)
            if (*key, device) not in self._datasets:
                self._datasets[*key, device] = self._datasets[key].to(device)
            return self._datasets[*key, device]

    def _in_process(self, job: Job) -> dict[str, Any]:
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        child = Child(_job_to_bytes(job), job.out, threads)
        self._children.add(child)
        try:
            child.wait(self.stop)
        finally:
            self._children.discard(child)
        return read_result(job.out)

    @contextmanager
    def abandoned_on_ctrl_c(self) -> Iterator[None]:
        """While runs save, Ctrl-C kills their processes; what they saved before is kept."""
        try:
            yield
        except KeyboardInterrupt:
            for child in list(self._children):
                child.kill()
            raise


def _can_stack(options: Options) -> bool:
    """Large networks fill a device by themselves, and their fused kernels know no stacks."""
    small = options.conditioner in ("made", "coupling") and options.mixture == "none"
    plain = small and options.accumulate == 1 and options.precision in PRECISIONS
    return plain and resolve_device(options.device).type == "cuda"


def _job_to_bytes(job: Job) -> bytes:
    """A job as a line of JSON, for another process."""
    spec = {"options": job.options.to_json(), "out": str(job.out), "name": job.name, "model": job.model}
    return json.dumps(spec).encode() + b"\n"


def job_from_bytes(line: bytes) -> Job:
    """What `_job_to_bytes` wrote."""
    spec = json.loads(line)
    return Job(from_json(spec["options"], "a job"), Path(spec["out"]), spec["name"], spec["model"])


# ---- folders ----


def _is_begun(job: Job) -> bool:
    return (job.out / "config.json").exists()


def _check_folder(job: Job) -> None:
    """Refuse a folder that is not this run's, or can't become it."""
    try:
        if _is_begun(job):
            _require_unchanged(job)
            return
        for left in (job.out / ".writable", *job.out.glob(f".*{TEMPORARY}")):  # by a process that was killed
            left.unlink(missing_ok=True)
        require_free(job.out)
        if (job.out.parent / "config.json").exists():
            raise ConfigError(f"--out {job.out} lies in the folder of another run; choose another --out")
        nearest = next(folder for folder in (job.out, *job.out.absolute().parents) if folder.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(
                f"--out {job.out} cannot be made: {nearest} is read-only; choose another folder"
            )
    except OSError as error:
        raise ConfigError(
            f"--out {job.out} cannot be written: {error.strerror}; choose another folder"
        ) from None


def _require_unchanged(job: Job) -> None:
    config = read_config_file(job.out)
    before = options_of_config(config, job.out / "config.json").to_json()
    now = job.options.to_json()
    if job.model is not None and job.options.layers is None:
        before["model"], now["model"] = config["model"], job.model
    for name, value in now.items():
        if value != before[name] and name not in HARMLESS:
            was, is_now = ("another", "this") if name == "model" else (repr(before[name]), repr(value))
            raise ConfigError(
                f"--resume continues runs as they were configured: {name} is {was} in {job.out} and {is_now} "
                "here; set it back, or begin anew with another --out"
            )


# ---- words ----


def first_problem(problems: Mapping[str, str]) -> str:
    """One line about many problems, by where they are: the first of them, and where else to look."""
    (where, text), *others = problems.items()
    line = f"{where}: {text}" if where else text
    return line + (f"; there are problems in {', '.join(name for name, _ in others)} too" if others else "")


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Within this block SIGTERM, too, raises KeyboardInterrupt; only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
