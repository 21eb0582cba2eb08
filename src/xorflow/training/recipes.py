"""Named sets of options that are known to work, with what they are for and what to expect of them.

A recipe is never changed in place: whoever changes its options raises its version. A run keeps the name and the version in its
configuration, `NAME@VERSION`, beside all options, so that it can be repeated when the recipe has moved on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from xorflow.errors import ConfigError

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """Options under a name.

    Attributes:
        name: what the option `recipe` calls it.
        version: of its options.
        summary: one sentence.
        options: those that differ from the defaults.
        data: what it is for.
        machine: on which its time was measured, or is meant to be.
        images: how many images it was trained on when it was measured; all 60,000 are `validation=0`.
        minutes: about how long it trains there, if that was measured.
        nll: the negative log-likelihood of test images that it then reached, in nats.
    """

    name: str
    version: int
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "mnist"
    machine: str = "one H200"
    images: int = 60_000
    minutes: float | None = None
    nll: float | None = None

    @property
    def label(self) -> str:
        """Name and version, as a run's configuration has them."""
        return f"{self.name}@{self.version}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"options": dict(self.options)}


_LONG = {
    "optimiser": "adamw",
    "clip": 1.0,
    "average": 0.999,
    "base": "learned:p0=0.99999",
    "validate_every": 4,
    "checkpoint_seconds": 120.0,
}
"""What the long recipes have in common; a base that is almost certain of 0 leaves the likelihood to the network."""

_TRANSFORMER = _LONG | {
    "skip": 1e-4,  # which leaves about 635 of 784 pixels: the others' entropies add up to 0.025 nats
    "mixture": "natural,columns",
    "estimator": "maximum-likelihood:split_batch=true,soft_targets=true",
    "batch_size": 128,  # half of it for either ordering
    "optimiser": "muon",
    "weight_decay": 0.01,
    "precision": "bf16-mixed",
    "compile": True,
}
"""Of transformers for a GPU."""


def _transformer(dropout: float) -> str:
    # few wide heads attend quicker than many narrow ones
    return f"transformer:width=256,depth=8,heads=4,dropout={dropout},reach=5,rotary=true"


_ALL = (
    Recipe(
        "demo",
        1,
        "The defaults: a MADE with one hidden layer of 1,024 units.",
        machine="two cores",
        images=50_000,
        minutes=2.6,
        nll=90.5,
    ),
    Recipe(
        "made-strong",
        1,
        "A MADE with two hidden layers of 4,096 units and direct connections.",
        _LONG
        | {
            "conditioner": "made:hidden=4096+4096,direct=true",
            "epochs": 60,
            "batch_size": 256,
            "lr": 1e-3,
            "warmup": 200,
            "weight_decay": 0.05,
        },
        minutes=0.2,
        nll=83.24,
    ),
    Recipe(
        "transformer-10min",
        5,
        "A causal transformer of 8 blocks of width 256, which knows two orderings, by rows and by columns, trained with Muon.",
        _TRANSFORMER | {"conditioner": _transformer(0.2), "epochs": 40, "lr": 2e-3, "warmup": 300},
        minutes=8.0,
        nll=77.65,
    ),
    Recipe(
        "transformer-pair",
        1,
        "Two causal transformers of 8 blocks of width 256, one by rows and one by columns, trained with Muon and mixed.",
        _TRANSFORMER
        | {
            "conditioner": _transformer(0.15),
            "shared": False,
            "epochs": 30,
            "lr": 1.5e-3,
            "warmup": 500,
        },
        minutes=5.9,
        nll=77.59,
    ),
    Recipe(
        "transformer-four",
        1,
        "Four causal transformers of 8 blocks of width 256, by rows and columns from either end, trained with Muon and mixed.",
        _TRANSFORMER
        | {
            "mixture": "natural,columns,reversed,columns-reversed",
            "conditioner": _transformer(0.1),
            "shared": False,
            "batch_size": 256,  # a quarter of it for each
            "weight_decay": 0.5,
            "epochs": 56,
            "lr": 1.5e-3,
            "warmup": 500,
            "validate_every": 14,
        },
        minutes=11.1,
        nll=77.32,
    ),
    Recipe(
        "recurrent",
        4,
        "A recurrent network of width 512, which also sees the pixels within four rows and columns, trained with Muon.",
        _LONG
        | {
            "conditioner": "recurrent:width=512,depth=1,dropout=0.1,reach=4",
            "estimator": "maximum-likelihood:soft_targets=true",
            "skip": 1e-4,
            "batch_size": 256,
            "epochs": 12,
            "optimiser": "muon",
            "lr": 2e-3,
            "warmup": 200,
            "weight_decay": 0.01,
            "average": 0.995,  # of the last epoch: over more, a recurrent network moves too far
        },
        minutes=1.7,
        nll=78.59,
    ),
    Recipe(
        "recurrent-cpu",
        1,
        "A recurrent network of width 192, which also sees the pixels within five rows and columns, trained with Muon.",
        _LONG
        | {
            "conditioner": "recurrent:width=192,depth=1,dropout=0.0,reach=5",
            "estimator": "maximum-likelihood:soft_targets=true",
            "skip": 1e-3,  # which leaves 557 of 784 pixels, and costs 0.04 nats
            "epochs": 3,
            "batch_size": 32,
            "optimiser": "muon",
            "lr": 4e-3,
            "warmup": 100,
            "weight_decay": 0.3,
            "average": 0.99,
            "validate_every": 1,
        },
        machine="two cores",
        images=50_000,
        minutes=30.0,
        nll=79.32,
    ),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""By name."""


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the options of the recipe that they name, if they name one; their own options override the recipe's.

    A recipe is named with or without its version, which can only be the one that is here.

    >>> expanded({"recipe": "recurrent", "epochs": 3})["lr"]
    0.002
    """
    name = values.get("recipe", NONE)
    if not isinstance(name, str) or name == NONE:
        return dict(values)
    recipe = _find(name)
    return {**recipe.options, **values, "recipe": recipe.label}


def _find(text: str) -> Recipe:
    name, _, version = text.partition("@")
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(f"recipe is none or one of {', '.join(RECIPES)}; got {text!r}; see xorflow recipes")
    if text not in (name, recipe.label):
        raise ConfigError(
            f"recipe {name!r} is at version {recipe.version} here; got version {version!r}: leave the version out, or give the "
            "config.json of a run of that version as --config"
        )
    return recipe


def check_alone(before: str, label: str) -> None:
    """Refuse a recipe over another one, whose options would stay where the new one names none."""
    if NONE not in (before, label) and before != label:
        raise ConfigError(
            f"the options are those of recipe {before!r} already, and {label!r} is another; leave one of them out"
        )


def check_data(label: str, data: str) -> None:
    """Refuse a recipe on data that it is not for."""
    recipe = RECIPES.get(label.partition("@")[0])
    if recipe is not None and recipe.data != data:
        raise ConfigError(
            f"recipe {recipe.name!r} is for {recipe.data}, and the data are {data}; leave recipe out and choose options of "
            "your own"
        )
