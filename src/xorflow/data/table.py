"""The cells of CSV files, and what categories they are."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xorflow._files import read_bytes
from xorflow.data.checks import narrow, validate
from xorflow.errors import DataError


@dataclass(frozen=True)
class Table:
    """Cells that are texts, without outer blanks; equal ones share their memory."""

    cells: np.ndarray  # (N, D)
    lines: Sequence[int]  # N, of the file
    path: Path | None = None
    names: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        return self.cells.shape[1]

    def below_header(self) -> Table:
        """The rows but the first, which names the columns."""
        names = tuple(self.cells[0])
        if len(self.cells) == 1:
            raise DataError(
                f"data must have at least one row: {self.path} has only a header, {','.join(names)}"
            )
        return replace(self, cells=self.cells[1:], lines=self.lines[1:], names=names)

    def place(self, n: int) -> str:
        """What messages call a row."""
        line = self.lines[n]
        return f"row {line} (from 0)" if self.path is None else f"{self.path}, line {line}"


def read_table(path: Path) -> Table:
    """The cells of a CSV file: comma-separated, UTF-8, quoted as usual; outer blanks of cells are dropped."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"a .csv file must be UTF-8 text: {path}, byte {error.start} is not; save it as UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return tabulate(_rows(path, io.StringIO(text, newline="")), path)
    except csv.Error as error:
        raise DataError(f"{path} is no valid CSV ({error}); it may be truncated within quotes") from None


def tabulate(rows: Iterable[tuple[int, Sequence[str]]], path: Path | None = None) -> Table:
    """Numbered rows of equal length."""
    same: dict[str, str] = {}
    lines, cells = [], []
    for line, row in rows:
        lines.append(line)
        cells.append([same.setdefault(cell, cell) for cell in map(str.strip, row)])
    if not lines:
        raise DataError("data must have at least one row, got none")
    return Table(np.array(cells, dtype=object), lines, path)


def _rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file, strict=True)
    blank = width = 0
    for row in reader:
        if not row:
            blank = blank or reader.line_num
            continue
        width = width or len(row)
        if blank:
            raise DataError(f"{path}, line {blank} is blank but more rows follow; remove it or fill it in")
        if len(row) != width:
            raise DataError(
                f"every row must have as many cells as the first, {width}: {path}, line {reader.line_num} "
                f"has {len(row)}; the file may be truncated there, or a cell with a comma lacks quotes"
            )
        if width == 1 and any(mark in row[0] for mark in ";\t"):
            raise DataError(
                f"cells must be separated by commas: {path}, line {reader.line_num} has {row[0]!r}"
            )
        yield reader.line_num, row


def has_header(table: Table) -> bool:
    """Whether the first row names the columns.

    It does if none of its cells is a number, and either some column holds nothing but numbers below it, or
    none of its cells occurs again below itself.
    """
    first, columns = table.cells[0], [{*column} for column in table.cells[1:].T]
    if any(map(is_number, first)):
        return False
    again = any(text in column for text, column in zip(first, columns, strict=True))
    return not again or any(column and all(map(is_number, column)) for column in columns)


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class Codec:
    """The names of columns, where they have any, and the values of each column in the order of their codes.

    >>> codec = Codec(("colour", "size"), (("blue", "red"), (1, 2, 10)))
    >>> codec.encode([["red", "10"], ["blue", "1"]])
    array([[1, 2],
           [0, 0]], dtype=uint8)
    >>> codec.decode([[1, 2]])
    [['red', '10']]
    """

    names: tuple[str, ...] | None
    values: tuple[tuple[str, ...] | tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.names is not None and len(self.names) != len(self.values):
            raise DataError(f"{len(self.names)} names were given for {len(self.values)} columns")

    @classmethod
    def fit(cls, table: Table) -> Codec:
        """The values seen in each column, sorted as numbers where all are integers and as text otherwise."""
        return cls(table.names, tuple(_sorted_values({*column} - {""}) for column in table.cells.T))

    @classmethod
    def integers(cls, categories: Sequence[int], names: tuple[str, ...] | None = None) -> Codec:
        """Columns that hold the integers 0..K_d - 1 themselves."""
        return cls(names, tuple(tuple(range(k)) for k in categories))

    @property
    def categories(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.values)

    def column(self, d: int) -> str:
        """Column `d` as messages call it."""
        return f"column {d + 1}" if self.names is None else f"column {self.names[d]!r}"

    def encode(self, rows: Table | Iterable[Sequence[str | int]]) -> np.ndarray:
        """Rows of cells as codes (N, D), uint8 where every K <= 256 and int64 otherwise."""
        table = rows if isinstance(rows, Table) else tabulate(self._numbered(rows))
        codes = np.empty(table.cells.shape, np.int32)
        for d, (values, cells) in enumerate(zip(self.values, table.cells.T, strict=True)):
            known = {str(value): code for code, value in enumerate(values)}
            code_of = {text: _look_up(known, values, text) for text in {*cells}}
            codes[:, d] = [code_of[text] for text in cells]
            if (codes[:, d] < 0).any():
                self._refuse(table, d, int(codes[:, d].argmin()))
        return narrow(torch.from_numpy(codes), self.categories).numpy()

    def decode(self, x: Any) -> list[list[str]]:
        """Codes (N, D) as rows of cells."""
        codes = validate(x, self.categories).cpu().numpy()
        if codes.ndim != 2:
            raise DataError(f"decoding takes rows of shape (N, {len(self.values)}), got {codes.shape}")
        texts = [np.array([str(value) for value in values], dtype=object) for values in self.values]
        return np.stack([t[codes[:, d]] for d, t in enumerate(texts)], axis=1).tolist()

    def to_json(self) -> dict[str, Any]:
        names = None if self.names is None else list(self.names)
        return {"names": names, "values": [list(values) for values in self.values]}

    @classmethod
    def from_json(cls, data: Any) -> Codec:
        """The inverse of `to_json`, with its input checked."""
        match data:
            case {"names": names, "values": [_, *_] as values} if all(map(_is_column, values)):
                if names is None or (isinstance(names, list) and all(map(_is_text, names))):
                    return cls(None if names is None else tuple(names), tuple(map(tuple, values)))
        raise DataError("a codec is {'names': [...] or null, 'values': [[...], ...]}; this one is damaged")

    def _numbered(self, rows: Iterable[Sequence[str | int]]) -> Iterator[tuple[int, list[str]]]:
        for n, row in enumerate(rows):
            if len(row) != len(self.values):
                raise DataError(
                    f"every row must have {len(self.values)} cells, row {n} (from 0) has {len(row)}"
                )
            yield n, [str(cell) for cell in row]

    def _refuse(self, table: Table, d: int, row: int) -> None:
        text, place = table.cells[row, d], f"{table.place(row)}, {self.column(d)}"
        if not text:
            raise DataError(
                f"every cell needs a value: {place} is empty; drop the row, or write a word for 'missing'"
            )
        hint = (
            f"; if this is a header, it should read {','.join(self.names)}" if row == 0 and self.names else ""
        )
        raise DataError(
            f"only known categories can be encoded: {place} holds {text!r}, which is none of "
            f"{_shortened(self.values[d])}; drop the row, or have this category in the training data{hint}"
        )


def _shortened(values: Sequence[str | int], limit: int = 8) -> str:
    """The values for a message: a range as 0..K-1, a long list by its beginning."""
    if len(values) > 2 and list(values) == list(range(len(values))):
        return f"0..{len(values) - 1}"
    more = f", ... ({len(values)} in all)" if len(values) > limit else ""
    return ", ".join(repr(value) for value in values[:limit]) + more


def _is_text(value: Any) -> bool:
    """Whether it can be written as UTF-8; JSON knows more."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def _is_column(values: Any) -> bool:
    """Whether these are distinct texts or distinct integers, and some."""
    if not isinstance(values, list) or not values:
        return False
    if not (all(map(_is_text, values)) or all(type(value) is int for value in values)):
        return False
    return len(set(values)) == len(values)


def _sorted_values(texts: set[str]) -> tuple[str, ...] | tuple[int, ...]:
    try:
        integers = sorted(map(int, texts))
    except ValueError:
        return tuple(sorted(texts))
    # '007' and '+7' are texts: as integers they could not be decoded to what the file held
    return tuple(integers) if {*map(str, integers)} == texts else tuple(sorted(texts))


def _look_up(known: dict[str, int], values: Sequence[str | int], text: str) -> int:
    """The code of a cell, or -1. In a column of integers, '1.0' and '1e0' are 1."""
    if text not in known and values and isinstance(values[0], int):
        try:
            number = float(text)
            text = str(int(number)) if number.is_integer() else text
        except (ValueError, OverflowError):
            pass
    return known.get(text, -1)
