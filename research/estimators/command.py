"""`python -m research estimators`: every gradient estimator against exact gradients, on models of our own or on a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from research import command
from research.budgets import find_budget
from research.estimators.display import StudyDisplay
from research.estimators.models import STUDY_BUDGETS
from research.estimators.names import parse_estimators
from research.estimators.study import Study, StudyRequest
from research.estimators.table import write_study
from research.estimators.training import TrainingComparison
from xorflow import ConfigError

EXAMPLES = """
[bold]Examples[/bold]

python -m research estimators --budget smoke --out runs/estimators

python -m research estimators runs/demo --estimators 'maximum-likelihood analytic special-case:baseline=greedy disarm'

python -m research estimators --training --device cuda --jobs 6

The same command again goes on with what is not finished.
"""

_NAME_WIDTH = 26
"""Of an estimator's text in a terminal of 80 columns, beside its figures."""


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
    request = StudyRequest(
        budget=find_budget(budget, STUDY_BUDGETS),
        out=folder,
        work=work,
        run=run,
        models=_names(models),
        estimators=parse_estimators(estimators),
        points=_names(points),
        draws=draws,
        batch=batch,
        device=device,
        seed=seed,
    )
    failed = _train(context, request, jobs) if training else _measure(context, request)
    table = write_study(folder)
    _show(Console(), table, training=training, everything=run is not None)
    typer.echo(f"results  {folder / 'table.md'}, {folder / 'table.json'}")
    command.complain(failed)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _measure(context: typer.Context, request: StudyRequest) -> list[str]:
    study, display = Study(request), StudyDisplay(Console(stderr=True))
    command.guarded(context, display, lambda: study.run(display))
    return []


def _train(context: typer.Context, request: StudyRequest, jobs: int) -> list[str]:
    if request.run is not None or request.models is not None or request.points is not None:
        raise ConfigError("--training trains models of its own; leave out RUN, --models and --points")
    comparison, display = TrainingComparison(request, jobs), StudyDisplay(Console(stderr=True))
    return command.guarded(context, display, lambda: comparison.run(display))


# ---- what a person sees ----


def _show(console: Console, table: dict[str, Any], *, training: bool, everything: bool) -> None:
    console.print(table["settings"]["words"], style="bold")
    if training:
        _show_training(console, table["training"])
        return
    rows = table["rows"]
    if not everything:  # the last layer at the end of training says most in one screen
        rows = [r for r in rows if r["part"] == "generator" and r["layer"] == r["depth"]]
        rows = [r for r in rows if r["point"] == _last_point(rows, r["model"])]
    for title, group in _groups(rows).items():
        show_rows(console, title, group)
    if everything and table["refused"]:
        names = ", ".join(dict.fromkeys(entry["estimator"] for entry in table["refused"]))
        console.print(Text(f"not defined for this model: {names}; table.md says why"))


def _last_point(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    order = ("start", "middle", "converged")
    return max((row["point"] for row in rows if row["model"] == model), key=order.index)


def _groups(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each gradient, objective and oracle, under a title that says all three; those of one gradient together."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        layer = row["part"] if row["layer"] is None else f"{row['part']} of layer {row['layer']}"
        oracle = "no exact gradient" if row["oracle"] is None else f"exact gradient: {row['oracle']}"
        of_gradient = found.setdefault(f"{row['model']}, {row['point']}: gradient of the {layer}", {})
        of_gradient.setdefault(f"{row['objective']}; {oracle}", []).append(row)
    return {
        f"{gradient}\n{words}": group for gradient, groups in found.items() for words, group in groups.items()
    }


def show_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The estimators of one gradient: bias and variance relative to its squared norm, and the cost."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    shown.add_column("estimator", overflow="fold", max_width=_NAME_WIDTH)
    for name, width in (("bias", 16), ("variance", 8), ("cosine", 7), ("passes", 6), ("ms", 6)):
        shown.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        cells = (_bias(row), *(_short(row[key]) for key in ("variance", "cosine", "passes", "milliseconds")))
        shown.add_row(Text(_broken(row["estimator"], _NAME_WIDTH)), *cells)
    console.print(shown, "")


def _show_training(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("depth", justify="right", no_wrap=True, min_width=5)
    shown.add_column("estimator", overflow="fold", max_width=2 * _NAME_WIDTH - 10)
    for name, width in (("greedy NLL", 10), ("NLL", 7), ("seconds", 7)):
        shown.add_column(name, justify="right", no_wrap=True, min_width=width)
    for run in runs:
        name = Text(_broken(run["estimator"], 2 * _NAME_WIDTH - 10))
        if run.get("error"):
            shown.add_row(str(run["depth"]), name, "-", "-", "-")
        else:
            nll = f"{run['nll']:.1f}" + (" " if run["kind"] == "exact" else "*")
            greedy, seconds = f"{run['greedy_nll']:.1f}", f"{run['seconds']:.1f}"
            shown.add_row(str(run["depth"]), name, greedy, nll, seconds)
    console.print("Negative log-likelihood of the test data, in nats (lower is better); * is a bound")
    console.print(shown)


def _broken(text: str, width: int) -> str:
    """An estimator's text in lines of a width, broken after a colon or a comma.

    >>> print(_broken("special-case:rewards=all,baseline=none", 26))
    special-case:rewards=all,
     baseline=none
    """
    lines = [""]
    for word in re.findall(r"[^:,]+[:,]?", text):
        if lines[-1] and len(lines[-1] + word) > width:
            lines.append(" ")
        lines[-1] += word
    return "\n".join(lines)


def _bias(row: Mapping[str, Any]) -> str:
    if row["bias"] is None:
        return "no oracle" if row["oracle"] is None else "-"
    if row["bias_stderr"] == 0:
        return _short(row["bias"])
    return f"{row['bias']:.1e} ± {row['bias_stderr']:.0e}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.3g}"
