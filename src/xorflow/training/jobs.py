"""Several runs at once: results are files, what is finished is kept, and one run's failure harms no other.

On the CPU each run is a process with its share of the cores. On a CUDA device the runs are threads of one process, each with a
stream of its own: their captured steps, small as they are, then share the device, which processes would only take turns on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from xorflow.data import Dataset
from xorflow.errors import ConfigError, UserError
from xorflow.training.build import build_data
from xorflow.training.devices import resolve_device
from xorflow.training.loop import Interrupted
from xorflow.training.options import CONFIG_VERSION, OF_DATA, Options
from xorflow.training.run import read_result, resume_run, train_run
from xorflow.training.storage import write_json


@dataclass(frozen=True)
class Job:
    """A run to be made: its options and its folder."""

    options: Options
    out: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its result, or why there is none."""

    job: Job
    result: dict[str, Any] | None
    error: str | None


class JobObserver(Protocol):
    """What watches many runs."""

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None: ...


def run_jobs(jobs: Sequence[Job], workers: int, observer: JobObserver | None = None) -> list[Outcome]:
    """Make all runs, at most `workers` at a time; finished ones are read, interrupted ones continued.

    Raises:
        Interrupted: after Ctrl-C, once all runs under way have saved.
    """
    if workers < 1:
        raise ConfigError(f"--jobs is at least 1; got {workers}")
    if len({job.out for job in jobs}) < len(jobs):
        raise ConfigError("every job needs a folder of its own, and two have the same")
    crew = _Crew(workers, observer, len(jobs))
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(crew.run, job) for job in jobs]
        try:
            outcomes = [future.result() for future in futures]
        except KeyboardInterrupt:
            crew.stop.set()
            for future in futures:
                future.cancel()
            outcomes = [future.result() for future in futures if not future.cancelled()]
    if crew.stop.is_set():
        raise Interrupted
    return outcomes


class _Crew:
    def __init__(self, workers: int, observer: JobObserver | None, total: int) -> None:
        self.stop = threading.Event()
        self._workers = workers
        self._observer = observer
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._datasets: dict[tuple[Any, ...], Dataset] = {}

    def run(self, job: Job) -> Outcome:
        try:
            outcome = Outcome(job, self._result(job), None)
        except Interrupted:
            return Outcome(job, None, "interrupted")
        except UserError as error:
            outcome = Outcome(job, None, str(error))
        except Exception as error:  # a bug in one run must not take the others with it
            outcome = Outcome(job, None, f"{type(error).__name__}: {error}")
        with self._lock:
            self._done += 1
            if self._observer is not None:
                self._observer.on_outcome(outcome, self._done, self._total)
        return outcome

    def _result(self, job: Job) -> dict[str, Any]:
        if self.stop.is_set():
            raise Interrupted
        if (job.out / "result.json").exists():
            return read_result(job.out)
        device = resolve_device(job.options.device)
        if device.type == "cuda":
            return self._in_thread(job, device)
        if self._workers == 1:
            return _train(job, self.stop)
        return self._in_process(job)

    def _in_thread(self, job: Job, device: torch.device) -> dict[str, Any]:
        own_stream = torch.cuda.stream(torch.cuda.Stream(device)) if self._workers > 1 else nullcontext()
        with own_stream:
            if (job.out / "config.json").exists():
                return _train(job, self.stop)
            return train_run(job.options, job.out, dataset=self._dataset(job.options, device), stop=self.stop)

    def _dataset(self, options: Options, device: torch.device) -> Dataset:
        """The data of a job, loaded once for all jobs on the same."""
        key = tuple(getattr(options, name) for name in OF_DATA)
        with self._loading:
            if key not in self._datasets:
                self._datasets[key] = build_data(options).to(device)
            return self._datasets[key]

    def _in_process(self, job: Job) -> dict[str, Any]:
        threads = max(1, (os.cpu_count() or 1) // self._workers)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            write_json(config, {"version": CONFIG_VERSION} | job.options.to_json())
            resume = ["--resume"] if (job.out / "config.json").exists() else ["--config", str(config)]
            command = [sys.executable, "-m", "xorflow", "train", "--out", str(job.out), *resume]
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            _, complaint = _wait(process, self.stop)
        if process.returncode in (130, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted
        if process.returncode != 0:
            lines = complaint.strip().splitlines() or [f"ended with code {process.returncode}"]
            raise UserError(lines[-1].removeprefix("error: "))
        return read_result(job.out)


def _train(job: Job, stop: threading.Event) -> dict[str, Any]:
    if (job.out / "config.json").exists():
        return resume_run(job.out, {}, stop=stop)
    return train_run(job.options, job.out, stop=stop)


def _wait(process: subprocess.Popen[str], stop: threading.Event) -> tuple[str | None, str]:
    """Wait for a run's process; if the others are told to stop, tell it too, once."""
    told = False
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            return out, err or ""
        except subprocess.TimeoutExpired:
            if stop.is_set() and not told:
                process.send_signal(signal.SIGINT)
                told = True
