"""Orderings of features, and masks of coupling layers, from short names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xorflow.errors import ModelError

Order = str | Sequence[int]


def resolve_order(order: Order, features: int, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """The features in the order in which they are visited.

    `"natural"`, `"reversed"`, `"random"` (seed 0), `"random:SEED"`, or the permutation itself; of an image, whose `shape` is
    given, also `"columns"` (column by column) and `"columns-reversed"`.

    >>> resolve_order("reversed", 3)
    (2, 1, 0)
    >>> resolve_order("columns", 6, shape=(2, 3))
    (0, 3, 1, 4, 2, 5)
    """
    if isinstance(order, str):
        return _named_order(order, features, shape)
    visited = tuple(int(d) for d in order)
    if sorted(visited) != list(range(features)):
        raise ModelError(
            f"an ordering names each of the features 0..{features - 1} once, and got {_shorten(visited)}"
        )
    return visited


def _named_order(order: str, features: int, shape: Sequence[int] | None) -> tuple[int, ...]:
    if order == "natural":
        return tuple(range(features))
    if order == "reversed":
        return tuple(reversed(range(features)))
    if order in ("columns", "columns-reversed"):
        rows, columns = image_shape(shape, features, f"the ordering {order!r}")
        visited = [row * columns + column for column in range(columns) for row in range(rows)]
        return tuple(visited if order == "columns" else reversed(visited))
    if (seed := _random_seed(order)) is not None:
        return tuple(int(d) for d in _random_keys(seed, features).argsort(kind="stable"))
    raise ModelError(
        "an ordering is 'natural', 'reversed', 'random', 'random:SEED', for images 'columns' or 'columns-reversed', or a "
        f"permutation, and got {order!r}"
    )


def image_shape(shape: Sequence[int] | None, features: int, what: str) -> tuple[int, int]:
    """Rows and columns of an image of that many features; `what` needs them."""
    if shape is None or len(shape) != 2 or shape[0] * shape[1] != features:
        came = None if shape is None else tuple(shape)
        raise ModelError(
            f"{what} needs the two-dimensional shape of {features} features, and got shape={came}"
        )
    return int(shape[0]), int(shape[1])


def ranks(order: Sequence[int]) -> Tensor:
    """rank[d] = how many features are visited before d."""
    rank = torch.empty(len(order), dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(len(order))
    return rank


def coupling_mask(
    mask: str | Sequence[bool] | Tensor,
    features: int,
    *,
    shape: Sequence[int] | None = None,
    flip: bool = False,
) -> Tensor:
    """Which features a coupling layer sees and leaves alone (True); it transforms the others.

    `"halves"`, `"alternate"`, `"checkerboard"` (needs the image's `shape`), `"random"`, `"random:SEED"`, or booleans.

    >>> coupling_mask("halves", 5).tolist()
    [True, True, False, False, False]
    """
    seen = _named_mask(mask, features, shape) if isinstance(mask, str) else torch.as_tensor(mask).bool()
    if seen.shape != (features,):
        raise ModelError(
            f"a coupling mask has one entry for each of {features} features, got {tuple(seen.shape)}"
        )
    if seen.all() or not seen.any():
        raise ModelError(
            f"a coupling mask must leave some features seen and some transformed, and got all {features} alike; "
            "use MADE for a single feature"
        )
    return ~seen if flip else seen


def _named_mask(mask: str, features: int, shape: Sequence[int] | None) -> Tensor:
    index = torch.arange(features)
    if mask == "halves":
        return index < features // 2
    if mask == "alternate":
        return index % 2 == 1
    if mask == "checkerboard":
        _, columns = image_shape(shape, features, "a checkerboard mask")
        return (index // columns + index % columns) % 2 == 0
    if (seed := _random_seed(mask)) is not None:
        place = torch.from_numpy(_random_keys(seed, features).argsort(kind="stable").argsort())
        return place < features // 2
    raise ModelError(
        "a coupling mask is 'halves', 'alternate', 'checkerboard', 'random', 'random:SEED' or booleans, "
        f"and got {mask!r}"
    )


def _random_seed(name: str) -> int | None:
    head, _, tail = name.partition(":")
    if head != "random":
        return None
    if tail and not tail.isdecimal():
        raise ModelError(f"the seed in 'random:SEED' is a whole number, and got {tail!r}")
    return int(tail or 0)


def _random_keys(seed: int, features: int) -> np.ndarray:
    # raw Philox output: the same permutation on every machine and version, so that a checkpoint stays readable
    return np.random.Philox(key=seed).random_raw(features)


def _shorten(values: Sequence[int]) -> str:
    return f"{list(values[:8])}{' ...' if len(values) > 8 else ''}"
