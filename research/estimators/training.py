"""Training with every estimator: depth 1 and depth 2, from the same start, for as many epochs."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

from research import results
from research.estimators.files import file_name, open_study, read_named, write_plan
from research.estimators.models import StudyBudget, hidden_units, image_options, make_data, posterior_of
from research.estimators.names import default_estimators
from research.estimators.study import StudyRequest
from xorflow import ConfigError, ModelError
from xorflow.data import Dataset
from xorflow.estimators import FullPosterior
from xorflow.training import (
    POSTERIORS,
    Job,
    JobObserver,
    Options,
    build_data,
    build_estimator,
    build_flow,
    read_result,
    resolve_device,
    run_jobs,
)

_DEPTHS = (1, 2)
_UNUSED = ("analytic:objective=elbo",)
"""The same gradient as `full-posterior:sum_last=true`, which is trained."""


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
        self._work = request.work / request.budget.name / "training"
        self._plan = open_study(request.out, self._settings())
        self._images = image_options(request.budget, request.work / request.budget.name)
        self._named = {
            (depth, text): self._options(depth, text) for depth in _DEPTHS for text in self._texts(depth)
        }
        self._jobs: dict[Path, tuple[int, str]] = {}

    def _settings(self) -> dict[str, Any]:
        """As a study has them; what is only of measurements is left to it."""
        budget = self._request.budget
        return {
            "budget": budget.name,
            "words": budget.words,
            "draws": None,
            "batch": None,
            "warm_up": None,
            "seed": self._request.seed,
            "device": results.device_name(self._device),
        }

    def _texts(self, depth: int) -> tuple[str, ...]:
        if self._request.estimators is not None:
            return tuple(self._request.estimators)
        return tuple(text for text in default_estimators(depth, posterior=True) if text not in _UNUSED)

    def _options(self, depth: int, text: str) -> Options:
        budget: StudyBudget = self._request.budget
        return self._images.replace(
            layers=depth,
            order="alternating" if depth > 1 else "natural",
            posterior=posterior_of(budget.hidden) if _needs_posterior(text) else "none",
            estimator=text,
            epochs=budget.compared_epochs,
            validation=0.0,
            evaluation_samples=budget.samples,
            seed=self._request.seed,
            device=str(self._device),
        )

    def _refusal(self, depth: int, text: str) -> str | None:
        """Why an estimator cannot train a depth; None if it can."""
        with torch.random.fork_rng(devices=[]):
            flow = build_flow(self._named[depth, text], self._dataset)
        try:
            build_estimator(text).admit(flow)
        except ModelError as error:
            return str(error)
        return None

    @functools.cached_property
    def _dataset(self) -> Dataset:
        make_data(Path(self._images.data), self._request.budget)
        return build_data(self._images)

    # ---- the work ----

    def run(self, observer: JobObserver | None = None) -> list[str]:
        """Train everything that is not finished; returns what went wrong, in one line each."""
        write_plan(self._request.out, self._plan)
        make_data(Path(self._images.data), self._request.budget)  # also for runs that are continued
        jobs = [job for depth, text in self._named if (job := self._job(depth, text)) is not None]
        outcomes = run_jobs(jobs, self._workers, observer, finish=self._record) if jobs else []
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        for outcome in failed:
            # gradients that are no numbers are a finding about the estimator, and are kept as one
            if "is not finite" in (outcome.error or ""):
                depth, text = self._jobs[outcome.job.out]
                found = re.split("; the last good|: train again", str(outcome.error))[0]
                self._write(depth, text, {"error": found})
        return [f"{outcome.job.name}: {outcome.error}" for outcome in failed]

    def _file(self, depth: int, text: str) -> Path:
        return self._request.out / "training" / f"{file_name(f'depth-{depth}.{text}')}.json"

    def _job(self, depth: int, text: str) -> Job | None:
        """The run of an estimator; None if it is finished, or not defined for this depth, which is then noted."""
        if read_named(self._file(depth, text), depth=depth, estimator=text) is not None:
            return None
        options = self._named[depth, text]
        reason = self._refusal(depth, text)
        if reason is not None:
            self._write(depth, text, {"error": f"not defined: {reason}"})
            return None
        folder = self._work / file_name(f"depth-{depth}.{text}")
        self._jobs[folder] = depth, text
        return Job(options, folder, f"depth {depth}, {text}")

    # ---- what a run leaves behind ----

    def _record(self, job: Job) -> None:
        depth, text = self._jobs[job.out]
        result = read_result(job.out)
        test = result["test"]
        found = {key: test.get(key) for key in ("nll", "stderr", "kind", "samples", "elbo_nll")}
        found |= {"greedy_nll": test["greedy_nll"], "greedy_stderr": test["greedy_stderr"]}
        found |= {"layers": test["layers"]}
        found |= {key: result[key] for key in ("seconds", "epochs", "steps", "parameters", "seed")}
        found |= {"together": 1}
        self._write(depth, text, found)

    def _write(self, depth: int, text: str, found: dict[str, Any]) -> None:
        options = self._named[depth, text]
        content = {
            "version": results.VERSION,
            "id": f"training.depth-{depth}.{text}",
            "depth": depth,
            "estimator": text,
            "posterior": POSTERIORS.read(options.posterior).name,
            "hidden": list(hidden_units(options)),
            "batch_size": options.batch_size,
            "lr": options.lr,
            **found,
            "device": results.device_name(self._device),
            "jobs": self._workers,
            "versions": results.versions(),
        }
        results.write(self._file(depth, text), content)


def _needs_posterior(text: str) -> bool:
    estimator = build_estimator(text)
    settings = estimator.config()
    named = settings.get("proposal") == "q" or settings.get("objective") == "elbo"
    return named or isinstance(estimator, FullPosterior)
