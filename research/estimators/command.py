"""`python -m research estimators`: every gradient estimator against exact gradients, on models of our own or on a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from research import command
from research.budgets import find_budget
from research.estimators.models import STUDY_BUDGETS
from research.estimators.names import POINTS, parse_estimators
from research.estimators.study import Study, StudyRequest
from research.estimators.table import layer_of, write_study
from research.estimators.training import TrainingComparison
from research.results import Record
from research.tables import fixed, marked, short, terminal_table, with_error
from xorflow import ConfigError

EXAMPLES = (
    "estimators --budget smoke --out runs/estimators",
    "estimators runs/demo --estimators 'maximum-likelihood analytic score-function:baseline=greedy disarm'",
    "estimators --training --device cuda --jobs 6",
)

_Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Folder of a finished run; without it, models of our own are studied.",
        show_default=False,
    ),
]
_Estimators = Annotated[
    list[str] | None,
    typer.Option(
        help="As --estimator of xorflow train takes them; several with spaces or semicolons, or the option again."
    ),
]
_Points = Annotated[str | None, typer.Option(help="Of training, with commas: start, middle, converged.")]
_Models = Annotated[
    str | None,
    typer.Option(
        help="Of our own, with commas: depth-1, depth-2, posterior-1, posterior-2, small-2, small-3."
    ),
]
_Draws = Annotated[
    int | None, typer.Option(help="Of each estimator; by default 400, in smaller budgets fewer.")
]
_Batch = Annotated[
    int | None, typer.Option(help="Rows of the one batch; by default 64, in smaller budgets fewer.")
]
_Training = Annotated[
    bool,
    typer.Option("--training", help="Train depth 1 and 2 with every estimator instead, and compare."),
]
_Seed = Annotated[int, typer.Option(help="Of the batch and of all noise.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the results; by default research/results/estimators, or RUN/estimators.",
        show_default=False,
    ),
]


def estimators(
    context: typer.Context,
    run: _Run = None,
    estimators: _Estimators = None,
    points: _Points = None,
    models: _Models = None,
    draws: _Draws = None,
    batch: _Batch = None,
    training: _Training = False,
    budget: command.BudgetName = "full",
    device: command.Device = "auto",
    jobs: command.Jobs = 1,
    seed: _Seed = 0,
    out: _Out = None,
    work: command.Work = command.WORK / "estimators",
) -> None:
    """Measure bias, variance and cost of gradient estimators against exact gradients."""
    folder = out or (command.RESULTS / "estimators" if run is None else run / "estimators")
    given = {key: value for key, value in (("draws", draws), ("batch", batch)) if value is not None}
    size = replace(find_budget(budget, STUDY_BUDGETS), **given)
    texts = parse_estimators(estimators)
    request = StudyRequest(size, folder, work, run, models, texts, points, device, seed)
    if training and (run, models, points) != (None, None, None):
        raise ConfigError("--training trains models of its own; leave out RUN, --models and --points")
    outcomes = command.carry_out(context, TrainingComparison(request, jobs) if training else Study(request))
    table = write_study(folder)
    console = Console()
    console.print(table["settings"]["description"], style="bold")
    if training:
        show_training(console, table["training"])
    else:
        show_measurements(console, table, everything=run is not None)
    command.conclude(folder, outcomes)


# ---- what a person sees ----


def show_measurements(console: Console, table: Record, *, everything: bool) -> None:
    """A table for each gradient, objective and oracle: bias and variance relative to its squared norm, and the cost."""
    rows = table["rows"]
    if not everything:  # the last layer at the end of training says most in one screen
        rows = [r for r in rows if r["part"] == "generator" and r["layer"] == r["depth"]]
        last = {r["model"]: r["point"] for r in sorted(rows, key=lambda r: POINTS.index(r["point"]))}
        rows = [r for r in rows if r["point"] == last[r["model"]]]
    groups: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        oracle = "no exact gradient" if row["oracle"] is None else f"exact gradient: {row['oracle']}"
        gradient = f"{row['model']}, {row['point']}: gradient of the {layer_of(row)}"
        figures = (short(row[key]) for key in ("variance", "cosine", "passes", "milliseconds"))
        cells = (row["estimator"], with_error(row["bias"], row["bias_stderr"]), *figures)
        groups.setdefault(f"{gradient}\n{row['objective']}; {oracle}", []).append(cells)
    columns = "estimator | >bias | >variance | >cosine | >passes | >ms"
    for title, cells in groups.items():
        console.print(terminal_table(columns, cells, title=title, title_justify="left"), "")
    if everything and table["refused"]:
        names = ", ".join(dict.fromkeys(entry["estimator"] for entry in table["refused"]))
        console.print(f"not defined for this model: {names}; table.md says why", markup=False)


def show_training(console: Console, runs: Sequence[Record]) -> None:
    """What the runs of the comparison reached."""
    console.print(command.BOUNDS)
    lines = []
    for run in runs:
        figures = [fixed(None)] * 3
        if not run.get("error"):
            figures = [fixed(run["greedy_nll"]), marked(run["nll"], run["kind"]), fixed(run["seconds"])]
        lines.append([str(run["depth"]), run["estimator"], *figures])
    console.print(terminal_table(">depth | estimator | >greedy NLL | >NLL | >seconds", lines))
