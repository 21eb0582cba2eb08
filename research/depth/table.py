"""Whether depth pays, from the result files of `python -m research depth`: numbers and Markdown."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.depth.figure import draw_depths, part
from research.results import VERSION, Record, Results, read_results, share_of_seconds, write_table
from research.tables import kind_of, markdown_table
from xorflow.training import spread


def make_depth_table(results: Results) -> Record:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    plan = results.plan
    by_name = {planned["id"]: _rows(results, planned) for planned in plan["rows"]}
    rows = [row for of_name in by_name.values() for row in of_name]
    level = results.computed("independent-pixels")
    return {
        "version": VERSION,
        **{key: plan[key] for key in ("budget", "description", "paper")},
        "independent": None if level is None else level["evaluation"]["nll"],
        "paired": _paired(results, rows),
        "rows": rows,
        "missing": [name for name, of_name in by_name.items() if not of_name],
    }


_FLOAT32_ERROR = 0.016
"""By how many nats the NLL of the rows that are rebased to the fixed base is too high at most.

They were evaluated in float32 when a log-odds of +1e4, which stands for a certain flip, cost 1.1e-4 (x = 1) or 1.5e-4 (x = 0)
nats, and at most 13.4 % of 784 pixels are flipped. Their weights are not kept; rows that are trained anew lack the error."""


def _rows(results: Results, planned: Record) -> list[Record]:
    """The row of a plan: none if it is not finished, two if it is rebased."""
    finals = results.of(planned["id"], "final")
    selected = results.selected(planned["id"])
    if selected is None:
        return []
    rows = [_row(results, planned, finals, selected)]
    if "own" in selected["evaluation"]:
        on_learned = [run | {"evaluation": run["evaluation"] | run["evaluation"]["own"]} for run in finals]
        chosen = next(run for run in on_learned if run["seed"] == selected["seed"])
        learned = planned | {
            "id": f"{planned['id']}-own",
            "title": planned["title"].replace("rebased to the fixed base", "on its own base"),
            "base": "learned",
        }
        rows.append(_row(results, learned, on_learned, chosen, of=planned["id"]))
    return rows


_OF_LAYERS = {"flip_rates": "flip_rate", "greedy_flip_rates": "greedy_flip_rate", "entropy": "entropy"}


def _row(
    results: Results,
    planned: Record,
    finals: Sequence[Record],
    selected: Record,
    of: str | None = None,
) -> Record:
    """Likelihoods are means over seeds; layers and errors over images are those of the seed selected on validation data."""
    evaluation, name = selected["evaluation"], of or planned["id"]
    figures = {key: [run["evaluation"][key] for run in finals] for key in ("nll", "greedy", "refit")}
    return {
        **{key: planned[key] for key in ("id", "title", "family", "series", "base", "depth", "estimator")},
        "greedy": _mean(figures["greedy"]),
        "bound": _mean(figures["nll"]),
        **{key: evaluation[key] for key in ("kind", "stderr", "samples")},
        **({"float32_error": _FLOAT32_ERROR} if planned["rebased"] == "fixed" and of is None else {}),
        "refit": _mean(figures["refit"]),
        **{name: [layer[key] for layer in evaluation["layers"]] for name, key in _OF_LAYERS.items()},
        **{key: evaluation[key] for key in ("effective_depth", "parameters")},
        "seconds": round(_seconds(results, planned, finals), 3),
        "seconds_in_all": round(sum(share_of_seconds(run) for run in results.runs if run["row"] == name), 3),
        "seeds": [run["seed"] for run in finals],
        "spread": {key: spread(values) for key, values in figures.items()},
        **{key: planned[key] for key in ("flow", "ordering", "init")},
        **{key: evaluation[key] for key in ("sampling_passes", "sampling_seconds")},
        "epochs": selected["epochs"],
        **_validation(results, name, own_base=of is not None),
        "device": selected["device_name"],
        "config": selected["config"],
    }


def _validation(results: Results, name: str, own_base: bool) -> dict[str, float]:
    """The figures on validation data, means over seeds: by these rows are chosen."""
    runs = [run["evaluation"] for run in results.of(name, "select")]
    figures = [run["own"] if own_base else run for run in runs]
    keys = {"validation": "nll", "validation_greedy": "greedy", "validation_refit": "refit"}
    return {name: _mean([run[key] for run in figures]) for name, key in keys.items()}


def _paired(results: Results, rows: Sequence[Record]) -> Record | None:
    """The best row of depth 1 on the fixed base and the best that uses more layers, image by image."""
    pair = _headline_pair(rows)
    if pair is None:
        return None
    finals = [results.of(row["id"], "final") for row in pair]
    if any("values" not in run["evaluation"] for runs in finals for run in runs):
        return None
    one, deep = (np.mean([_unpacked(run["evaluation"]["values"]) for run in runs], 0) for runs in finals)
    if one.shape != deep.shape:
        return None
    gain = deep - one
    return {
        "rows": [row["id"] for row in pair],
        "gain": float(gain.mean()),
        "stderr": float(gain.std(ddof=1) / len(gain) ** 0.5),
    }


def _headline_pair(rows: Sequence[Record]) -> tuple[Record, Record] | None:
    """On the fixed base, the rows that are best on validation data: of depth 1, and of those that use more layers.

    Of the latter only rows with as many seeds as any have: one lucky seed decides nothing for depth.
    """
    ordered = part(rows, "autoregressive", "fixed")
    one = [r for r in ordered if r["depth"] == 1 and r["kind"] == "exact"]
    deep = [r for r in ordered if r["depth"] > 1 and r["effective_depth"] > 1]
    if not one or not deep:
        return None
    most = max(len(r["seeds"]) for r in deep)
    deep = [r for r in deep if len(r["seeds"]) == most]
    return min(one, key=lambda r: r["validation"]), min(deep, key=lambda r: r["validation"])


def _unpacked(values: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(values), "<f4").astype(float)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds(results: Results, planned: Record, finals: Sequence[Record]) -> float:
    """Of one final run, with that of the run that it started from."""
    seconds = _mean([share_of_seconds(run) for run in finals])
    before = next((row for row in results.plan["rows"] if row["id"] == planned["init"]), None)
    earlier = [] if before is None else results.of(before["id"], "final")
    return seconds + (_seconds(results, before, earlier) if before is not None and earlier else 0.0)


# ---- the table as text ----

_PARTS = (
    ("Orderings on the fixed base", "autoregressive", "fixed"),
    ("Orderings on a learned base", "autoregressive", "learned"),
    ("Couplings on a learned base", "coupling", "learned"),
)


def depth_markdown(table: Record) -> str:
    """The rows in their three parts, and what each layer does."""
    sections = [(title, part_table(table, family, base)) for title, family, base in _PARTS]
    sections.append(("What each layer does", layer_table(table)))
    return "\n\n".join([table["description"], *(f"## {title}\n\n{text}" for title, text in sections if text)])


_COLUMNS = (
    "row | >depth | >used | >NLL | which is | >greedy | >refitted | >weights | >seconds | >passes | >seeds"
)


def part_table(table: Record, family: str, base: str, columns: int = 11, but: str = "$") -> str:
    """The likelihoods of one part of the rows, but those whose names match; in the first columns or in all."""
    shown = (row for row in part(table["rows"], family, base) if not re.match(but, row["id"]))
    rows = [_cells(row)[:columns] for row in shown]
    return markdown_table(" | ".join(_COLUMNS.split(" | ")[:columns]), rows)


def _cells(row: Record) -> list[str]:
    std, kind = row["spread"]["nll"]["std"], kind_of(row)
    if "float32_error" in row:
        kind += f"; float32, at most {row['float32_error']} too high"
    return [
        *(f"`{row['id']}` {row['title']}", f"{row['depth']}", f"{row['effective_depth']}"),
        *(f"{row['bound']:.2f}" + (f" ± {std:.2f}" if std is not None else ""), kind),
        *(f"{row['greedy']:.1f}", f"{row['refit']:.1f}", f"{row['parameters'] / 1e6:.1f} M"),
        *(f"{row['seconds']:.0f}", f"{row['sampling_passes']:,}", f"{len(row['seeds'])}"),
    ]


def layer_table(table: Record) -> str:
    """For each row of two layers or more: drawn flips, greedy flips and entropy, layer by layer."""
    return markdown_table(
        "row | drawn flips, % of pixels | greedy flips, % | entropy of the choices, nats",
        (
            [
                f"`{row['id']}`",
                *(
                    ", ".join(f"{100 * rate:.2f}" for rate in row[key])
                    for key in ("flip_rates", "greedy_flip_rates")
                ),
                ", ".join(f"{entropy:.1f}" for entropy in row["entropy"]),
            ]
            for row in table["rows"]
            if row["depth"] > 1 and len(row["flip_rates"]) == row["depth"]
        ),
    )


# ---- files ----


def write_depth(folder: Path) -> Record:
    """Write `table.json`, `table.md` and the picture from the result files in a folder; returns the table."""
    table = write_table(folder, lambda: make_depth_table(read_results(folder, "depth")), depth_markdown)
    draw_depths(table, folder / "depth.png")
    return table
