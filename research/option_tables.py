"""The tables of docs/options.md, from the declarations of options and the constructors that their values call."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from research.results import line
from xorflow.training import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    OPTIONS,
    POSTERIORS,
    TRANSFORMS,
    Registry,
    values,
)

_TOO_MANY = 2**31
"""A limit that only slips of the finger pass is not worth a word."""


def group_block(folder: Path, group: str) -> str:
    """The options of a group."""
    del folder
    lines = ["| option | values | default | |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        if option.group == group:
            ends = [
                words for words, _ in option.limits() if option.below != _TOO_MANY or "below" not in words
            ]
            kinds = "a name, see below" if option.registry else values.expected(option.type)
            needs = "".join(f"; only if {need}" for need in option.needs)
            rule = ", ".join([kinds, *ends])
            lines.append(line([f"`{name}`", rule, f"`{values.write(option.default)}`", option.help + needs]))
    return "\n".join(lines)


def names_block(folder: Path, registry: Registry) -> str:
    """What a text may name, with the settings of each constructor."""
    del folder
    lines = [f"| {registry.what} | setting | values | default | |", "|---|---|---|---|---|"]
    for name in registry:
        meanings = _meanings(registry.makers[name])
        called = f"`{name}`"
        for key, setting in registry.settings(name).items():
            kind, default = values.expected(setting.annotation), f"`{values.write(setting.default)}`"
            lines.append(line([called, f"`{key}`", kind, default, meanings.get(key, "")]))
            called = ""
        if called:
            lines.append(line([called, "", "", "", ""]))
    return "\n".join(lines)


def _meanings(maker: Callable[..., object]) -> dict[str, str]:
    """What a docstring says of the arguments."""
    text = inspect.getdoc(getattr(maker, "func", maker)) or ""
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE)
    words = {name: re.sub(r":math:`(.+?)`", r"`\1`", " ".join(meaning.split())) for name, meaning in found}
    return {name: meaning.rstrip(".").replace("|", "\\|") for name, meaning in words.items()}


BLOCKS = {
    **{
        group.lower(): functools.partial(group_block, group=group)
        for group in ("Data", "Model", "Training", "Run")
    },
    **{
        f"{registry.what}s": functools.partial(names_block, registry=registry)
        for registry in (CONDITIONERS, POSTERIORS, TRANSFORMS, BASES, ESTIMATORS)
    },
}
"""By name."""
