"""Files of delimited text as columns of texts: what separates cells, and whether the first line names the columns.

pyarrow reads every cell as text; `texts` finds types on whole columns, so that no block decides for those after it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pacsv

from xorflow.data.arrow import compute as pc
from xorflow.data.arrow import emptied
from xorflow.data.texts import is_number
from xorflow.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIXES = (".csv", ".tsv", ".data")

MOST_COLUMNS = 10_000
"""A table with more is taken for a mistake."""

_BLOCK = 2**22
"""Bytes that are parsed at a time; a row has fewer."""

SEPARATORS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class Delimited:
    """A file of delimited text; cells are without outer blanks, and an empty one is a gap.

    Args:
        path: of the file.
        header: whether the first line names the columns; None: by `names_columns`, and never in a .data file.
        expected: names that are looked for: a first line with one of them is a header, and any other is none.
    """

    path: Path
    header: bool | None = None
    expected: Sequence[str] | None = None

    @cached_property
    def separator(self) -> str:
        """What stands between cells: of those that split all of the first lines alike, the one that makes most cells."""
        if self.path.suffix.lower() == ".tsv":
            return "\t"
        separator = max(SEPARATORS, key=lambda separator: _width(self._first_lines, separator))
        if _width(self._first_lines, separator) == 1 and _has_blanks_between(self._first_lines):
            raise DataError(
                f"cells are separated by commas, semicolons, tabs or bars, and those of {self.path} seem to be by "
                "blanks; write commas instead"
            )
        return separator

    @cached_property
    def has_header(self) -> bool:
        if self.header is not None:
            return self.header
        if self.expected is not None:
            return any(column[0].as_py() in self.expected for column in self._first_block.columns)
        return self.path.suffix.lower() != ".data" and names_columns(self._first_block)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the columns: by the header, or by their places from 1 where it has none."""
        given = [column[0].as_py() if self.has_header else None for column in self._first_block.columns]
        return tuple(name or f"column {place}" for place, name in enumerate(given, 1))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows, with the columns that are named, in that order, or all."""
        below, some = int(self.has_header), False
        places = range(len(self.names)) if columns is None else [self.names.index(name) for name in columns]
        for block in self._blocks(self._first_block.schema.names, places):
            rows = block.slice(below)
            below = 0
            if len(rows):
                some = True
                yield rows.rename_columns([self.names[place] for place in places])
        if not some:
            raise DataError(
                f"data must have at least one row: {self.path} has only a header, {','.join(self.names)}"
            )

    @cached_property
    def _first_lines(self) -> list[str]:
        with _told(self.path), self.path.open("rb") as file:
            lines = file.read(2**20).decode("utf-8-sig", "replace").splitlines()
        return [line for line in lines[:20] if line.strip()]

    @cached_property
    def _first_block(self) -> pa.RecordBatch:
        """As it is in the file, a header too, with made-up names."""
        if not self._first_lines:
            raise DataError(f"data must have at least one row, and {self.path} has none; check the file")
        width = _width(self._first_lines[:1], self.separator)
        if width > MOST_COLUMNS:
            raise DataError(
                f"a table has at most {MOST_COLUMNS:,} columns, and {self.path} has {width:,}; integers of so many features "
                "belong in a .npy file"
            )
        with _told(self.path):
            names = self._open(_Checked(self.path), pacsv.ConvertOptions()).schema.names
        return next(self._blocks(names, range(len(names))))

    def _blocks(self, names: Sequence[str], places: Sequence[int]) -> Iterator[pa.RecordBatch]:
        kept = [names[place] for place in places]
        convert = pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=kept)
        with _told(self.path):
            file = _Checked(self.path)
            stream = self._open(file, convert)
        last = None
        while True:
            with _told(self.path):  # and not what is done with a block
                block = next(stream, None)
            if block is None:
                break
            last = block if len(block) else last
            yield pa.record_batch([_trimmed(column) for column in block.columns], names=kept)
        if (
            file.quotes % 2
            and last is not None
            and any("\n" in (cells[-1].as_py() or "") for cells in last.columns)
        ):
            raise DataError(f"a quote in {self.path} is never closed, and holds all lines after it; close it")

    def _open(self, file: io.RawIOBase, convert: pacsv.ConvertOptions) -> pacsv.CSVStreamingReader:
        lines, separator = self._first_lines, self.separator
        return pacsv.open_csv(
            pa.PythonFile(file, mode="r"),
            read_options=pacsv.ReadOptions(
                autogenerate_column_names=True, use_threads=False, block_size=_BLOCK
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=separator,
                newlines_in_values=True,
                ignore_empty_lines=_width(lines, separator) > 1,  # in a single column an empty line is a gap
            ),
            convert_options=convert,
        )


def names_columns(block: pa.RecordBatch) -> bool:
    """Whether the first row of cells names the columns.

    It does if none of its cells is a number and, besides, some column has nothing but numbers below it, or no cell occurs again
    in its column, or all cells are different and some does not. It does, too, if no cell occurs again in its
    column and the numbers among its cells are three or more, in equal steps, as years are.

    >>> rows = pa.table({"f0": ["pet", "cat", "ox", "pet"], "f1": ["farm", "no", "yes", "no"]})
    >>> names_columns(rows.to_batches()[0])
    True
    """
    first = [column[0].as_py() for column in block.columns]
    named = [cell for cell in first if cell is not None]
    below = [column.slice(1) for column in block.columns]
    again = [
        bool(pc.any(pc.equal(cells, cell)).as_py()) for cell, cells in zip(first, below, strict=True) if cell
    ]
    numbers = [float(cell) for cell in named if is_number(cell)]
    if not named or numbers:
        steps = {right - left for left, right in pairwise(numbers)}
        return len(numbers) > 2 and len(steps) == 1 and max(steps) > 0 and not any(again)
    if any(len(cells) > cells.null_count and _all_numbers(cells) for cells in below):
        return True
    return not any(again) or (len({*named}) == len(named) and not all(again))


def _all_numbers(cells: pa.Array) -> bool:
    return all(map(is_number, cells.unique().drop_null().to_pylist()))


def _width(lines: Sequence[str], separator: str) -> int:
    """How many cells the lines have; 1 if they do not agree."""
    try:
        widths = {len(row) for row in csv.reader(lines, delimiter=separator)}
    except csv.Error:
        return 1
    return widths.pop() if len(widths) == 1 else 1


def _has_blanks_between(lines: Sequence[str]) -> bool:
    """Whether all lines have as many words as the first, and below it some of them are numbers in all lines."""
    words = [line.split() for line in lines]
    same = len({*map(len, words)}) == 1 and len(words) > 1 and len(words[0]) > 1
    return same and any(all(map(is_number, column)) for column in zip(*words[1:], strict=True))


def _trimmed(cells: pa.Array) -> pa.Array:
    texts = pc.utf8_trim_whitespace(cells)
    return emptied(texts, pc.equal(texts, ""))


class _Checked(io.RawIOBase):
    """A file of text that is read once; text has no zeros."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        self.quotes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        count = self._file.readinto(buffer)
        content = bytes(memoryview(buffer)[:count])
        if b"\0" in content:
            raise DataError(f"text in {self._path} is UTF-8, and it holds a zero byte; save it as UTF-8 text")
        self.quotes += content.count(b'"')
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What pyarrow finds wrong in a file, as a rule, what came and what to do."""
    try:
        yield
    except pa.ArrowInvalid as error:
        what = str(error).removeprefix("CSV parse error: ")
        if "UTF8" in what:
            raise DataError(f"text is UTF-8, and {path} is not ({what}); save it as UTF-8") from None
        if "Empty CSV" in what:
            raise DataError(f"data must have at least one row, and {path} has none; check the file") from None
        if "straddling" in what:
            raise DataError(
                f"a row has at most {_BLOCK:,} bytes, and one of {path} has more; a quote may not be closed"
            ) from None
        raise DataError(
            f"every row has as many cells as the first: {path}: {what}; the file may be truncated there, or a cell with a "
            "separator lacks quotes"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
