"""`python -m docs.options`: the tables of options.md, from the declarations of options and the constructors of their values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_origin

from research.documents import fill
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
"""What a count is always below; a page need not say it, nor that a count is at least 0 or 1."""


def group_table(group: str) -> str:
    """The options of a group; what holds of all options of data or of a model stands above the table."""
    rows = []
    for name, option in OPTIONS.items():
        if option.group == group:
            limits = [f"{rule} {limit}" for rule, limit in option.range.items() if 0 < limit < _UNLIMITED]
            needs = [
                f"{f'`{need.of}` ' if need.of else ''}only if {str(need).partition(' (')[0]}"
                for need in option.needs
                if need.option not in ("layers", "data")
            ]
            rows.append(
                [
                    f"`{name}={value_text(option.default)}`",
                    "; ".join([option.help, *_choices(option.type), *limits, *needs]),
                ]
            )
    return markdown_table("option and default | meaning", rows)


def names_table(registry: Registry) -> str:
    """What a text may name, with the settings of each constructor, explained where they come first."""
    rows, explained = [], set[tuple[str, str]]()
    for name in registry:
        known = registry is ESTIMATORS or (registry is POSTERIORS and name in CONDITIONERS)
        meanings = {} if known else _meanings(registry.makers[name])
        settings = []
        for key, setting in registry.settings(name).items():
            meaning = meanings.get(key, "")
            first = (key, meaning) not in explained
            explained.add((key, meaning))
            text = f"`{key}={registry.default(name, key)}` {meaning if first else ''}".rstrip()
            settings.append("; ".join([text, *_choices(setting.annotation)]))
        rows.append([f"`{name}`", "; ".join(settings)])
    return markdown_table(f"{registry.what} | settings and defaults", rows)


def _choices(type: Any) -> list[str]:
    return [value_rule(type)] if get_origin(type) is Literal else []


def _meanings(maker: Callable[..., object]) -> dict[str, str]:
    """What a docstring says of the arguments."""
    text = inspect.getdoc(getattr(maker, "func", maker)) or ""
    described = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE)
    meanings = {
        name: re.sub(r":math:`\\(.+?)`", r"`\1`", " ".join(meaning.split())) for name, meaning in described
    }
    return {name: meaning.rstrip(".").replace("|", "\\|") for name, meaning in meanings.items()}


def filled(text: str) -> str:
    """The page with its tables of now."""
    tables = {group.lower(): group_table(group) for group in ("Data", "Model", "Training", "Run")}
    for registry in (CONDITIONERS, POSTERIORS, TRANSFORMS, BASES, ESTIMATORS, *ESTIMATORS.inner.values()):
        tables[f"{registry.what}s"] = names_table(registry)
    for name, table in tables.items():
        text = fill(text, name, table)
    return text


if __name__ == "__main__":
    page = Path(__file__).with_suffix(".md")
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
