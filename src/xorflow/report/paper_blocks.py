"""The blocks of documents that speak about the paper's table, from committed result files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from xorflow.report.paper_claims import claims
from xorflow.report.reproduction import (
    VARIANTS,
    essence_table,
    layer_table,
    main_table,
    posterior_table,
    spread_table,
    verdict,
)
from xorflow.training.storage import read_json

NOT_RUN = (
    "The full budget has not been run yet, so there are no figures of ours here. `xorflow reproduce` makes them, and "
    "`make docs` writes them into this page."
)

_PIXELS, _P0 = 784, 0.9


def full_table(results: Path) -> dict[str, Any] | None:
    """The committed table; None if there is none, or it is of a smaller budget."""
    path = results / "paper/table.json"
    if not path.exists():
        return None
    table = read_json(path, "the table of the reproduction")
    return table if table["budget"] == "full" and table["rows"] else None


def essence_block(results: Path) -> str:
    """For the README: the likelihoods side by side, and the paper's figure."""
    table = full_table(results)
    if table is None:
        return NOT_RUN
    return "\n\n".join((essence_table(table), *_missing(table), *_picture(results, "results")))


def meaning_block(results: Path) -> str:
    """The paper's own figures, against pixels that know nothing of each other."""
    rows = json.loads((results / "paper.json").read_text(encoding="utf-8"))
    demo = read_json(results / "demo/result.json", "the result of the demo")
    level = demo["independent_nll"]
    floor, error = -_PIXELS * math.log(_P0), math.log(_P0 / (1 - _P0))
    lines = [
        f"| the paper's row | NLL | against independent pixels ({level:.1f}) | wrong pixels in an image |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        depth = f", depth {row['depth']}" if row["words"] == "straight-through" else ""
        wrong = (row["nll"] - floor) / error
        lines.append(f"| {row['words']}{depth} | {row['nll']} | {row['nll'] - level:+.1f} | {wrong:.1f} |")
    above = sum(row["nll"] > level for row in rows)
    lines += [
        "",
        f"{above} of the {len(rows)} rows are worse than independent pixels. The last column reads an NLL as that of one "
        f"bijection: {floor:.1f} nats if all pixels of y are 0, and {error:.3f} more for each that is not.",
    ]
    return "\n".join(lines)


def table_block(results: Path) -> str:
    """Ours beside the paper's."""
    table = full_table(results)
    if table is None:
        return NOT_RUN
    return "\n\n".join((main_table(table), *_missing(table)))


def verdict_block(results: Path) -> str:
    """What reproduced, and what did not: figures, then conclusions."""
    table = full_table(results)
    if table is None:
        return NOT_RUN
    parts = [
        verdict(table),
        *_attempts(table, results),
        "What the paper concludes, against ours:",
        claims(table),
    ]
    return "\n\n".join(part for part in parts if part)


def _attempts(table: dict[str, Any], results: Path) -> list[str]:
    """The figures of what else was tried for rows that fall short."""
    short = [row["id"] for row in table["rows"] if row.get("attempts")]
    path = results / "paper/tuning.json"
    if not short or not path.exists():
        return []
    lines = [
        f"- {run['row']}, batches of {run['batch_size']}, {run['epochs']} epochs, decay {run['weight_decay']:g}, "
        f"`{run['estimator']}`: NLL {run['validation']['nll']:.1f}, greedy {run['validation']['greedy']:.1f}"
        for run in read_json(path, "the runs that chose the recipes")["runs"]
        if run["row"] in short
    ]
    return [
        "These attempts on validation data, one seed each; the first is the row's recipe but for the epochs. The row's own "
        f"figures on validation data are {_selected(table, short)}.",
        "\n".join(lines),
    ]


def _selected(table: dict[str, Any], names: list[str]) -> str:
    """What rows reached on validation data, in the run by which their seed was chosen."""
    rows = [row for row in table["rows"] if row["id"] in names]
    return ", ".join(
        f"{row['ours']['validations'][-1][1]:.1f} after {row['ours']['validations'][-1][0]} epochs ({row['id']})"
        for row in rows
    )


def details_block(results: Path) -> str:
    """Spread over seeds, layers, recipes, cost, pictures."""
    table = full_table(results)
    if table is None:
        return NOT_RUN
    parts = [
        ("### Spread over seeds", spread_table(table)),
        ("### Retrained alone", _retrained(results)),
        ("### What the layers do", layer_table(table)),
        ("### The paper's greedy column of the full-posterior rows", posterior_table(table)),
        ("### Recipes", _recipes(table)),
        ("### What was tried", _tuning(results)),
        ("### Cost", _cost(table)),
        ("### Pictures", "\n\n".join(_picture(results, "../results", curves=True))),
    ]
    return "\n\n".join(f"{heading}\n\n{text}" for heading, text in parts if text)


def _retrained(results: Path) -> str:
    """Runs of the table made once more, each by itself."""
    again = sorted((results / "paper/retrained").glob("*.json"))
    if not again:
        return ""
    lines = [
        "The table's runs were trained as groups of three seeds, several groups at once. These were made again, one by one, "
        "from the same seeds and recipes, with a later state of the code. A group rounds otherwise than a run alone, and "
        "roundings grow along a run.",
        "",
        "| run | NLL alone | in the table | greedy alone | in the table |",
        "|---|---:|---:|---:|---:|",
    ]
    for path in again:
        alone, table = (
            read_json(file, "a run")["evaluation"] for file in (path, results / "paper/runs" / path.name)
        )
        figures = [part[key] for key in ("nll", "greedy") for part in (alone, table)]
        name = path.name.removesuffix(".final.json").replace(".", ", ")
        lines.append(f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    return "\n".join(lines)


def _recipes(table: dict[str, Any]) -> str:
    lines = []
    for row in table["rows"]:
        for variant in VARIANTS:
            if row[variant] and "choices" in row:
                cure = f" ({row['cure']})" if variant == "cured" and row["cure"] else ""
                lines.append(f"- {row['id']}, {variant}{cure}: {row['choices'][variant]}")
    return "\n".join(lines)


def _tuning(results: Path) -> str:
    """The runs by which the recipes were chosen."""
    path = results / "paper/tuning.json"
    if not path.exists():
        return ""
    content = read_json(path, "the runs that chose the recipes")
    lines = [
        content["words"],
        "",
        "| row | estimator | hidden units | batch | epochs | learning rate | decay of weights | NLL | greedy |",
        "|---|---|---|---:|---:|---|---|---:|---:|",
    ]
    for run in content["runs"]:
        estimator = f"`{run['estimator']}`" + (f", posterior {run['posterior']}" if run["posterior"] else "")
        decay = f"{run['weight_decay']:g}" + (" (AdamW)" if run["optimiser"] == "adamw" else "")
        found = run["validation"]
        bound = "" if found["kind"] == "exact" else "*"
        cells = [run["row"], estimator, run["hidden"], run["batch_size"], run["epochs"], run["schedule"]]
        cells += [
            decay if run["weight_decay"] else "none",
            f"{found['nll']:.1f}{bound}",
            f"{found['greedy']:.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    notes = (
        "NLL is of the latent reading, in straight-through rows too; \\* a bound, by 8 samples with the last layer summed out. "
        "These runs are of an earlier state of the code than the rows, with which runs at a constant rate ended some nats "
        "higher: they compare with each other, and not with the table."
    )
    return "\n".join([*lines, "", notes])


def _cost(table: dict[str, Any]) -> str:
    seconds = sum(row["seconds"] for row in table["rows"])  # of training alone, each run's part of its group
    devices = sorted(
        {row[v]["device"] for row in table["rows"] for v in VARIANTS if "device" in (row[v] or {})}
    )
    return (
        f"Training took {seconds / 60:.0f} minutes on {', '.join(devices)}, if the times of groups that were trained side by "
        "side are added up; evaluation is not in it."
    )


def _missing(table: dict[str, Any]) -> list[str]:
    return [f"Not run yet: {', '.join(table['missing'])}."] if table["missing"] else []


def _picture(results: Path, root: str, *, curves: bool = False) -> list[str]:
    pictures = [
        (
            "samples.png",
            "One hundred samples of the best score-function row and of the best straight-through row",
        )
    ]
    pictures += (
        [("curves.png", "Validation likelihood by epoch, as the paper describes it and cured")]
        if curves
        else []
    )
    return [
        f"![{words}]({root}/paper/{name})" for name, words in pictures if (results / "paper" / name).exists()
    ]
