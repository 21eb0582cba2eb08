"""CSV cells as integer codes, read in one pass whose memory does not hold the texts of all cells."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from xorflow.errors import DataError

_CHUNK = 4096  # rows; enough to spread the cost of a numpy call, few enough to stay in the cache


@dataclass(frozen=True)
class Table:
    """Cell (n, d) is `texts[d][codes[n, d]]`; `place` names a row for messages."""

    codes: np.ndarray  # (N, D) int32
    texts: list[list[str]]
    place: Callable[[int], str]

    @property
    def width(self) -> int:
        return len(self.texts)

    def row(self, n: int) -> list[str]:
        return [texts[code] for texts, code in zip(self.texts, self.codes[n], strict=True)]

    def without_first_row(self) -> "Table":
        """The rows below the header; texts that only the header held are forgotten."""
        codes = self.codes[1:]
        gone = (codes != 0).all(0)  # the first row was coded first, so all its codes are 0
        texts = [t[1:] if g else t for t, g in zip(self.texts, gone, strict=True)]
        return Table(codes - gone.astype(np.int32), texts, lambda n: self.place(n + 1))


class _Codes(dict[str, int]):
    """Numbers texts in the order in which they are first looked up."""

    def __missing__(self, text: str) -> int:
        code = self[text] = len(self)
        return code


def read_table(path: Path) -> Table:
    """The cells of a CSV file: comma-separated, UTF-8, quoted as usual; outer blanks of cells are dropped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return tabulate(_rows(path, file), lambda n: f"{path}, line {_line(path, n)}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"a .csv file must be UTF-8 text: {path}, byte {error.start} is not; save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path} is no valid CSV ({error}); it may be truncated within quotes") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def tabulate(rows: Iterable[Sequence[str]], place: Callable[[int], str]) -> Table:
    """Code rows of equal length, column by column."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise DataError("data must have at least one row, got none")
    columns = [_Codes() for _ in first]
    rows = chain([first], rows)
    blocks = []
    while chunk := list(islice(rows, _CHUNK)):
        block = np.empty((len(chunk), len(columns)), dtype=np.int32)
        for d, (codes, cells) in enumerate(zip(columns, zip(*chunk, strict=True), strict=True)):
            block[:, d] = np.fromiter(map(codes.__getitem__, cells), np.int32, len(chunk))
        blocks.append(block)
    codes = np.concatenate(blocks)
    return Table(codes, [_strip(codes[:, d], list(texts)) for d, texts in enumerate(columns)], place)


def _strip(codes: np.ndarray, texts: list[str]) -> list[str]:
    """Drop outer blanks, and recode in place where that makes two texts one."""
    stripped = [text.strip() for text in texts]
    merged = _Codes()
    table = np.array([merged[text] for text in stripped], dtype=np.int32)
    if len(merged) < len(stripped):
        codes[:] = table[codes]
    return list(merged)


def _rows(path: Path, file: Iterable[str]) -> Iterator[list[str]]:
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
        yield row


def _line(path: Path, n: int) -> int:
    """The line on which row `n` ends. Reads the file again: only messages need it."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        next(islice(reader, n, None), None)
        return reader.line_num


def has_header(table: Table) -> bool:
    """Whether the first row names the columns.

    It does if none of its cells is a number, and either some column holds nothing but numbers below it, or
    none of its cells occurs again below itself.
    """
    if any(map(is_number, table.row(0))):
        return False
    again = (table.codes[1:] == 0).any(0)
    below = [texts if a else texts[1:] for texts, a in zip(table.texts, again, strict=True)]
    return not again.any() or any(texts and all(map(is_number, texts)) for texts in below)


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
