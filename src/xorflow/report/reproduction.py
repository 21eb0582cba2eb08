"""The reproduction of the paper's table, from its result files: numbers, Markdown, and what they amount to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xorflow.report.results import Results, assembled, share_of_seconds, write_table
from xorflow.training.tables import spread

VARIANTS = ("ours", "cured")

_FIGURES = ("nll", "greedy", "exact", "elbo", "kind", "stderr", "mean", "spread")
"""What every row has of ours; None where a row that is not trained has no such figure."""

FALLING = 0.5
"""A validation likelihood that fell by more than this, in nats, between the last two validations is still falling."""

# ---- the table as numbers ----


def make_table(results: Results) -> dict[str, Any]:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    return assembled(results, _row)


def _row(results: Results, planned: dict[str, Any]) -> dict[str, Any] | None:
    name = planned["id"]
    shared = {"id": name, "title": planned["title"], "family": planned["family"], "paper": planned["paper"]}
    if planned["family"] == "reference":
        found = next((run for run in results.runs if run["row"] == name), None)
        if found is None:
            return None
        none = {"cured": None, "seeds": [], "config": None, "epochs": None, "seconds": 0.0}
        ours = dict.fromkeys(_FIGURES) | found["evaluation"] | {"exact": found["evaluation"]["nll"]}
        return shared | {"ours": ours} | none | {"words": planned["words"]}
    figures = {variant: _variant(results, name, variant) for variant in VARIANTS}
    if not any(figures.values()):
        return None
    runs = [run for run in results.runs if run["row"] == name]
    chosen = {variant: results.selected(name, variant) for variant in VARIANTS}
    configs = {variant: run["config"] for variant, run in chosen.items() if run is not None}
    return (
        shared
        | figures
        | {
            "seeds": sorted({run["seed"] for run in runs if run["phase"] == "final"}),
            "config": configs,
            "epochs": next(found["epochs"] for found in figures.values() if found),
            "seconds": round(sum(share_of_seconds(run) for run in runs), 1),
            "depth": planned["depth"],
            "metric": planned["metric"],
            "choices": planned["choices"],
            "cure": planned["cure"],
            "attempts": planned["attempts"],
        }
    )


def _variant(results: Results, row: str, variant: str) -> dict[str, Any] | None:
    """The figures of the selected seed, and their mean and spread over all seeds."""
    selected, finals = results.selected(row, variant), results.of(row, variant, "final")
    if selected is None:
        return None
    nll = _spread([run["evaluation"]["nll"] for run in finals])
    greedy = _spread([run["evaluation"]["greedy"] for run in finals])
    return selected["evaluation"] | {
        "seed": selected["seed"],
        "mean": nll.pop("mean"),
        "spread": nll,
        "greedy_mean": greedy.pop("mean"),
        "greedy_spread": greedy,
        "by_seed": [
            {"seed": run["seed"], "nll": run["evaluation"]["nll"], "greedy": run["evaluation"]["greedy"]}
            for run in sorted(finals, key=lambda run: run["seed"])
        ],
        "epochs": selected["epochs"],
        "last_change": _last_change(results, row, variant),
        "validations": _validations(results.selection(row, variant)),
        "parameters": selected["parameters"],
        "seconds": round(sum(share_of_seconds(run) for run in results.runs if _is(run, row, variant)), 1),
        "device": selected["device_name"],
    }


def _last_change(results: Results, row: str, variant: str) -> float | None:
    """How much the validation likelihood fell at most, of all seeds, between the last two validations, in nats.

    None where the learning rate falls to zero: such a run comes to rest by itself, converged or not.
    """
    runs = results.of(row, variant, "select")
    if not runs or any(run["config"]["schedule"] != "constant" for run in runs):
        return None
    curves = [values for run in runs if len(values := _validations(run)) > 1]
    return round(min(values[-1][1] - values[-2][1] for values in curves), 2) if curves else None


def _validations(run: dict[str, Any] | None) -> list[list[Any]]:
    """Epochs and the likelihood of validation data after them, by which weights are chosen."""
    if run is None:
        return []
    metrics = run["metrics"]
    pairs = zip(metrics["epoch"], metrics["validation_nll"], strict=True)
    return [[epoch, value] for epoch, value in pairs if value is not None]


def _is(run: dict[str, Any], row: str, variant: str) -> bool:
    return run["row"] == row and run.get("variant") == variant


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    found = spread(values)
    assert found is not None
    return found


# ---- the table as text ----


def markdown(table: dict[str, Any]) -> str:
    """What `table.md` holds: the table, the spread over seeds, and the layers, in Markdown."""
    parts = [main_table(table), spread_table(table), layer_table(table), posterior_table(table)]
    return "\n\n".join(part for part in parts if part)


def main_table(table: dict[str, Any]) -> str:
    """Ours beside the paper's."""
    lines = [
        "| row | paper: NLL | greedy | ours: NLL | which is | exact | greedy | cured: NLL | which is | exact | greedy |",
        "|---|---:|---:|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    for row in table["rows"]:
        paper = row["paper"]
        cells = [row["title"], _one(paper["nll"]), _one(paper["greedy"])]
        for variant in VARIANTS:
            cells += _cells(row[variant])
        lines.append(_line(cells))
    return "\n".join(lines)


def essence_table(table: dict[str, Any]) -> str:
    """NLL alone: the paper's, ours, and cured."""
    lines = ["| row | the paper | ours, as described | ours, cured |", "|---|---:|---:|---:|"]
    for row in table["rows"]:
        lines.append(_line([row["title"], _one(row["paper"]["nll"]), *(_marked(row[v]) for v in VARIANTS)]))
    return "\n".join(
        [
            *lines,
            "",
            "\\* a bound: on average above the model's NLL. The others of ours are exact. As described: what the paper leaves "
            "open is our choice, a slight decay of the weights among it.",
        ]
    )


def _marked(found: dict[str, Any] | None) -> str:
    if found is None:
        return _one(None)
    return _one(found["nll"]) + ("" if found["kind"] == "exact" else "\\*")


def _cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    nll = _one(found["nll"]) + (f" ± {found['stderr']:.1f}" if found["stderr"] is not None else "")
    kind = "exact" if found["kind"] == "exact" else f"bound, {found['samples']:,} samples"
    return [nll, kind, _one(found.get("exact")), _one(found.get("greedy"))]


def spread_table(table: dict[str, Any]) -> str:
    """Mean and spread over the seeds of each variant."""
    lines = [
        "| row | variant | seeds | NLL: mean | std | least to greatest | greedy: mean | std | refitted | epochs | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            found = row[variant]
            if found is None or found["mean"] is None:
                continue
            nll, greedy = found["spread"], found["greedy_spread"]
            cells = [
                *(row["title"], variant, str(len(row["seeds"]))),
                *(_one(found["mean"]), _two(nll["std"]), f"{nll['min']:.1f} to {nll['max']:.1f}"),
                *(_one(found["greedy_mean"]), _two(greedy["std"]), _one(found["refit"])),
                *(str(found["epochs"]), f"{found['seconds']:.0f}"),
            ]
            lines.append(_line(cells))
    note = "Refitted is of the seed in the table; seconds are those of training all seeds, in both phases."
    return "\n".join([*lines, "", note]) if len(lines) > 2 else ""


def layer_table(table: dict[str, Any]) -> str:
    """What each layer of the deeper rows does."""
    lines = [
        "| row | variant | layer | entropy of its choices | drawn flips | greedy flips |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            layers = (row[variant] or {}).get("layers") or []
            if len(layers) < 2:
                continue
            for number, layer in enumerate(layers, 1):
                rates = [f"{100 * layer[key]:.2f} %" for key in ("flip_rate", "greedy_flip_rate")]
                lines.append(
                    _line([row["title"], variant, str(number), f"{layer['entropy']:.2f} nats", *rates])
                )
    return "\n".join(lines) if len(lines) > 2 else ""


def posterior_table(table: dict[str, Any]) -> str:
    """The score that explains the paper's greedy column; it is no likelihood, and says so."""
    lines = [
        "| row | variant | paper's greedy | argmax of the posterior (not a likelihood) | greedy through the generator |",
        "|---|---|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            score = (row[variant] or {}).get("argmax_posterior")
            if score is not None:
                values = (row["paper"]["greedy"], score["value"], row[variant]["greedy"])
                lines.append(_line([row["title"], variant, *map(_one, values)]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _one(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# ---- what they amount to ----


def verdict(table: dict[str, Any]) -> str:
    """Which rows are at or below the paper's figures and which are not, in words."""
    lines = [
        f"- {words}, {_compared(table, variant, key, name)}"
        for variant, words in (("ours", "As the paper describes it"), ("cured", "Cured"))
        for key, name in (("nll", "NLL"), ("greedy", "greedy NLL"))
    ]
    falling = [
        f"{row['id']} {variant} (by {-change:.1f})"
        for row in table["rows"]
        for variant in VARIANTS
        if (change := (row[variant] or {}).get("last_change")) is not None and change < -FALLING
    ]
    if falling:
        lines.append(
            f"- Still falling, in one seed or more by over {FALLING} nats of validation data between the last two validations: "
            f"{', '.join(falling)}. (Where the learning rate falls to zero this does not tell, and nothing is said.)"
        )
    for row in table["rows"]:
        if row.get("attempts"):
            lines.append(f"- {row['id']} was also tried with {'; with '.join(row['attempts'])}.")
    return "\n".join(lines)


def _compared(table: dict[str, Any], variant: str, key: str, name: str) -> str:
    rows = [row for row in table["rows"] if row["paper"][key] is not None and row[variant]]
    met, missed = [], []
    for row in rows:
        gap = row[variant][key] - row["paper"][key]
        notes = [f"by {gap:.1f} nats"] if round(gap, 1) > 0 else []
        notes += ["the paper's figure is not a likelihood"] if _no_likelihood(row, key) else []
        text = row["id"] + (f" ({'; '.join(notes)})" if notes else "")
        (missed if round(gap, 1) > 0 else met).append(text)
    return f"at or below the paper's {name}: {', '.join(met) or 'none'}. Above it: {', '.join(missed) or 'none'}."


def _no_likelihood(row: dict[str, Any], key: str) -> bool:
    """Whether the paper takes the most probable choice of a posterior that has seen the whole image."""
    return key == "greedy" and row["family"] == "full posterior"


# ---- files ----


def write_reproduction(folder: Path) -> dict[str, Any]:
    """Write `table.json`, `table.md` and the pictures from the result files in a folder; returns the table."""
    from xorflow.report.figures import draw_curves, draw_samples  # half a second of imports

    results, table = write_table(folder, make_table, markdown)
    draw_curves(results, folder / "curves.png")
    draw_samples(results, folder / "samples.png")
    return table
