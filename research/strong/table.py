"""What strong conditioners reach, from the result files of `xorflow strong`: numbers, Markdown, samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from research.results import Results, assembled, full_table, line, write_table
from research.samples import save_figure, show_samples
from xorflow.training import spread

_VARIANT = "ours"

# ---- the table as numbers ----


def make_strong_table(results: Results) -> dict[str, Any]:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    table = assembled(results, _row)
    best = _best(results, table)
    return table | {"shown": None if best is None else best["id"]}


def _row(results: Results, planned: dict[str, Any]) -> dict[str, Any] | None:
    """Likelihoods are of the first seed, by which the recipe was selected; `each` has those of all seeds."""
    finals = _finals(results, planned)
    if not finals:
        return None
    chosen = finals[0]
    found = chosen["evaluation"]
    copied = (
        "nll",
        "kind",
        "stderr",
        "components",
        "draws",
        "greedy",
        "greedy_fixed",
        "refit",
        "train_nll",
        "bf16",
        "sampling",
    )
    each = [run["evaluation"]["nll"] for run in finals]
    selections = results.of(planned["id"], _VARIANT, "select")
    return {
        **{key: planned[key] for key in ("id", "title", "recipe", "part")},
        **{key: found[key] for key in copied},
        "each": {"nll": each, "spread": spread(each)},
        "validation": [run["selection"]["nll"] for run in selections],
        "parameters": chosen["parameters"],
        "seconds": chosen["seconds"],
        "epochs": chosen.get("epochs"),
        "seeds": chosen.get("seeds") or [run["seed"] for run in finals],
        "device": chosen["device_name"],
        "config": chosen["config"],
    }


def _finals(results: Results, planned: dict[str, Any]) -> list[dict[str, Any]]:
    if planned["family"] == "mixed":
        return [run for run in results.runs if run["row"] == planned["id"]]
    return results.of(planned["id"], _VARIANT, "final")


# ---- the table as text ----


def strong_markdown(table: dict[str, Any]) -> str:
    """The likelihoods, latent and deterministic, then what they cost."""
    rows = table["rows"]
    return "\n\n".join((_likelihoods(rows), _deterministic(rows), _costs(rows)))


def _likelihoods(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| conditioner | recipe | NLL, exact | draws: least to greatest | other seeds | components alone, first draw | "
        "training images | bf16 differs by |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        draws = row["draws"]["nll"]
        others = ", ".join(f"{nll:.2f}" for nll in row["each"]["nll"] if nll != row["nll"]) or "–"
        cells = [
            row["title"],
            f"`{row['recipe']}`",
            _nll(row),
            f"{min(draws):.2f} to {max(draws):.2f}",
            others,
        ]
        lines.append(
            line([*cells, _alone(row), f"{row['train_nll']:.2f}", f"{row['bf16']['difference']:+.4f}"])
        )
    return "\n".join(lines)


def _nll(row: dict[str, Any]) -> str:
    return f"{row['nll']:.2f} ± {row['stderr']:.2f}"


def _alone(row: dict[str, Any]) -> str:
    """The components of a mixture, in the first draw."""
    found = row["components"]
    return ", ".join(f"{nll:.2f}" for nll in found) if len(found) > 1 else "–"


def _deterministic(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| conditioner | latent | greedy, base refitted | greedy, fixed base | latent to refitted |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        gap = row["refit"] - row["nll"]
        lines.append(
            f"| {row['title']} | {row['nll']:.2f} | {row['refit']:.2f} | {row['greedy_fixed']:.2f} | {gap:+.2f} |"
        )
    return "\n".join(lines)


def _costs(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| conditioner | weights | epochs | training | 100 samples | on |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['title']} | {row['parameters']:,} | {row['epochs'] or '–'} | {_time(row)} | "
            f"{row['sampling']['seconds']:.2f} s | {row['device']} |"
        )
    return "\n".join(lines)


def _time(row: dict[str, Any]) -> str:
    """Of training."""
    seconds = row["seconds"]
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


# ---- files ----


def write_strong(folder: Path) -> dict[str, Any]:
    """`table.json`, `table.md` and `samples.png` beside the runs; returns the table."""
    results, table = write_table(folder, "strong", make_strong_table, strong_markdown)
    shown = _shown(results, table)
    if shown is not None:
        figure = Figure(figsize=(6, 6.3))
        show_samples(figure.subplots(), *shown)
        save_figure(figure, folder / "samples.png")
    return table


def _shown(results: Results, table: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """What the picture is called, and the run whose samples it shows."""
    best = next((row for row in table["rows"] if row["id"] == table["shown"]), None)
    if best is None:
        return None
    runs = [run for run in results.runs if run["row"] == best["id"] and run["phase"] != "select"]
    return f"{best['title']}, exact NLL {best['nll']:.2f}", runs[0]


def _best(results: Results, table: dict[str, Any]) -> dict[str, Any] | None:
    """The row that is best on validation data, or the mixture that it is a part of."""

    def level(row: dict[str, Any]) -> tuple[float, bool]:
        runs = results.of(row["part"] or row["id"], _VARIANT, "select")
        # a mixture before its part
        return min((run["selection"]["nll"] for run in runs), default=float("inf")), row["part"] is None

    return min(table["rows"], key=level, default=None)


# ---- documents ----


def strong_block(folder: Path) -> str:
    """For a document: all tables."""
    return strong_markdown(full_table(folder, "strong"))
