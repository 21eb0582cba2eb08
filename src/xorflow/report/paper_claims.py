"""What the paper concludes from its table, held against ours: each sentence follows from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_IDLE = 0.001
"""A layer that flips fewer pixels than this is idle."""

Row = dict[str, Any]


def claims(table: dict[str, Any]) -> str:
    """The paper's conclusions, one by one: what ours say, and whether they reproduce; in Markdown."""
    rows = {row["id"]: row for row in table["rows"] if row["ours"]}
    found = [
        _score_function_beats_straight_through(rows),
        _special_case_is_best(rows),
        _running_average_beats_critic(rows),
        _depth_does_not_help(rows),
        _layers_become_fixed(rows),
    ]
    return "\n".join(f"- {line}" for line in found if line)


def _nll(row: Row, variant: str = "ours") -> float:
    return row[variant]["nll"]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _said(holds: bool) -> str:
    return "**reproduced**" if holds else "**not reproduced**"


def _score_function_beats_straight_through(rows: dict[str, Row]) -> str:
    sampled = [rows[i] for i in ("sfe-posterior-running", "sfe-special-running") if i in rows]
    through = [row for row in rows.values() if row["family"] == "straight-through"]
    if not sampled or not through:
        return ""
    best, other = min(map(_nll, sampled)), min(map(_nll, through))
    found = _list([_nll(row) for row in sampled])
    return (
        "*With proper variance reduction the score function beats straight-through, with fewer weights*: "
        f"{_said(best < other)}. Depth 1 with a running average: {found}; straight-through at its best depth: {other:.1f}."
    )


def _special_case_is_best(rows: dict[str, Row]) -> str:
    special, full = rows.get("sfe-special-running"), rows.get("sfe-posterior-running")
    if special is None or full is None:
        return ""
    holds = _nll(special) < _nll(full)
    return (
        f"*In the special case performance is highest*: {_said(holds)}. Special case {_nll(special):.1f}, full posterior "
        f"{_nll(full):.1f}, both with a running average; the paper has {special['paper']['nll']} and {full['paper']['nll']}."
    )


def _running_average_beats_critic(rows: dict[str, Row]) -> str:
    pairs = [
        (rows[f"sfe-{family}-running"], rows[f"sfe-{family}-greedy"], words)
        for family, words in (("posterior", "full posterior"), ("special", "special case"))
        if f"sfe-{family}-running" in rows and f"sfe-{family}-greedy" in rows
    ]
    if not pairs:
        return ""
    holds = all(_nll(running) < _nll(greedy) for running, greedy, _ in pairs)
    cells = "; ".join(f"{words} {_nll(a):.1f} against {_nll(b):.1f}" for a, b, words in pairs)
    return f"*A running average is a better baseline than the greedy self-critic* (its table): {_said(holds)}. {cells}."


def _depth_does_not_help(rows: dict[str, Row]) -> str:
    through = [row for row in rows.values() if row["family"] == "straight-through"]
    special = [row for name, row in rows.items() if name.startswith("sfe-special-running")]
    if len(through) < 2 or len(special) < 2:
        return ""
    cells, deepest_is_best = [], []
    for words, family in (("straight-through", through), ("special case", special)):
        for variant, suffix in (("ours", ""), ("cured", ", cured")):
            there = [row for row in family if row[variant]]
            if len(there) < 2:
                continue
            depths = ", ".join(str(row["depth"]) for row in there)
            values = [_nll(row, variant) for row in there]
            cells.append(f"{words}{suffix} at depths {depths}: {_list(values)}")
            deepest_is_best.append(min(values) == values[-1])
    return (
        f"*Performance does not increase with depth*: {_said(not any(deepest_is_best))}. {'; '.join(cells)}. From depth 1 to 2 "
        "something may be gained, and beyond that nothing. [Depth](depth.md) has what it takes to change that."
    )


def _layers_become_fixed(rows: dict[str, Row]) -> str:
    cells, idle_somewhere = [], False
    for name, row in rows.items():
        for variant in ("ours", "cured"):
            layers = (row[variant] or {}).get("layers") or []
            if len(layers) < 2:
                continue
            idle = sum(layer["flip_rate"] < _IDLE for layer in layers)
            idle_somewhere |= variant == "ours" and idle > 0
            cells.append(f"{name} {variant} {idle} of {len(layers)}")
    if not cells:
        return ""
    return (
        f"*Deeper layers become fixed*: {_said(idle_somewhere)} where a layer flips fewer than one pixel in a thousand: "
        f"{', '.join(cells)}."
    )
