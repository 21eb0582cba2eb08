"""The public edge: whatever holds integers comes in, an int64 tensor or a `DataError` comes out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xorflow.errors import DataError

LIMIT = 2**16
"""More categories than this in one column are taken for a mistake, unless `categories` states them."""

_KEPT = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64
)  # fmt: skip


def validate(x: Any, categories: Sequence[int], *, allow_empty: bool = False) -> Tensor:
    """Check values of shape (..., D) against 0..K_d - 1 for each feature d; return them as int64.

    Takes tensors, arrays and lists of bool, any integer type, or floats that hold integers. The result stays
    on the device of `x`; one host synchronisation when all is well, of floats two. No rows at all are an error unless
    `allow_empty`.

    >>> validate([[0.0, 2.0], [1.0, 0.0]], categories=(2, 3))
    tensor([[0, 2],
            [1, 0]])
    """
    values = to_tensor(x)
    may_be_narrow = not allow_empty and values.ndim > 0 and values.shape[0] == 0  # another error says more
    if values.ndim == 0 or (values.shape[-1] != len(categories) and not may_be_narrow):
        raise DataError(
            f"data must have shape (..., D) with D = {len(categories)} features, got {tuple(values.shape)}"
            "; give every row the features that the model was built for"
        )
    values = whole(values)
    if values.numel() > 0:
        require_in_range(values, categories)
    elif not allow_empty:
        raise DataError(f"data must have at least one row, got shape {tuple(values.shape)}")
    return values.to(torch.int64)


def require_in_range(values: Tensor, categories: Sequence[int]) -> None:
    """Refuse integers (..., D) that are not in 0..K_d - 1."""
    bound = torch.tensor(tuple(categories)).to(values.device, non_blocking=True)  # (D,)
    _refuse(values, (values < 0) | (values >= bound), categories)


def narrow(values: Tensor, categories: Sequence[int]) -> Tensor:
    """The values in the type that data of so many categories are kept in."""
    return values.to(torch.uint8 if max(categories) <= 256 else torch.int64)


def stated(categories: int | Sequence[int], width: int) -> tuple[int, ...]:
    """The `categories` argument as one K for each feature."""
    each = (categories,) * width if isinstance(categories, int) else tuple(map(int, categories))
    if len(each) != width:
        raise DataError(f"categories= must state one K, or one for each of {width} columns, got {len(each)}")
    if min(each) < 2:
        raise DataError(f"every feature needs at least two categories, categories= states {min(each)}")
    return each


def constant(count: int, width: int, first: str, value: str | int) -> DataError:
    """Why columns with one value are refused."""
    return DataError(
        f"a constant column carries no information, and {count} of {width} are constant: first {first}, "
        f"always {value!r}; drop them, or state how many categories there are (categories=2) if they are "
        "integers 0..K-1 that could vary"
    )


def whole(values: Tensor) -> Tensor:
    """The same values in an integer type, refusing NaN, fractions and floats too large to be exact."""
    if not values.is_floating_point():
        return values
    _refuse(values, (values != values.floor()) | (values.abs() > 2**53))  # NaN differs from itself
    return values.to(torch.int64)


def to_tensor(x: Any) -> Tensor:
    """A tensor of a type that torch computes with: uint8, a signed integer, float32 or float64."""
    if not isinstance(x, Tensor):
        x = _from_array(x)
    if x.is_complex() or x.is_quantized or x.is_sparse or x.is_meta:
        raise DataError(
            f"data must be a dense tensor of integers, with values, got {x.dtype} ({x.layout}) on {x.device}; make it one"
        )
    x = x.detach()
    if x.dtype in _KEPT:
        return x
    return x.to(
        torch.uint8 if x.dtype == torch.bool else torch.float32 if x.is_floating_point() else torch.int64
    )


def _from_array(x: Any) -> Tensor:
    try:
        array = np.asarray(x)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"data must be a rectangular array of integers: {error}") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(
            f"data must be integers (or floats that hold integers), got an array of {array.dtype}"
            "; encode texts and objects as 0..K-1 first, or keep them in a .csv file"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise DataError(f"values must fit in 63 bits, got {int(array.max())}; re-code them as 0..K-1")
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    native = np.dtype(np.int64) if wide else array.dtype.newbyteorder("=")
    # torch shares memory only with writable arrays of positive strides; copy just those that are neither.
    return torch.from_numpy(np.require(array.astype(native, copy=False), requirements=["C", "W"]))


def _refuse(values: Tensor, bad: Tensor, categories: Sequence[int] | None = None) -> None:
    """Raise an error for the first bad value, if there is one."""
    if not bool(bad.any()):
        return
    *rows, feature = index = tuple(bad.nonzero()[0].tolist())
    value = values[index].item()
    place = f"row {rows[0]}, " if len(rows) == 1 else f"index {tuple(rows)}, " if rows else ""
    place += f"feature {feature} (both from 0)" if len(rows) == 1 else f"feature {feature}"
    if value != value:
        raise DataError(f"discrete data has no NaN: {place}; drop the row, or code 'missing' as a category")
    if categories is None:
        raise DataError(
            f"values must be integers, as floats up to 2^53: {place} holds {value}; round or re-code them"
        )
    k = categories[feature]
    raise DataError(
        f"values must lie in 0..K-1: {place} holds {value} where K = {k}, so 0..{k - 1}"
        "; re-code the value, or state more categories"
    )
