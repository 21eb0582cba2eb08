"""What the table of depths says, in sentences: every number in them comes from the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

_ENOUGH = 1.0
"""By how many nats depth must be better to be called that."""
_SAME_WEIGHTS = 0.02


def verdict_words(table: dict[str, Any]) -> list[str]:
    """One sentence or two for each question that the rows there are can answer."""
    rows = table["rows"]
    fixed = [r for r in rows if (r["family"], r["base"]) == ("autoregressive", "fixed")]
    learned = [r for r in rows if (r["family"], r["base"]) == ("autoregressive", "learned")]
    coupled = [r for r in rows if r["family"] == "coupling"]
    lines = [
        *_depth_on_fixed_base(fixed, table["paired"]),
        *_one_ordering(fixed),
        *_deterministic(fixed),
        *_unused(fixed),
        *_learned(learned),
        *_couplings(coupled),
        *_against_straight_through(coupled),
        *_deterministic_couplings(coupled, table["independent"]),
        *_sampling(rows),
    ]
    return lines or ["No row is finished."]


def _best(rows: Sequence[Row], key: Callable[[Row], float] = lambda row: row["validation"]) -> Row | None:
    """The row that is best on validation data: the test data only say how good it is."""
    return min(rows, key=key, default=None)


def headline_pair(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """On the fixed base, the best row of depth 1 and the best of those that use more layers."""
    fixed = [r for r in rows if (r["family"], r["base"]) == ("autoregressive", "fixed")]
    one = _best([r for r in fixed if r["depth"] == 1 and r["kind"] == "exact"])
    deep = _best([r for r in fixed if r["depth"] > 1 and r["effective_depth"] > 1])
    return None if one is None or deep is None else (one, deep)


def _nats(row: Row) -> str:
    """A row's likelihood, in words."""
    kind = "exactly" if row["kind"] == "exact" else "at most"
    return f"`{row['id']}` has {kind} {row['bound']:.2f} nats"


def _depth_on_fixed_base(rows: Sequence[Row], paired: dict[str, Any] | None) -> list[str]:
    pair = headline_pair(rows)
    if pair is None:
        return []
    one, deep = pair
    gain = one["bound"] - deep["bound"]
    seeds = math.hypot(*(_over_seeds(row) for row in pair))
    images = math.hypot(*(row["stderr"] or 0.0 for row in pair)) if paired is None else paired["stderr"]
    error = math.hypot(images, seeds)
    clear = gain - 2 * error
    if gain >= _ENOUGH and clear > 0:
        verdict = f"Depth pays on the fixed base, by {gain:.2f} nats"
    elif gain > 0 and clear > 0:
        verdict = f"Depth pays little on the fixed base, {gain:.2f} nats"
    else:
        verdict = f"Depth does not pay on the fixed base: the difference is {gain:.2f} nats"
    longest = max((r["seconds"] for r in rows if r["depth"] == 1), default=0.0)
    same = abs(deep["parameters"] / one["parameters"] - 1) <= _SAME_WEIGHTS
    return [
        f"{verdict} (standard error {error:.2f}, over images{'' if paired is None else ' in pairs'} and seeds). The best flow "
        f"of depth 1, {_nats(one)}; the best that uses more layers, "
        f"{_nats(deep)}, and uses {deep['effective_depth']} of {deep['depth']}.",
        f"They have {one['parameters'] / 1e6:.1f} and {deep['parameters'] / 1e6:.1f} million weights"
        f"{', the same' if same else ''}, and trained for {one['seconds']:.0f} and {deep['seconds']:.0f} seconds; the row "
        f"of depth 1 that trained longest had {longest:.0f}.",
    ]


def _over_seeds(row: Row) -> float:
    """The standard error of a row's mean over seeds, where there are several."""
    return (row["spread"]["nll"]["std"] or 0.0) / math.sqrt(len(row["seeds"]))


def _one_ordering(rows: Sequence[Row]) -> list[str]:
    lines = []
    for depth in sorted({r["depth"] for r in rows if r["series"] == "shared"}):
        of_depth = [r for r in rows if r["depth"] == depth]
        shared = _best([r for r in of_depth if r["series"] == "shared"])
        deep = _best([r for r in of_depth if r["series"] != "shared" and r["effective_depth"] > 1])
        if shared is not None and deep is not None:
            lines.append(
                f"In one shared ordering, where depth adds no distributions, depth {depth} reaches {shared['bound']:.2f} nats "
                f"(`{shared['id']}`), and {deep['bound']:.2f} in several."
            )
    return lines


def _deterministic(rows: Sequence[Row]) -> list[str]:
    deep = [r for r in rows if r["depth"] > 1]
    greedy, refit = _best(deep, lambda r: r["greedy"]), _best(deep, lambda r: r["refit"])
    if greedy is None or refit is None:
        return []
    return [
        f"Read as one bijection, the best flow of depth 2 or more has {greedy['greedy']:.1f} nats (`{greedy['id']}`), and "
        f"{refit['refit']:.1f} on a refitted base (`{refit['id']}`)."
    ]


def _unused(rows: Sequence[Row]) -> list[str]:
    idle = [r for r in rows if r["effective_depth"] < r["depth"]]
    if not idle:
        return []
    words = ", ".join(f"`{r['id']}` ({r['effective_depth']} of {r['depth']})" for r in idle)
    return [
        f"Layers that flip fewer than one pixel in a thousand are no depth; rows with such layers: {words}."
    ]


def _learned(rows: Sequence[Row]) -> list[str]:
    best = _best(rows)
    return (
        [] if best is None else [f"On a learned base the best MADE, {_nats(best)}, at depth {best['depth']}."]
    )


def _couplings(rows: Sequence[Row]) -> list[str]:
    best = _best(rows)
    if best is None:
        return []
    lines = [
        f"The best latent coupling flow, {_nats(best)}, and samples in {best['sampling_passes']} passes of its networks."
    ]
    for series in dict.fromkeys(r["series"] for r in rows):
        own = sorted((r for r in rows if r["series"] == series), key=lambda r: r["depth"])
        if len(own) > 1:
            figures = ", ".join(f"{r['bound']:.1f} at depth {r['depth']}" for r in own)
            falls = all(a["bound"] > b["bound"] for a, b in itertools.pairwise(own))
            lines.append(f"{series}: {figures}; it {'falls' if falls else 'does not fall'} with every step.")
    return lines


def _against_straight_through(rows: Sequence[Row]) -> list[str]:
    """At each depth, the best other estimator against the best straight-through one."""
    parts = []
    for depth in sorted({r["depth"] for r in rows}):
        own = [r for r in rows if r["depth"] == depth]
        through = _best([r for r in own if r["estimator"].startswith("straight-through")])
        other = _best([r for r in own if not r["estimator"].startswith("straight-through")])
        if through is not None and other is not None:
            parts.append(
                f"{other['bound']:.1f} against {through['bound']:.1f} at depth {depth} (`{other['id']}`)"
            )
    return [f"Other estimators against straight-through, in couplings: {', '.join(parts)}."] if parts else []


def _deterministic_couplings(rows: Sequence[Row], independent: float | None) -> list[str]:
    best = _best(rows, lambda r: r["refit"])
    if best is None:
        return []
    line = f"The best deterministic coupling flow has {best['refit']:.1f} nats on a refitted base (`{best['id']}`)"
    if independent is None:
        return [f"{line}."]
    below = independent - best["refit"]
    side = "below" if below >= 0 else "above"
    return [f"{line}, {abs(below):.1f} {side} independent pixels, which have {independent:.1f}."]


def _sampling(rows: Sequence[Row]) -> list[str]:
    coupled = _best([r for r in rows if r["family"] == "coupling"])
    ordered = _best([r for r in rows if r["family"] == "autoregressive" and r["base"] == "learned"])
    if coupled is None or ordered is None:
        return []
    return [
        f"Of 64 images, the best coupling flow draws the pixels in {coupled['sampling_passes']} passes and "
        f"{coupled['sampling_seconds']:.3f} seconds; the best MADE, whose plain sampler needs {ordered['sampling_passes']:,} "
        f"passes, takes {ordered['sampling_seconds']:.3f} seconds with the library's own."
    ]
