"""An experiment of many rows: which runs it needs, in which order, and what each leaves behind.

Every row is trained in two phases. `select` trains on 50,000 images and keeps the epoch that is best on 10,000 others; `final`
trains the frozen recipe on all 60,000, for the same seeds, and is what the table reports. A finished run is a JSON file, and is
never repeated; an interrupted one goes on from its folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from research import results
from research.budgets import PHASES, Phase, write_digits
from research.experiment import Request, Trained
from research.files import RunName, open_results, read_curves, read_finished, read_trained, require_begun
from research.results import Record
from research.rows import VARIANTS, ComputedRow, TrainedRow
from research.samples import draw_samples
from xorflow import CheckpointError, ConfigError, UserError
from xorflow.cli.progress import Planned
from xorflow.data import Dataset
from xorflow.training import (
    Job,
    JobObserver,
    Options,
    Outcome,
    build_data,
    create_run,
    open_run,
    out_of_memory_as_error,
    read_config,
    resolve_device,
    run_jobs,
)

_NEARLY_ALL = 0.9
"""A best epoch before this part of training shortens the final run to it, where no schedule depends on the length."""

_SELECTION_SAMPLES = 50
"""Of the importance-sampled bound of a run whose figures are not reported."""


class Runner:
    """All runs of a request, with what is finished left out.

    Raises:
        ConfigError: before any work, if the request means nothing, or its folders hold something else.
    """

    def __init__(self, request: Request) -> None:
        if request.seeds is not None and request.seeds < 1:
            raise ConfigError(f"--seeds is how many seeds to train, at least 1; got {request.seeds}")
        if request.workers < 1:
            raise ConfigError(f"--jobs is at least 1; got {request.workers}")
        self._request, self._experiment = request, request.experiment
        self._device = resolve_device(request.device)
        self._work = request.work / request.budget.name
        self._digits = self._work.resolve() / "digits.npy"
        self._datasets: dict[tuple[Any, ...], Dataset] = {}
        self._names: dict[Path, RunName] = {}
        plan = self._experiment.plan(request.budget)
        open_results(request.out, request.budget, plan, self._experiment.name)
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
        outcomes: dict[str, Outcome] = {}
        for phase in PHASES:
            # those that others start from come first
            while ready := [n for n in self._all(phase) if str(n) not in outcomes and self._is_ready(n)]:
                made = self._make(ready, observer)
                outcomes |= {str(self._names[outcome.job.out]): outcome for outcome in made}
        self._compute_rows()
        return list(outcomes.values())

    def waiting(self) -> list[str]:
        """The names of the rows that could not be computed yet."""
        return [row.id for row in self._computed() if not results.exists(self._file(row))]

    def _all(self, phase: Phase) -> list[RunName]:
        finals = [
            RunName(row, variant, seed, "final")
            for row in self._request.rows
            if isinstance(row, TrainedRow)
            for variant in VARIANTS
            if variant in row.recipes
            for seed in self._request.seeds_of(row)
        ]
        selections = {str(name): name for name in map(self._selection, finals)}
        return finals if phase == "final" else list(selections.values())

    def _selection(self, name: RunName) -> RunName:
        """The run that chooses the epochs of another."""
        return replace(name, phase="select", seed=name.seed if self._experiment.selects else 0)

    def _start(self, name: RunName) -> RunName | None:
        """The run that another starts from."""
        rows = [row for row in self._experiment.rows if row.id == name.row.init]
        return replace(name, row=rows[0]) if rows else None

    def _is_ready(self, name: RunName) -> bool:
        """Whether a run is to be made now: a final one only if its selection, and what it starts from, is finished."""
        needed = [self._start(name), self._selection(name) if name.phase == "final" else None]
        return not self._finished(name) and all(
            run is None or results.exists(run.file(self._request.out)) for run in needed
        )

    def _make(self, names: Sequence[RunName], observer: JobObserver | None) -> list[Outcome]:
        """What becomes of some runs; those whose folders are damaged fail at once, and harm no other."""
        jobs: list[Job] = []
        damaged: list[Outcome] = []
        for job in [self._job(name) for name in names]:
            try:
                begun = _begun_with(job.out)
            except CheckpointError as error:
                damaged.append(Outcome(job, None, str(error)))
                continue
            if begun is not None:
                require_begun(job.out, begun, job.options)
            jobs.append(job)
        if observer is not None:
            for outcome in damaged:
                observer.on_outcome(outcome)
        made = run_jobs(jobs, self._request.workers, observer, finish=self._record) if jobs else []
        return damaged + made

    def _job(self, name: RunName) -> Job:
        options = self._options(name)
        if name.phase == "final":
            options = options.replace(epochs=self._final_epochs(name, options))
        start = self._start(name)
        if start is not None:
            options = options.replace(init=str(self._weights(start, name)))
        folder = name.folder(self._work)
        self._names[folder] = name
        if self._experiment.build is not None:
            dataset = self._dataset(options).to("cpu")
            flow = self._experiment.build(name.row, options, dataset)
            if flow is not None:
                options = options.without_model()
                if not folder.exists():
                    create_run(options, folder, model=flow, dataset=dataset)
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
        recipe = self._request.budget.options(name.row.options(name.variant), name.phase, self._digits)
        return recipe.replace(seed=name.seed, device=self._request.device)

    def _final_epochs(self, name: RunName, options: Options) -> int:
        """That of the final runs there are; otherwise by the selected seed."""
        names = [replace(name, seed=seed) for seed in self._request.seeds_of(name.row)]
        known = next((run["epochs"] for run in map(self._finished, names) if run is not None), None)
        if known is not None:
            return known
        if _ends_with_the_run(options):
            return options.epochs
        runs = [self._finished(self._selection(name)) for name in names]
        best = min((run for run in runs if run is not None), key=lambda run: run["selection"]["nll"])
        return final_epochs(options.epochs, best["best_epoch"], options.validate_every)

    def _finished(self, name: RunName) -> Record | None:
        return read_finished(name, self._request.out, self._options(name).to_json(), self._experiment.name)

    def _to_plan(self, name: RunName) -> Planned:
        """Its cost is in passes over the data through one network."""
        options = self._options(name)
        networks = (options.layers or 1) * (1 if options.posterior == "none" else 2)
        return Planned(str(name), name.folder(self._work), networks * (options.epochs + 1.0), options.epochs)

    # ---- what a run leaves behind ----

    def _record(self, job: Job) -> None:
        """Evaluate a run whose training is finished, and write its file."""
        name, request = self._names[job.out], self._request
        curves = read_curves(job.out, job.options.epochs)
        began = time.monotonic()
        with out_of_memory_as_error("use --jobs 1"):
            figures = self._evaluated(name, job)
        result = read_trained(job.out, name.part)
        content = {
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
            **figures,
            "metrics": curves,
            **{key: result[key] for key in ("parameters", "seconds", "device", "data")},
            "evaluation_seconds": round(time.monotonic() - began, 3),
            "device_name": results.device_name(self._device),
        }
        results.keep(name.file(request.out), content)

    def _evaluated(self, name: RunName, job: Job) -> Record:
        opened, dataset = open_run(job.out, device=str(self._device)), self._dataset(job.options)
        known = read_trained(job.out, name.part)[name.part]
        budget, samples = self._request.budget, None
        if name.phase == "select":  # compares what the run itself reports: its bound may be rough
            budget = replace(budget, samples=min(budget.samples, _SELECTION_SAMPLES))
        split = dataset.parts[name.part]
        run = Trained(name.row, opened.flow, split, dataset.train, known, budget, name.phase)
        figures = self._experiment.score(run)
        if name.phase == "final":
            samples = draw_samples(name.row.flow, opened.flow, opened.shape)
        return {"evaluation": _drawn(dataset, name.part) | figures, "samples": samples}

    def _dataset(self, options: Options) -> Dataset:
        key = options.data, options.validation, options.test
        if key not in self._datasets:
            self._datasets[key] = build_data(options).to(self._device)
        return self._datasets[key]

    # ---- rows that are not trained ----

    def _computed(self) -> list[ComputedRow]:
        rows = (*self._request.rows, *self._experiment.levels)
        return [row for row in rows if isinstance(row, ComputedRow)]

    def _file(self, row: ComputedRow) -> Path:
        return self._request.out / "runs" / f"{row.id}.json"

    def _compute_rows(self) -> None:
        for row in self._computed():
            path = self._file(row)
            if results.exists(path):
                _require_current(row, path, results.read(path, self._experiment.name).get("recipe"))
                continue
            dataset = self._dataset(self._request.budget.options(Options(), "final", self._digits))
            record = self._experiment.compute(row, self._request, dataset)
            if record is not None:
                evaluation = _drawn(dataset, "test") | record["evaluation"]
                about = {"budget": self._request.budget.name, "row": row.id}
                results.keep(path, about | record | {"evaluation": evaluation})


def _require_current(row: ComputedRow, path: Path, before: str | None) -> None:
    """What was computed from runs of another recipe is not passed off as of this one."""
    if before != row.recipe:
        raise ConfigError(
            f"{path} is of {before}, and row {row.id} now of {row.recipe}: remove that record, or choose another --out"
        )


def _drawn(dataset: Dataset, part: str) -> Record:
    """What was evaluated."""
    return {"part": part, "draw": dataset.describe()["sha256"][part]}


def _ends_with_the_run(options: Options) -> bool:
    """Whether something is scheduled over all epochs: with fewer of them it would be another recipe."""
    return options.schedule == "cosine" or "anneal=" in options.estimator


def final_epochs(epochs: int, best: int, validate_every: int) -> int:
    """How long the final run trains: to the best epoch of the selection, unless that came near the end.

    >>> final_epochs(100, 42, 5), final_epochs(100, 88, 5), final_epochs(100, 100, 5)
    (45, 100, 100)
    """
    length = -(-best // validate_every) * validate_every
    return length if length < _NEARLY_ALL * epochs else epochs


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


def _selection(name: RunName, result: Record) -> Record | None:
    """By what the seed is compared with the others, on validation data."""
    if name.phase != "select":
        return None
    key = "greedy_nll" if name.row.metric == "greedy" else "nll"
    return {"metric": name.row.metric, "nll": result["validation"][key]}
