"""Data of one's own: a data set to train on, rows to be scored by a model that exists, and rows that it sampled."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xorflow._files import write_bytes
from xorflow.data.arrays import (
    ARRAYS,
    array_categories,
    as_rows,
    check_path,
    read_arrays,
    read_parts,
    single_array,
)
from xorflow.data.checks import narrow, to_tensor, validate, whole
from xorflow.data.dataset import Dataset, Split
from xorflow.data.parts import Parts
from xorflow.data.schema import Schema
from xorflow.data.schema_file import read_wishes
from xorflow.data.stream import stream_dataset, streams
from xorflow.data.table import open_rows, read_rows, table_dataset
from xorflow.data.tables import SUFFIXES, is_frame, means_several, without_formulas, write_table
from xorflow.errors import DataError

READABLE = (*ARRAYS, *SUFFIXES)
"""Suffixes of data files."""


def load(
    data: Any,
    *,
    validation: float | int | None = None,
    test: float | int | None = None,
    validation_data: Any = None,
    test_data: Any = None,
    part: str | None = None,
    seed: int = 0,
    categories: int | Sequence[int] | None = None,
    header: bool | None = None,
    schema: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    rare: int = 0,
    stream: Literal["auto", "always", "never"] = "auto",
) -> Dataset:
    """A data set from a file, a frame (of pandas, polars or pyarrow), an array or a tensor.

    Arrays, and .npy and .npz files, hold integers from 0, (N, D) or images (N, H, W); K_d is the maximum over all rows + 1,
    unless `categories` states it. A .npz file has one array (or one named 'x'), or 'train' and optionally 'validation' and
    'test'. All else is a table, whose columns get their kinds by a rule: see `Schema`. The path of a folder, or a pattern
    such as `rows/*.parquet`, is a table in several Parquet files.

    Rows that validate and test are other files or frames, are named by a column, or are drawn by `seed`; the test rows then
    depend on `seed` and `test` alone.

    Args:
        data: the training rows, or all rows.
        validation: how many rows validate, a fraction (float) or a number (int); by default a tenth, at most 100,000.
        test: how many rows test, likewise.
        validation_data: rows that validate.
        test_data: rows that test.
        part: the column of a table that says of each row `train`, `validation` or `test`.
        seed: of the split.
        categories: of arrays, K for all features or for each.
        header: whether the first line of a text file names the columns; by default a rule decides.
        schema: a schema file, or what it would hold, for columns where the rule has it wrong.
        rare: merge the values of a category that occur in fewer training rows.
        stream: whether training rows in Parquet files stay there, and are read as they are trained on; by default if their
            states would take more than a tenth of the free memory. `Dataset.train` is then a sample of them.
    """
    held_out = {"validation": validation_data, "test": test_data}
    held_out = {name: each for name, each in held_out.items() if each is not None}
    parts = Parts(validation, test, held_out, part, seed)
    if not _is_table(data):
        given = {"part": part, "header": header, "schema": schema, "rare": rare or None}
        given["stream"] = "always" if stream == "always" else None
        odd = next((name for name, value in given.items() if value is not None), None)
        if odd is not None:
            raise DataError(f"{odd}= is about tables, and {_name(data)} holds integers; leave {odd} out")
        return _array_dataset(data, parts, categories)
    if categories is not None:
        raise DataError(
            "categories= is of arrays of integers from 0, and columns of tables have kinds; leave it out"
        )
    if not all(map(_is_table, held_out.values())):
        raise DataError("all parts of a table are tables; convert the arrays among them")
    wishes = {} if schema is None else read_wishes(schema)
    if streams(data, stream):
        return stream_dataset(data, _name(data), parts, wishes=wishes, rare=rare)
    return table_dataset(data, _name(data), parts, header=header, wishes=wishes, rare=rare)


def _is_table(data: Any) -> bool:
    """Whether this is a frame, or the path of a file that holds a table; the path of no data file is an error."""
    if isinstance(data, str | os.PathLike) and not means_several(data):
        return check_path(data, READABLE).suffix.lower() in SUFFIXES
    return means_several(data) or is_frame(data)


def _name(data: Any) -> str:
    if isinstance(data, str | os.PathLike):
        return Path(data).name
    return "frame" if is_frame(data) else "array"


def _array_dataset(data: Any, parts: Parts, categories: int | Sequence[int] | None) -> Dataset:
    arrays, shape = _read_array(data)
    if "x" not in arrays and (parts.held_out or parts.validation or parts.test):
        raise DataError(
            f"{_name(data)} has its parts inside: leave out what says which rows validate or test"
        )
    for name, each in parts.held_out.items():
        other, its_shape = _read_array(each)
        if "x" not in other or its_shape != shape or other["x"].shape[1] != arrays["x"].shape[1]:
            raise DataError(
                f"all parts have rows of one shape, and {_name(each)} has others than {_name(data)}"
            )
        arrays[name] = other["x"]
    rows = parts.drawn(len(arrays["x"])) if "x" in arrays else {}
    kinds = array_categories(arrays, categories)
    arrays = {name: narrow(array, kinds) for name, array in arrays.items()}
    arrays |= {name: arrays["x"][torch.from_numpy(each)] for name, each in rows.items()}
    splits = {name: Split(array) for name, array in arrays.items() if name != "x"}
    return Dataset(
        _name(data),
        splits["train"],
        splits.get("validation"),
        splits.get("test"),
        kinds,
        shape,
        seed=parts.seed,
    )


def _read_array(data: Any) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    if isinstance(data, str | os.PathLike):
        return read_parts(Path(data))
    values, shape = as_rows(data if isinstance(data, np.ndarray) else to_tensor(data), "the array")
    return {"x": values}, shape


# ---- beside a model that exists ----


def load_rows(
    data: Any,
    *,
    categories: Sequence[int],
    schema: Schema | None = None,
    shape: Sequence[int] | None = None,
    header: bool | None = None,
) -> Tensor:
    """Rows (N, D) for a model with these `categories`: uint8 where every K <= 256, else int64.

    With a schema a table is read, by the names of its columns; otherwise arrays of integers 0..K_d - 1, and images must have
    the `shape` that the model was built for.
    """
    if schema is not None:
        return torch.from_numpy(read_rows(schema, open_rows(schema, data, header)))
    path = check_path(data, ARRAYS)
    values, row_shape = as_rows(single_array(read_arrays(path), path), str(path))
    if row_shape is not None and shape is not None and row_shape != tuple(shape):
        raise DataError(
            f"images must have the shape {tuple(shape)} of the model, those of {path} have {row_shape}"
        )
    if values.shape[1] != len(categories):
        raise DataError(
            f"the model has D = {len(categories)} features, but the rows of {path} have {values.shape[1]}"
            "; give the columns that it was trained on, in the same order"
        )
    return narrow(validate(values, categories), categories)


def write_rows(
    path: str | os.PathLike[str],
    x: Any,
    schema: Schema | None = None,
    seed: int = 0,
    *,
    quote_formulas: bool = False,
) -> None:
    """Write states `x` (N, D), which appear whole or not at all: as they are to a .npy file or, with a schema, as a table.

    Where within its state a cell of a table lies is drawn by the seed. With `quote_formulas`, cells of a table that a
    spreadsheet would compute get an apostrophe in front.
    """
    path, values = Path(path), whole(to_tensor(x)).cpu()
    if values.ndim != 2:
        raise DataError(f"rows to write must have shape (N, D), got {tuple(values.shape)}")
    if not os.path.isdir(path.parent):
        raise DataError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another"
        )
    if schema is not None:
        table = schema.with_left_out(schema.decode(values.numpy(), seed))
        write_table(path, without_formulas(table) if quote_formulas else table, schema.layout)
        return
    if path.suffix.lower() != ".npy":
        raise DataError(f"rows of integers are written to .npy files, got {path}; choose that suffix")
    small = values.numel() == 0 or (int(values.min()) >= 0 and int(values.max()) < 256)
    buffer = io.BytesIO()
    np.save(buffer, values.to(torch.uint8 if small else torch.int64).numpy(), allow_pickle=False)
    write_bytes(path, buffer.getbuffer(), "choose a folder that can be written and has room", DataError)
