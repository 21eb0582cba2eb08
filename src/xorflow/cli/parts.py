"""Folders of many files, each made by a task of its own: several at a time, and kept once they are there."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from xorflow import __version__
from xorflow._devices import resolve_device
from xorflow._files import inside, read_json, write_json
from xorflow.cli.app import show_error
from xorflow.cli.progress import SPEED_SECONDS, Bar, times
from xorflow.errors import ConfigError, UserError
from xorflow.training.folder import held, require_free
from xorflow.training.jobs import attempted, begin_child, first_problem, torch_threads
from xorflow.training.trainer import handled_signals

MANIFEST = "manifest.json"
"""The file that says of what run, options and data the files of a folder are."""


class Engine(StrEnum):
    """What runs the tasks."""

    PROCESSES = "processes"
    RAY = "ray"


Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Of a folder: files at a time, one core each. [dim]\\[all cores][/dim]",
        show_default=False,
    ),
]

WithEngine = Annotated[Engine, typer.Option("--engine", help="Of a folder: what makes its files.")]


@dataclass(frozen=True)
class Task:
    """What makes one file.

    Attributes:
        name: of the file.
        of: what `make` is called with: the name of a file to score, the number of a part.
        size: how much work it is, beside others.
    """

    name: str
    of: Any
    size: int


Make = Callable[[Any, Path], None]
"""Writes a file, wholly or not at all, of a task's `of` and its path."""

_Done = Callable[[Task, str | None, bool], None]
"""Is told of a task that is done, why its file could not be made, and whether that is a fault of ours."""


def is_folder(out: Path) -> bool:
    """Whether --out is a folder of many files: a name without a dot."""
    return not out.suffix


IN_A_FOLDER, OF_ONE_FILE = "where --out is a folder", "where --out is no folder"


def refuse(options: Mapping[str, Any], where: str) -> None:
    """Options that were given, and would have no effect there."""
    given = [name for name, value in options.items() if value not in (None, False, Engine.PROCESSES)]
    if given:
        raise ConfigError(f"{' and '.join(given)} would have no effect {where}; leave it out")


def make_files(
    out: Path,
    tasks: Sequence[Task],
    make: Make,
    about: Mapping[str, Any],
    jobs: int | None,
    device: str,
    engine: Engine = Engine.PROCESSES,
) -> None:
    """Make every file that is not there yet; `about` is what the files follow from, such as the run, options and data.

    Raises:
        UserError: about files that cannot be made, once all others are there.
    """
    if engine is Engine.RAY and find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs the package ray, which is not installed: pip install 'xorflow[ray]'"
        )
    manifest = {"format": 1, **about, "versions": {"xorflow": __version__, "torch": torch.__version__}}
    _require_ours(out, manifest)
    with held(out), handled_signals({signal.SIGTERM: signal.default_int_handler}):
        _require_ours(out, manifest)  # somebody may have been quicker
        write_json(out / MANIFEST, manifest)
        lacking = [task for task in tasks if not os.path.exists(out / task.name)]
        display = _Display(tasks, lacking)
        try:
            with display:
                if lacking and engine is Engine.RAY:
                    _by_ray(lacking, out, make, jobs, display.on_done)
                elif lacking:
                    _by_processes(lacking, out, make, jobs or _cores(device), display.on_done)
        except KeyboardInterrupt:
            typer.echo("stopped; what is there is kept: the same command goes on", err=True)
            raise typer.Exit(130) from None
        finally:
            for path in out.rglob(".*.tmp"):
                path.unlink(missing_ok=True)
    if display.problems:
        message = first_problem(display.problems) + "; all other files are there, and are kept"
        if display.fault:
            show_error(message)
            raise typer.Exit(1)
        raise UserError(message)


def _cores(device: str) -> int:
    """As many processes as there are cores; one, where they would share another device."""
    return (os.cpu_count() or 1) if resolve_device(device).type == "cpu" else 1


def _require_ours(out: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a folder that holds anything but files that follow from the same."""
    if not os.path.lexists(out / MANIFEST):
        require_free(out, resumes=False)
        return
    kept = read_json(inside(out, MANIFEST), "what --out was begun with")
    other = next((key for key, value in manifest.items() if kept.get(key) != value), None)
    if other is not None:
        raise ConfigError(
            f"--out goes on with what was begun there, and that in {out} has another {other!r}; give the same again, or "
            "choose another --out"
        )


class _Display(Bar):
    """A progress bar with the time left, silent where there is no terminal; it keeps what went wrong."""

    def __init__(self, tasks: Sequence[Task], lacking: Sequence[Task]) -> None:
        super().__init__(Console(stderr=True), *times(), speed_estimate_period=SPEED_SECONDS)
        self.problems: dict[str, str] = {}
        self.fault = False
        self._files, self._done = len(tasks), len(tasks) - len(lacking)
        self._bar = self.add_task(self._count(), total=sum(task.size for task in lacking))

    def on_done(self, task: Task, error: str | None, fault: bool) -> None:
        self._done += 1
        self.update(self._bar, advance=task.size, description=self._count())
        if error is not None:
            self.problems[task.name] = error
        self.fault |= fault

    def _count(self) -> str:
        return f"files {self._done}/{self._files}"


# ---- engines ----


def _by_processes(tasks: Sequence[Task], out: Path, make: Make, jobs: int, done: _Done) -> None:
    if min(jobs, len(tasks)) == 1:
        with torch_threads(1):  # bits do not depend on how many processes there are
            for task in tasks:
                _, error, fault = attempted(make, task.of, out / task.name)
                done(task, error, fault)
        return
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, begin_child, (1,)) as pool:
        try:
            # inherited: Ctrl-C in a terminal is for us alone
            with handled_signals({signal.SIGINT: signal.SIG_IGN}):
                made = {pool.submit(attempted, make, task.of, out / task.name): task for task in tasks}
            for future in as_completed(made):
                _, error, fault = future.result()
                done(made[future], error, fault)
        except BrokenProcessPool:
            raise UserError(
                "a process was ended (by hand, or for want of memory); what is there is kept: give the same command again, "
                "or with fewer --jobs"
            ) from None
        finally:  # what is begun is not worth waiting for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()


def _by_ray(tasks: Sequence[Task], out: Path, make: Make, jobs: int | None, done: _Done) -> None:
    """By Ray Data, on the cluster of RAY_ADDRESS or on one of this machine's own, which listens to nobody else."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux, too: it would listen to the network
    import ray  # pyright: ignore[reportMissingImports]
    import ray.data  # pyright: ignore[reportMissingImports]

    own = {"num_cpus": jobs or os.cpu_count(), "include_dashboard": False}

    def make_file(row: dict[str, Any]) -> dict[str, Any]:
        task = tasks[row["id"]]
        _, error, fault = attempted(make, task.of, out / task.name)
        return {**row, "error": error, "fault": fault}

    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        if address and ":" in address:  # Ray itself would try for minutes
            host, port = address.removeprefix("ray://").rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=20).close()
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **({} if address else own))
        ray.data.DataContext.get_current().enable_progress_bars = False
        pool = ray.data.TaskPoolStrategy(size=jobs)
        # a block each, or they would all be in one, and with one worker
        made = ray.data.range(len(tasks)).repartition(len(tasks)).map(make_file, compute=pool)
        with redirect_stdout(sys.stderr):  # where Ray says which workers died
            for row in made.iter_rows():
                done(tasks[row["id"]], row["error"], row["fault"])
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise UserError(
            f"Ray could not finish: {error}; what is there is kept: the same command goes on"
        ) from None
    finally:
        ray.shutdown()
