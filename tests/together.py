"""Small training runs, made by one process or by several at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tiny_runs import rows_array
from xorflow import MADE, MLP, CausalTransformer, FactorisedBase, LatentFlow, Layer, Mixture
from xorflow._distributed import rank
from xorflow.conditioners import BoostedTrees
from xorflow.data import Dataset, Split, load
from xorflow.estimators import (
    ELBO,
    VIMCO,
    Bound,
    Estimator,
    FeatureScale,
    MaximumLikelihood,
    OneScale,
    Relax,
    ScoreFunction,
)
from xorflow.training import Options, Trainer
from xorflow.training.checkpoint import save_tensors
from xorflow.training.registry import Trainable

ROWS, BATCH, STEPS = 170, 17, 50


@dataclass(frozen=True)
class Case:
    """A model, an estimator and options of training."""

    flow: Callable[[], Trainable]
    estimator: Estimator
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "binary"


def made(
    layers: int = 1, *, posterior: bool = False, categories: int = 2, dropout: float = 0.0
) -> LatentFlow:
    parts = [
        Layer(
            MADE(6, (8,), categories=categories, dropout=dropout),
            posterior=MLP(6, (8,), categories=categories) if posterior else None,
        )
        for _ in range(layers)
    ]
    return LatentFlow(parts, FactorisedBase(6, categories=categories, learned=True))


def mixture() -> Mixture:
    orders = ("natural", "reversed", "random:1")
    flows = [
        LatentFlow([Layer(MADE(6, (8,), order=order))], FactorisedBase(6, p0=0.9, learned=True))
        for order in orders
    ]
    return Mixture(flows)


def transformer() -> LatentFlow:
    net = CausalTransformer(6, width=8, depth=1, heads=2, dropout=0.0)
    return LatentFlow([Layer(net)], FactorisedBase(6, learned=True))


CASES = {
    "maximum likelihood": Case(made, MaximumLikelihood(), {"average": 0.9, "clip": 0.1}),
    "of two layers, in parts": Case(
        lambda: made(2, categories=3), MaximumLikelihood(2), {"average": 0.9, "accumulate": 2}, "three values"
    ),
    "running mean and one scale": Case(
        lambda: made(2), ScoreFunction(Bound(0.1, 0.5), standardise=OneScale())
    ),
    "scales by feature": Case(
        made, ScoreFunction(standardise=FeatureScale(decay=0.5)), {"optimiser": "sgd", "lr": 0.1}
    ),
    "posterior": Case(lambda: made(2, posterior=True), ScoreFunction(ELBO("cross-entropy"))),
    "RELAX": Case(lambda: made(2), Relax(4)),
    "VIMCO": Case(lambda: made(2), VIMCO(3)),
    "mixture": Case(mixture, MaximumLikelihood()),
    "mixture, split batch": Case(mixture, MaximumLikelihood(split_batch=True)),
    "images, soft targets": Case(made, MaximumLikelihood(soft_targets=True), data="images"),
    "images": Case(made, MaximumLikelihood(), {"weight_decay": 0.1, "optimiser": "adamw"}, "images"),
    "transformer": Case(transformer, MaximumLikelihood(), {"optimiser": "muon", "warmup": 9}),
    "validation": Case(
        made, MaximumLikelihood(), {"validation_rows": 31, "lr": 0.3, "patience": 2, "epochs": 30}
    ),
    "validation by a bound": Case(lambda: made(2), MaximumLikelihood(), {"validation_rows": 31, "lr": 0.1}),
}
"""All that the weights of a run depend on, in batches of 17 rows, which two processes share as 9 and 8."""

DROPOUT = Case(lambda: made(dropout=0.3), MaximumLikelihood())


def dataset(kind: str, validation: int = 0) -> Dataset:
    x = torch.from_numpy(rows_array(ROWS + validation))
    if kind == "images":
        return Dataset("images", Split(x * 100, stochastic=True), None, None, categories=(2,) * 6)
    x = x if kind == "three values" else (x > 0).to(torch.uint8)
    held_out = Split(x[ROWS:]) if validation else None
    return Dataset(
        "rows", Split(x[:ROWS]), held_out, None, categories=(3 if kind == "three values" else 2,) * 6
    )


def trained(case: Case) -> dict[str, Tensor]:
    """All weights after 50 steps in float64, and the running state of the estimator."""
    given = {"epochs": STEPS * BATCH // ROWS, "lr": 0.01} | case.options
    data = dataset(case.data, given.pop("validation_rows", 0))
    options = Options(data="rows", layers=None, batch_size=BATCH, precision="64-true", device="cpu").replace(
        **given
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow = case.flow()
    trainer = Trainer(flow, copy.deepcopy(case.estimator), data, options)
    trainer.train()
    state = torch.tensor(
        [trainer.progress.step, trainer.progress.best_epoch or 0, trainer.progress.best_nll or 0.0]
    )
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()} | {
        "progress": state.double()
    }


def write_rows(folder: Path) -> None:
    """Two files of 90 rows, in row groups of 20."""
    folder.mkdir()
    rows = rows_array(180)
    for number, part in enumerate((rows[:90], rows[90:])):
        table = pa.table({f"c{d}": part[:, d] for d in range(part.shape[1])})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)


def streaming(folder: Path) -> Trainer:
    """A score function with the rows of a step from their files, 17 in all."""
    data = load(folder, stream="always", validation=0, test=0)
    options = Options(data="rows", layers=None, batch_size=BATCH, precision="64-true", device="cpu", epochs=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Layer(MADE(data.features, (8,), categories=data.categories)) for _ in range(2)]
        flow = LatentFlow(layers, FactorisedBase(data.features, categories=data.categories, learned=True))
    return Trainer(flow, ScoreFunction(), data, options)


def streamed(folder: Path) -> dict[str, Tensor]:
    """The weights at the end."""
    trainer = streaming(folder)
    trainer.train()
    return dict(trainer.module.state_dict())


def trees() -> dict[str, Tensor]:
    x = torch.from_numpy(rows_array(400))
    net = BoostedTrees(6, categories=3).fit(x[:300], x[300:])
    return dict(net.state_dict())


def train_all(folder: Path) -> None:
    """Every case, the weights of each in files of its name in a folder, which is kept by one process."""
    results = {name: trained(case) for name, case in CASES.items()}
    results["streamed"] = streamed(folder / "rows")
    results |= {"dropout": trained(DROPOUT), "dropout again": trained(DROPOUT), "trees": trees()}
    for name, tensors in results.items():
        save_tensors(folder / str(rank()), name, tensors)
