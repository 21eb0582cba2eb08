"""The question of depth as an experiment: its rows, what they are worth, and what a person sees of it."""

from __future__ import annotations

from research.depth.codes import coded_flow
from research.depth.rows import DEPTH_ROWS, DepthRow
from research.depth.score import score
from research.depth.table import write_depth
from research.experiment import Experiment
from research.paper.rows import PAPER_TABLE, REFERENCES
from research.paper.score import compute
from research.results import Record
from research.tables import fixed, marked
from xorflow import LatentFlow
from xorflow.data import Dataset
from xorflow.training import BASES, CONDITIONERS, Options

_LARGE = 784


def _planned(row: DepthRow) -> Record:
    """All that a table must know about a row."""
    options = row.options()
    mask = CONDITIONERS.read(options.conditioner).get("mask")
    return {
        "id": row.id,
        "title": row.title,
        "family": row.family,
        "series": row.series,
        "base": "fixed" if row.rebased else BASES.read(options.base)["name"],
        "depth": row.depth,
        "estimator": options.estimator,
        "ordering": mask if row.family == "coupling" else options.order,
        "flow": row.flow,
        "rebased": row.rebased,
        "init": row.init,
        "metric": row.metric,
    }


def _build(row: DepthRow, options: Options, dataset: Dataset) -> LatentFlow | None:
    """The flow of a row with a code; small images have few features to spare, so that groups are small there."""
    if row.code is None:
        return None
    groups, size = row.code
    return coded_flow(groups, size if dataset.features >= _LARGE else 2, options, dataset)


def _cells(row: Record) -> list[str]:
    """Its depth, how much of it is used, and its likelihoods."""
    depths = (str(row["depth"]), str(row["effective_depth"]))
    nll = marked(row["bound"], row["kind"])
    return [row["id"], row["base"], *depths, nll, fixed(row["greedy"]), fixed(row["refit"])]


_PAPER = [{"depth": row.depth, "nll": row.nll} for row in PAPER_TABLE if row.title == "straight-through"]

DEPTH = Experiment(
    name="depth",
    summary="Compare flows of growing depth, at equal weights, with the best of depth 1.",
    examples=(
        "depth --budget smoke --rows ar-1-marginal,ar-2-code --out runs/smoke-depth",
        "depth --rows 'coupling-*-posterior' --device cuda --jobs 4",
    ),
    rows=DEPTH_ROWS,
    planned=_planned,
    about=lambda budget: {"experiment": "depth", "samples": budget.samples, "paper": _PAPER},
    score=score,
    compute=compute,
    write=write_depth,
    columns="row | >base | >depth | >used | >NLL | >greedy | >refitted",
    cells=_cells,
    levels=REFERENCES[:1],
    build=_build,
)
"""Whether depth pays."""
