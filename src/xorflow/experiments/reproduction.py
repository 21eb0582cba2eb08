"""The reproduction itself: which runs it needs, in which order, and what each leaves behind.

Every row is trained in two phases. `select` trains on 50,000 images and keeps the epoch that is best on 10,000 others; `final`
trains the frozen recipe on all 60,000, for the same seeds, and is what the table reports. A finished run is a JSON file, and is
never repeated; an interrupted one goes on from its folder.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import xorflow
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.experiments.budgets import PHASES, Budget, Phase, write_digits
from xorflow.experiments.files import RESULT_VERSION, RunName, open_results, read_finished, write_compact
from xorflow.experiments.rows import VARIANTS, Reference, Row, Variant
from xorflow.experiments.scores import draw_samples, reference, score
from xorflow.training import Interrupted, Job, JobObserver, Options, Outcome, build_data, open_run, run_jobs
from xorflow.training.devices import out_of_memory_as_error, own_stream, resolve_device
from xorflow.training.metrics import read_metrics
from xorflow.training.options import HARMLESS, OF_DATA, options_of_config
from xorflow.training.products import full_products
from xorflow.training.run import read_config_file, read_result

_NEARLY_ALL = 0.9
"""A best epoch before this part of training shortens the final run to it."""

_SELECTION_SAMPLES = 50
"""Of the importance-sampled bound of a run whose figures are not reported."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        rows: those to train.
        references: those to compute.
        budget: how much work each is.
        seeds: how many seeds, from 0.
        out: the folder of results.
        work: the folder of the runs themselves.
        device: where to train and evaluate.
        workers: how many runs at once.
    """

    rows: Sequence[Row]
    references: Sequence[Reference]
    budget: Budget
    seeds: int
    out: Path
    work: Path
    device: str = "auto"
    workers: int = 1


@dataclass(frozen=True)
class Planned:
    """A run that is still to be made, for whoever shows progress; `cost` is in passes over the data through one network."""

    name: str
    folder: Path
    epochs: int
    cost: float


class Reproduction:
    """All runs of a request, with what is finished left out.

    Raises:
        ConfigError: before any work, if the request means nothing, or its folders hold something else.
    """

    def __init__(self, request: Request) -> None:
        if request.seeds < 1:
            raise ConfigError(f"--seeds is how many seeds to train, at least 1; got {request.seeds}")
        if request.workers < 1:
            raise ConfigError(f"--jobs is at least 1; got {request.workers}")
        self._request = request
        self._device = resolve_device(request.device)
        self._work = request.work / request.budget.name
        self._digits = self._work.absolute() / "digits.npy"
        self._datasets: dict[tuple[Any, ...], Dataset] = {}
        self._stopping = threading.Event()
        self._names: dict[Path, RunName] = {}
        open_results(request.out, request.budget)
        self.planned = [
            self._to_plan(name) for phase in PHASES for name in self._all(phase) if not self._finished(name)
        ]

    # ---- the work ----

    def run(self, observer: JobObserver | None = None) -> list[Outcome]:
        """Make everything that is not finished; see `run_jobs` for what may be raised.

        Returns:
            What became of the runs; one that failed is tried again by the next reproduction.
        """
        if self._request.budget.digits and not self._digits.exists():
            write_digits(self._digits)
        self._compute_references()
        outcomes: list[Outcome] = []
        for phase in PHASES:
            jobs = [self._job(name) for name in self._all(phase) if self._ready(name)]
            for job in jobs:
                self._require_same_work(job)
            watch = _Numbered(observer, len(outcomes), self._stopping)
            outcomes += run_jobs(jobs, self._request.workers, watch, finish=self._record) if jobs else []
        return outcomes

    def _all(self, phase: Phase) -> list[RunName]:
        return [
            RunName(row, variant, seed, phase)
            for row in self._request.rows
            for variant in VARIANTS
            if row.recipe(variant) is not None
            for seed in range(self._request.seeds)
        ]

    def _ready(self, name: RunName) -> bool:
        """Whether a run is to be made now: a final one only if its selection is finished."""
        if self._finished(name):
            return False
        return name.phase == "select" or name_of_selection(name).file(self._request.out).exists()

    def _job(self, name: RunName) -> Job:
        options = self._options(name)
        if name.phase == "final":
            options = options.replace(epochs=self._final_epochs(name.row, name.variant, options))
        folder = name.folder(self._work)
        self._names[folder] = name
        return Job(options, folder, f"{name.row.id}.{name.variant}.{name.phase}")

    def _options(self, name: RunName) -> Options:
        """A run's options; a final run may turn out to need fewer epochs."""
        budget = self._request.budget
        recipe = budget.options(name.row.options(name.variant), name.phase, self._digits)
        return recipe.replace(seed=name.seed, device=self._request.device)

    def _final_epochs(self, row: Row, variant: Variant, options: Options) -> int:
        """That of the final runs there are; otherwise by the selected seed."""
        finals = [self._finished(RunName(row, variant, k, "final")) for k in range(self._request.seeds)]
        known = next((run["epochs"] for run in finals if run is not None), None)
        if known is not None:
            return known
        runs = [self._finished(RunName(row, variant, k, "select")) for k in range(self._request.seeds)]
        best = min((run for run in runs if run is not None), key=lambda run: run["selection"]["nll"])
        return final_epochs(options.epochs, best["best_epoch"], options.validate_every)

    def _finished(self, name: RunName) -> dict[str, Any] | None:
        but = ("epochs",) if name.phase == "final" else ()
        return read_finished(name, self._request.out, self._options(name).to_json(), but=but)

    def _to_plan(self, name: RunName) -> Planned:
        options = self._options(name)
        networks = (options.layers or 1) * (1 if options.posterior == "none" else 2)
        cost = networks * (options.epochs + 1.0)
        return Planned(str(name), name.folder(self._work), options.epochs, cost)

    def _require_same_work(self, job: Job) -> None:
        """A run that was begun with another recipe can't be continued."""
        if not (job.out / "config.json").exists():
            return
        config = read_config_file(job.out)
        before = options_of_config(config, job.out / "config.json").to_json()
        for key, value in job.options.to_json().items():
            if before[key] != value and key not in HARMLESS:
                raise ConfigError(
                    f"the run in {job.out} was begun with {key} {before[key]!r}, and the row now says {value!r}: "
                    "remove that folder, or choose another --work"
                )

    # ---- what a run leaves behind ----

    def _record(self, job: Job) -> None:
        """Evaluate a run whose training is finished, and write its file."""
        name, request = self._names[job.out], self._request
        began = time.monotonic()
        with own_stream(self._device), out_of_memory_as_error("use --jobs 1"):
            found = self._evaluated(name, job)
        result = read_result(job.out)
        content = {
            "version": RESULT_VERSION,
            "budget": request.budget.name,
            "row": name.row.id,
            "variant": name.variant,
            "seed": name.seed,
            "phase": name.phase,
            "config": job.options.to_json(),
            "epochs": job.options.epochs,
            "best_epoch": result["best_epoch"],
            "selection": _selection(name, result),
            **found,
            "metrics": _curves(job.out),
            "parameters": result["parameters"],
            "seconds": result["seconds"],
            "evaluation_seconds": round(time.monotonic() - began, 3),
            "device": result["device"],
            "device_name": _device_name(self._device),
            "together": result.get("together", 1),
            "data": result["data"],
            "versions": _versions(),
        }
        self._pause()
        write_compact(name.file(request.out), content)

    def _evaluated(self, name: RunName, job: Job) -> dict[str, Any]:
        part = "validation" if name.phase == "select" else "test"
        opened = open_run(job.out, device=str(self._device))
        dataset = self._dataset(job.options)
        split, known = dataset.parts[part], read_result(job.out)[part]
        self._pause()
        with full_products():
            figures = score(name.row, opened.latent, split, known, self._evaluation(name), pause=self._pause)
        draw = {"part": part, "draw": dataset.describe()["sha256"][part]}
        samples = None
        if name.phase == "final":
            samples = draw_samples(name.row, opened.latent, opened.shape)
        return {"evaluation": draw | figures, "samples": samples}

    def _evaluation(self, name: RunName) -> Budget:
        """Selection compares what the run itself found: its bound may be rough."""
        budget = self._request.budget
        rough = name.phase == "select"
        return replace(budget, samples=min(budget.samples, _SELECTION_SAMPLES)) if rough else budget

    def _pause(self) -> None:
        if self._stopping.is_set():
            raise Interrupted

    def _dataset(self, options: Options) -> Dataset:
        key = tuple(getattr(options, field) for field in OF_DATA)
        if key not in self._datasets:
            self._datasets[key] = build_data(options).to(self._device)
        return self._datasets[key]

    def _compute_references(self) -> None:
        request = self._request
        for row in request.references:
            path = request.out / "runs" / f"{row.id}.json"
            if path.exists():
                continue
            options = request.budget.options(Options(), "final", self._digits)
            dataset = self._dataset(options)
            draw = {"part": "test", "draw": dataset.describe()["sha256"]["test"]}
            content = {
                "version": RESULT_VERSION,
                "budget": request.budget.name,
                "row": row.id,
                "phase": "reference",
                "evaluation": draw | reference(row, dataset.to("cpu")),
                "versions": _versions(),
            }
            write_compact(path, content)


def name_of_selection(name: RunName) -> RunName:
    return RunName(name.row, name.variant, name.seed, "select")


def final_epochs(epochs: int, best: int, validate_every: int) -> int:
    """How long the final run trains: to the best epoch of the selection, unless that came near the end.

    >>> final_epochs(100, 42, 5), final_epochs(100, 88, 5), final_epochs(100, 100, 5)
    (45, 100, 100)
    """
    rounded = -(-best // validate_every) * validate_every
    return rounded if rounded < _NEARLY_ALL * epochs else epochs


class _Numbered:
    """Passes outcomes on, counted over both phases, and notes that the work is to stop."""

    def __init__(self, observer: JobObserver | None, before: int, stopping: threading.Event) -> None:
        self._observer, self._before, self._stopping = observer, before, stopping

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None:
        if self._observer is not None:
            self._observer.on_outcome(outcome, self._before + done, self._before + total)

    def on_stop(self) -> None:
        self._stopping.set()
        if self._observer is not None:
            self._observer.on_stop()


def _selection(name: RunName, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """By what the seed is compared with the others, on validation data."""
    if name.phase != "select":
        return None
    key = "greedy_nll" if name.row.metric == "greedy" else "nll"
    return {"metric": name.row.metric, "nll": result["validation"][key]}


def _curves(run: Path) -> dict[str, list[float | int | None]]:
    """The records of each epoch as columns."""
    records = read_metrics(run / "metrics.jsonl")
    rounded: Callable[[Any], Any] = lambda value: None if value is None else round(value, 4)  # noqa: E731
    return {
        "epoch": [record["epoch"] for record in records],
        "train_nll": [rounded(record["train_nll"]) for record in records],
        "validation_nll": [rounded(record.get("validation_nll")) for record in records],
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _versions() -> dict[str, str]:
    return {
        "xorflow": xorflow.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
