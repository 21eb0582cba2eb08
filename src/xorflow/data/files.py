"""Files of one's own: a data set to train on, rows to be scored by a model that exists, and rows that it sampled."""

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
from xorflow._math import philox_raw
from xorflow.data.arrays import array_categories, as_rows, check_path, read_arrays, read_parts, single_array
from xorflow.data.checks import LIMIT, constant, narrow, stated, to_tensor, validate, whole
from xorflow.data.dataset import ORDER, Dataset, Split
from xorflow.data.table import Codec, Table, has_header, is_number, read_table
from xorflow.errors import DataError


def load(
    path: str | os.PathLike[str],
    *,
    validation: float | int = 0.1,
    test: float | int = 0.1,
    seed: int = 0,
    categories: int | Sequence[int] | None = None,
    header: bool | None = None,
) -> Dataset:
    """A data set from a .npy, .npz or .csv file.

    Arrays are (N, D) or images (N, H, W) of integers from 0; K_d is the maximum over the file + 1, unless
    `categories` states it. A .npz file has one array (or one named 'x'), or 'train' and optionally
    'validation' and 'test', which are then used as they are. In a .csv file, integers or text, each column
    has its own categories: the values that occur, sorted; with `categories`, the integers 0..K_d - 1.

    The first line of a .csv file is a header if none of its cells is a number and either some column holds
    only numbers below it or none of its cells occurs again in its column; `header` overrides the rule.

    `validation` and `test` are fractions (float) or numbers of rows (int), drawn by `seed`; 0 leaves a split
    out. The test rows depend on `seed` and `test` alone.
    """
    path = check_path(path)
    codec = shape = None
    if path.suffix.lower() == ".csv":
        table = _read_csv(path, header)
        sizes = _sizes(len(table.cells), validation, test)
        codec = Codec.fit(table) if categories is None else _integers(table, categories)
        arrays = {"x": torch.from_numpy(codec.encode(table))}
        kinds = codec.categories
        if categories is None:
            _require_usable(codec)
    else:
        arrays, shape = read_parts(path)
        sizes = None if "train" in arrays else _sizes(len(arrays["x"]), validation, test)
        kinds = array_categories(arrays, categories)
        arrays = {name: narrow(array, kinds) for name, array in arrays.items()}
    if sizes is not None:
        arrays = _divide(arrays["x"], sizes, seed)
    splits = {name: Split(array) for name, array in arrays.items()}
    return Dataset(
        path.name, splits["train"], splits.get("validation"), splits.get("test"), kinds, shape, codec, seed
    )


def _read_csv(path: Path, header: bool | None) -> Table:
    """The rows of a .csv file, which are named by its header if there is one."""
    table = read_table(path)
    if not (has_header(table) if header is None else header):
        return table
    names = [*table.cells[0]]
    if "" in names:
        raise DataError(
            f"every column needs a name: the header of {path} has none for column {names.index('') + 1}; drop it"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the header of {path} uses a name twice: {', '.join(twice)}; rename one of them")
    return table.below_header()


def _integers(table: Table, categories: int | Sequence[int]) -> Codec:
    """The codec of columns that hold the integers 0..K_d - 1 themselves."""
    codec = Codec.integers(stated(categories, table.width), table.names)
    for d, cells in enumerate(table.cells.T):
        odd = next((text for text in cells if text and not is_number(text)), None)
        if odd is not None:
            raise DataError(
                f"categories= is for columns of integers 0..K-1, but {codec.column(d)} holds {odd!r}"
                "; leave it out, and each column gets the categories that occur in it"
            )
    return codec


def _require_usable(codec: Codec) -> None:
    same = [d for d, k in enumerate(codec.categories) if k == 1]
    if same:
        raise constant(len(same), len(codec.values), codec.column(same[0]), codec.values[same[0]][0])
    for d, k in enumerate(codec.categories):
        if k > LIMIT:
            raise DataError(
                f"{codec.column(d)} has {k} different values, more than {LIMIT}; drop or group them"
            )


def _sizes(rows: int, validation: float | int, test: float | int) -> tuple[int, int]:
    """How many rows validate and test; at least one trains."""
    counts = []
    for name, share in (("validation", validation), ("test", test)):
        if isinstance(share, bool) or not share >= 0 or (isinstance(share, float) and share >= 1):
            raise DataError(f"{name}= is a fraction in [0, 1) or a number of rows, got {share!r}")
        # A split that was asked for is never empty, however small the fraction.
        counts.append(max(1, round(rows * share)) if isinstance(share, float) and share else int(share))
    needed = 1 + sum(counts)
    if rows < needed:
        raise DataError(
            f"the split needs {needed} rows or more, 1 to train, {counts[0]} to validate and {counts[1]} to "
            f"test, got {rows}; lower validation= and test=, or bring more rows"
        )
    return counts[0], counts[1]


def _divide(values: Tensor, sizes: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Rows in the order of the seed: first test, then validation, the rest trains."""
    validation, test = sizes
    order = torch.from_numpy(shuffled(len(values), seed))
    rows = order.split([test, validation, len(values) - test - validation])
    return {
        name: values[each]
        for name, each in zip(("test", "validation", "train"), rows, strict=True)
        if len(each)
    }


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0..count - 1 from the seed: the order of `count` raw words."""
    return np.argsort(philox_raw(seed, ORDER, count), kind="stable")


# ---- beside a model that exists ----


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
        first = tuple(table.cells[0])
        if first == codec.names if codec is not None else not any(map(is_number, first)):
            table = table.below_header()
        return torch.from_numpy((codec or Codec.integers(categories)).encode(table))
    values, row_shape = as_rows(single_array(read_arrays(path), path), str(path))
    if row_shape is not None and shape is not None and row_shape != tuple(shape):
        raise DataError(
            f"images must have the shape {tuple(shape)} of the model, those of {path} have {row_shape}"
        )
    _check_width(path, values.shape[1], categories)
    return narrow(validate(values, categories), categories)


def write_rows(
    path: str | os.PathLike[str], x: Any, codec: Codec | None, *, quote_formulas: bool = False
) -> None:
    """Write codes `x` (N, D) to a .npy file, or decoded to a .csv file, which appears whole or not at all.

    With `quote_formulas`, cells of a .csv file that a spreadsheet would compute get an apostrophe in front.
    """
    path = Path(path)
    values = whole(to_tensor(x)).cpu() if codec is None else validate(x, codec.categories).cpu()
    if values.ndim != 2:
        raise DataError(f"rows to write must have shape (N, D), got {tuple(values.shape)}")
    if not os.path.isdir(path.parent):
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
        header = [] if codec is None or codec.names is None else [codec.names]
        rows = values.tolist() if codec is None else codec.decode(values)
        written = [
            [_quoted(str(cell)) for cell in row] if quote_formulas else row for row in [*header, *rows]
        ]
        csv.writer(text, lineterminator="\n").writerows(written)
        text.detach()  # or its end would close the buffer
    else:
        raise DataError(f"rows are written to .npy or .csv files, got {path}; choose one of these suffixes")
    write_bytes(path, buffer.getbuffer(), "choose a folder that can be written and has room", DataError)


def _quoted(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not is_number(cell) else cell


def _check_width(path: Path, width: int, categories: Sequence[int]) -> None:
    if width != len(categories):
        raise DataError(
            f"the model has D = {len(categories)} features, but the rows of {path} have {width}"
            "; give the columns that it was trained on, in the same order"
        )
