"""The rows of the reproduction, as data: what the paper reports, how we train it, and how to do better.

The paper fixes a MADE in every layer, Adam with learning rate 1e-3, the base at 0.9 / 0.1, evaluation by 1,000 samples and the
best of three runs. Everything else in a recipe is our choice, made on validation data; `choices` puts it into words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from research.files import Recipe, Variant
from research.paper.published import PAPER_TABLE
from xorflow import ConfigError
from xorflow.training import CONDITIONERS, POSTERIORS, Options

Family = Literal["straight-through", "full posterior", "special case", "maximum likelihood"]


@dataclass(frozen=True)
class Row:
    """A row that is trained.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
        family: how it is trained, which decides what its likelihood is.
        depth: the number of layers.
        ours: the recipe as the paper describes the row.
        improved: the recipe of the same row with a changed objective; None where there is nothing to change.
        improvement: what is changed, as tables name it.
        attempts: what else was tried, if the row falls short of the paper.
    """

    id: str
    title: str
    family: Family
    depth: int
    ours: Recipe
    improved: Recipe | None = None
    improvement: str = ""
    attempts: tuple[str, ...] = field(default=())

    @property
    def paper(self) -> dict[str, float | None]:
        """What the paper's table says; None where it says nothing."""
        found = next((row for row in PAPER_TABLE if row.id == self.id), None)
        return {"nll": found.nll, "greedy": found.greedy} if found else {"nll": None, "greedy": None}

    @property
    def metric(self) -> Literal["greedy", "likelihood"]:
        """By which likelihood of validation data its seeds are compared."""
        return "greedy" if self.family in ("straight-through", "special case") else "likelihood"

    @property
    def flow(self) -> Literal["deterministic", "latent"]:
        """Which model the row is about: the one bijection, or the distribution over bijections."""
        return "deterministic" if self.family == "straight-through" else "latent"

    def recipe(self, variant: Variant) -> Recipe | None:
        return self.ours if variant == "ours" else self.improved

    def options(self, variant: Variant) -> Options:
        """All options of a variant, before a budget or a phase changes any."""
        recipe = self.recipe(variant)
        if recipe is None:
            raise ConfigError(f"row {self.id} has no variant {variant!r}")
        return Options().replace(**recipe)


@dataclass(frozen=True)
class Reference:
    """A row that is computed, without training."""

    id: str
    title: str
    words: str


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


def _straight_through(depth: int, **changes: Any) -> Row:
    shared = {**_SHARED, **_layers(depth), "select": "greedy"}
    return Row(
        id=f"ste-{depth}",
        title=f"straight-through, depth {depth}",
        family="straight-through",
        depth=depth,
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
        **changes,
    )


def _full_posterior(critic: str, baseline: str, title: str, **changes: Any) -> Row:
    shared = {**_SHARED, **_layers(1), "posterior": "mlp:direct=false", "select": "likelihood"}
    return Row(
        id=f"sfe-posterior-{critic}",
        title=f"score function, full posterior, {title}",
        family="full posterior",
        depth=1,
        ours={**shared, **_DECAY, "estimator": f"full-posterior:baseline={baseline}"},
        # the exact gradient of the ELBO; the posterior begins at Bayes' rule
        improved={**shared, **_WIDE, "posterior": "linear", "estimator": "full-posterior:sum_last=true"},
        improvement=_SUMMED_OUT,
        **changes,
    )


def _special_case(
    critic: str, depth: int, title: str, ours: str, improved: str, epochs: int | None = None, **changes: Any
) -> Row:
    shared = {**_SHARED, **_layers(depth), "select": "greedy"}
    return Row(
        id=f"sfe-special-{critic}" + (f"-{depth}" if depth > 1 else ""),
        title=f"score function, special case, {title}" + (f", depth {depth}" if depth > 1 else ""),
        family="special case",
        depth=depth,
        ours={
            **shared,
            **_SMALL_BATCHES,
            "epochs": epochs or _SPECIAL_CASE_EPOCHS[depth],
            "estimator": f"special-case:{ours}",
        },
        # the bonus falls to zero, which makes the sampled bound of the latent flow tight
        improved={
            **shared,
            **_WIDE,
            "epochs": _IMPROVED_EPOCHS[depth],
            "estimator": f"special-case:{improved}",
        },
        improvement=_ENTROPY_BONUS,
        **changes,
    )


def _running(depth: int, **changes: Any) -> Row:
    ours = "rewards=impatient,baseline=none,standardise=feature"
    improved = f"baseline=running-mean,{_bonus(depth, anneal=0.5)}"
    return _special_case("running", depth, "running average", ours, improved, **changes)


ROWS: tuple[Row, ...] = (
    _straight_through(1),
    _straight_through(2),
    _straight_through(4),
    _straight_through(8),
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
        "rewards=impatient,baseline=greedy,standardise=feature",
        f"baseline=greedy,{_bonus(1, anneal=0.5)}",
        epochs=120,  # its gradients are the noisiest, and it gets on slowly
    ),
    _running(1),
    _running(2),
    _running(4),
    Row(
        id="marginal",
        title="exact marginal likelihood",
        family="maximum likelihood",
        depth=1,
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

IDS: tuple[str, ...] = tuple(row.id for row in (*ROWS, *REFERENCES))


def chosen(names: str | None) -> tuple[tuple[Row, ...], tuple[Reference, ...]]:
    """The rows that a comma-separated list names, in the order of the table; all of them for None.

    >>> [row.id for row in chosen("ste-2,ste-1")[0]]
    ['ste-1', 'ste-2']
    """
    if names is None:
        return ROWS, REFERENCES
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in IDS]
    if unknown or not wanted:
        raise ConfigError(f"--rows names rows of {', '.join(IDS)}; got {unknown[0] if unknown else names!r}")
    return (
        tuple(row for row in ROWS if row.id in wanted),
        tuple(reference for reference in REFERENCES if reference.id in wanted),
    )


_POSTERIORS = {
    "mlp": "a posterior that sees all pixels",
    "made": "a posterior that sees the pixels up to each",
    "linear": "a posterior that corrects the generator's logits by a linear map of the pixels",
}


def choices(options: Options) -> str:
    """What the paper leaves open and a recipe settles, in words."""
    sizes = CONDITIONERS.read(options.conditioner)["hidden"]
    widths = ", ".join(f"{width:,}" for width in sizes)
    hidden = "one hidden layer" if len(sizes) == 1 else f"{len(sizes)} hidden layers"
    words = [
        f"each MADE with {hidden} of {widths} units",
        f"batches of {options.batch_size}",
        f"{options.epochs} epochs",
        "learning rate falling to 0 along a cosine"
        if options.schedule == "cosine"
        else "constant learning rate",
        "output biases initialised at the pixels' frequencies"
        if options.init != "random"
        else "random initialisation",
    ]
    if options.layers is not None and options.layers > 1:
        words.append(f"{options.order} orderings")
    if options.posterior != "none":
        words.append(_POSTERIORS[POSTERIORS.read(options.posterior).name])
    if options.weight_decay:
        words.append(f"weights decayed by {options.weight_decay:g} in the gradient")
    if options.average:
        words.append(f"weights averaged with decay {options.average}")
    return ", ".join(words) + f"; estimator {options.estimator}"
