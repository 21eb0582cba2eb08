"""What is attacked: small data, and small runs of every kind, made once and copied into the folder of each case."""

from __future__ import annotations

import datetime
import importlib.util
import random
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from tiny_runs import DEEP, StopAt, images_file, people_file, rows_file, tiny_dataset, tiny_options, train_run
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, fit
from xorflow.conditioners import BoostedTrees, Stacked
from xorflow.data.tables import write_table
from xorflow.training import Interrupted, combine_runs

COUPLING = {
    "layers": 2,
    "conditioner": "coupling:hidden=8,mask=halves",
    "posterior": "mlp:hidden=8",
    "estimator": "score-function:objective=elbo",
}
TRANSFORMER = {"conditioner": "transformer:width=8,depth=1,heads=2"}
MIXTURE = {"mixture": "natural,reversed", "conditioner": "made:hidden=8"}


class World:
    """Data and runs below a folder; nothing in it changes once it is made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "cases"
        self.scratch.mkdir(parents=True, exist_ok=True)

    @cached_property
    def people(self) -> Path:
        return people_file(self._new("people.csv"), rows=60)

    @cached_property
    def rows(self) -> Path:
        return rows_file(self._new("rows.npy"), rows=60)

    @cached_property
    def columns(self) -> Path:
        """A table of every kind of column, with gaps."""
        chance, path = random.Random(0), self._new("columns.parquet")
        count = range(60)
        table = {
            "word": [chance.choice(("a", "b", "c", None)) for _ in count],
            "truth": [chance.random() < 0.5 for _ in count],
            "whole": [chance.choice((1, 2, 3, None)) for _ in count],
            "number": [chance.choice((0.0, chance.lognormvariate(1, 2))) for _ in count],
            "day": [datetime.date(2000, 1, 1) + datetime.timedelta(chance.randrange(900)) for _ in count],
        }
        write_table(path, pa.table(table), {})
        return path

    @cached_property
    def images(self) -> Path:
        return images_file(self._new("images.npy"), rows=40)

    def run(self, kind: str) -> Path:
        """A run of a kind, finished unless it is `unfinished`."""
        folder = self.root / "runs" / kind
        if not folder.exists():
            KINDS[kind](self, folder)
        return folder

    def copy(self, kind: str, to: Path) -> Path:
        """A run in the folder of a case, which may do with it what it likes."""
        shutil.copytree(self.run(kind), to)
        return to

    def _new(self, name: str) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root / name


def _trained(data: str, **options: object) -> Callable[[World, Path], None]:
    def make(world: World, folder: Path) -> None:
        train_run(tiny_options(getattr(world, data), epochs=1, **options), folder)

    return make


def _unfinished(world: World, folder: Path) -> None:
    options = tiny_options(world.rows, epochs=3, checkpoint_seconds=0, **DEEP)
    try:
        train_run(options, folder, StopAt({3}))
    except Interrupted:
        return
    raise AssertionError("the run was not interrupted")


def _trees(world: World, folder: Path) -> None:
    """A model of trees stacked with a network, where the library that fits trees is there; without trees otherwise."""
    dataset = tiny_dataset(rows=100)
    trees = BoostedTrees(6, categories=3)
    if importlib.util.find_spec("lightgbm") is not None:
        trees.fit(dataset.train.values, dataset.train.values, threads=1)
    stacked = Stacked([trees, MADE(6, (4,), categories=3)])
    fit(
        LatentFlow([Layer(stacked)], FactorisedBase(6, categories=3, learned=True)),
        dataset,
        out=folder,
        epochs=1,
        device="cpu",
    )


def _combined(world: World, folder: Path) -> None:
    combine_runs([world.run("table"), world.run("table")], folder)


KINDS: dict[str, Callable[[World, Path], None]] = {
    "table": _trained("people"),
    "columns": _trained("columns"),
    "deep": _trained("rows", layers=2),
    "images": _trained("images"),
    "transformer": _trained("rows", **TRANSFORMER),
    "mixture": _trained("people", **MIXTURE),
    "coupling": _trained("rows", **COUPLING),
    "trees": _trees,
    "combined": _combined,
    "unfinished": _unfinished,
}
FINISHED = tuple(kind for kind in KINDS if kind != "unfinished")
