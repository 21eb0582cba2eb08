"""Rows in files beside a model that exists: read to be scored, written when sampled."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xorflow._files import write_bytes
from xorflow.data.arrays import as_rows, check_path, read_arrays, single_array
from xorflow.data.checks import to_tensor, validate, whole
from xorflow.data.codec import Codec, narrow
from xorflow.data.tables import Table, is_number, read_table
from xorflow.errors import DataError


def load_rows(
    path: str | os.PathLike[str],
    *,
    categories: Sequence[int],
    codec: Codec | None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Rows (N, D) to be scored by a model with these `categories`: uint8 where every K <= 256, else int64.

    A .csv file is read by `codec`, or without one as integers 0..K_d - 1; its header may be there or not.
    Arrays hold codes, as `write_rows` writes them; images must have the `shape` that the model was built for.
    """
    path = check_path(path)
    if path.suffix.lower() == ".csv":
        table = read_table(path)
        _check_width(path, table.width, categories)
        reader = Codec.integers(categories) if codec is None else codec
        if _is_header(table, codec):
            table = table.without_first_row()
        if len(table.codes) == 0:
            raise DataError(f"data must have at least one row: {path} has only a header")
        return torch.from_numpy(reader.encode_table(table))
    values, row_shape = as_rows(single_array(read_arrays(path), path), str(path))
    if row_shape is not None and shape is not None and row_shape != tuple(shape):
        raise DataError(
            f"images must have the shape {tuple(shape)} of the model, those of {path} have {row_shape}"
        )
    _check_width(path, values.shape[1], categories)
    checked = validate(values, categories)
    return checked.to(torch.uint8) if narrow(categories) is np.uint8 else checked


def write_rows(path: str | os.PathLike[str], x: Any, codec: Codec | None) -> None:
    """Write codes `x` (N, D) to a .npy file, or decoded to a .csv file, which appears whole or not at all."""
    path = Path(path)
    values = whole(to_tensor(x)).cpu() if codec is None else validate(x, codec.categories).cpu()
    if values.ndim != 2:
        raise DataError(f"rows to write must have shape (N, D), got {tuple(values.shape)}")
    if not path.parent.is_dir():
        raise DataError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another"
        )
    suffix = path.suffix.lower()
    buffer = io.BytesIO()
    if suffix == ".npy":
        small = values.numel() == 0 or (int(values.min()) >= 0 and int(values.max()) < 256)
        np.save(buffer, values.to(torch.uint8 if small else torch.int64).numpy(), allow_pickle=False)
    elif suffix == ".csv":
        text = io.TextIOWrapper(buffer, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        if codec is not None and codec.names is not None:
            writer.writerow(codec.names)
        writer.writerows(values.tolist() if codec is None else codec.decode(values))
        text.detach()  # or its end would close the buffer
    else:
        raise DataError(f"rows are written to .npy or .csv files, got {path}; choose one of these suffixes")
    write_bytes(path, buffer.getbuffer(), "choose a folder that can be written and has room", DataError)


def _is_header(table: Table, codec: Codec | None) -> bool:
    """The names that the codec knows; where it knows none, a first row without any number over integers."""
    first = table.row(0)
    if codec is None:
        return not any(map(is_number, first))
    return codec.names is not None and first == list(codec.names)


def _check_width(path: Path, width: int, categories: Sequence[int]) -> None:
    if width != len(categories):
        raise DataError(
            f"the model has D = {len(categories)} features, but the rows of {path} have {width}"
            "; give the columns that it was trained on, in the same order"
        )
