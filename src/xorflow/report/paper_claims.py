"""What the paper concludes from its table, held against ours: each sentence follows from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xorflow.report.reproduction import FALLING

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
    """By the series of depths of which every run is converged; the others are shown beside it, at equal epochs."""
    families = {
        "straight-through": [row for row in rows.values() if row["family"] == "straight-through"],
        "special case": [row for name, row in rows.items() if name.startswith("sfe-special-running")],
    }
    settled, falling, deepest_is_best = [], [], []
    for words, family in families.items():
        for variant, suffix in (("ours", ""), ("cured", ", cured")):
            there = [row for row in family if row[variant]]
            if len(there) < 2:
                continue
            values = [_nll(row, variant) for row in there]
            cell = f"{words}{suffix} at depths {_depths(there)}: {_list(values)}"
            late = [row for row in there if _still_falls(row[variant])]
            if late:
                falling.append(f"{cell}, still falling at {_depths(late)}{_at_equal_epochs(there, variant)}")
            else:
                settled.append(cell)
                deepest_is_best.append(min(values) == values[-1])
    if not settled and not falling:
        return ""
    said = f"{_said(not any(deepest_is_best))} by rows that are converged. {'; '.join(settled)}."
    open_ones = f" **Open** for those that are not. {'; '.join(falling)}." if falling else ""
    return (
        f"*Performance does not increase with depth*: {said if settled else ''}{open_ones} [Depth](depth.md) has what it takes "
        "to change that."
    )


def _depths(rows: Sequence[Row]) -> str:
    return ", ".join(str(row["depth"]) for row in rows)


def _still_falls(variant: Row) -> bool:
    change = variant.get("last_change")
    return change is not None and change < -FALLING


def _at_equal_epochs(rows: Sequence[Row], variant: str) -> str:
    """The likelihoods of validation data after as many epochs as all of the rows have."""
    curves = [dict(row[variant].get("validations") or []) for row in rows]
    shared = set.intersection(*map(set, curves))
    if not shared:
        return ""
    epoch = max(shared)
    return f" (validation data after {epoch} epochs each: {_list([curve[epoch] for curve in curves])})"


def _layers_become_fixed(rows: dict[str, Row]) -> str:
    """The paper says it of several stochastic layers; those of straight-through are shown beside them."""
    drawn = {name: row for name, row in rows.items() if row["family"] == "special case"}
    through = {name: row for name, row in rows.items() if row["family"] == "straight-through"}
    cells, others = _idle_layers(drawn), _idle_layers(through)
    if not cells:
        return ""
    fixed = any(row["depth"] > 1 and _idle(row["ours"]) for row in drawn.values())
    beside = f" Of straight-through, for comparison: {', '.join(others)}." if others else ""
    return (
        f"*Deeper layers become fixed* (of several layers that are drawn): {_said(fixed)} where a layer is fixed if it flips "
        f"fewer than one pixel in a thousand: {', '.join(cells)}.{beside}"
    )


def _idle_layers(rows: dict[str, Row]) -> list[str]:
    found = [(name, row, variant) for name, row in rows.items() for variant in ("ours", "cured")]
    return [
        f"{name} {variant} {_idle(row[variant])} of {len(row[variant]['layers'])}"
        for name, row, variant in found
        if row[variant] and len(row[variant].get("layers") or []) > 1
    ]


def _idle(variant: Row) -> int:
    return sum(layer["flip_rate"] < _IDLE for layer in variant["layers"])
