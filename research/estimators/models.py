"""What is studied: models of our own at three points of their training, or the run of a user."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from research.budgets import write_array, write_digits
from research.estimators.names import default_estimators
from xorflow import ConfigError, LatentFlow, data
from xorflow.data import Dataset
from xorflow.training import (
    CONDITIONERS,
    HARMLESS,
    Observer,
    Options,
    Progress,
    begin_run,
    build_data,
    build_flow,
    complete_run,
    open_run,
    read_config,
    reopen_run,
    untrained,
)

POINTS = ("start", "middle", "converged")


@dataclass(frozen=True)
class StudyBudget:
    """A size of the study.

    Attributes:
        name: by which the command line knows it.
        words: what its figures are.
        draws: of each estimator.
        batch: rows of the one batch.
        warm_up: batches for estimators that learn.
        hidden: width of the networks on images.
        epochs: of the training of the models.
        compared_epochs: of the training comparison.
        samples: of the bound of deep models in the training comparison.
        digits: whether images are a few small digits, made for the purpose, instead of MNIST.
        points: of the models on images, unless the command line says otherwise.
    """

    name: str
    words: str
    draws: int
    batch: int
    warm_up: int
    hidden: int
    epochs: int
    compared_epochs: int
    samples: int
    digits: bool = False
    points: tuple[str, ...] = POINTS


STUDY_BUDGETS: tuple[StudyBudget, ...] = (
    StudyBudget(
        "smoke",
        "Smoke test on a few hundred digits of 8 x 8 pixels: that everything runs, and nothing about the estimators.",
        draws=8, batch=4, warm_up=2, hidden=16, epochs=2, compared_epochs=1, samples=8, digits=True,
        points=("converged",),
    ),
    StudyBudget(
        "quick",
        "Quick study of narrow networks after few epochs, with few draws: rough.",
        draws=64, batch=32, warm_up=20, hidden=64, epochs=4, compared_epochs=1, samples=20,
    ),
    StudyBudget(
        "full",
        "Full study.",
        draws=400, batch=64, warm_up=200, hidden=1024, epochs=20, compared_epochs=10, samples=1000,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model to be studied.

    Attributes:
        name: its name in files.
        title: its name in tables.
        words: what it is, and how it was trained.
        points: at which weights it is studied by default.
        known: at which it can be.
        estimators: the default ones.
        blank: the model with any weights, without training anything.
        at: the model at a point; trains it, if need be.
        dataset: its data.
        device: where it is trained and studied.
        pinned: whether that is so whatever device is asked for.
    """

    name: str
    title: str
    words: str
    points: tuple[str, ...]
    known: tuple[str, ...]
    estimators: tuple[str, ...]
    blank: Callable[[], LatentFlow]
    at: Callable[[str, Observer | None], LatentFlow]
    dataset: Callable[[], Dataset]
    device: str
    pinned: bool = False


# ---- models of our own ----

_PIXELS = ((10, 14), (14, 12), (14, 16), (18, 14))
"""Of an image, around its middle: the features of the small models."""
_PIXEL_ROWS = 2000
_SMALL = ("small-2", "small-3")


def own_models(budget: StudyBudget, work: Path, device: str) -> tuple[Subject, ...]:
    """The models of the study, to be trained into a folder: those on images on a device, the small ones on the CPU.

    A model of a few pixels is all launches, which a GPU is slower at.
    """
    images, deep = image_options(budget, work), {"layers": 2, "order": "alternating"}
    posterior = images.replace(
        posterior=posterior_of(budget.hidden), estimator="full-posterior:sum_last=true"
    )
    small = {
        depth: Options(
            data=str(work.absolute() / f"pixels{features}.npy"), layers=depth, order="alternating",
            conditioner="made:hidden=16", posterior=posterior_of(16), base="fixed", init="biases",
            estimator="full-posterior:kl=suffix", epochs=8, batch_size=50, evaluation_samples=8,
        )
        for depth, features in ((2, 4), (3, 3))
    }  # fmt: skip
    side = "8 x 8" if budget.digits else "28 x 28"
    models = {
        "depth-1": (images, f"depth 1, {side} pixels"),
        "depth-2": (
            images.replace(**deep, estimator="maximum-likelihood:samples=4"),
            f"depth 2, {side} pixels",
        ),
        "posterior-1": (posterior, f"depth 1 with a posterior, {side} pixels"),
        "posterior-2": (posterior.replace(**deep), f"depth 2 with posteriors, {side} pixels"),
        "small-2": (small[2], "depth 2 with posteriors, 4 pixels"),
        "small-3": (small[3], "depth 3 with posteriors, 3 pixels"),
    }
    return tuple(
        _own(name, title, options.replace(device="cpu" if name in _SMALL else device), work / name, budget)
        for name, (options, title) in models.items()
    )


def posterior_of(width: int) -> str:
    """A perceptron, as the paper's: it begins without Bayes' rule."""
    return f"mlp:hidden={width},direct=false"


def hidden_units(options: Options) -> tuple[int, ...]:
    """Those of each hidden layer of the generators."""
    return CONDITIONERS.read(options.conditioner)["hidden"]


def image_options(budget: StudyBudget, work: Path) -> Options:
    """Of one layer on images, on the paper's fixed base."""
    own = {"data": str(work.absolute() / "digits.npy"), "test": 100.0} if budget.digits else {}
    return Options().replace(
        **own,
        conditioner=f"made:hidden={budget.hidden}",
        base="fixed",
        init="biases",
        epochs=budget.epochs,
        batch_size=50 if budget.digits else 128,
        evaluation_samples=min(budget.samples, 64),
        estimator="maximum-likelihood",
    )


def _own(name: str, title: str, options: Options, folder: Path, budget: StudyBudget) -> Subject:
    small = name in _SMALL
    depth, middle = options.layers or 1, middle_epoch(options.epochs)
    points = budget.points if not small else tuple(p for p in budget.points if p != "middle")
    words = (
        f"trained for {_epochs(options.epochs)} by {options.estimator}, on a fixed base, networks of "
        f"{hidden_units(options)[0]:,} hidden units{f'; middle: after epoch {middle}' if 'middle' in points else ''}"
    )

    @functools.cache
    def dataset() -> Dataset:
        make_data(Path(options.data), budget)
        return build_data(options)

    def at(point: str, observer: Observer | None) -> LatentFlow:
        return _trained(options, folder, dataset(), point, observer)

    posterior = options.posterior != "none"
    estimators = default_estimators(depth, posterior=posterior, alone=posterior and not small)
    blank = lambda: _blank(options, dataset())  # noqa: E731
    return Subject(
        name, title, words, points, POINTS, estimators, blank, at, dataset, options.device, pinned=small
    )


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def middle_epoch(epochs: int) -> int:
    """After which epoch training is half-way: early, since the learning rate falls and most is learnt at once."""
    return max(1, epochs // 4)


def _blank(options: Options, dataset: Dataset) -> LatentFlow:
    with torch.random.fork_rng(devices=[]):
        flow = build_flow(options, dataset)
    assert isinstance(flow, LatentFlow)
    return flow


def make_data(path: Path, budget: StudyBudget) -> None:
    """Write the file of a model's data, if it has one of our own that is not there."""
    if path.suffix != ".npy" or path.exists():
        return
    if budget.digits and path.stem == "digits":
        write_digits(path)
        return
    count = int(path.stem.removeprefix("pixels"))
    grey = data.mnist(validation=0).train.values[:_PIXEL_ROWS].reshape(-1, 28, 28).numpy()
    chosen = np.stack([grey[:, row, column] for row, column in _PIXELS[:count]], 1)
    write_array(path, data.binarise(np.ascontiguousarray(chosen), seed=0, stream=0))


class _Keeper:
    """Keeps the weights of the points that a run passes, and passes on what happens."""

    def __init__(self, folder: Path, middle: int, observer: Observer | None) -> None:
        self.flow: torch.nn.Module | None = None
        self._folder, self._middle, self._observer = folder, middle, observer

    def on_start(self, total_steps: int, progress: Progress) -> None:
        if progress.step == 0:
            self._keep("start")
        if self._observer is not None:
            self._observer.on_start(total_steps, progress)

    def on_step(self, step: int) -> None:
        if self._observer is not None:
            self._observer.on_step(step)

    def on_epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] == self._middle:
            self._keep("middle")
        if self._observer is not None:
            self._observer.on_epoch(record)

    def _keep(self, point: str) -> None:
        assert self.flow is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.flow.state_dict().items()}
        save_file(weights, self._folder / f"{point}.safetensors")


def _trained(
    options: Options, folder: Path, dataset: Dataset, point: str, observer: Observer | None
) -> LatentFlow:
    """The model at a point of its training, which is made or continued if it is not finished."""
    run, points = folder / "run", folder / "points"
    _require_same(options, run)
    if not (run / "result.json").exists():
        keeper = _Keeper(points, middle_epoch(options.epochs), observer)
        begun = (run / "config.json").exists()
        trainer = (
            reopen_run(run, {"device": options.device}, keeper, dataset=dataset)
            if begun
            else begin_run(options, run, keeper, dataset=dataset)
        )
        keeper.flow = trainer.flow
        complete_run(trainer)
    flow = open_run(run, device=options.device).latent
    if point != "converged":
        flow.load_state_dict(load_file(points / f"{point}.safetensors"))
    return flow


def _require_same(options: Options, run: Path) -> None:
    """A run that was begun with other options is not the model that is asked for."""
    if not (run / "config.json").exists():
        return
    before = read_config(run / "config.json")[0].to_json()
    for key, value in options.to_json().items():
        if before[key] != value and key not in HARMLESS:
            raise ConfigError(
                f"the run in {run} was begun with {key} {before[key]!r}, and the study needs {value!r}: remove that folder, or "
                "choose another --work"
            )


# ---- the run of a user ----


def run_model(run: Path, device: str) -> Subject:
    """A finished run, at the end of its training and, if it was made from options, at its start."""
    opened = open_run(run, device=device)
    flow = opened.latent
    known = ("converged",) if opened.options.layers is None else ("start", "converged")

    def at(point: str, observer: Observer | None) -> LatentFlow:
        del observer
        if point == "converged":
            return flow
        begun = untrained(opened)
        assert isinstance(begun, LatentFlow)
        return begun.to(flow.device)

    return Subject(
        name=run.resolve().name,
        title=f"the run in {run.resolve().name}",
        words=f"trained for {_epochs(opened.options.epochs)} by {opened.options.estimator}",
        points=("converged",),
        known=known,
        estimators=default_estimators(flow.depth, posterior=flow.has_posterior),
        blank=lambda: flow,
        at=at,
        dataset=opened.data,
        device=device,
    )


def fingerprint(flow: LatentFlow) -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(flow.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
