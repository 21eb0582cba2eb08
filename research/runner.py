"""An experiment of many rows: which runs it needs, in which order, and what each leaves behind.

The reproduction of the paper's table is one, the question of depth another; an `Experiment` says in what they differ.

Every row is trained in two phases. `select` trains on 50,000 images and keeps the epoch that is best on 10,000 others; `final`
trains the frozen recipe on all 60,000, for the same seeds, and is what the table reports. A finished run is a JSON file, and is
never repeated; an interrupted one goes on from its folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from research import results
from research.budgets import PHASES, Budget, Phase, write_digits
from research.files import (
    VARIANTS,
    RunName,
    TrainedRow,
    Variant,
    open_results,
    read_curves,
    read_finished,
    read_trained,
)
from research.samples import draw_samples
from xorflow import CheckpointError, ConfigError, LatentFlow, UserError
from xorflow.data import Dataset, Split
from xorflow.training import (
    HARMLESS,
    Interrupted,
    Job,
    JobObserver,
    Options,
    Outcome,
    build_data,
    open_run,
    out_of_memory_as_error,
    prepare_run,
    read_config,
    resolve_device,
    run_jobs,
)

_NEARLY_ALL = 0.9
"""A best epoch before this part of training shortens the final run to it, where no schedule depends on the length."""

_SELECTION_SAMPLES = 50
"""Of the importance-sampled bound of a run whose figures are not reported."""


class Scorer(Protocol):
    """All figures of a trained flow on one part of its data; see `score`."""

    def __call__(
        self,
        row: Any,
        flow: Any,
        split: Split,
        known: dict[str, Any],
        budget: Budget,
        *,
        phase: Phase,
        train: Split,
        pause: Callable[[], None],
    ) -> dict[str, Any]: ...


def own_selection(name: RunName) -> RunName:
    """Each seed of each row is selected by itself."""
    return replace(name, phase="select")


@dataclass(frozen=True)
class Experiment:
    """In what one experiment differs from another.

    Attributes:
        command: by which the command line knows it.
        plan: what `plan.json` holds, for a budget.
        score: the figures of a run.
        reference: the figure of a row that is computed, without training.
        starts: by row, the row whose run of the same seed and phase it starts from.
        selection: the run that chooses the epochs of a final run.
        build: the model of a row that no options describe, for options and data; None for the others.
    """

    command: str
    plan: Callable[[Budget], Mapping[str, Any]]
    score: Scorer
    reference: Callable[[Any, Dataset], dict[str, Any]] | None = None
    starts: Mapping[str, TrainedRow] = field(default_factory=dict)
    selection: Callable[[RunName], RunName] = own_selection
    build: Callable[[Any, Options, Dataset], LatentFlow | None] = lambda row, options, dataset: None  # noqa: ARG005


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
        experiment: what the rows are about.
        fewer: by row, how many seeds it has, if these are fewer.
    """

    rows: Sequence[TrainedRow]
    references: Sequence[Any]
    budget: Budget
    seeds: int
    out: Path
    work: Path
    device: str
    workers: int
    experiment: Experiment
    fewer: Mapping[str, int] = field(default_factory=dict)

    def seeds_of(self, row: TrainedRow) -> range:
        """The seeds that a row is trained with."""
        return range(min(self.seeds, self.fewer.get(row.id, self.seeds)))


@dataclass(frozen=True)
class Planned:
    """A run that is still to be made, for whoever shows progress; `cost` is in passes over the data through one network."""

    name: str
    folder: Path
    epochs: int
    cost: float


class Runner:
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
        self._digits = self._work.resolve() / "digits.npy"
        self._datasets: dict[tuple[Any, ...], Dataset] = {}
        self._stopping = threading.Event()
        self._names: dict[Path, RunName] = {}
        experiment = request.experiment
        open_results(request.out, request.budget, experiment.plan(request.budget), experiment.command)
        self.planned = [
            self._to_plan(name) for phase in PHASES for name in self._all(phase) if not self._finished(name)
        ]

    # ---- the work ----

    def run(self, observer: JobObserver | None = None) -> list[Outcome]:
        """Make everything that is not finished; see `run_jobs` for what may be raised.

        Returns:
            What became of the runs; one that failed is tried again by the next command.
        """
        if self._request.budget.digits and not self._digits.exists():
            write_digits(self._digits)
        self._compute_references()
        outcomes: list[Outcome] = []
        for phase in PHASES:
            for names in self._waves(phase):
                jobs, damaged = self._sorted_out([self._job(name) for name in names if self._ready(name)])
                watch = _Numbered(observer, len(outcomes), self._stopping)
                for done, outcome in enumerate(damaged, 1):
                    watch.on_outcome(outcome, done, len(jobs) + len(damaged))
                outcomes += damaged
                watch = _Numbered(observer, len(outcomes), self._stopping)
                outcomes += run_jobs(jobs, self._request.workers, watch, finish=self._record) if jobs else []
        return outcomes

    def _all(self, phase: Phase) -> list[RunName]:
        finals = [
            RunName(row, variant, seed, "final")
            for row in self._request.rows
            for variant in VARIANTS
            if row.recipe(variant) is not None
            for seed in self._request.seeds_of(row)
        ]
        selections = map(self._selection, finals)
        return finals if phase == "final" else list({str(name): name for name in selections}.values())

    def _selection(self, name: RunName) -> RunName:
        return self._request.experiment.selection(name)

    def _waves(self, phase: Phase) -> list[list[RunName]]:
        """The runs of a phase, those before that others start from."""
        steps = [(self._generation(name.row), name) for name in self._all(phase)]
        return [[name for own, name in steps if own == step] for step in sorted({own for own, _ in steps})]

    def _generation(self, row: TrainedRow) -> int:
        """How many rows, each started from the one before, come before it."""
        before = self._request.experiment.starts.get(row.id)
        return 0 if before is None else 1 + self._generation(before)

    def _ready(self, name: RunName) -> bool:
        """Whether a run is to be made now: a final one only if its selection, and what it starts from, is finished."""
        if self._finished(name):
            return False
        if name.phase == "final" and not results.exists(self._selection(name).file(self._request.out)):
            return False
        start = self._start(name)
        return start is None or results.exists(start.file(self._request.out))

    def _start(self, name: RunName) -> RunName | None:
        """The run that another starts from."""
        row = self._request.experiment.starts.get(name.row.id)
        return None if row is None else replace(name, row=row)

    def _job(self, name: RunName) -> Job:
        options = self._options(name)
        if name.phase == "final":
            options = options.replace(epochs=self._final_epochs(name.row, name.variant, options))
        start = self._start(name)
        if start is not None:
            options = options.replace(init=str(self._weights(start, name)))
        folder = name.folder(self._work)
        self._names[folder] = name
        flow = self._request.experiment.build(name.row, options, self._dataset(options).to("cpu"))
        if flow is not None:
            options = options.without_model()
            if not folder.exists():
                prepare_run(flow, options, self._dataset(options).to("cpu"), folder)
        return Job(options, folder, f"{name.row.id}.{name.variant}.{name.phase}")

    def _weights(self, start: RunName, name: RunName) -> Path:
        """The folder of the run that another starts from, which must be there."""
        folder = start.folder(self._work).resolve()
        if not (folder / "result.json").exists():
            raise ConfigError(
                f"row {name.row.id} starts from row {start.row.id}, whose weights are not in {folder}: choose the --work that "
                f"has them, or remove {start.file(self._request.out)} to train it again"
            )
        return folder

    def _options(self, name: RunName) -> Options:
        """A run's options; a final run may turn out to need fewer epochs."""
        budget = self._request.budget
        recipe = budget.options(name.row.options(name.variant), name.phase, self._digits)
        return recipe.replace(seed=name.seed, device=self._request.device)

    def _final_epochs(self, row: TrainedRow, variant: Variant, options: Options) -> int:
        """That of the final runs there are; otherwise by the selected seed."""
        names = [RunName(row, variant, k, "final") for k in self._request.seeds_of(row)]
        known = next((run["epochs"] for run in map(self._finished, names) if run is not None), None)
        if known is not None:
            return known
        if _ends_with_the_run(options):
            return options.epochs
        runs = [self._finished(self._selection(name)) for name in names]
        best = min((run for run in runs if run is not None), key=lambda run: run["selection"]["nll"])
        return final_epochs(options.epochs, best["best_epoch"], options.validate_every)

    def _finished(self, name: RunName) -> dict[str, Any] | None:
        but = ("epochs",) if name.phase == "final" else ()
        command = self._request.experiment.command
        return read_finished(name, self._request.out, self._options(name).to_json(), but=but, command=command)

    def _to_plan(self, name: RunName) -> Planned:
        options = self._options(name)
        networks = (options.layers or 1) * (1 if options.posterior == "none" else 2)
        cost = networks * (options.epochs + 1.0)
        return Planned(str(name), name.folder(self._work), options.epochs, cost)

    def _sorted_out(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Outcome]]:
        """The jobs that can be made, and what becomes of those whose folders are damaged, which harm no other."""
        sound: list[Job] = []
        damaged: list[Outcome] = []
        for job in jobs:
            try:
                begun = _begun_with(job.out)
            except CheckpointError as error:
                damaged.append(Outcome(job, None, str(error)))
                continue
            self._require_same_work(job, begun)
            sound.append(job)
        return sound, damaged

    def _require_same_work(self, job: Job, begun: Options | None) -> None:
        """A run that was begun with another recipe can't be continued."""
        before = job.options.to_json() if begun is None else begun.to_json()
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
        curves = read_curves(job.out, job.options.epochs)
        began = time.monotonic()
        with out_of_memory_as_error("use --jobs 1"):
            found = self._evaluated(name, job)
        result = read_trained(job.out, _part(name))
        content = {
            "version": results.VERSION,
            "budget": request.budget.name,
            "row": name.row.id,
            "variant": name.variant,
            "seed": name.seed,
            "phase": name.phase,
            # as the row says it: where the runs lie is no part of the results
            "config": self._options(name).replace(epochs=job.options.epochs).to_json(),
            "epochs": job.options.epochs,
            "best_epoch": result["best_epoch"],
            "selection": _selection(name, result),
            **found,
            "metrics": curves,
            "parameters": result["parameters"],
            "seconds": result["seconds"],
            "evaluation_seconds": round(time.monotonic() - began, 3),
            "device": result["device"],
            "device_name": results.device_name(self._device),
            "together": result.get("together", 1),
            "data": result["data"],
            "versions": results.versions(),
        }
        self._pause()
        results.write(name.file(request.out), content)

    def _evaluated(self, name: RunName, job: Job) -> dict[str, Any]:
        part = _part(name)
        known = read_trained(job.out, part)[part]
        opened = open_run(job.out, device=str(self._device))
        dataset = self._dataset(job.options)
        split = dataset.parts[part]
        self._pause()
        figures = self._request.experiment.score(
            name.row,
            opened.flow,
            split,
            known,
            self._evaluation(name),
            phase=name.phase,
            train=dataset.train,
            pause=self._pause,
        )
        draw = {"part": part, "draw": dataset.describe()["sha256"][part]}
        samples = None
        if name.phase == "final":
            samples = draw_samples(name.row.flow, opened.flow, opened.shape)
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
        key = options.data, options.validation, options.test
        if key not in self._datasets:
            self._datasets[key] = build_data(options).to(self._device)
        return self._datasets[key]

    def _compute_references(self) -> None:
        request = self._request
        for row in request.references:
            path = request.out / "runs" / f"{row.id}.json"
            if results.exists(path) or request.experiment.reference is None:
                continue
            options = request.budget.options(Options(), "final", self._digits)
            dataset = self._dataset(options)
            draw = {"part": "test", "draw": dataset.describe()["sha256"]["test"]}
            content = {
                "version": results.VERSION,
                "budget": request.budget.name,
                "row": row.id,
                "phase": "reference",
                "evaluation": draw | request.experiment.reference(row, dataset.to("cpu")),
                "versions": results.versions(),
            }
            results.write(path, content)


def _ends_with_the_run(options: Options) -> bool:
    """Whether something is scheduled over all epochs: with fewer of them it would be another recipe."""
    return options.schedule == "cosine" or "anneal=" in options.estimator


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


def _part(name: RunName) -> str:
    """On which part of its data a run is evaluated."""
    return "validation" if name.phase == "select" else "test"


def _begun_with(folder: Path) -> Options | None:
    """The options that a run was begun with; None if there is none yet.

    Raises:
        CheckpointError: if the folder is damaged.
    """
    again = f"remove {folder}, and the run is made again"
    in_the_way = next((path for path in (folder.parents[1], folder.parent, folder) if path.is_file()), None)
    if in_the_way is not None:
        raise CheckpointError(
            f"{in_the_way} is to be a folder, and is a file; remove it, and the run is made"
        )
    if (folder / "config.json").exists():
        try:
            return read_config(folder / "config.json")[0]
        except UserError as error:
            raise CheckpointError(f"{error}; or {again}") from None
    # what a process that was killed left half written begins with a dot
    if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise CheckpointError(
            f"{folder} is no folder of a run: it has no config.json, and is not empty; {again}"
        )
    return None


def _selection(name: RunName, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """By what the seed is compared with the others, on validation data."""
    if name.phase != "select":
        return None
    key = "greedy_nll" if name.row.metric == "greedy" else "nll"
    return {"metric": name.row.metric, "nll": result["validation"][key]}
