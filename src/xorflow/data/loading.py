"""A data set from a file of one's own."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xorflow.data.arrays import as_rows, check_path, read_arrays, single_array
from xorflow.data.binarisation import shuffled
from xorflow.data.categories import array_categories, fit_codec
from xorflow.data.codec import empty_cell, narrow
from xorflow.data.datasets import Dataset
from xorflow.data.splits import Split
from xorflow.data.tables import Table, has_header, read_table
from xorflow.errors import DataError

PARTS = ("train", "validation", "test")


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
    if path.suffix.lower() == ".csv":
        table, names = read_csv(path, header)
        sizes = _sizes(len(table.codes), validation, test)
        codec = fit_codec(table, names, categories)
        kinds, shape = codec.categories, None
        arrays = _divide(torch.from_numpy(codec.encode_table(table)), sizes, seed)
    else:
        arrays, shape = _read_arrays(path)
        sizes = None if "train" in arrays else _sizes(len(arrays["x"]), validation, test)
        kinds, codec = array_categories(arrays, categories), None
        arrays = {name: array.to(_dtype(kinds)) for name, array in arrays.items()}
        arrays = arrays if sizes is None else _divide(arrays["x"], sizes, seed)
    splits = {name: Split(array) for name, array in arrays.items()}
    return Dataset(
        name=path.name,
        train=splits["train"],
        validation=splits.get("validation"),
        test=splits.get("test"),
        categories=kinds,
        shape=shape,
        codec=codec,
        seed=seed,
    )


def read_csv(path: Path, header: bool | None) -> tuple[Table, tuple[str, ...] | None]:
    """The rows of a .csv file below its header, and the names in the header if there is one."""
    table = read_table(path)
    names = None
    if has_header(table) if header is None else header:
        names = tuple(table.row(0))
        if "" in names:
            at = names.index("") + 1
            raise DataError(
                f"every column needs a name: the header of {path} has none for column {at}; drop it"
            )
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(f"the header of {path} uses a name twice: {', '.join(twice)}; rename one of them")
        table = table.without_first_row()
        if len(table.codes) == 0:
            raise DataError(f"data must have at least one row: {path} has only a header, {','.join(names)}")
    for d, texts in enumerate(table.texts):
        if "" in texts:
            row = int(np.argmax(table.codes[:, d] == texts.index("")))
            column = d + 1 if names is None else repr(names[d])
            raise empty_cell(f"{table.place(row)}, column {column}")
    return table, names


def _read_arrays(path: Path) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """The named arrays of a .npz file, or the one array as 'x'; and the shape of a row that is no vector."""
    arrays = read_arrays(path)
    if "train" in arrays:
        extra = sorted(set(arrays) - set(PARTS))
        if extra:
            raise DataError(
                f"beside 'train', {path} may hold 'validation' and 'test', got {', '.join(extra)}"
            )
    else:
        arrays = {"x": single_array(arrays, path)}
    shapes = {name: array.shape[1:] for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"all arrays of {path} must have rows of one shape, got {shapes}")
    rows = {name: as_rows(array, f"array {name!r} of {path}") for name, array in arrays.items()}
    return {name: values for name, (values, _) in rows.items()}, next(iter(rows.values()))[1]


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
    order = torch.from_numpy(shuffled(len(values), seed))
    validation, test = sizes
    cuts = {
        "test": order[:test],
        "validation": order[test : test + validation],
        "train": order[test + validation :],
    }
    return {name: values[rows] for name, rows in cuts.items() if len(rows)}


def _dtype(categories: Sequence[int]) -> torch.dtype:
    return torch.uint8 if narrow(categories) is np.uint8 else torch.int64
