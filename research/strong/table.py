"""What strong conditioners reach, from the result files of `python -m research strong`: numbers, Markdown, samples."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from research.results import Record, Results, assembled, read_results, write_table
from research.samples import save_figure, show_samples
from research.tables import markdown_table
from xorflow.training import spread

_COPIED = (
    *("nll", "kind", "stderr", "components", "draws", "greedy", "greedy_fixed", "refit", "train_nll", "bf16"),
    "sampling",
)

# ---- the table as numbers ----


def make_strong_table(results: Results) -> Record:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    table = assembled(results, _row)

    def level(row: Record) -> tuple[float, bool]:
        """On validation data; a mixture comes before its part."""
        runs = results.of(row["part"] or row["id"], "select")
        return min((run["selection"]["nll"] for run in runs), default=float("inf")), row["part"] is None

    best = min(table["rows"], key=level, default=None)
    return table | {"shown": None if best is None else best["id"]}


def _row(results: Results, planned: Record) -> Record | None:
    """Likelihoods are of the first seed, by which the recipe was selected; `each` has those of all seeds."""
    finals = _finals(results, planned["id"])
    if not finals:
        return None
    chosen = finals[0]
    each = [run["evaluation"]["nll"] for run in finals]
    selections = results.of(planned["id"], "select")
    return {
        **{key: planned[key] for key in ("id", "title", "recipe", "part")},
        **{key: chosen["evaluation"][key] for key in _COPIED},
        "each": {"nll": each, "spread": spread(each)},
        "validation": [run["selection"]["nll"] for run in selections],
        "parameters": chosen["parameters"],
        "seconds": chosen["seconds"],
        "epochs": chosen.get("epochs"),
        "seeds": chosen.get("seeds") or [run["seed"] for run in finals],
        "device": chosen["device_name"],
        "config": chosen["config"],
    }


def _finals(results: Results, name: str) -> list[Record]:
    """The final runs of a row by seed, or the mixture."""
    return sorted(
        (run for run in results.runs if run["row"] == name and run["phase"] != "select"),
        key=lambda run: run["seed"],
    )


# ---- the table as text ----


def strong_markdown(table: Record) -> str:
    """What `table.md` holds."""
    return f"{table['description']}\n\n{strong_tables(table)}"


def strong_tables(table: Record) -> str:
    """The latent likelihoods, then the deterministic ones and what a row costs."""
    rows = table["rows"]
    likelihoods = markdown_table(
        "conditioner | recipe | >NLL, exact | >draws: least to greatest | >other seeds | >components alone, first draw | "
        ">training images | >bf16 differs by",
        map(_likelihoods, rows),
    )
    others = markdown_table(
        "recipe | >greedy, base refitted | >greedy, fixed base | >weights | >epochs | >training | >100 samples | on",
        (
            [
                *(f"`{row['recipe']}`", f"{row['refit']:.2f}", f"{row['greedy_fixed']:.2f}"),
                *(f"{row['parameters']:,}", str(row["epochs"] or "–"), _time(row["seconds"])),
                *(f"{row['sampling']['seconds']:.2f} s", row["device"]),
            ]
            for row in rows
        ),
    )
    return f"{likelihoods}\n\n{others}"


def _likelihoods(row: Record) -> list[str]:
    draws, components = row["draws"]["nll"], row["components"]
    return [
        *(row["title"], f"`{row['recipe']}`", f"{row['nll']:.2f} ± {row['stderr']:.2f}"),
        f"{min(draws):.2f} to {max(draws):.2f}",
        _listed([nll for nll in row["each"]["nll"] if nll != row["nll"]]),
        _listed(components if len(components) > 1 else []),
        *(f"{row['train_nll']:.2f}", f"{row['bf16']['difference']:+.4f}"),
    ]


def _listed(nlls: list[float]) -> str:
    return ", ".join(f"{nll:.2f}" for nll in nlls) or "–"


def _time(seconds: float) -> str:
    """Of training."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


# ---- files ----


def write_strong(folder: Path) -> Record:
    """`table.json`, `table.md` and `samples.png` beside the runs; returns the table."""
    results = read_results(folder, "strong")
    table = write_table(folder, lambda: make_strong_table(results), strong_markdown)
    for row in table["rows"]:
        if row["id"] == table["shown"]:
            figure = Figure(figsize=(6, 6.3))
            title = f"{row['title']}, exact NLL {row['nll']:.2f}"
            show_samples(figure.subplots(), title, _finals(results, row["id"])[0])
            save_figure(figure, folder / "samples.png")
    return table
