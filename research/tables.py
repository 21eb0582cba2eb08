"""Tables as text: Markdown for documents, and what a terminal shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from research.results import Record


def markdown_table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, nothing without rows; columns are named as in `row | >NLL`, where > aligns to the right.

    >>> print(markdown_table("row | >NLL", [["`made`", "84.9"]]))
    | row | NLL |
    |---|---:|
    | `made` | 84.9 |
    """
    names = columns.split(" | ")
    head = [name.removeprefix(">") for name in names]
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    rules = "|".join("---:" if name.startswith(">") else "---" for name in names)
    return "\n".join((first, f"|{rules}|", *others)) if others else ""


def terminal_table(columns: str, rows: Iterable[Sequence[str]], **about: Any) -> Table:
    """The same for a terminal, where what does not fit goes on in the next line; `about` is of the table."""
    table = Table(box=None, pad_edge=False, header_style="bold", **about)
    for name in columns.split(" | "):
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for cells in rows:
        table.add_row(*map(Text, cells))
    return table


# ---- numbers ----


def fixed(value: float | None, digits: int = 1) -> str:
    """With so many digits after the point, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Three digits, or a dash."""
    return "–" if value is None else "0" if value == 0 else f"{value:.3g}"


def with_error(value: float | None, stderr: float | None) -> str:
    """A number and its standard error, as far as both are there."""
    return f"{value:.2g} ± {stderr:.1g}" if value is not None and stderr else short(value)


def kind_of(figures: Record) -> str:
    """What a likelihood is."""
    return "exact" if figures["kind"] == "exact" else f"bound, {figures['samples']:,} samples"


def marked(value: float, kind: str) -> str:
    """A likelihood on a terminal, where a star says that it is a bound."""
    return fixed(value) + (" " if kind == "exact" else "*")
