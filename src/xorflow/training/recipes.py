"""Named sets of options: recipes.toml has them, with what to expect of them.

A run keeps the name and the version in its configuration, `NAME@VERSION`, beside all options, so that it can be repeated when
the recipe has moved on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
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


_TOML = resources.files("xorflow.training").joinpath("recipes.toml").read_text("utf-8")
RECIPES = {name: Recipe(name, **recipe) for name, recipe in tomllib.loads(_TOML).items()}
"""By name."""


AUTO = Recipe(
    "auto",
    1,
    "The best exact density that some minutes allow: trees and networks in several orderings, stacked and mixed.",
    data="tables",
    machine="two cores",
    images=0,
    minutes=2.0,
)
"""The recipe for tables, which is no set of options but a search of its own."""


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the options of the recipe that they name, if they name one; their own options override the recipe's.

    A recipe is named with or without its version, which can only be the one that is here.

    >>> expanded({"recipe": "recurrent", "epochs": 3})["lr"]
    0.002
    """
    text = values.get("recipe", NONE)
    if not isinstance(text, str) or text == NONE:
        return dict(values)
    name, _, version = text.partition("@")
    recipe = {**RECIPES, AUTO.name: AUTO}.get(name)
    if recipe is None:
        raise ConfigError(
            f"recipe is none or one of {', '.join((*RECIPES, AUTO.name))}; got {text!r}; see xorflow recipes"
        )
    if text not in (name, recipe.label):
        raise ConfigError(
            f"recipe {name!r} is at version {recipe.version} here; got version {version!r}: leave the version out, or give the "
            "config.json of a run of that version as --config"
        )
    return {**recipe.options, **values, "recipe": recipe.label}


def check_alone(before: str, label: str) -> None:
    """Refuse a recipe over another one, whose options would stay where the new one names none."""
    if NONE not in (before, label) and before != label:
        raise ConfigError(
            f"the options are those of recipe {before!r} already, and {label!r} is another; leave one of them out"
        )


def check_data(label: str, data: str) -> None:
    """Refuse a recipe on data that it is not for."""
    recipe = {**RECIPES, AUTO.name: AUTO}.get(label.partition("@")[0])
    kind = "tables" if recipe is AUTO and data != "mnist" else data
    if recipe is not None and recipe.data != kind:
        raise ConfigError(
            f"recipe {recipe.name!r} is for {recipe.data}, and the data are {data}; leave recipe out and choose options of "
            "your own, or give data that it is for"
        )
