"""Doors in Python: fit, load, log_prob, sample and what is beside them, and scikit-learn's, with arguments that do not fit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import xorflow as xf
from attack.damage import TEXTS, VALUES, Chance
from attack.data_files import integers, odd_array
from attack.rule import Case, require
from attack.tables import frame
from attack.world import FINISHED
from tiny_runs import rows_array, tiny_dataset, tiny_flow
from xorflow import UserError
from xorflow.data import Dataset, Split
from xorflow.data.tables import write_table

TABLE = pa.table({name: ["x", "y", "x"] for name in "abcdef"})

_TYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bool,
)


def odd_tensor(chance: Chance, width: int) -> Any:
    """Rows of a model, nearly, or anything that could be taken for rows."""
    good = torch.from_numpy(rows_array(8))[:, :width].to(chance.choice(_TYPES)).clamp(0, 1)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: good,
        lambda: good[:0],
        lambda: good[0],
        lambda: good[None, None],
        lambda: good[:, :-1],
        lambda: good.t(),
        lambda: good.to(torch.int64) + 1000,
        lambda: good.to(torch.int64) - 1,
        lambda: good + 0.5,
        lambda: good * float("nan"),
        lambda: good.to(torch.bfloat16),
        lambda: good.to(torch.complex64),
        lambda: good.to("meta"),
        lambda: good.to_sparse() if good.dtype != torch.bool else good,
        lambda: good.numpy(),
        lambda: good.numpy()[::-1, ::-1],
        lambda: good.tolist(),
        lambda: [good.tolist()[0], [1]],
        lambda: torch.tensor(3),
        lambda: torch.zeros(2, width, dtype=torch.float16),
        lambda: torch.full((2, width), 1e300, dtype=torch.float64),
        lambda: torch.full((2, width), 2**63 - 1),
        lambda: odd_array(chance),
        lambda: None,
        lambda: "rows",
        lambda: {"x": good},
    )
    return chance.choice(makers)()


def _flow(case: Case) -> Any:
    return xf.load(case.world.run(case.chance.choice(FINISHED)))


def log_prob(case: Case) -> None:
    """Rows of any shape and type: log p of each, or an error on purpose."""
    flow = _flow(case)
    x = odd_tensor(case.chance, flow.features)
    case.note("x", repr(x)[:200])
    how: Callable[[], Any] = case.chance.choice(
        (
            lambda: flow().log_prob(x),
            lambda: flow.greedy()().log_prob(x),
            lambda: xf.evaluate.exact(flow, x).values,
            lambda: xf.evaluate.greedy(flow, x).values,
            lambda: xf.evaluate.importance(flow, x, samples=2).values,
        )
    )
    found = case.python(how, also=(TypeError,))
    if not isinstance(found, Exception):
        require(bool(found.isfinite().all()), "wrong", f"log p of {found.flatten()[:5]}")


def numbers(case: Case) -> None:
    """Samples, and importance samples, of any count."""
    flow, chance = _flow(case), case.chance
    value = chance.choice(
        (*VALUES, *VALUES, *TEXTS, (2, 3), (0,), (-1,), [4], torch.tensor(3), np.int64(4), ())
    )
    few = (
        value if not isinstance(value, int) or value < 1000 else 1000
    )  # so many samples take years, which is no hang
    case.note("value", repr(value)[:200])
    x = torch.zeros(2, flow.features, dtype=torch.int64)
    how: Callable[[], Any] = chance.choice(
        (
            lambda: flow().sample(value if isinstance(value, tuple) else (value,)),
            lambda: xf.evaluate.importance(flow, x, samples=few).values,
            lambda: xf.evaluate.exact(flow, x, memory=value).values,
        )
    )
    found = case.python(how, also=(TypeError, OverflowError))
    if isinstance(found, torch.Tensor) and not found.is_floating_point():
        sizes = torch.tensor(flow.states.sizes)
        require(
            found.numel() == 0 or bool(((found >= 0) & (found < sizes)).all()),
            "wrong",
            "samples outside 0..K-1",
        )


def datasets(case: Case) -> None:
    """Splits and data sets of any tensors, and the files that rows are written to."""
    chance = case.chance
    x = odd_tensor(chance, 6)
    case.note("x", repr(x)[:200])
    categories = chance.choice(((3,) * 6, (2,) * 6, (3,), 3, (), (0,) * 6, (3.0,) * 6, (3, 2)))
    path = case.folder / chance.choice(("out.npy", "out.csv", "out.txt", "none/x.csv"))
    how: Callable[[], Any] = chance.choice(
        (
            lambda: xf.data.validate(x, categories),
            lambda: Dataset(
                "x",
                Split(x if isinstance(x, torch.Tensor) else torch.zeros(3)),
                None,
                None,
                categories=categories,
            ),
            lambda: xf.data.write_rows(path, x, None),
            lambda: xf.data.Schema.fit(TABLE).decode(x),
            lambda: xf.data.Schema.fit(TABLE).encode(x),
            lambda: xf.data.load(x),
        )
    )
    found = case.python(how, also=(TypeError,), writes=(path.name,))
    require(not path.exists() or found is None, "made", "a file beside an error")


def fit(case: Case) -> None:
    """`fit` with data, contexts and options that do not fit."""
    chance = case.chance
    flow = tiny_flow(context=chance.choice((0, 0, 3)), layers=chance.choice((1, 2)))
    dataset = tiny_dataset(context=chance.random() < 0.3, validation=chance.random() < 0.7, rows=100)
    if chance.random() < 0.3:
        values = dataset.train.values[:, : chance.choice((6, 5))]
        dataset = Dataset(
            "x", Split(values), None, None, categories=(chance.choice((2, 3, 4)),) * values.shape[1]
        )
    names = (
        "epochs",
        "batch_size",
        "lr",
        "clip",
        "average",
        "precision",
        "device",
        "patience",
        "data",
        "layers",
        "seed",
        "magic",
    )
    options: dict[str, Any] = {"epochs": 1, "device": "cpu", "batch_size": 32, "evaluation_samples": 2}
    for name in chance.sample(names, chance.choice((0, 1, 1, 2))):
        options[name] = chance.choice((*VALUES, 1, 2, 0.5, "cpu", "none"))
    options |= {"epochs": 1} if isinstance(options["epochs"], int) and options["epochs"] > 3 else {}
    init = chance.choice(("data", "random", "random", "biases", None, 3))
    case.note(options, "init", init)
    out = chance.choice((None, case.folder / "run"))
    found = case.python(
        lambda: xf.fit(flow, dataset, init=init, out=out, **options), also=(TypeError,), writes=("run",)
    )
    if isinstance(found, dict) and out is not None:
        again = case.python(lambda: xf.load(out))
        require(not isinstance(again, UserError), "wrong", f"what was saved is not loaded: {again}")
        same = all(torch.equal(t, again.state_dict()[name]) for name, t in flow.state_dict().items())
        require(same, "wrong", "other weights came back")


def save(case: Case) -> None:
    """`save` of models with schemas and data of theirs or of others; commands take the folder."""
    chance = case.chance
    schema = xf.data.Schema.fit(TABLE)
    sizes = chance.choice((schema.categories, schema.categories, schema.categories, (3,) * 6, (2, 2)))
    base = xf.FactorisedBase(len(sizes), categories=sizes, learned=True)
    flow = xf.LatentFlow([xf.Layer(xf.MADE(len(sizes), (4,), categories=sizes))], base)
    write_table(case.folder / "rows.parquet", TABLE, {})
    data = chance.choice((None, None, case.folder / "rows.parquet", case.world.people, *TEXTS))
    of_table = chance.random() < 0.5
    case.note(sizes, of_table, repr(data)[:100])
    run = case.folder / "run"
    found = case.python(lambda: xf.save(flow, run, schema if of_table else None, data), writes=("run",))
    if isinstance(found, UserError):
        return
    again = case.python(lambda: xf.load(run))
    require(not isinstance(again, UserError), "wrong", f"what was saved is not loaded: {again}")
    case.command("sample", "run", "--count", 2, "--out", "new.npy", writes=("new.npy",))
    evaluated = case.command("evaluate", "run", "--json")
    require(evaluated.code == (0 if data is not None else 2), "wrong", f"evaluate: {evaluated.err}")


def load(case: Case) -> None:
    """`load` of names that are no runs, and on devices that are not there."""
    chance = case.chance
    run: Any = chance.choice(
        (*TEXTS, Path("."), case.world.people, case.world.root, case.world.run("unfinished"))
    )
    device = chance.choice(("cpu", "cpu", "cuda:7", "meta", "", "é"))
    case.note(repr(run)[:100], device)
    found = case.python(lambda: xf.load(run, device=device))
    require(isinstance(found, UserError), "wrong", f"{run!r} is a run")


SCIKIT_THERE = importlib.util.find_spec("sklearn") is not None
_REFUSED = (ValueError, TypeError)
"""What scikit-learn raises, and its tests ask for, where rows are no rows."""


def estimators(case: Case) -> None:
    """Fit an estimator on any rows, then score others."""
    from xorflow.sklearn import FlowDensity, FlowDetector

    chance = case.chance
    options: dict[str, Any] = {"minutes": 0}
    names = ("minutes", "orderings", "validation", "rare", "columns", "random_state")
    for name in chance.sample(names, chance.choice((0, 0, 1, 2))):
        options[name] = chance.choice((*VALUES, 1, 2, 3, 0.5, (4, 4)))
    case.note(options)
    rows, others = _rows(case), _rows(case)
    estimator = chance.choice((FlowDensity, FlowDetector))(**options)
    if isinstance(_told(case, lambda: estimator.fit(rows)), Exception):
        return
    scores = _told(case, lambda: estimator.score_samples(rows))
    require(
        isinstance(scores, np.ndarray) and bool(np.isfinite(scores).all()),
        "wrong",
        f"its own rows have {scores!r}",
    )
    if chance.random() < 0.5:
        drawn = _told(case, lambda: estimator.sample(chance.choice((1, 3, 50))))
        require(not isinstance(drawn, Exception), "wrong", f"no samples: {drawn!r}")
        again = _told(case, lambda: estimator.score_samples(drawn))
        require(isinstance(again, np.ndarray), "wrong", f"samples have no log p: {again!r}")
    scores = _told(case, lambda: estimator.score_samples(others))
    if isinstance(scores, np.ndarray):
        require(bool(np.isfinite(scores).all()), "wrong", f"log p of {scores[~np.isfinite(scores)][:3]}")


def _rows(case: Case) -> Any:
    chance, table = case.chance, frame(case.chance)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: table,
        lambda: table.slice(0, chance.choice((0, 1, 3))),
        lambda: integers(chance),
        lambda: integers(chance).astype(float) * chance.choice((1.0, 1e300, 1e-300, 0.1)),
        lambda: odd_array(chance),
        lambda: np.array(
            [[chance.choice((None, "a", 1, 2.5, float("nan"), True)) for _ in range(3)] for _ in range(20)],
            object,
        ),
        lambda: None,
    )
    rows = chance.choice(makers[:3] * 3 + makers)()
    case.note("rows", rows.schema.to_string()[:200] if isinstance(rows, pa.Table) else repr(rows)[:200])
    return rows


def _told(case: Case, call: Callable[[], Any]) -> Any:
    found = case.python(call, also=_REFUSED)
    arrow = isinstance(found, pa.ArrowException) and "sklearn" not in str(found)
    require(not arrow, "traceback", f"of pyarrow, not ours: {found!r}"[:300])
    return found
