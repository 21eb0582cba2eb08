"""How much work a reproduction may be: seconds, minutes, or what the paper's table deserves."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from research.results import write_bytes
from xorflow import ConfigError, data
from xorflow.data import Split
from xorflow.training import CONDITIONERS, POSTERIORS, Options, Registry

Phase = Literal["select", "final"]
PHASES = ("select", "final")
"""Choose the best epoch and seed on validation data; then train the frozen recipe on these data too."""


@dataclass(frozen=True)
class Budget:
    """A size of the reproduction.

    Attributes:
        name: by which the command line knows it.
        description: what its figures are.
        seeds: how many a row has at most, unless the command line says otherwise.
        samples: S of the importance-sampled bound.
        rows: how many images of a part the bound is computed on; None for all.
        changes: the options that differ from a row's recipe; None if none does.
        validation: how many images validate while selecting.
        digits: whether the data are a few small digits, made for the purpose, instead of MNIST.
    """

    name: str
    description: str
    seeds: int
    samples: int
    rows: int | None
    changes: Callable[[Options], dict[str, Any]] | None = None
    validation: int = 10_000
    digits: bool = False

    def options(self, recipe: Options, phase: Phase, digits: Path) -> Options:
        """The options of a phase; `digits` is where a budget's own data lie, if it has any."""
        validation = float(self.validation if phase == "select" else 0)
        changes = self.changes(recipe) if self.changes else {}
        if self.digits:
            # only MNIST has grey values, which soft targets are made of
            estimator = recipe.estimator.replace("soft_targets=true", "soft_targets=false")
            changes |= {"data": str(digits), "test": float(_DIGITS_TEST), "estimator": estimator}
        return recipe.replace(**changes, validation=validation)

    def limited(self, split: Split) -> Split:
        """The rows of a part of the data that are evaluated."""
        return split if self.rows is None or self.rows >= len(split) else split.subset(self.rows)


def narrowed(registry: Registry, text: str, width: int) -> str:
    """A network with no hidden layer wider than that, and a sequence network that is as small as it can be."""
    call = registry.read(text)
    small = {
        "hidden": [min(width, hidden) for hidden in call.get("hidden", ())],
        "width": 16,
        "depth": 1,
        "heads": 2,
    }
    return registry.text({key: small.get(key, value) for key, value in call.items()})


def _narrow(options: Options, width: int, epochs: int) -> dict[str, Any]:
    return {
        "conditioner": narrowed(CONDITIONERS, options.conditioner, width),
        "posterior": narrowed(POSTERIORS, options.posterior, width),
        "epochs": min(epochs, options.epochs),
        "validate_every": 1,
        "evaluation_samples": 1,
        "skip": min(0.05, options.skip),  # of few images
        "warmup": min(1, options.warmup),
        "precision": "auto",
        "recipe": "none",  # which is for the whole of MNIST
    }


_DIGITS, _DIGITS_TEST, _DIGITS_SIDE, _DIGITS_MARGIN = 360, 100, 8, 6

BUDGETS = (
    Budget(
        name="smoke",
        description="Smoke test on a few hundred digits of 8 x 8 pixels: that everything runs, and nothing about the models.",
        seeds=1,
        samples=8,
        rows=None,
        changes=lambda options: _narrow(options, 16, 2) | {"batch_size": 50},
        validation=60,
        digits=True,
    ),
    Budget(
        name="quick",
        description="Quick run with narrow networks and few epochs: not converged, and not to be compared with the paper.",
        seeds=1,
        samples=20,
        rows=500,
        changes=lambda options: _narrow(options, 64, 1),
    ),
    Budget(
        name="full",
        description="Full run of every recipe as it stands in the row.",
        seeds=3,
        samples=1000,
        rows=None,
    ),
)


def find_budget(name: str, among: Sequence[Any] = BUDGETS) -> Any:
    """A budget by its name."""
    for budget in among:
        if budget.name == name:
            return budget
    raise ConfigError(f"--budget is one of {', '.join(budget.name for budget in among)}; got {name!r}")


def write_digits(path: Path) -> None:
    """A few training images of MNIST, every second pixel of their middle, binarised once."""
    kept = slice(_DIGITS_MARGIN, _DIGITS_MARGIN + 2 * _DIGITS_SIDE, 2)
    write_images(path, _DIGITS, lambda grey: grey[:, kept, kept])


def write_images(path: Path, count: int, cut: Callable[[np.ndarray], np.ndarray]) -> None:
    """A .npy file of what is cut out of some training images of MNIST, binarised once."""
    grey = cut(data.mnist(validation=0).train.values[:count].reshape(-1, 28, 28).numpy())
    array = data.binarise(np.ascontiguousarray(grey.reshape(len(grey), -1)), seed=0, stream=0)
    buffer = io.BytesIO()
    np.save(buffer, array.reshape(grey.shape), allow_pickle=False)
    write_bytes(path, buffer.getvalue())
