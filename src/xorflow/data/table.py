"""A table as a data set, and rows of another one that are matched with its columns by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from xorflow.data.dataset import Dataset, Split
from xorflow.data.kinds import typed
from xorflow.data.parts import Parts
from xorflow.data.schema import Schema
from xorflow.data.schema_file import LEFT_OUT, Wish
from xorflow.data.tables import Source, open_table
from xorflow.errors import DataError

if TYPE_CHECKING:
    from xorflow.data.stream import Stream


def table_dataset(
    data: Any, name: str, parts: Parts, *, header: bool | None, wishes: Mapping[str, Wish], rare: int
) -> Dataset:
    """A data set of a table; the arguments are those of `load`."""
    source = open_table(data, header)
    label = source.label if source.layout.get("header", True) else _about_header(source)
    with told(label):
        table = typed(source.read(), wishes) if source.text else source.read()
        if parts.column is None:
            rows = parts.drawn(len(table))
        else:
            rows, wishes = parts.named(table), {**wishes, parts.column: Wish(LEFT_OUT)}
        # in the order of the file, so that what rises from row to row is seen
        training = table.take(pa.array(np.sort(rows["train"])))
        schema = Schema.fit(training, wishes, rare=rare, layout=source.layout)
        states, added = scored(schema, [table])
    held = {name: (states[each], added[each]) for name, each in rows.items() if name != "train"}
    notes = [_about_header(source)] if source.text else []
    shown = schema.shown(states[rows["train"]], parts.seed)  # some cells of which are hidden
    return assembled(name, schema, parts, shown, held, notes, header=header)


def assembled(
    name: str,
    schema: Schema,
    parts: Parts,
    train: np.ndarray,
    held: Mapping[str, tuple[np.ndarray, np.ndarray]],
    notes: Sequence[str],
    *,
    header: bool | None = None,
    stream: Stream | None = None,
) -> Dataset:
    """A data set of training states and what `scored` gave for rows of other parts, with the parts that are other tables."""
    held, notes = {**held}, [*notes]
    for name_of_part, each in parts.held_out.items():
        other = open_rows(schema, each, header)
        notes += extra_columns(schema, other)
        with told(other.label):
            held[name_of_part] = scored(schema, other.batches(schema.names))
    splits = {
        name: Split(torch.from_numpy(each), log_density=torch.from_numpy(densities))
        for name, (each, densities) in held.items()
    }
    return Dataset(
        name,
        Split(torch.from_numpy(train)),
        splits.get("validation"),
        splits.get("test"),
        schema.categories,
        schema=schema,
        seed=parts.seed,
        notes=tuple(notes),
        stream=stream,
    )


def open_rows(schema: Schema, data: Any, header: bool | None = None) -> Source:
    """Rows whose columns are matched with those of a schema, by name or, where one of the two has no names, by place."""
    by_place = header is False or not schema.layout.get("header", True)
    source = open_table(data, header, () if by_place else schema.order)
    if source.text and by_place and len(source.types) == len(schema.order):
        source = source.renamed(schema.order)
    lacking = [name for name in schema.names if name not in source.types]
    if lacking:
        raise DataError(
            f"columns are matched by their names, and {source.label} has no {', '.join(map(repr, lacking[:5]))}: it has "
            f"{', '.join(map(repr, [*source.types][:10]))}; add what is lacking"
            + (", or say --no-header if its first line is a row of all columns in order" * source.text)
        )
    return source


def extra_columns(schema: Schema, source: Source) -> list[str]:
    """What to say of columns that are ignored, if there are any: nothing is known of them."""
    extra = [name for name in source.types if name not in schema.order]
    return (
        [f"{source.label} has columns that are ignored: {', '.join(map(repr, extra[:20]))}"] if extra else []
    )


def read_rows(schema: Schema, source: Source) -> np.ndarray:
    """The states (N, D) of all rows, read batch by batch."""
    with told(source.label):
        return np.concatenate([schema.encode(batch) for batch in source.batches(schema.names)])


def scored(schema: Schema, batches: Iterable[pa.Table | pa.RecordBatch]) -> tuple[np.ndarray, np.ndarray]:
    """The states (N, D) of rows, and what the places of cells within them add to log p, (N,)."""
    states, added = [], []
    for batch in batches:
        cells = schema.cells(batch)
        states.append(schema.states(cells))
        added.append(schema.log_density(cells, states[-1]))
    return np.concatenate(states), np.concatenate(added)


@contextmanager
def told(label: str) -> Iterator[None]:
    """Errors within this block name the file that they are about."""
    try:
        yield
    except DataError as error:
        raise error if label in str(error) else DataError(f"{label}: {error}") from None


def _about_header(source: Source) -> str:
    if source.layout["header"]:
        return f"the first line of {source.label} names the columns (--no-header if it is a row)"
    return f"{source.label} has no header (--header if its first line names the columns)"
