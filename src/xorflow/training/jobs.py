"""Several runs at once: results are files, what is finished is kept, and one run's failure harms no other.

One at a time, runs are made in this process; several at a time, each is a process of its own with its share of the cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from xorflow.data import Dataset
from xorflow.errors import ConfigError, UserError
from xorflow.training.build import build_data
from xorflow.training.config import HARMLESS, OF_DATA, Options, from_json, options_of_config
from xorflow.training.folder import read_config_file, read_result, require_free
from xorflow.training.run import check_run, create_run, finish_run, resume_run
from xorflow.training.storage import TEMPORARY
from xorflow.training.trainer import Interrupted


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
        KeyboardInterrupt: after another Ctrl-C while processes save, at once.
    """
    if workers < 1:
        raise ConfigError(f"--jobs is at least 1; got {workers}")
    pool = _Pool(jobs, observer, finish)
    pool.check()
    with _sigterm_as_ctrl_c():
        if min(workers, len(jobs)) > 1:
            pool.run_in_processes(min(workers, len(jobs)))
        else:
            pool.run_here()
    return [pool.outcomes[job.out] for job in jobs]


def make_run(job: Job, *, dataset: Dataset | None = None) -> dict[str, Any]:
    """The result of a job's run, begun or gone on with as its folder has it; `dataset` is its data, if loaded."""
    if _is_begun(job):
        trainer = resume_run(job.out, job.options.to_json(), dataset=dataset)
    else:
        trainer = create_run(job.options, job.out, model=job.model, dataset=dataset)
    return read_result(job.out) if trainer is None else finish_run(trainer)


class _Pool:
    def __init__(
        self, jobs: Sequence[Job], observer: JobObserver | None, finish: Callable[[Job], object] | None
    ) -> None:
        self.outcomes: dict[Path, Outcome] = {}
        self._jobs = jobs
        self._observer = observer
        self._finish = finish
        self._loaded: tuple[tuple[Any, ...], Dataset] | None = None  # what names the data, and the data

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
                    check_run(job.options, self._dataset(job.options), model=job.model)
            except UserError as error:
                problems.setdefault(f"run {job.name!r}" if job.name else "", str(error))
        if problems:
            raise ConfigError(first_problem(problems))

    def run_here(self) -> None:
        """One run after the other."""
        try:
            for job in self._jobs:
                dataset = None if _is_begun(job) else self._dataset(job.options)
                self._record(job, lambda job=job, dataset=dataset: make_run(job, dataset=dataset))
        except (Interrupted, KeyboardInterrupt) as stop:
            self._tell_stop()
            raise Interrupted from stop

    def run_in_processes(self, workers: int) -> None:
        """At most so many runs at a time."""
        self._loaded = None  # each process loads its own
        threads = max(1, (os.cpu_count() or 1) // workers)
        waiting = list(reversed(self._jobs))
        children: dict[Path, _Child] = {}
        try:
            while waiting or children:
                while waiting and len(children) < workers:
                    job = waiting.pop()
                    children[job.out] = _Child(job, threads)
                done = [child for child in children.values() if child.ended]
                for child in done:
                    del children[child.job.out]
                    self._record(child.job, child.result)
                if not done:
                    time.sleep(_POLL_SECONDS)
        except BaseException as error:
            self._stop(children.values())
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted from None
            raise

    def _stop(self, children: Iterable[_Child]) -> None:
        """Let the runs under way save; Ctrl-C meanwhile kills them, and what they saved before is kept."""
        try:
            for child in children:
                child.stop()
            self._tell_stop()
            for child in children:
                child.wait()
        except KeyboardInterrupt:
            for child in children:
                child.kill()
            raise

    def _record(self, job: Job, result: Callable[[], dict[str, Any]]) -> None:
        """Write down what became of a job."""
        try:
            outcome = Outcome(job, result(), None)
            if self._finish is not None:
                self._finish(job)
        except Interrupted:
            raise
        except UserError as error:
            outcome = Outcome(job, None, _in_one_line(str(error)))
        except Exception as error:  # a bug in one run must not take the others with it
            outcome = Outcome(job, None, _in_one_line(f"{type(error).__name__}: {error}"))
        self.outcomes[job.out] = outcome
        if self._observer is not None:
            self._observer.on_outcome(outcome, len(self.outcomes), len(self._jobs))

    def _tell_stop(self) -> None:
        if self._observer is not None:
            self._observer.on_stop()

    def _dataset(self, options: Options) -> Dataset:
        """The data of a job, loaded once for jobs on the same that follow each other."""
        key = tuple(getattr(options, name) for name in OF_DATA)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = key, build_data(options)
        return self._loaded[1]


# ---- processes ----

_POLL_SECONDS = 0.1
_INTERRUPTED = 130
"""The code with which a process ends that was told to stop, and has saved."""


class _Child:
    """A process that makes one run; it saves and stops once its standard input is closed: on purpose, or by our death.

    Args:
        job: the run; one that is finished is read, without a process.
        threads: its share of the cores, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(self, job: Job, threads: int) -> None:
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None
        if (job.out / "result.json").exists():
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from xorflow.training import jobs; jobs.work()", str(job.out)],
            env={"OMP_NUM_THREADS": str(threads)} | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C in the terminal is for the first process alone
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if it is dead already, its code says why
            self._process.stdin.write(_job_to_bytes(job))
            self._process.stdin.flush()

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Of the run, once the process has ended.

        Raises:
            UserError: if the run failed, or its process was killed.
        """
        if self._process is None:
            return make_run(self.job)
        self.stop()
        with self._errors:
            self._errors.seek(0)
            complaint = self._errors.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        if code in (_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise UserError("its process was told to stop; continue it with --resume")
        if code < 0:
            reason = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
            raise UserError(f"its process was ended by signal {-code}{reason}; continue it with --resume")
        if code > 0:
            raise UserError(complaint[-1] if complaint else f"its process ended with code {code}")
        return read_result(self.job.out)

    def stop(self) -> None:
        """Tell it to save and end."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def work() -> None:
    """Make the run whose job comes on standard input; the exit code and the last line on stderr say how it went."""
    try:
        job = _job_from_bytes(sys.stdin.buffer.readline())
        threading.Thread(target=_stop_with_standard_input, daemon=True).start()
        make_run(job)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except UserError as error:
        sys.stderr.write(_in_one_line(str(error)) + "\n")
        sys.exit(2)


def _stop_with_standard_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _job_to_bytes(job: Job) -> bytes:
    """A job as a line of JSON, for another process."""
    spec = {"options": job.options.to_json(), "out": str(job.out), "name": job.name, "model": job.model}
    return json.dumps(spec).encode() + b"\n"


def _job_from_bytes(line: bytes) -> Job:
    """What `_job_to_bytes` wrote."""
    spec = json.loads(line)
    return Job(from_json(spec["options"]), Path(spec["out"]), spec["name"], spec["model"])


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


# ---- messages ----


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
