"""What is studied: models of our own at three points of their training, or the run of a user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from research.budgets import write_digits, write_images
from research.estimators.names import POINTS, default_estimators
from research.files import require_begun
from research.results import Record
from xorflow import LatentFlow
from xorflow.data import Dataset
from xorflow.training import (
    CONDITIONERS,
    Options,
    Progress,
    build_data,
    build_flow,
    create_run,
    finish_run,
    open_run,
    read_config,
    resume_run,
    untrained,
)


@dataclass(frozen=True)
class StudyBudget:
    """A size of the study.

    Attributes:
        name: by which the command line knows it.
        description: what its figures are.
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
    description: str
    draws: int
    batch: int
    warm_up: int
    hidden: int
    epochs: int
    compared_epochs: int
    samples: int
    digits: bool = False
    points: tuple[str, ...] = POINTS


STUDY_BUDGETS = (
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
    """A model to be studied, which is a run, or becomes one.

    Attributes:
        name: its name in files.
        title: its name in tables.
        points: at which weights it is studied by default.
        known: at which it can be.
        estimators: the default ones.
        run: the folder of its run.
        options: of that run.
        dataset: its data.
        blank: the model with any weights, without training anything.
        pinned: whether its device is that of its options, whatever device is asked for.
    """

    name: str
    title: str
    points: tuple[str, ...]
    known: tuple[str, ...]
    estimators: tuple[str, ...]
    run: Path
    options: Options
    dataset: Callable[[], Dataset]
    blank: Callable[[], LatentFlow]
    pinned: bool = False

    def at(self, point: str) -> LatentFlow:
        """The model at a point of its training, which is made or continued if it is not finished."""
        middle = self.run.with_name("middle.safetensors")
        if not (self.run / "result.json").exists():
            self._train(middle)
        opened = open_run(self.run, device=self.options.device)
        flow = untrained(opened) if point == "start" else opened.flow
        assert isinstance(flow, LatentFlow)
        if point == "middle":
            flow.load_state_dict(load_file(middle))
        return flow.to(opened.flow.device)

    def _train(self, middle: Path) -> None:
        keeper = _Keeper(middle, middle_epoch(self.options.epochs))
        if (self.run / "config.json").exists():
            require_begun(self.run, read_config(self.run / "config.json")[0], self.options)
            device = {"device": self.options.device}
            trainer = resume_run(self.run, device, keeper, dataset=self.dataset())
        else:
            trainer = create_run(self.options, self.run, keeper, dataset=self.dataset())
        assert trainer is not None  # its caller has seen that it is not finished
        keeper.flow = trainer.flow
        finish_run(trainer)


class _Keeper:
    """Keeps the weights that a run has after some epoch."""

    flow: nn.Module

    def __init__(self, path: Path, epoch: int) -> None:
        self._path, self._epoch = path, epoch

    def on_start(self, total_steps: int, progress: Progress) -> None:
        pass

    def on_step(self, step: int) -> None:
        pass

    def on_epoch(self, record: Record) -> None:
        if record["epoch"] == self._epoch:
            weights = {name: value.detach().cpu().clone() for name, value in self.flow.state_dict().items()}
            save_file(weights, self._path)


def middle_epoch(epochs: int) -> int:
    """After which epoch training is half-way: early, since the learning rate falls and most is learnt at once."""
    return max(1, epochs // 4)


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
        posterior=posterior_of(budget.hidden), estimator="score-function:objective=elbo,sum_last=true"
    )
    small = {
        depth: Options(
            data=str(work.absolute() / f"pixels{features}.npy"), layers=depth, order="alternating",
            conditioner="made:hidden=16", posterior=posterior_of(16), base="fixed", init="biases",
            estimator="score-function:objective=elbo,divergence=cross-entropy", epochs=8, batch_size=50, evaluation_samples=8,
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
    small = {"data": str(work.absolute() / "digits.npy"), "test": 100.0} if budget.digits else {}
    return Options().replace(
        **small,
        conditioner=f"made:hidden={budget.hidden}",
        base="fixed",
        init="biases",
        epochs=budget.epochs,
        batch_size=50 if budget.digits else 128,
        evaluation_samples=min(budget.samples, 64),
        estimator="maximum-likelihood",
    )


def _own(name: str, title: str, options: Options, folder: Path, budget: StudyBudget) -> Subject:
    small, posterior = name in _SMALL, options.posterior != "none"
    points = tuple(point for point in budget.points if not small or point != "middle")
    dataset = functools.cache(lambda: make_data(options, budget))
    return Subject(
        name=name,
        title=title,
        points=points,
        known=POINTS,
        estimators=default_estimators(
            options.layers or 1, posterior=posterior, alone=posterior and not small
        ),
        run=folder / "run",
        options=options,
        dataset=dataset,
        blank=lambda: blank_flow(options, dataset()),
        pinned=small,
    )


def blank_flow(options: Options, dataset: Dataset) -> LatentFlow:
    """The model of options with any weights."""
    with torch.random.fork_rng(devices=[]):
        flow = build_flow(options, dataset)
    assert isinstance(flow, LatentFlow)
    return flow


def make_data(options: Options, budget: StudyBudget) -> Dataset:
    """The data of a model; if they are our own, their file is written unless it is there."""
    path = Path(options.data)
    if path.suffix == ".npy" and not path.exists():
        if budget.digits and path.stem == "digits":
            write_digits(path)
        else:
            rows, columns = zip(*_PIXELS[: int(path.stem.removeprefix("pixels"))], strict=True)
            write_images(path, _PIXEL_ROWS, lambda grey: grey[:, rows, columns])
    return build_data(options)


# ---- the run of a user ----


def run_model(run: Path, device: str) -> Subject:
    """A finished run, at the end of its training and, if it was made from options, at its start."""
    opened = open_run(run, device=device)
    name, flow = run.resolve().name, opened.latent
    return Subject(
        name=name,
        title=f"the run in {name}",
        points=("converged",),
        known=("converged",) if opened.options.layers is None else ("start", "converged"),
        estimators=default_estimators(flow.depth, posterior=flow.has_posterior),
        run=run,
        options=opened.options.replace(device=device),
        dataset=opened.data,
        blank=lambda: flow,
    )
