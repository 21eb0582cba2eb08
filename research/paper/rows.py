"""The rows of the reproduction, as data: what the paper reports, how we train it, and how to do better.

The paper fixes a MADE in every layer, Adam with learning rate 1e-3, the base at 0.9 / 0.1, evaluation by 1,000 samples and the
best of three runs. Everything else in a recipe is our choice, made on validation data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from research.paper.published import PAPER_TABLE
from research.rows import ComputedRow, Recipe, TrainedRow, Variant

NOTHING: dict[str, float | None] = {"nll": None, "greedy": None}
Family = Literal["straight-through", "full posterior", "special case", "maximum likelihood"]


@dataclass(frozen=True)
class Row(TrainedRow):
    """A row of the paper's table, `ours` as the paper describes it, and `improved`, with a changed objective.

    Attributes:
        family: how it is trained, which decides what its likelihood is.
        improvement: what is changed, as tables name it.
        attempts: what else was tried, if the row falls short of the paper.
    """

    family: Family
    improvement: str = ""
    attempts: tuple[str, ...] = ()

    @property
    def paper(self) -> dict[str, float | None]:
        """What the paper's table says; None where it says nothing."""
        figures = {row.id: {"nll": row.nll, "greedy": row.greedy} for row in PAPER_TABLE}
        return figures.get(self.id, NOTHING)


def _row(
    id: str, title: str, family: Family, ours: Recipe, improved: Recipe | None = None, **about: Any
) -> Row:
    recipes: dict[Variant, Recipe] = (
        {"ours": ours} if improved is None else {"ours": ours, "improved": improved}
    )
    return Row(id, title, recipes, family, seeds=3, **about)


@dataclass(frozen=True)
class Reference(ComputedRow):
    """What the rows are to be measured by; `description` says what it is."""

    description: str


_ENTROPY_BONUS = "with entropy bonus"
_SUMMED_OUT = "last layer summed out"
_SHARED: Recipe = {
    "base": "fixed",
    "init": "biases",
    "batch_size": 128,
    "epochs": 100,
    "validate_every": 5,
    "evaluation_samples": 8,
}


_DECAY: Recipe = {"weight_decay": 1e-5}
"""The plain bound stalls where probabilities saturate and its gradient dies; a slight decay of the weights brings them back."""
_SMALL_BATCHES: Recipe = {"batch_size": 32, "schedule": "constant", **_DECAY}
"""Many noisy steps get furthest."""
_STRAIGHT_THROUGH_EPOCHS = {1: 60, 2: 40, 4: 40, 8: 35}
_SPECIAL_CASE_EPOCHS = {1: 60, 2: 60, 4: 70}
"""Of small batches, by depth: until validation data gains less than half a nat in five epochs."""
_WIDE: Recipe = {"conditioner": "made:hidden=2048"}
_IMPROVED_EPOCHS = {1: 100, 2: 100, 4: 60, 8: 60}


def _bonus(depth: int, **more: float) -> str:
    """Options of the entropy bonus: the layers before the last get none, for their noise would reach all that follow."""
    settings = {"entropy": 0.7, **more} | ({"earlier": 0.0} if depth > 1 else {})
    return ",".join(f"{key}={value}" for key, value in settings.items())


def _layers(depth: int) -> Recipe:
    return {"layers": depth} | ({"order": "alternating"} if depth > 1 else {})


def _straight_through(depth: int) -> Row:
    shared = {**_SHARED, **_layers(depth), "select": "greedy"}
    return _row(
        id=f"ste-{depth}",
        title=f"straight-through, depth {depth}",
        family="straight-through",
        ours={
            **shared,
            **_SMALL_BATCHES,
            "epochs": _STRAIGHT_THROUGH_EPOCHS[depth],
            "estimator": "straight-through",
        },
        improved={
            **shared,
            **_WIDE,
            "epochs": _IMPROVED_EPOCHS[depth],
            "estimator": f"straight-through:{_bonus(depth)}",
        },
        improvement=_ENTROPY_BONUS,
    )


def _full_posterior(critic: str, baseline: str, title: str, **changes: Any) -> Row:
    shared = {**_SHARED, **_layers(1), "posterior": "mlp:direct=false", "select": "likelihood"}
    return _row(
        id=f"sfe-posterior-{critic}",
        title=f"score function, full posterior, {title}",
        family="full posterior",
        ours={**shared, **_DECAY, "estimator": f"score-function:objective=elbo,baseline={baseline}"},
        # the exact gradient of the ELBO; the posterior begins at Bayes' rule
        improved={
            **shared,
            **_WIDE,
            "posterior": "linear",
            "estimator": "score-function:objective=elbo,sum_last=true",
        },
        improvement=_SUMMED_OUT,
        **changes,
    )


def _special_case(
    critic: str, depth: int, title: str, ours: str, improved: str, epochs: int | None = None
) -> Row:
    shared = {**_SHARED, **_layers(depth), "select": "greedy"}
    return _row(
        id=f"sfe-special-{critic}" + (f"-{depth}" if depth > 1 else ""),
        title=f"score function, special case, {title}" + (f", depth {depth}" if depth > 1 else ""),
        family="special case",
        ours={
            **shared,
            **_SMALL_BATCHES,
            "epochs": epochs or _SPECIAL_CASE_EPOCHS[depth],
            "estimator": f"score-function:{ours}",
        },
        # the bonus falls to zero, which makes the sampled bound of the latent flow tight
        improved={
            **shared,
            **_WIDE,
            "epochs": _IMPROVED_EPOCHS[depth],
            "estimator": f"score-function:{improved}",
        },
        improvement=_ENTROPY_BONUS,
    )


def _running(depth: int) -> Row:
    ours = "credit=impatient,baseline=none,standardise=feature"
    improved = f"objective=bound,{_bonus(depth, anneal=0.5)},baseline=running-mean"
    return _special_case("running", depth, "running average", ours, improved)


ROWS: tuple[Row, ...] = (
    *map(_straight_through, (1, 2, 4, 8)),
    _full_posterior(
        "greedy",
        "greedy",
        "greedy self-critic",
        attempts=(
            "a decay of the weights ten times as strong",
            "rewards standardised for each pixel",
            "batches of 32",
        ),
    ),
    _full_posterior("running", "running-mean", "running average"),
    _special_case(
        "greedy",
        1,
        "greedy self-critic",
        "credit=impatient,baseline=greedy,standardise=feature",
        f"objective=bound,{_bonus(1, anneal=0.5)},baseline=greedy",
        epochs=120,  # its gradients are the noisiest, and it gets on slowly
    ),
    _running(1),
    _running(2),
    _running(4),
    _row(
        id="marginal",
        title="exact marginal likelihood",
        family="maximum likelihood",
        ours={**_SHARED, **_layers(1), **_WIDE, "estimator": "maximum-likelihood", "select": "likelihood"},
    ),
)
"""The paper's table, the depths that its text speaks of, and the exact objective that it takes for intractable."""

REFERENCES: tuple[Reference, ...] = (
    Reference(
        "independent-pixels",
        "independent pixels",
        "each pixel has its frequency in the training data, whatever the others are",
    ),
    Reference("identity", "identity flow", "the base itself: no pixel is ever flipped"),
    Reference("floor", "floor of the base", "what no flow on this base can be below: every pixel at 0"),
)
"""What the rows are to be measured by."""
