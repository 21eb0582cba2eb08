"""The rows of the question of depth, as data: which flows are compared, and how each is trained.

Two settings. On the paper's fixed base, flows in orderings of depth 1, 2, 4 and 8 are compared at equal weights: about
12.9 million, as of 8,192 hidden units in all, whichever layers they are in. On a learned base, couplings of depth 2 to 16,
which sample in as many passes, must build the model from layers that leave most of the pixels alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from research.files import Recipe, Variant
from xorflow import ConfigError
from xorflow.training import Options

Family = Literal["autoregressive", "coupling"]


@dataclass(frozen=True)
class DepthRow:
    """A row that is trained.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
        family: of its conditioners.
        series: rows that differ in their depth alone; a line of the figure.
        training: the recipe.
        seeds: how many are trained, unless the command line says otherwise.
        samples: at most so many of the importance-sampled bound.
        rebased: the base, `fixed`, that the trained flow is put on; None for the base that it was trained on.
        init: the row whose run of the same seed gives it its initial weights.
        code: what hand-made layers before the last write, GROUPSxFEATURES; see `codes`.
        milliseconds: about what a step takes on one H200, of all its seeds together, by which work is planned.
    """

    id: str
    title: str
    family: Family
    series: str
    training: Recipe
    seeds: int = 1
    samples: int = 1000
    rebased: Literal["fixed"] | None = None
    init: str | None = None
    code: str | None = None
    milliseconds: float = 0.3

    @property
    def depth(self) -> int:
        return int(self.training.get("layers", 1))

    @property
    def metric(self) -> Literal["greedy", "likelihood"]:
        """By which likelihood of validation data its seeds are compared."""
        return "greedy" if self.training.get("select") == "greedy" else "likelihood"

    @property
    def flow(self) -> Literal["deterministic", "latent"]:
        return "deterministic" if self.metric == "greedy" else "latent"

    def recipe(self, variant: Variant) -> Recipe | None:
        return self.training if variant == "ours" else None

    def options(self, variant: Variant) -> Options:
        """All options, before a budget or a phase changes any; initial weights are named by their row."""
        if variant != "ours":
            raise ConfigError(f"row {self.id} has no variant {variant!r}")
        return Options().replace(**self.training, init="biases" if self.init is None else f"rows/{self.init}")

    @property
    def seconds(self) -> float:
        """About what both phases of all its seeds take on one H200."""
        options = self.options("ours")
        return options.epochs * (50_000 + 60_000) / options.batch_size * self.milliseconds / 1000


# ---- in orderings ----

_WIDTHS = {1: 8192, 2: 4096, 4: 2048, 8: 1024}
"""Of the hidden layers, by depth: together always the same number of weights."""
_DIRECT = 784 // 2
"""Hidden units that have as many weights as direct connections, or as a layer without hidden units, which writes a code."""

_ORDERED: Recipe = {
    "batch_size": 256,
    "lr": 2e-3,
    "epochs": 60,
    "optimiser": "adamw",
    "weight_decay": 0.02,
    "average": 0.999,
    "validate_every": 5,
    "evaluation_samples": 8,
}
_PLAIN: Recipe = {"base": "learned:p0=0.99999"}
"""A base that is almost certain of 0 leaves the likelihood to the network."""
_GREEDY: Recipe = {
    "batch_size": 128,
    "lr": 1e-3,
    "epochs": 40,
    "select": "greedy",
    "optimiser": "adam",
    "weight_decay": 0.0,
    "average": 0.0,
}
"""Of the rows that are trained for their deterministic flow."""
_FEWER_SAMPLES = 200
"""Of the bound of rows that decide nothing, or whose choices are certain but for the last layer's, which are summed out."""


_BOUND = "vimco:samples=4,sum_last=true"


def _ordered(depth: int, **changes: Any) -> dict[str, Any]:
    return {
        **_ORDERED,
        "base": "fixed",
        "layers": depth,
        "conditioner": f"made:hidden={_WIDTHS[depth]}",
        **changes,
    }


def _direct(width: int) -> str:
    return f"made:hidden={width},direct=true"


def _one(name: str, title: str, **changes: Any) -> DepthRow:
    of_row = {
        key: changes.pop(key) for key in ("seeds", "rebased", "milliseconds", "samples") if key in changes
    }
    return DepthRow(f"ar-1-{name}", title, "autoregressive", name, _ordered(1, **changes), **of_row)


def _inward(name: str, title: str, **changes: Any) -> DepthRow:
    """The rival of a code: one layer that goes through the image as the code's reader does, with direct connections as that."""
    given = {"order": "inward", "conditioner": _direct(_WIDTHS[1] - _DIRECT), **_PLAIN}
    return _one(name, title, seeds=3, rebased="fixed", milliseconds=0.8, **given, **changes)


def _code(depth: int, code: str, **of_row: Any) -> DepthRow:
    """Layers that write what some pixels are into blank ones, and one that reads it, trained as its rival is."""
    training = _ordered(
        depth,
        order="inward",
        conditioner=_direct(_WIDTHS[1] - depth * _DIRECT),
        estimator="maximum-likelihood:samples=1",
        **_PLAIN,
    )
    return DepthRow(
        f"ar-{depth}-code",
        f"depth {depth}: layers that write pixels as words into blank ones, and one that reads them",
        "autoregressive",
        "code",
        training,
        rebased="fixed",
        samples=_FEWER_SAMPLES,
        code=code,
        **of_row,
    )


def _from_identity(depth: int, milliseconds: float, order: str) -> DepthRow:
    shared = order == "natural"
    training = _ordered(depth, order=order, estimator=_BOUND, epochs=20)
    orderings = "one shared ordering" if shared else "alternating orderings"
    return DepthRow(
        f"ar-{depth}-{order}",
        f"depth {depth}: {orderings}, IWAE bound, from near the identity",
        "autoregressive",
        "shared" if shared else "alternating",
        training,
        samples=_FEWER_SAMPLES,
        milliseconds=milliseconds,
    )


def _entropy(depth: int, milliseconds: float) -> DepthRow:
    bonus = "entropy=0.7" + (",earlier=0.0" if depth > 1 else "")
    training = _ordered(
        depth,
        order="alternating" if depth > 1 else "natural",
        estimator=f"straight-through:{bonus}",
        **_GREEDY,
    )
    orderings = ", alternating orderings" if depth > 1 else ""
    return DepthRow(
        f"ar-{depth}-entropy",
        f"depth {depth}: straight-through with maximum entropy{orderings}",
        "autoregressive",
        "entropy",
        training,
        samples=_FEWER_SAMPLES,
        milliseconds=milliseconds,
    )


_AUTOREGRESSIVE: tuple[DepthRow, ...] = (
    _one("marginal", "depth 1: exact marginal likelihood", seeds=3, milliseconds=0.75),
    _one(
        "plain",
        "depth 1: plain likelihood, rebased to the fixed base",
        seeds=3,
        rebased="fixed",
        milliseconds=0.75,
        **_PLAIN,
    ),
    _one(
        "plain-two",
        "depth 1: plain likelihood, two hidden layers, rebased to the fixed base",
        seeds=3,
        rebased="fixed",
        milliseconds=1.0,
        conditioner="made:hidden=2880+2880",
        **_PLAIN,
    ),
    _one(
        "plain-long",
        "depth 1: plain likelihood, six times as long, rebased to the fixed base",
        seeds=3,
        rebased="fixed",
        epochs=360,
        milliseconds=0.75,
        **_PLAIN,
    ),
    _one(
        "long",
        "depth 1: exact marginal likelihood, three times as long",
        seeds=3,
        epochs=180,
        milliseconds=0.75,
    ),
    _inward("plain-inward", "depth 1: plain likelihood, from the border inward, rebased to the fixed base"),
    _inward("plain-inward-long", "depth 1: the same, three times as long", epochs=180),
    _one(
        "inward",
        "depth 1: exact marginal likelihood, from the border inward",
        order="inward",
        milliseconds=0.3,
    ),
    _one(
        "half",
        "depth 1: exact marginal likelihood, half the weights",
        conditioner="made:hidden=4096",
        milliseconds=0.18,
    ),
    _entropy(1, 0.25),
    _code(2, "3x7", seeds=3, milliseconds=0.8),
    _code(4, "3x7", milliseconds=0.5),
    _code(8, "7x6", milliseconds=0.8),
    _from_identity(2, 0.7, "natural"),
    _from_identity(4, 0.8, "natural"),
    _from_identity(8, 1.1, "natural"),
    DepthRow(
        "ar-2-onto",
        "depth 2: a layer near the identity put before a trained model, IWAE bound",
        "autoregressive",
        "onto",
        _ordered(2, order="reversed,natural", estimator=_BOUND, epochs=20, lr=5e-4),
        init="ar-1-half",
        samples=_FEWER_SAMPLES,
        milliseconds=0.7,
    ),
    _from_identity(2, 0.7, "alternating"),
    _from_identity(4, 0.8, "alternating"),
    _from_identity(8, 1.1, "alternating"),
    _entropy(2, 0.35),
    _entropy(4, 0.5),
    _entropy(8, 0.9),
    DepthRow(
        "ar-2-special",
        "depth 2: special case with the last layer summed out, maximum entropy falling to zero",
        "autoregressive",
        "special",
        _ordered(
            2,
            order="alternating",
            estimator="special-case:baseline=running-mean,entropy=0.7,anneal=0.5,earlier=0.0,sum_last=true",
            epochs=30,
            optimiser="adam",
            weight_decay=1e-5,
        ),
        samples=_FEWER_SAMPLES,
        milliseconds=0.5,
    ),
)

_LEARNED: tuple[DepthRow, ...] = (
    DepthRow(
        "made-1-wide",
        "learned base: two hidden layers of 4,096",
        "autoregressive",
        "learned",
        {
            **_ORDERED,
            **_PLAIN,
            "conditioner": "made:hidden=4096+4096",
            "lr": 1e-3,
            "weight_decay": 0.05,
            "average": 0.9995,
        },
        milliseconds=0.5,
    ),
    DepthRow(
        "made-1-mixture",
        "learned base: a mixture of four orderings, one hidden layer of 4,096 each",
        "autoregressive",
        "learned",
        {**_ORDERED, **_PLAIN, "conditioner": "made:hidden=4096", "mixture": "4", "weight_decay": 0.05},
        milliseconds=0.9,
    ),
    DepthRow(
        "made-2",
        "learned base, depth 2: alternating orderings, IWAE bound",
        "autoregressive",
        "learned",
        _ordered(2, order="alternating", estimator=_BOUND, epochs=30, base="learned"),
        samples=_FEWER_SAMPLES,
        milliseconds=0.7,
    ),
)

# ---- couplings ----

_COUPLED: Recipe = {
    "batch_size": 512,
    "lr": 2e-3,
    "epochs": 40,
    "average": 0.999,
    "validate_every": 10,
    "evaluation_samples": 8,
}
_DECAY: Recipe = {"weight_decay": 1e-5}
"""Without it, choices that are certain too early never change again."""


_MASKS = ("nested", "random", "checkerboard")
_DEPTHS = (2, 4, 8, 16)


def _coupled(name: str, title: str, mask: str, depth: int, cost: float, **changes: Any) -> DepthRow:
    """A coupling flow; `cost` is that of a layer, in milliseconds a step."""
    words = {
        "nested": "nested grids",
        "random": "random masks",
        "checkerboard": "checkerboards",
    }[mask]
    return DepthRow(
        f"coupling-{depth}-{mask}-{name}",
        f"couplings, {words}, depth {depth}: {title}",
        "coupling",
        f"{mask}, {name}",
        {**_COUPLED, "layers": depth, "conditioner": f"coupling:mask={mask}", **changes},
        samples=_FEWER_SAMPLES,
        milliseconds=round(0.1 + 1.15 * cost * depth, 3),
    )


def _posterior(mask: str, depth: int) -> DepthRow:
    return _coupled(
        "posterior",
        "evidence bound with a posterior",
        mask,
        depth,
        0.08 + 0.006 * depth,
        posterior="diagonal",
        base="learned:p0=0.999999",
        estimator="full-posterior:sum_last=true",
    )


def _straight_through(mask: str, depth: int) -> DepthRow:
    return _coupled(
        "ste",
        "straight-through",
        mask,
        depth,
        0.04,
        estimator="straight-through",
        select="greedy",
        **_DECAY,
    )


def _with_entropy(mask: str, depth: int) -> DepthRow:
    return _coupled(
        "ste-entropy",
        "straight-through with maximum entropy",
        mask,
        depth,
        0.05,
        estimator="straight-through:entropy=0.3",
        select="greedy",
    )


def _sampled(depth: int, name: str, title: str, estimator: str, cost: float) -> DepthRow:
    return _coupled(name, title, "nested", depth, cost, estimator=estimator, **_DECAY)


_COUPLING: tuple[DepthRow, ...] = (
    *(_posterior(mask, depth) for mask in _MASKS for depth in _DEPTHS),
    *(_straight_through(mask, depth) for mask in _MASKS for depth in _DEPTHS),
    *(_with_entropy("nested", depth) for depth in _DEPTHS),
    *(_sampled(depth, "vimco", "VIMCO, last layer summed out", _BOUND, 0.12) for depth in _DEPTHS),
    _sampled(4, "special", "special case, last layer summed out", "special-case:sum_last=true", 0.1),
    _sampled(4, "leave-one-out", "leave-one-out, last layer summed out", "leave-one-out:sum_last=true", 0.12),
    _sampled(4, "disarm", "DisARM, last layer summed out", "disarm:sum_last=true", 0.15),
)

DEPTH_ROWS: tuple[DepthRow, ...] = (*_AUTOREGRESSIVE, *_LEARNED, *_COUPLING)

BY_ID: Mapping[str, DepthRow] = {row.id: row for row in DEPTH_ROWS}

STARTS: Mapping[str, DepthRow] = {row.id: BY_ID[row.init] for row in DEPTH_ROWS if row.init is not None}
"""By row, the row that it starts from."""


def chosen_depths(names: str | None) -> tuple[DepthRow, ...]:
    """The rows that a comma-separated list names, with those that they start from, in the order of the table; all for None.

    A name with a star stands for all rows that fit it.

    >>> [row.id for row in chosen_depths("ar-2-onto")]
    ['ar-1-half', 'ar-2-onto']
    """
    if names is None:
        return DEPTH_ROWS
    wanted: set[str] = set()
    for name in (name.strip() for name in names.split(",") if name.strip()):
        found = {row.id for row in DEPTH_ROWS if fnmatchcase(row.id, name)}
        if not found:
            raise ConfigError(f"--rows names rows of {', '.join(BY_ID)}, or several with a *; got {name!r}")
        wanted |= found
    if not wanted:
        raise ConfigError(f"--rows names rows of {', '.join(BY_ID)}, or several with a *; got {names!r}")
    while more := {STARTS[name].id for name in wanted if name in STARTS} - wanted:
        wanted |= more
    return tuple(row for row in DEPTH_ROWS if row.id in wanted)
