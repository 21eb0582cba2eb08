"""The public edge: whatever holds integers comes in, an int64 tensor or a `DataError` comes out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xorflow.errors import DataError

_SMALL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def validate(x: Any, categories: Sequence[int], *, allow_empty: bool = False) -> Tensor:
    """Check values of shape (..., D) against 0..K_d - 1 for each feature d; return them as int64.

    Takes tensors, arrays and lists of bool, any integer type, or floats that hold integers. The result stays
    on the device of `x`; one host synchronisation when all is well. No rows at all are an error unless `allow_empty`.

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
    if values.numel() == 0:
        if allow_empty:
            return values.to(torch.int64)
        raise DataError(f"data must have at least one row, got shape {tuple(values.shape)}")
    bound = _bound(categories, values.device)
    if values.is_floating_point():
        bad = (values != values.floor()) | (values < 0) | (values >= bound)  # NaN differs from itself
    else:
        values = values.to(torch.int64)
        bad = (values < 0) | (values >= bound)
    if bool(bad.any()):
        raise _complaint(values, bad, categories)
    return values.to(torch.int64)


def whole(values: Tensor) -> Tensor:
    """The same values in an integer type, refusing NaN, fractions and floats too large to be exact."""
    if not values.is_floating_point():
        return values
    bad = (values != values.floor()) | (values.abs() > 2**53)
    if bool(bad.any()):
        raise _complaint(values, bad, None)
    return values.to(torch.int64)


def to_tensor(x: Any) -> Tensor:
    """A tensor of a type that torch computes with: uint8, a signed integer, float32 or float64."""
    if not isinstance(x, Tensor):
        x = _from_array(x)
    if x.is_complex() or x.is_quantized or x.is_sparse:
        raise DataError(f"data must be a dense tensor of integers, got {x.dtype} ({x.layout})")
    x = x.detach()
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    if x.is_floating_point():
        return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    return x if x.dtype in _SMALL else x.to(torch.int64)


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


def _bound(categories: Sequence[int], device: torch.device) -> int | Tensor:
    if len(set(categories)) == 1:
        return categories[0]
    return torch.tensor(tuple(categories), dtype=torch.int64).to(device, non_blocking=True)  # (D,)


def _complaint(values: Tensor, bad: Tensor, categories: Sequence[int] | None) -> DataError:
    """The error for the first bad value. Slow: it is read back from the device."""
    index = [int(i) for i in bad.nonzero()[0]]
    value = values[tuple(index)].item()
    *rows, feature = index
    place = f"row {rows[0]}, " if len(rows) == 1 else f"index {tuple(rows)}, " if rows else ""
    place += f"feature {feature} (both from 0)" if len(rows) == 1 else f"feature {feature}"
    if value != value:
        return DataError(f"discrete data has no NaN: {place}; drop the row, or code 'missing' as a category")
    if categories is None or value != value // 1 or value in (float("inf"), float("-inf")):
        return DataError(f"values must be integers: {place} holds {value}; round or re-code the data")
    k = categories[feature]
    return DataError(
        f"values must lie in 0..K-1: {place} holds {int(value)} where K = {k}, so 0..{k - 1}"
        "; re-code the value, or state more categories"
    )
