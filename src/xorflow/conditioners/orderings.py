"""Orderings of features, and masks of coupling layers, from short names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from xorflow.errors import ModelError

Order = str | Sequence[int]

OF_IMAGES = ("columns", "columns-reversed", "outward", "inward")
"""Orderings that need the shape of an image."""


def resolve_order(order: Order, features: int, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """The features in the order in which they are visited.

    `"natural"`, `"reversed"`, `"random"` (seed 0), `"random:SEED"`, or the permutation itself; of an image, whose `shape` is
    given, also `"columns"` (column by column) and `"columns-reversed"`, `"outward"` (ring by ring, from the middle) and
    `"inward"`, its reverse.

    >>> resolve_order("reversed", 3)
    (2, 1, 0)
    >>> resolve_order("outward", 9, shape=(3, 3))
    (4, 0, 1, 2, 3, 5, 6, 7, 8)
    >>> resolve_order("columns", 6, shape=(2, 3))
    (0, 3, 1, 4, 2, 5)
    """
    if isinstance(order, str):
        return _named_order(order, features, shape)
    if not isinstance(order, Iterable):
        raise _no_ordering(order)
    visited = tuple(int(d) for d in order)
    if sorted(visited) != list(range(features)):
        raise ModelError(
            f"an ordering names each of the features 0..{features - 1} once, and got {_shorten(visited)}"
        )
    return visited


def _named_order(order: str, features: int, shape: Sequence[int] | None) -> tuple[int, ...]:
    if order in OF_IMAGES:
        rows, columns = image_shape(shape, features, f"the ordering {order!r}")
        pixels = np.indices((rows, columns)).reshape(2, -1).T
        middle = np.array([rows - 1, columns - 1]) / 2
        # how far each pixel is from the middle, in rows or columns, whichever are more; or in which column it is
        keys = pixels[:, 1] if "columns" in order else np.abs(pixels - middle).max(1)
    elif order in ("natural", "reversed"):
        keys = np.arange(features)
    elif (seed := _random_seed(order)) is not None:
        keys = _random_keys(seed, features)
    else:
        raise _no_ordering(order)
    visited = tuple(keys.argsort(kind="stable").tolist())
    return visited[::-1] if order in ("reversed", "columns-reversed", "inward") else visited


def _no_ordering(order: object) -> ModelError:
    return ModelError(
        f"an ordering is 'natural', 'reversed', 'random', 'random:SEED', for images {', '.join(map(repr, OF_IMAGES))}, or a "
        f"permutation, and got {order!r}"
    )


def image_shape(shape: Sequence[int] | None, features: int, what: str) -> tuple[int, int]:
    """Rows and columns of an image of that many features; `what` needs them."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else ()
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != features:
        came = sizes if isinstance(shape, Iterable) else shape
        raise ModelError(
            f"{what} needs the two-dimensional shape of {features} features, and got shape={came}"
        )
    return int(sizes[0]), int(sizes[1])


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

    `"halves"`, `"alternate"`, `"checkerboard"` (needs the image's `shape`), `"random"`, `"random:SEED"`, or booleans; or
    `"nested:LEVEL"` of an image: of the pixels of a grid, which is the coarser the higher the level, those between the points
    of the next grid are transformed, given all others. Level 0 is a checkerboard; after the last level comes the first again.

    >>> coupling_mask("halves", 5).tolist()
    [True, True, False, False, False]
    >>> [int((~coupling_mask(f"nested:{level}", 64, shape=(8, 8))).sum()) for level in range(7)]
    [32, 16, 8, 4, 2, 1, 32]
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
    head, _, level = mask.partition(":")
    if head == "nested" and level.isdecimal():
        return ~_between_grids(int(level), *image_shape(shape, features, "a nested mask"))
    if (seed := _random_seed(mask)) is not None:
        place = torch.from_numpy(_random_keys(seed, features).argsort(kind="stable").argsort())
        return place < features // 2
    raise ModelError(
        "a coupling mask is 'halves', 'alternate', 'checkerboard', 'random', 'random:SEED', 'nested:LEVEL' or booleans, "
        f"and got {mask!r}"
    )


def _between_grids(level: int, rows: int, columns: int) -> Tensor:
    """The pixels of one grid that are not of the next; grids lie around the middle, where images differ most."""
    down = (torch.arange(rows) - rows // 2)[:, None].expand(rows, columns)
    across = (torch.arange(columns) - columns // 2)[None, :].expand(rows, columns)

    def grid(number: int) -> Tensor:
        step = 2 ** (number // 2)
        points = (down % step == 0) & (across % step == 0)
        return points & ((down + across) // step % 2 == 0) if number % 2 else points

    levels = next(number for number in itertools.count() if int(grid(number).sum()) == 1)
    return (grid(level % levels) & ~grid(level % levels + 1)).flatten()


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
