"""How boosted trees are fitted: LightGBM, column by column, each stopped where its validation rows say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Event
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xorflow import _distributed as distributed
from xorflow._math import pair_information
from xorflow.errors import ConfigError

LEAVES = 8
"""The most of a tree; a byte has a bit for each."""


@dataclass(frozen=True)
class Boosting:
    """How trees are fitted.

    Attributes:
        rate: what each tree is multiplied by.
        rounds: the most of a column.
        patience: a column ends when so many rounds did not improve its validation likelihood.
        rows: the fewest of a leaf.
        l2: what is added to the Hessian of a leaf.
        most: columns of more values than this get none, and keep the frequencies of their values: a round is a tree for each.
        seen: the most columns that a column's trees look at; of more, those with the greatest mutual information with it.
    """

    rate: float = 0.1
    rounds: int = 300
    patience: int = 15
    rows: int = 5
    l2: float = 1.0
    most: int = 32
    seen: int = 128


@dataclass(frozen=True)
class Tree:
    """Nodes as (feature, number of the split among those of it), the leaves that each keeps where a row goes right, values."""

    nodes: list[tuple[int, int]]
    kept: list[int]
    values: list[float]


@dataclass(frozen=True)
class Column:
    """The logits of a column before any tree, and the trees of each logit."""

    levels: NDArray[np.float64]
    trees: list[list[Tree]]


Splits = list[dict[bytes, int]]
"""Of each feature the splits, numbered: which of its values go left, as the bytes of booleans."""


def boosted(
    x: NDArray[Any],
    validation: NDArray[Any],
    sizes: Sequence[int],
    order: Sequence[int],
    ordered: Sequence[int],
    settings: Boosting,
    threads: int,
    stopping: Event,
) -> tuple[dict[int, Column], Splits]:
    """Trees for each column, on the columns before it in an ordering, and the splits that they use."""
    visited = list(order)
    # arranged by the ordering, column after column, so that those before one lie together
    train, other = (np.asfortranarray(rows[:, visited].astype(np.float32)) for rows in (x, validation))
    before = _before(train, np.array([sizes[d] for d in visited]), settings.seen)

    def of_rank(rank: int) -> _Fitted:
        if stopping.is_set():
            raise CancelledError
        size, seen = sizes[visited[rank]], before[rank]
        target, held_out = (rows[:, rank].astype(np.int64) for rows in (train, other))
        counts = np.bincount(target, minlength=size) + 0.5
        levels = np.log(counts / counts.sum())
        if rank == 0 or size == 1 or size > settings.most or (counts > 1).sum() < 2:
            return levels, []
        of_seen = [(sizes[d], d not in ordered) for d in (visited[rank] for rank in seen)]
        categorical = [place for place, (size, unordered) in enumerate(of_seen) if unordered and size > 2]
        parameters = _parameters(size, max(size for size, _ in of_seen), settings)
        rows = (train[:, seen], target), (other[:, seen], held_out)
        return levels, _fitted(rows, levels, categorical, parameters, settings)

    with ThreadPoolExecutor(threads) as pool:
        mine = range(distributed.rank(), len(sizes), distributed.process_count())
        fitted = _of_all(list(pool.map(of_rank, mine)), len(sizes))
    columns: dict[int, Column] = {}
    splits: Splits = [{} for _ in sizes]
    for d, seen, (levels, texts) in zip(visited, before, fitted, strict=True):
        logits = 1 if sizes[d] == 2 else sizes[d]
        trees: list[list[Tree]] = [[] for _ in range(logits)]
        for number, text in enumerate(texts):
            if int(text["num_leaves"][0]) > 1:
                trees[number % logits].append(_tree(text, splits, [visited[rank] for rank in seen], sizes))
        columns[d] = Column(levels[1:] - levels[0] if logits == 1 else levels, trees)
    return columns, splits


_Fitted = tuple[NDArray[np.float64], list[dict[str, list[str]]]]
"""The levels of a column, and its trees as LightGBM describes them."""


def _of_all(fitted: list[_Fitted], features: int) -> list[_Fitted]:
    """All columns, of which each process has fitted every n-th."""
    count = distributed.process_count()
    if count == 1:
        return fitted
    mine = json.dumps([(levels.tolist(), texts) for levels, texts in fitted]).encode()
    each = [json.loads(content) for content in distributed.gathered(mine)]
    both = (each[column % count][column // count] for column in range(features))
    return [(np.array(levels), texts) for levels, texts in both]


_MOST_VALUES = 2**12
"""Of all columns together, in the table of all pairs; values that lie side by side share a place where there are more."""


def _before(train: NDArray[np.float32], sizes: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """Which columns before each its trees look at."""
    before = [np.arange(rank) for rank in range(len(sizes))]
    if len(sizes) <= most + 1:
        return before
    kept = np.minimum(sizes, max(2, _MOST_VALUES // len(sizes)))
    places = torch.from_numpy(train.astype(np.int64) * kept // sizes)
    _, information = pair_information(places, torch.from_numpy(kept))
    # rounded, so that no sequence of sums decides between columns that tell as much
    ranked = (-information.numpy().round(12)).argsort(1, kind="stable")
    return [
        every if len(every) <= most else np.sort(ranked[rank][ranked[rank] < rank][:most])
        for rank, every in enumerate(before)
    ]


def _parameters(size: int, bins: int, settings: Boosting) -> dict[str, Any]:
    """LightGBM's, for a target of so many values."""
    kind = {"objective": "multiclass", "metric": "multi_logloss", "num_class": size}
    if size == 2:
        kind = {"objective": "binary", "metric": "binary_logloss"}
    return kind | {
        "learning_rate": settings.rate,
        "num_leaves": LEAVES,
        "min_data_in_leaf": settings.rows,
        "min_data_per_group": settings.rows,
        "lambda_l2": settings.l2,
        "max_bin": max(bins, 2),
        "min_data_in_bin": 1,
        "feature_pre_filter": False,
        "boost_from_average": False,
        "use_missing": False,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": 1,
        "seed": 0,
        "verbosity": -1,
    }


_Rows = tuple[NDArray[np.float32], NDArray[np.int64]]
"""What is seen, and the target."""


def _fitted(
    rows: tuple[_Rows, _Rows],
    levels: NDArray[np.float64],
    categorical: list[int],
    parameters: dict[str, Any],
    settings: Boosting,
) -> list[dict[str, list[str]]]:
    """The trees of one column, as LightGBM describes them, round by round and logit by logit."""
    lightgbm = _lightgbm()
    start = np.array([levels[1] - levels[0]]) if len(levels) == 2 else levels
    train, held_out = (
        lightgbm.Dataset(
            seen,
            target,
            init_score=np.repeat(start, len(target)),
            categorical_feature=categorical,
            params=parameters,
        )
        for seen, target in rows
    )
    held_out.reference = train
    losses: dict[str, Any] = {}
    booster = lightgbm.train(
        parameters,
        train,
        settings.rounds,
        valid_sets=[held_out],
        callbacks=[
            lightgbm.early_stopping(settings.patience, verbose=False),
            lightgbm.record_evaluation(losses),
        ],
    )
    if min(losses["valid_0"][parameters["metric"]]) >= -levels[rows[1][1]].mean():
        return []
    described = booster.model_to_string(num_iteration=booster.best_iteration).split("\nTree=")[1:]
    return [
        {
            key: value.split()
            for key, _, value in (line.partition("=") for line in tree.split("\n"))
            if value and key
        }
        for tree in described
    ]


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise ConfigError(
            "boosted trees are fitted by LightGBM, which is not installed; pip install 'xorflow[trees]'"
        ) from None
    return lightgbm


def _tree(text: dict[str, list[str]], splits: Splits, seen: Sequence[int], sizes: Sequence[int]) -> Tree:
    """A described tree of some features, with its leaves renumbered from left to right."""
    children = [[*map(int, text[side])] for side in ("left_child", "right_child")]
    kept, values = [2**LEAVES - 1] * (LEAVES - 1), [0.0] * LEAVES
    leaves = iter(range(LEAVES))

    def visit(node: int) -> int:
        """The byte of the leaves below; negative nodes are leaves."""
        if node < 0:
            place = next(leaves)
            values[place] = float(text["leaf_value"][~node])
            return 1 << place
        left, right = (visit(side[node]) for side in children)
        kept[node] = 2**LEAVES - 1 - left
        return left | right

    visit(0)
    nodes = []
    for node, place in enumerate(map(int, text["split_feature"])):
        feature = seen[place]
        numbers, goes_left = splits[feature], _goes_left(text, node, sizes[feature]).tobytes()
        nodes.append((feature, numbers.setdefault(goes_left, len(numbers))))
    return Tree(nodes + nodes[:1] * (LEAVES - 1 - len(nodes)), kept, values)


def _goes_left(text: dict[str, list[str]], node: int, size: int) -> NDArray[np.bool_]:
    """Which values of its feature go left at a node."""
    threshold, values = text["threshold"][node], np.arange(size)
    if not int(text["decision_type"][node]) & 1:  # no set of categories
        return values <= float(threshold)
    first, last = (int(text["cat_boundaries"][int(threshold) + end]) for end in (0, 1))
    masks = np.array([*map(int, text["cat_threshold"][first:last])], dtype=np.uint32)
    member = np.zeros(max(size, 32 * len(masks)), dtype=np.bool_)
    member[: 32 * len(masks)] = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return member[:size]


def available() -> bool:
    """Whether trees can be fitted here."""
    return find_spec("lightgbm") is not None
