"""What strong conditioners reach, from the result files of `xorflow strong`: numbers, Markdown, samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xorflow.report.results import Results, assembled, write_table
from xorflow.training.storage import read_json
from xorflow.training.tables import spread

NOT_RUN = (
    "The full budget has not been run yet, so there are no figures here. `xorflow strong` makes them, and `make docs` writes "
    "them into this page."
)

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
    """The likelihoods, then both readings, then what they cost."""
    rows = table["rows"]
    return "\n\n".join((_likelihoods(rows), _readings(rows), _costs(rows)))


def _likelihoods(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| conditioner | recipe | NLL, exact | draws: least to greatest | other seeds | components alone, first draw | "
        "training images | bf16 differs by |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        draws = row["draws"]["nll"]
        others = ", ".join(f"{nll:.2f}" for nll in row["each"]["nll"] if nll != row["nll"]) or "–"
        lines.append(
            f"| {row['title']} | `{row['recipe']}` | {row['nll']:.2f} ± {row['stderr']:.2f} | "
            f"{min(draws):.2f} to {max(draws):.2f} | {others} | {_alone(row)} | {row['train_nll']:.2f} | "
            f"{row['bf16']['difference']:+.4f} |"
        )
    return "\n".join(lines)


def _alone(row: dict[str, Any]) -> str:
    """The components of a mixture, in the first draw."""
    found = row["components"]
    return ", ".join(f"{nll:.2f}" for nll in found) if len(found) > 1 else "–"


def _readings(rows: Sequence[dict[str, Any]]) -> str:
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
    results, table = write_table(folder, make_strong_table, strong_markdown)
    shown = _shown(results, table)
    if shown is not None:
        from xorflow.report.figures import draw_grid  # half a second of imports

        draw_grid(*shown, folder / "samples.png")
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


def strong_headline_block(results: Path) -> str:
    """For the front page: the recipe for two cores; what each conditioner reaches, what was published, samples of the best."""
    table = _full_table(results)
    if table is None:
        return on_cores_block(results)
    lines = [
        on_cores_block(results),
        "",
        f"On {table['rows'][0]['device']}, test images, the mean over five draws of their binarisation, ± the standard error:",
        "",
        "| conditioner | NLL, exact | training |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {row['title']} | {row['nll']:.2f} ± {row['stderr']:.2f} | {_time(row)} |" for row in table["rows"]
    ]
    title = next(row["title"] for row in table["rows"] if row["id"] == table["shown"])
    picture = f"![One hundred samples of {title}, chosen by validation data](results/strong/samples.png)"
    return "\n".join([*lines, "", _published(results), "", picture])


def _published(results: Path) -> str:
    known = json.loads((results / "published.json").read_text(encoding="utf-8"))
    sources = {entry["source"]: [] for entry in known}
    for entry in known:
        mark = "\\*" if entry["kind"] == "bound" else ""
        sources[entry["source"]].append(f"{entry['model']} {entry['nll']:.2f}{mark}")
    figures = "; ".join(f"{', '.join(models)} ({source})" for source, models in sources.items())
    return f"For comparison, as published, in nats: {figures}. \\* a bound: the NLL is at most that."


def on_cores_block(results: Path) -> str:
    """What the recipe for machines without a GPU reached, and what it cost."""
    folder = results / "recurrent-cpu"
    result = read_json(folder / "result.json", "the result of recurrent-cpu")
    cost = read_json(folder / "cost.json", "the cost of recurrent-cpu")
    test, validation = result["test"], result["validation"]
    images = result["data"]["sizes"]["train"]
    return (
        f"`{cost['command']}` took {cost['wall_seconds'] / 60:.0f} minutes on {cost['cores']} cores, its evaluation included, "
        f"and {cost['peak_gigabytes']} GB of memory at the peak: {result['parameters']:,} weights, {result['epochs']} epochs "
        f"of {images:,} images. Its NLL is exactly {test['nll']:.2f} ± {test['stderr']:.2f} nats on test images, in the draw "
        f"of seed {result['data']['seed']}, and {validation['nll']:.2f} on validation images; deterministic, with the base "
        f"refitted, {test['refit_nll']:.2f}."
    )


def strong_block(results: Path) -> str:
    """For a document: the tables."""
    table = _full_table(results)
    if table is None:
        return NOT_RUN
    missing = [f"Not run yet: {', '.join(table['missing'])}."] if table["missing"] else []
    return "\n\n".join((strong_markdown(table), _published(results), *missing))


def _full_table(results: Path) -> dict[str, Any] | None:
    """The committed table; None if there is none, or it is of a smaller budget."""
    path = results / "strong/table.json"
    if not path.exists():
        return None
    table = read_json(path, "the table of strong conditioners")
    return table if table["budget"] == "full" and table["rows"] else None
