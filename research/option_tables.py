"""The tables of docs/options.md, from the declarations of options and the constructors that their values call."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from research.tables import markdown_table
from xorflow.training import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    OPTIONS,
    POSTERIORS,
    TRANSFORMS,
    Registry,
    value_rule,
    value_text,
)

_UNLIMITED = 2**31
"""What a count is always below; a page need not say it."""


def group_block(folder: Path, group: str) -> str:
    """The options of a group."""
    del folder
    rows = []
    for name, option in OPTIONS.items():
        if option.group == group:
            limits = [f"{words} {limit:,}" for words, limit in option.range.items() if limit < _UNLIMITED]
            kind = "a name, see below" if option.registry else value_rule(option.type)
            needs = [
                f"`{need.of}` only if {need}" if need.of else f"only if {need}"
                for need in option.needs
                if need.option != "layers"  # what holds of all options of a model
            ]
            meaning = "; ".join([option.help, *needs])
            rows.append([f"`{name}`", ", ".join([kind, *limits]), f"`{value_text(option.default)}`", meaning])
    return markdown_table("option | values | default | meaning", rows)


def names_block(folder: Path, registry: Registry) -> str:
    """What a text may name, with the settings of each constructor."""
    del folder
    rows = []
    for name in registry:
        meanings = _meanings(registry.makers[name])
        settings = registry.settings(name)
        rows += [] if settings else [[f"`{name}`", "", "", "", ""]]
        for number, (key, setting) in enumerate(settings.items()):
            kind = "a name here" if key in registry.inner else value_rule(setting.annotation)
            default = f"`{registry.default(name, key)}`"
            rows.append(["" if number else f"`{name}`", f"`{key}`", kind, default, meanings.get(key, "")])
    return markdown_table(f"{registry.what} | setting | values | default | meaning", rows)


def estimators_block(folder: Path) -> str:
    """The settings of each estimator with their defaults; what they mean stands in its docstring."""
    del folder
    rows = [
        [
            f"`{name}`",
            ", ".join(f"`{key}={ESTIMATORS.default(name, key)}`" for key in ESTIMATORS.settings(name)),
        ]
        for name in ESTIMATORS
    ]
    return markdown_table("estimator | settings", rows)


def _meanings(maker: Callable[..., object]) -> dict[str, str]:
    """What a docstring says of the arguments."""
    text = inspect.getdoc(getattr(maker, "func", maker)) or ""
    described = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE)
    meanings = {
        name: re.sub(r":math:`\\(.+?)`", r"`\1`", " ".join(meaning.split())) for name, meaning in described
    }
    return {name: meaning.rstrip(".").replace("|", "\\|") for name, meaning in meanings.items()}


_GROUPS = ("Data", "Model", "Training", "Run")
BLOCKS = {
    **{group.lower(): functools.partial(group_block, group=group) for group in _GROUPS},
    **{
        f"{registry.what}s": functools.partial(names_block, registry=registry)
        for registry in (CONDITIONERS, POSTERIORS, TRANSFORMS, BASES, *ESTIMATORS.inner.values())
    },
    "estimators": estimators_block,
}
"""By name."""
