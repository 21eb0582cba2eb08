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


def short_words(table: dict[str, Any]) -> list[str]:
    """What depth does, in a sentence or two for each setting."""
    coupled = [r for r in table["rows"] if r["family"] == "coupling"]
    best = _best(coupled)
    series = [] if best is None else [r for r in coupled if r["series"] == best["series"]]
    return [*headline_words(table), *_couplings(series)[1:], *_against_straight_through(coupled)]


def headline_words(table: dict[str, Any]) -> list[str]:
    """Whether depth pays, and what it makes of couplings."""
    coupled = [r for r in table["rows"] if r["family"] == "coupling"]
    return [*_depth_on_fixed_base(table["rows"], table["paired"])[:1], *_couplings(coupled)[:1]]


def _best(rows: Sequence[Row], key: Callable[[Row], float] = lambda row: row["validation"]) -> Row | None:
    """The row that is best on validation data: the test data only say how good it is."""
    return min(rows, key=key, default=None)


def headline_pair(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """On the fixed base, the best row of depth 1 and the best of those that use more layers.

    Of the latter only rows with as many seeds as any have: one lucky seed decides nothing for depth.
    """
    fixed = [r for r in rows if (r["family"], r["base"]) == ("autoregressive", "fixed")]
    one = _best([r for r in fixed if r["depth"] == 1 and r["kind"] == "exact"])
    deep = [r for r in fixed if r["depth"] > 1 and r["effective_depth"] > 1]
    most = max((len(r["seeds"]) for r in deep), default=0)
    best = _best([r for r in deep if len(r["seeds"]) == most])
    return None if one is None or best is None else (one, best)


def _nats(row: Row) -> str:
    """A row's likelihood, in words."""
    kind = "exactly" if row["kind"] == "exact" else "at most"
    return f"`{row['id']}`, has {kind} {row['bound']:.2f} nats"


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
    return [
        f"{verdict} (standard error {error:.2f}, over images{'' if paired is None else ' in pairs'} and seeds). The best flow "
        f"of depth 1, {_nats(one)}; the best that uses more layers, "
        f"{_nats(deep)}, and uses {deep['effective_depth']} of {deep['depth']}.",
        _weights_and_time(one, deep, [r for r in rows if r["depth"] == 1 and _as_heavy(r, deep)] or [one]),
        *_better_but_alone(deep, rows),
    ]


def _as_heavy(row: Row, deep: Row) -> bool:
    """Whether a row has as many weights as another, or more."""
    return row["parameters"] >= (1 - _SAME_WEIGHTS) * deep["parameters"]


def _weights_and_time(one: Row, deep: Row, rows: Sequence[Row]) -> str:
    """Whether the comparison is at equal weights and time."""
    same = abs(deep["parameters"] / one["parameters"] - 1) <= _SAME_WEIGHTS
    text = (
        f"They have {one['parameters'] / 1e6:.1f} and {deep['parameters'] / 1e6:.1f} million weights"
        f"{', the same' if same else ''}, and trained for {one['seconds']:.0f} and {deep['seconds']:.0f} seconds."
    )
    if one["seconds"] >= deep["seconds"]:
        return text
    patient = _best([r for r in rows if r["seconds"] >= deep["seconds"]])
    if patient is not None:
        return (
            f"{text} With no less time than the deeper one, the best of depth 1 is `{patient['id']}`: {patient['seconds']:.0f} "
            f"seconds, and {patient['bound']:.2f} nats."
        )
    longest = max(rows, key=lambda r: r["seconds"])
    return (
        f"{text} No flow of depth 1 had as much time: `{longest['id']}` trained longest, for {longest['seconds']:.0f} seconds "
        f"and has {longest['bound']:.2f} nats."
    )


def _better_but_alone(deep: Row, rows: Sequence[Row]) -> list[str]:
    """A row of fewer seeds that is better than the one that is compared."""
    fewer = [r for r in rows if r["effective_depth"] > 1 and len(r["seeds"]) < len(deep["seeds"])]
    best = _best(fewer)
    if best is None or best["validation"] >= deep["validation"]:
        return []
    return [f"A row of fewer seeds, {_nats(best)}."]


def _over_seeds(row: Row) -> float:
    """The standard error of a row's mean over seeds, where there are several."""
    return (row["spread"]["nll"]["std"] or 0.0) / math.sqrt(len(row["seeds"]))


def _one_ordering(rows: Sequence[Row]) -> list[str]:
    lines = []
    for depth in sorted({r["depth"] for r in rows if r["series"].endswith("shared")}):
        of_depth = [r for r in rows if r["depth"] == depth]
        shared = _best([r for r in of_depth if r["series"].endswith("shared")])
        deep = _best([r for r in of_depth if not r["series"].endswith("shared") and r["effective_depth"] > 1])
        if shared is not None and deep is not None:
            lines.append(
                f"In one shared ordering, where depth adds no distributions, depth {depth} reaches {shared['bound']:.2f} nats "
                f"(`{shared['id']}`), and {deep['bound']:.2f} in several."
            )
    return lines


def _deterministic(rows: Sequence[Row]) -> list[str]:
    """The best bijections, of one layer and of more."""
    parts = []
    for words, own in (
        ("of depth 2 or more", [r for r in rows if r["effective_depth"] > 1]),
        ("of depth 1", [r for r in rows if r["depth"] == 1]),
    ):
        greedy, refit = _best(own, _greedy), _best(own, _refit)
        if greedy is not None and refit is not None:
            parts.append(
                f"the best flow {words} has {greedy['greedy']:.1f} nats (`{greedy['id']}`), and {refit['refit']:.1f} on a "
                f"refitted base (`{refit['id']}`)"
            )
    return [f"Read as one bijection, {'; '.join(parts)}."] if parts else []


def _greedy(row: Row) -> float:
    return row["validation_greedy"]


def _refit(row: Row) -> float:
    return row["validation_refit"]


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
        f"The best latent coupling flow, {_nats(best)}, and samples in {best['sampling_passes']} passes of its networks. Of "
        f"its layers {best['effective_depth']} flip more than one pixel in a thousand."
    ]
    for series in dict.fromkeys(r["series"] for r in rows):
        own = sorted((r for r in rows if r["series"] == series), key=lambda r: r["depth"])
        if len(own) > 1:
            latent = own[0]["reading"] == "latent"
            key = "bound" if latent else "refit"
            figures = ", ".join(f"{r[key]:.1f} at depth {r['depth']}" for r in own)
            falls = all(a[key] > b[key] for a, b in itertools.pairwise(own))
            lines.append(
                f"{series.capitalize()}{'' if latent else ', deterministic, refitted'}: {figures}; it "
                f"{'falls' if falls else 'does not fall'} with every step."
            )
    return lines


def _against_straight_through(rows: Sequence[Row]) -> list[str]:
    """At each depth, the best other estimator against the best straight-through one, which has the better of its readings."""
    parts, better = [], []
    for depth in sorted({r["depth"] for r in rows}):
        own = [r for r in rows if r["depth"] == depth]
        through = _best(
            [r for r in own if _is_straight_through(r)], lambda r: min(r["validation"], _refit(r))
        )
        other = _best([r for r in own if not _is_straight_through(r)])
        if through is not None and other is not None:
            reached = through["refit"] if _refit(through) < through["validation"] else through["bound"]
            better.append(other["bound"] < reached)
            parts.append(
                f"{other['bound']:.1f} against {reached:.1f} at depth {depth} (`{other['id']}`, `{through['id']}`)"
            )
    if not parts:
        return []
    count = "at every depth" if all(better) else "at no depth" if not any(better) else "not at every depth"
    return [
        f"In couplings, the best other estimator beats straight-through {count}: {', '.join(parts)}. Straight-through has the "
        "better of its two readings here."
    ]


def _is_straight_through(row: Row) -> bool:
    return row["estimator"].startswith("straight-through")


def _deterministic_couplings(rows: Sequence[Row], independent: float | None) -> list[str]:
    best = _best(rows, _refit)
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
