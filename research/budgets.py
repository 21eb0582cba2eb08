"""How much work a reproduction may be: seconds, minutes, or what the paper's table deserves."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from research.results import write_bytes
from xorflow import ConfigError, data
from xorflow.training import CONDITIONERS, POSTERIORS, Options, Registry

Phase = Literal["select", "final"]
PHASES: tuple[Phase, ...] = ("select", "final")
"""Choose the best epoch and seed on validation data; then train the frozen recipe on these data too."""


@dataclass(frozen=True)
class Budget:
    """A size of the reproduction.

    Attributes:
        name: by which the command line knows it.
        words: what its figures are.
        seeds: how many, unless the command line says otherwise.
        samples: S of the importance-sampled bound.
        rows: how many images of a part the bound is computed on; None for all.
        changes: the options that differ from a row's recipe.
        validation: how many images validate while selecting.
        digits: whether the data are a few small digits, made for the purpose, instead of MNIST.
    """

    name: str
    words: str
    seeds: int
    samples: int
    rows: int | None
    changes: Callable[[Options], dict[str, Any]]
    validation: int = 10_000
    digits: bool = False

    def options(self, recipe: Options, phase: Phase, digits: Path) -> Options:
        """The options of a phase; `digits` is where a budget's own data lie, if it has any."""
        validation = float(self.validation if phase == "select" else 0)
        own = {"data": str(digits), "test": float(_DIGITS_TEST)} if self.digits else {}
        return recipe.replace(**self.changes(recipe), validation=validation, **own)


def narrowed(registry: Registry, text: str, width: int) -> str:
    """A network with no hidden layer wider than that."""
    call = registry.read(text)
    widths = [min(width, own) for own in call["hidden"]] if "hidden" in call.defaults else []
    return str(call.having(hidden=widths))


def _narrow(options: Options, width: int, epochs: int) -> dict[str, Any]:
    return {
        "conditioner": narrowed(CONDITIONERS, options.conditioner, width),
        "posterior": narrowed(POSTERIORS, options.posterior, width),
        "epochs": min(epochs, options.epochs),
        "validate_every": 1,
        "evaluation_samples": 1,
    }


_DIGITS, _DIGITS_TEST, _DIGITS_SIDE, _DIGITS_MARGIN = 360, 100, 8, 6

BUDGETS: tuple[Budget, ...] = (
    Budget(
        name="smoke",
        words="Smoke test on a few hundred digits of 8 x 8 pixels: that everything runs, and nothing about the models.",
        seeds=2,
        samples=8,
        rows=None,
        changes=lambda options: _narrow(options, 16, 2) | {"batch_size": 50},
        validation=60,
        digits=True,
    ),
    Budget(
        name="quick",
        words="Quick run with narrow networks and few epochs: not converged, and not to be compared with the paper.",
        seeds=1,
        samples=20,
        rows=500,
        changes=lambda options: _narrow(options, 64, 1),
    ),
    Budget(
        name="full",
        words="Full run of every recipe as it stands in the row.",
        seeds=3,
        samples=1000,
        rows=None,
        changes=lambda options: {},  # noqa: ARG005
    ),
)


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str: ...


def find_budget(name: str, among: Sequence[Named] = BUDGETS) -> Any:
    """A budget by its name."""
    found = next((budget for budget in among if budget.name == name), None)
    if found is None:
        raise ConfigError(f"--budget is one of {', '.join(b.name for b in among)}; got {name!r}")
    return found


def write_digits(path: Path) -> None:
    """A few training images of MNIST, every second pixel of their middle, binarised once."""
    grey = data.mnist(validation=0).train.values[:_DIGITS].reshape(-1, 28, 28).numpy()
    kept = slice(_DIGITS_MARGIN, _DIGITS_MARGIN + 2 * _DIGITS_SIDE, 2)
    middle = grey[:, kept, kept]
    array = data.binarise(np.ascontiguousarray(middle.reshape(len(middle), -1)), seed=0, stream=0)
    write_array(path, array.reshape(-1, _DIGITS_SIDE, _DIGITS_SIDE))


def write_array(path: Path, array: np.ndarray) -> None:
    """A .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes(path, buffer.getvalue())
