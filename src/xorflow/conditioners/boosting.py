"""How boosted trees are fitted: LightGBM, column by column, each stopped where its validation rows say."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """

    rate: float = 0.1
    rounds: int = 300
    patience: int = 15
    rows: int = 5
    l2: float = 1.0
    most: int = 32


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


@dataclass
class Forest:
    """The columns, and of each feature the splits: which of its values go left."""

    columns: list[Column]
    splits: list[list[NDArray[np.bool_]]]
    numbers: list[dict[bytes, int]] = field(default_factory=list)

    def number(self, feature: int, goes_left: NDArray[np.bool_]) -> int:
        """Of a split among those of its feature."""
        numbers = self.numbers[feature]
        key = goes_left.tobytes()
        if key not in numbers:
            numbers[key] = len(numbers)
            self.splits[feature].append(goes_left)
        return numbers[key]


def boosted(
    x: NDArray[Any],
    validation: NDArray[Any],
    sizes: Sequence[int],
    order: Sequence[int],
    ordered: Sequence[int],
    settings: Boosting,
    threads: int,
) -> Forest:
    """Trees for each column, on the columns before it in an ordering."""
    features, visited = len(sizes), list(order)
    # arranged by the ordering, column after column, so that those before one lie together
    train, other = (np.asfortranarray(rows[:, visited].astype(np.float32)) for rows in (x, validation))
    kinds = [rank for rank, d in enumerate(visited) if d not in set(ordered) and sizes[d] > 2]

    def of_rank(rank: int) -> tuple[NDArray[np.float64], list[dict[str, list[str]]]]:
        size, categorical = sizes[visited[rank]], [kind for kind in kinds if kind < rank]
        target, held_out = (rows[:, rank].astype(np.int64) for rows in (train, other))
        counts = np.bincount(target, minlength=size) + 0.5
        levels = np.log(counts / counts.sum())
        if rank == 0 or size == 1 or size > settings.most or (counts > 1).sum() < 2:
            return levels, []
        rows = (train[:, :rank], target), (other[:, :rank], held_out)
        bins = max(sizes[d] for d in visited[:rank])
        return levels, _fitted(rows, levels, categorical, bins, settings)

    with ThreadPoolExecutor(threads) as pool:
        fitted = list(pool.map(of_rank, range(features)))
    forest = Forest([], [[] for _ in sizes], [{} for _ in sizes])
    columns: dict[int, Column] = {}
    for d, (levels, texts) in zip(visited, fitted, strict=True):
        logits = 1 if sizes[d] == 2 else sizes[d]
        trees: list[list[Tree]] = [[] for _ in range(logits)]
        for number, text in enumerate(texts):
            if int(text["num_leaves"][0]) > 1:
                trees[number % logits].append(_tree(text, forest, visited, sizes))
        columns[d] = Column(levels[1:] - levels[0] if logits == 1 else levels, trees)
    forest.columns.extend(columns[d] for d in range(features))
    return forest


_Rows = tuple[NDArray[np.float32], NDArray[np.int64]]
"""What is seen, and the target."""


def _fitted(
    rows: tuple[_Rows, _Rows],
    levels: NDArray[np.float64],
    categorical: list[int],
    bins: int,
    settings: Boosting,
) -> list[dict[str, list[str]]]:
    """The trees of one column, as LightGBM describes them, round by round and logit by logit."""
    lightgbm = _lightgbm()
    binary = len(levels) == 2
    kind = {"objective": "binary"} if binary else {"objective": "multiclass", "num_class": len(levels)}
    loss = "binary_logloss" if binary else "multi_logloss"
    parameters = kind | {
        "metric": loss,
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
    start = np.array([levels[1] - levels[0]]) if binary else levels
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
    if min(losses["valid_0"][loss]) >= -levels[rows[1][1]].mean():
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


def _tree(text: dict[str, list[str]], forest: Forest, visited: Sequence[int], sizes: Sequence[int]) -> Tree:
    """A described tree, with its leaves renumbered from left to right."""
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
    for node, rank in enumerate(map(int, text["split_feature"])):
        feature = visited[rank]
        nodes.append((feature, forest.number(feature, _goes_left(text, node, sizes[feature]))))
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
