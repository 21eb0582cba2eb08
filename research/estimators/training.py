"""Training with every estimator: depth 1 and depth 2, from the same start, for as many epochs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from research import results
from research.estimators.models import blank_flow, hidden_units, image_options, make_data, posterior_of
from research.estimators.names import default_estimators
from research.estimators.study import StudyRequest, file_name, open_study, read_named, refusal, write_plan
from research.results import Record
from xorflow import ConfigError
from xorflow.cli.progress import Planned
from xorflow.training import (
    POSTERIORS,
    Job,
    JobObserver,
    Options,
    Outcome,
    build_estimator,
    read_result,
    resolve_device,
    run_jobs,
)

_DEPTHS = (1, 2)
_UNUSED = ("analytic:objective=elbo",)
"""The same gradient as `score-function:objective=elbo,sum_last=true`, which is trained."""


@dataclass(frozen=True)
class Trial:
    """A run of the comparison."""

    depth: int
    estimator: str
    options: Options

    def __str__(self) -> str:
        return f"depth-{self.depth}.{self.estimator}"


class TrainingComparison:
    """The runs of a comparison, with what is finished left out.

    All training data are trained on, and the weights are those of the last epoch: none is chosen, so that all estimators have
    the same steps.

    Args:
        request: what the command line asks for; its draws and batch are of no importance here.
        workers: how many runs at once.

    Raises:
        UserError: before any work, if the request means nothing.
    """

    def __init__(self, request: StudyRequest, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"--jobs is at least 1; got {workers}")
        self._request, self._workers = request, workers
        self._device = resolve_device(request.device)
        budget, work = request.budget, request.work / request.budget.name
        device = results.device_name(self._device)
        settings = {
            "budget": budget.name,
            "description": budget.description,
            "seed": request.seed,
            "device": device,
        }
        self._plan = open_study(request.out, settings)
        self._images = image_options(budget, work)
        trials = [self._trial(depth, text) for depth in _DEPTHS for text in self._texts(depth)]
        self._trials = {
            work / "training" / file_name(str(trial)): trial
            for trial in trials
            if read_named(self._file(trial), depth=trial.depth, estimator=trial.estimator) is None
        }
        self.planned = [
            Planned(str(trial), folder, epochs=trial.options.epochs) for folder, trial in self._trials.items()
        ]

    def _texts(self, depth: int) -> Sequence[str]:
        if self._request.estimators is not None:
            return self._request.estimators
        return [text for text in default_estimators(depth, posterior=True) if text not in _UNUSED]

    def _trial(self, depth: int, text: str) -> Trial:
        options = self._images.replace(
            layers=depth,
            order="alternating" if depth > 1 else "natural",
            posterior=posterior_of(self._request.budget.hidden)
            if build_estimator(text).proposal == "q"
            else "none",
            estimator=text,
            epochs=self._request.budget.compared_epochs,
            validation=0.0,
            evaluation_samples=self._request.budget.samples,
            seed=self._request.seed,
            device=str(self._device),
        )
        return Trial(depth, text, options)

    def _file(self, trial: Trial) -> Path:
        return self._request.out / "training" / f"{file_name(str(trial))}.json"

    # ---- the work ----

    def run(self, observer: JobObserver | None = None) -> list[Outcome]:
        """Train everything that is not finished; what is not defined for a depth is noted as that."""
        write_plan(self._request.out, self._plan)
        dataset = make_data(self._images, self._request.budget)
        jobs = []
        for folder, trial in self._trials.items():
            reason = refusal(trial.estimator, blank_flow(trial.options, dataset))
            if reason is None:
                jobs.append(Job(trial.options, folder, f"depth {trial.depth}, {trial.estimator}"))
            else:
                self._write(trial, {"error": f"not defined: {reason}"})
        outcomes = run_jobs(jobs, self._workers, observer, finish=self._record) if jobs else []
        for outcome in outcomes:
            # gradients that are no numbers are a finding about the estimator, and are kept as one
            if outcome.error is not None and "is not finite" in outcome.error:
                error = re.split("; the last good|: train again", outcome.error)[0]
                self._write(self._trials[outcome.job.out], {"error": error})
        return outcomes

    # ---- what a run leaves behind ----

    def _record(self, job: Job) -> None:
        result = read_result(job.out)
        of_test = ("nll", "stderr", "kind", "samples", "elbo_nll", "greedy_nll", "greedy_stderr", "layers")
        of_run = ("seconds", "epochs", "steps", "parameters", "seed")
        figures = {key: result["test"].get(key) for key in of_test}
        self._write(self._trials[job.out], figures | {key: result[key] for key in of_run})

    def _write(self, trial: Trial, figures: Record) -> None:
        options = trial.options
        content = {
            "id": f"training.{trial}",
            "depth": trial.depth,
            "estimator": trial.estimator,
            "posterior": POSTERIORS.read(options.posterior)["name"],
            "hidden": list(hidden_units(options)),
            "batch_size": options.batch_size,
            "lr": options.lr,
            **figures,
            "device": results.device_name(self._device),
            "jobs": self._workers,
        }
        results.keep(self._file(trial), content)
