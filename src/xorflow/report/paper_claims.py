"""What the paper concludes from its table, held against ours: each sentence follows from the figures."""

from __future__ import annotations

import math
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
    """The mean over seeds, as everywhere here: one seed decides nothing."""
    return row[variant]["mean"]


def _greedy(row: Row, variant: str = "ours") -> float:
    """The same of the deterministic reading."""
    return row[variant]["greedy_mean"]


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
        f"{_said(best < other)} as a ranking. Depth 1 with a running average: {found}; straight-through at its best depth: "
        f"{other:.1f}.{_as_bijections(sampled, through)} The reason is another than less noise: at depth 1 straight-through is "
        "the gradient of the special-case bound without any."
    )


def _as_bijections(sampled: Sequence[Row], through: Sequence[Row]) -> str:
    """Straight-through trains one bijection: compared as such, with its remedy and without."""
    parts = []
    for variant, words in (("ours", "Read as one bijection"), ("cured", "cured")):
        drawn = [_greedy(row, variant) for row in sampled if row[variant]]
        straight = [_greedy(row, variant) for row in through if row[variant]]
        if drawn and straight:
            parts.append(f"{words}, {_list(drawn)} against {min(straight):.1f}")
    return f" {'; '.join(parts)}." if parts else ""


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
    """By the series of depths in which no row still falls; the others are shown beside them, at equal epochs."""
    families = {
        "straight-through": [row for row in rows.values() if row["family"] == "straight-through"],
        "special case": [row for name, row in rows.items() if name.startswith("sfe-special-running")],
    }
    level, gaining, falling = [], [], []
    for words, family in families.items():
        for variant, suffix in (("ours", ""), ("cured", ", cured")):
            there = [row for row in family if row[variant]]
            if len(there) < 2:
                continue
            values = [row[variant]["mean"] for row in there]
            cell = f"{words}{suffix} at depths {_depths(there)}: {_list(values)}{_epochs(there, variant)}"
            late = [row for row in there if _still_falls(row[variant])]
            if late:
                falling.append(f"{cell}, still falling at {_depths(late)}{_at_equal_epochs(there, variant)}")
            elif gain := _gain_of_depth(there, variant):
                gaining.append(f"{cell}, {gain}")
            else:
                level.append(cell)
    if not level and not gaining and not falling:
        return ""
    verdicts = {
        f"{_said(True)} where deeper is not better by three standard errors": level,
        f"{_said(False)} where it is": gaining,
        "**open** where rows still fall": falling,
    }
    said = "; ".join(f"{words} ({'; '.join(cells)})" for words, cells in verdicts.items() if cells)
    return (
        f"*Performance does not increase with depth*: {said}. [Depth](depth.md) asks what would change that."
    )


def _gain_of_depth(rows: Sequence[Row], variant: str) -> str:
    """By how much the best of the deeper rows is below the first; nothing if seeds differ as much."""
    first, *deeper = (row[variant] for row in rows)
    depths = [row["depth"] for row in rows[1:]]
    depth, best = min(zip(depths, deeper, strict=True), key=lambda pair: pair[1]["mean"])
    gain, error = first["mean"] - best["mean"], math.hypot(_error_of_mean(first), _error_of_mean(best))
    return (
        f"depth {depth} better than depth {rows[0]['depth']} by {gain:.1f} ± {error:.1f}"
        if gain > 3 * error
        else ""
    )


def _error_of_mean(variant: Row) -> float:
    return variant["spread"]["std"] / math.sqrt(len(variant["by_seed"]))


def _epochs(rows: Sequence[Row], variant: str) -> str:
    """Where rows did not train equally long."""
    epochs = [row[variant]["epochs"] for row in rows]
    return f" after {', '.join(map(str, epochs))} epochs" if len(set(epochs)) > 1 else ""


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
