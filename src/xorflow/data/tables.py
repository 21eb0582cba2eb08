"""Tables from anywhere, read batch by batch: files of text, Parquet, Feather, and frames; and tables written to files.

Frames of pandas, polars and others come through the Arrow C stream, and none of these packages is imported.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from xorflow._files import write_bytes
from xorflow.data import delimited
from xorflow.data.arrays import check_path
from xorflow.data.arrow import compute as pc
from xorflow.data.columns.types import Cells, is_text, value_type
from xorflow.data.delimited import MOST_COLUMNS, Delimited
from xorflow.data.texts import NUMBER
from xorflow.errors import DataError

SUFFIXES = (*delimited.SUFFIXES, ".parquet", ".feather", ".arrow")
"""Of files that hold tables."""

_PATTERN = re.compile(r"[*?\[]")

_ROWS = 2**14
"""How many rows are read at a time."""


@dataclass(frozen=True)
class Source:
    """A table that is there, and not yet read.

    Attributes:
        label: what messages call it.
        types: the Arrow type of each column, by its name, in the order of the source.
        text: whether its cells are texts, whose types are still to be found.
        layout: how a file like it is written: its `format` and, of text, `separator` and `header`.
    """

    label: str
    types: Mapping[str, pa.DataType]
    text: bool
    layout: Mapping[str, Any]
    _read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]] = field(repr=False)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows, some at a time, with these columns in this order; at least one row."""
        some = False
        for batch in self._read(columns):
            for first in range(0, len(batch), _ROWS):
                some = True
                yield batch.slice(first, _ROWS).select(columns)
        if not some:
            raise DataError(f"data must have at least one row, and {self.label} has none; check it")

    def renamed(self, names: Sequence[str]) -> Source:
        """The same with other names of its columns, in their order."""
        old = dict(zip(names, self.types, strict=True))

        def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
            for batch in self._read([old[name] for name in columns]):
                yield batch.rename_columns([*columns])

        return replace(self, types=dict(zip(names, self.types.values(), strict=True)), _read=read)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows at once; at least one."""
        columns = [*self.types] if columns is None else columns
        return pa.Table.from_batches(map(without_views, self.batches(columns)))


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows with texts that Arrow can take some of, which views, as polars has them, are not."""
    fields = [
        one.with_type(pa.large_string()) if one.type == pa.string_view() else one for one in batch.schema
    ]
    return batch.cast(pa.schema(fields))


def is_frame(data: object) -> bool:
    """Whether this is a table in memory of a package that speaks Arrow."""
    return hasattr(data, "__arrow_c_stream__")


def table_files(
    data: str | os.PathLike[str], one: Sequence[str] = SUFFIXES, several: Sequence[str] = (".parquet",)
) -> list[Path]:
    """The plain files that a path means: itself, or those of a folder or of a pattern such as `rows/*.parquet`.

    `one` and `several` are the suffixes that they may have. In a folder, what begins with a dot or an underscore is no data.
    """
    path = Path(data)
    if os.path.isdir(path):
        of_kind = (name for name in path.iterdir() if name.suffix.lower() in several)
        names = sorted(name for name in of_kind if name.name[0] not in "._")
    elif _PATTERN.search(str(data)) and not os.path.lexists(path):
        names = [Path(name) for name in sorted(glob.glob(str(data), recursive=True))]
    else:
        return [check_path(path, one)]
    if not names:
        raise DataError(
            f"{data} names no data: it is a file, a folder of {', '.join(several)} files, or a pattern such as "
            "'rows/*.parquet'; mend it"
        )
    return [check_path(name, several) for name in names]


def means_several(data: object) -> bool:
    """Whether this is the path of a folder, or a pattern of paths."""
    if not isinstance(data, str | os.PathLike):
        return False
    return os.path.isdir(data) or (_PATTERN.search(str(data)) is not None and not os.path.lexists(data))


def open_table(data: Any, header: bool | None = None, expected: Sequence[str] | None = None) -> Source:
    """A table from the path of a file, or of several, or a frame; for `header` and `expected` see `Delimited`."""
    if is_frame(data):
        return _of_table(as_table(data), "the frame", {"format": "parquet"})
    if header is not None and Path(data).suffix.lower() not in delimited.SUFFIXES:
        raise DataError(
            f"header is of files of text, {', '.join(delimited.SUFFIXES)}, and {data} is none; leave it out"
        )
    path, *others = table_files(data)
    suffix = path.suffix.lower()
    if others:
        return _of_parquets(str(data), [path, *others])
    if suffix in delimited.SUFFIXES:
        return _of_text(Delimited(path, header, expected))
    return _of_parquet(path) if suffix == ".parquet" else _of_feather(path)


def _of_text(file: Delimited) -> Source:
    layout = {
        "format": file.path.suffix.lower().removeprefix("."),
        "separator": file.separator,
        "header": file.has_header,
    }
    label = str(file.path)
    schema = pa.schema([(name, pa.string()) for name in file.names])
    return Source(label, _checked(schema, label), True, layout, file.batches)


def _of_parquet(path: Path) -> Source:
    with parquet_file(path) as file:
        types = _checked(file.schema_arrow, str(path))
    return Source(str(path), types, False, {"format": "parquet"}, partial(parquet_batches, path))


def _of_parquets(label: str, paths: Sequence[Path]) -> Source:
    """Files of the same columns, one after the other."""
    first, *others = map(_of_parquet, paths)
    for other in others:
        odd = sorted({*first.types.items()} ^ {*other.types.items()}, key=str)
        if odd:
            raise DataError(
                f"files of one table have the same columns, and {other.label} differs from {first.label} in {odd[0][0]!r}, "
                f"{' and '.join(str(kind) for name, kind in odd if name == odd[0][0])}: convert it, or leave it out"
            )

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for path in paths:
            yield from parquet_batches(path, columns)

    return replace(first, label=label, _read=read)


@contextmanager
def parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """An open file, of which only what is asked for is held in memory."""
    with _told(path), pq.ParquetFile(path, pre_buffer=False) as file:
        yield file


def parquet_batches(
    path: Path, columns: Sequence[str], group: int | None = None, rows: int = _ROWS
) -> Iterator[pa.RecordBatch]:
    """All rows of a file, or those of one of its row groups, some at a time."""
    with parquet_file(path) as file:
        plain = not any("." in name for name in columns)  # which would be a path to a nested column
        groups = None if group is None else [group]
        yield from file.iter_batches(rows, row_groups=groups, columns=[*columns] if plain else None)


def _of_feather(path: Path) -> Source:
    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with _told(path), pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for place in range(reader.num_record_batches):
                batch = reader.get_batch(place).select(columns)
                batch.validate(full=True)  # nothing else would find offsets that point elsewhere
                yield batch

    with _told(path), pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        types = _checked(reader.schema, str(path))
    layout = {"format": path.suffix.lower().removeprefix(".")}
    return Source(str(path), types, False, layout, read)


def _of_table(table: pa.Table | pa.RecordBatch, label: str, layout: Mapping[str, Any]) -> Source:
    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        chosen = table.select(columns)
        yield from [chosen] if isinstance(chosen, pa.RecordBatch) else chosen.to_batches(_ROWS)

    return Source(label, _checked(table.schema, label), False, layout, read)


def as_table(data: Any) -> pa.Table | pa.RecordBatch:
    """A frame as an Arrow table."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return data
    try:
        return pa.table(data)
    except (
        pa.ArrowException,
        TypeError,
        ValueError,
    ) as error:  # of pandas: two names alike, cells of several types
        raise DataError(
            f"a frame has columns of one type each, with a name each: {error}; convert it"
        ) from None


def _checked(schema: pa.Schema, label: str) -> dict[str, pa.DataType]:
    """The columns by name; each has one of its own."""
    if not 1 <= len(schema) <= MOST_COLUMNS:
        raise DataError(f"a table has 1 to {MOST_COLUMNS:,} columns, and {label} has {len(schema):,}")
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(
            f"every column has a name of its own, and {label} uses {', '.join(map(repr, twice[:5]))} twice; rename them, "
            "or say --no-header if the first line of a file is a row"
        )
    return dict(zip(schema.names, schema.types, strict=True))


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What pyarrow finds wrong in a file, as what to do."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of names that are no text
        raise DataError(
            f"{path} cannot be read as {path.suffix[1:]} ({error}); it is truncated, damaged or another format"
        ) from None


# ---- written ----

_FORMULA = r"^[=+\-@\t\r]"


def without_formulas(table: pa.Table) -> pa.Table:
    """The table with an apostrophe in front of texts, and names, that a spreadsheet would take for a formula."""
    names = [_quoted(pa.array([name]))[0].as_py() for name in table.column_names]
    columns = [_quoted(cells) if is_text(value_type(cells.type)) else cells for cells in table.columns]
    return pa.table(columns, names=names)


def _quoted(cells: Cells) -> Cells:
    texts = cells.cast(pa.string())
    formulas = pc.and_not(pc.match_substring_regex(texts, _FORMULA), pc.match_substring_regex(texts, NUMBER))
    return pc.if_else(formulas, pc.binary_join_element_wise("'", texts, ""), texts)


def _options(table: pa.Table, separator: str, header: bool) -> pacsv.WriteOptions:
    """How text is written; left to itself, pyarrow quotes all texts and names, whether there is need or not."""
    special = f'["\r\n{re.escape(separator)}]'
    cells = [column.cast(pa.string()) for column in table.columns if is_text(value_type(column.type))]
    names, texts = (
        "needed" if any(pc.any(pc.match_substring_regex(part, special)).as_py() for part in parts) else "none"
        for parts in ([pa.array(table.column_names)], cells)
    )
    return pacsv.WriteOptions(
        include_header=header, delimiter=separator, quoting_style=texts, quoting_header=names
    )


def write_table(path: Path, table: pa.Table, layout: Mapping[str, Any]) -> None:
    """Write a table, whole or not at all, in the format that the file's suffix says; text as `layout` has it."""
    suffix = path.suffix.lower()
    buffer = io.BytesIO()
    if suffix in delimited.SUFFIXES:
        separator = layout.get("separator", ",") if suffix != ".tsv" else "\t"
        header = layout.get("header", suffix != ".data")
        pacsv.write_csv(table, buffer, _options(table, separator, header))
        if not buffer.getvalue().strip():  # gaps of one column alone: a file of blank lines has no row
            buffer = io.BytesIO(b'""\n' * len(table))
    elif suffix == ".parquet":
        pq.write_table(table, buffer)
    elif suffix in (".feather", ".arrow"):
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    else:
        raise DataError(
            f"tables are written to {', '.join(SUFFIXES)} files, got {path}; choose one of these suffixes"
        )
    write_bytes(path, buffer.getbuffer(), "choose a folder that can be written and has room", DataError)
