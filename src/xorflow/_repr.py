"""How models are shown: in print, and in a notebook as a table."""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

_LONGEST = 8
"""So many entries of a sequence are shown."""

Rows = Sequence[tuple[str, object]]
"""Names, and what is shown beside them."""


@runtime_checkable
class Tabular(Protocol):
    """What is a table itself, also within another."""

    def _repr_html_(self) -> str: ...


def as_call(thing: object, settings: Mapping[str, Any], first: str, always: Sequence[str] = ()) -> str:
    """A call of the thing's class: `first`, then the settings that differ from its defaults, and `always` these."""
    defaults = {name: p.default for name, p in inspect.signature(type(thing)).parameters.items()}
    named = [
        f"{name}={brief(value)}"
        for name, value in settings.items()
        if name in always or (name in defaults and _plain(value) != _plain(defaults[name]))
    ]
    return f"{type(thing).__name__}({', '.join([first, *named])})"


def brief(value: object) -> str:
    """A setting in a few characters: of a mask its first bits, and how many are set."""
    value = _plain(value)
    if not isinstance(value, tuple):
        return repr(value)
    if value and all(isinstance(entry, bool) for entry in value):
        bits = "".join(str(int(entry)) for entry in value[: 2 * _LONGEST])
        return f"{bits}{'...' if len(value) > len(bits) else ''} ({sum(value)} of {len(value)})"
    if len(value) <= _LONGEST:
        return repr(value)
    return f"({', '.join(map(repr, value[:_LONGEST]))}, ... {len(value)} in all)"


def as_text(name: str, rows: Rows) -> str:
    """A line for each row, or an indented block."""
    lines = "\n".join(f"{what}: {shown!s}" for what, shown in rows)
    return f"{name}(\n{textwrap.indent(lines, '  ')}\n)"


def as_table(name: str, rows: Rows) -> str:
    """The same as HTML."""
    left = "style='text-align: left'"
    cells = [
        f"<tr><th {left}>{html.escape(what)}</th><td {left}>{_cell(shown)}</td></tr>" for what, shown in rows
    ]
    return f"<table><caption>{html.escape(name)}</caption>{''.join(cells)}</table>"


def _cell(shown: object) -> str:
    return shown._repr_html_() if isinstance(shown, Tabular) else html.escape(str(shown))


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
