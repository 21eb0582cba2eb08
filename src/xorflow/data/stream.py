"""More rows than memory holds: a table in Parquet files, whose training rows are read and encoded as they are trained on."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from xorflow._math import philox_raw
from xorflow.data.columns.tally import Counting
from xorflow.data.dataset import SHUFFLE, Dataset
from xorflow.data.parts import Parts, words
from xorflow.data.schema import Schema
from xorflow.data.schema_file import LEFT_OUT, Wish
from xorflow.data.table import assembled, scored, told
from xorflow.data.tables import (
    is_frame,
    open_table,
    parquet_batches,
    parquet_file,
    table_files,
    without_views,
)
from xorflow.errors import DataError

_ROWS = 2**16
"""So many rows are read at a time."""

_BUFFER_BYTES, _MOST_ROWS = 2**26, 2**20
"""The buffer in which rows are shuffled."""

_SAMPLE = 100_000
"""So many rows stand for all where all are not needed: to begin with, and to refit a base."""


@dataclass(frozen=True)
class Group:
    """A row group of a file, as it was written: what is read in one piece.

    Attributes:
        path: of the file.
        number: of the row group within it.
        first: the number of its first row in the whole table.
        rows: how many it has.
        train: how many of them train.
    """

    path: Path
    number: int
    first: int
    rows: int
    train: int = 0


@dataclass(frozen=True)
class _Draw:
    """Which rows do what, known of each row by itself."""

    parts: Parts
    last: tuple[int, int]  # words up to which rows test, and validate

    def of(self, batch: pa.RecordBatch, first: int) -> np.ndarray:
        """The name of each row's part; `first` is the number of the first one in the table."""
        if self.parts.column is not None:
            return self.parts.names(batch)
        test, held_out = self.last
        drawn = (
            words(len(batch), self.parts.seed, first) if held_out >= 0 else np.zeros(len(batch), np.uint64)
        )
        names = np.full(len(batch), "train", "U10")
        if held_out >= 0:
            names[drawn <= np.uint64(held_out)] = "validation"
        if test >= 0:
            names[drawn <= np.uint64(test)] = "test"
        return names


@dataclass(frozen=True, eq=False)
class Stream:
    """The training rows of a table in Parquet files.

    An epoch takes the row groups in an order of its own, and shuffles the rows within a buffer. Where it stands follows from
    the number of the batch, so it can be taken up anywhere.

    Attributes:
        groups: those with training rows.
        schema: of the table.
        draw: which rows train.
    """

    groups: tuple[Group, ...]
    schema: Schema
    draw: _Draw

    def __len__(self) -> int:
        return sum(group.train for group in self.groups)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the files' sizes and of what Parquet keeps at their ends: where pages lie, with their extremes."""
        digest = hashlib.sha256()
        for path in dict.fromkeys(group.path for group in self.groups):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size - 8)
                file.seek(max(0, size - 8 - int.from_bytes(file.read(4), "little")))
                digest.update(size.to_bytes(8, "little") + file.read())
        return digest.hexdigest()

    @cached_property
    def dtype(self) -> type[np.generic]:
        """The smallest type of all states."""
        most = max(self.schema.categories)
        return np.uint8 if most <= 2**8 else np.int16 if most <= 2**15 else np.int32

    @cached_property
    def buffer(self) -> int:
        """Rows that are shuffled together."""
        bytes_of_a_row = len(self.schema.columns) * np.dtype(self.dtype).itemsize
        return max(1, min(_BUFFER_BYTES // bytes_of_a_row, _MOST_ROWS))

    def share(self, rank: int, world: int) -> list[Group]:
        """The row groups of one of several processes: about equally many rows each."""
        shares: list[list[Group]] = [[] for _ in range(world)]
        for group in sorted(self.groups, key=lambda group: (-group.train, group.first)):
            min(shares, key=lambda groups: sum(group.train for group in groups)).append(group)
        return shares[rank]

    def steps(self, size: int, world: int = 1) -> int:
        """How many batches of so many rows an epoch has, if each of several processes takes its part of each."""
        steps = [
            sum(group.train for group in self.share(rank, world)) // max(1, last - first)
            for rank, (first, last) in enumerate(parts_of_batch(size, world))
        ]
        if min(steps) == 0:
            raise DataError(
                f"row groups of the files are shared out among processes, each with enough rows for its part of a batch, and "
                f"there are {len(self.groups)} for {world}: begin fewer processes, or write smaller row groups"
            )
        return min(steps)

    def batches(
        self, size: int, seed: int, epoch: int, first: int = 0, *, rank: int = 0, world: int = 1
    ) -> Iterator[Tensor]:
        """The rows of an epoch, (size, D) at a time, from batch `first` on; what is left over waits for other epochs.

        One of several processes takes its part of each batch, from row groups of its own.
        """
        begin, end = parts_of_batch(size, world)[rank]
        size = end - begin
        of_epoch, share = (seed << 20) + epoch, self.share(rank, world)
        groups = [share[place] for place in _permutation(len(share), of_epoch, 0)]
        before, skipped = divmod(first * size, self.buffer)
        shuffled = self._shuffled(groups, before, of_epoch)
        left = np.zeros((0, len(self.schema.columns)), self.dtype)
        with ThreadPoolExecutor(1) as pool:  # the next rows are read while these are trained on
            following = pool.submit(next, shuffled, None)
            while (rows := following.result()) is not None:
                following = pool.submit(next, shuffled, None)
                rows, skipped = np.concatenate([left, rows[skipped:]]), 0
                whole = len(rows) // size * size
                if whole:
                    yield from torch.from_numpy(rows[:whole]).split(size)
                left = rows[whole:]

    def sample(self) -> np.ndarray:
        """States of some training rows, (N, D)."""
        groups = [self.groups[place] for place in _permutation(len(self.groups), self.draw.parts.seed, 0)]
        states = next(self._buffers(groups, 0))[:_SAMPLE]
        return states if states.dtype == np.uint8 else states.astype(np.int64)

    def _shuffled(self, groups: Sequence[Group], before: int, seed: int) -> Iterator[np.ndarray]:
        for number, rows in enumerate(self._buffers(groups, before), before):
            yield rows[_permutation(len(rows), seed, 1 + number)]

    def _buffers(self, groups: Sequence[Group], before: int) -> Iterator[np.ndarray]:
        """The training rows of these groups, a buffer at a time, without the first `before` buffers."""
        skipped, held, count = before * self.buffer, [], 0
        for group in groups:
            if skipped >= group.train:  # which are not read
                skipped -= group.train
                continue
            for states in self._states(group):
                rest = states[skipped:]
                skipped -= len(states) - len(rest)
                held.append(rest)
                count += len(rest)
                while count >= self.buffer:
                    rows = np.concatenate(held)
                    yield rows[: self.buffer]
                    held, count = [rows[self.buffer :]], count - self.buffer
        if count:
            yield np.concatenate(held)

    def _states(self, group: Group) -> Iterator[np.ndarray]:
        """The states of a group's training rows, some of which show what no training row has, as `Schema.shown` does."""
        first = group.first
        for batch in _batches(group, self._columns()):
            rows = batch.filter(pa.array(self.draw.of(batch, first) == "train"))
            with told(str(group.path)):
                states = self.schema.encode(rows)
            generator = np.random.Generator(np.random.Philox(key=[self.draw.parts.seed, first]))
            for d, column in enumerate(self.schema.columns):
                column.show_unseen(states[:, d], generator)
            yield states.astype(self.dtype)
            first += len(batch)

    def _columns(self) -> list[str]:
        return [*self.schema.names, *filter(None, [self.draw.parts.column])]


def _batches(group: Group, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for batch in parquet_batches(group.path, columns, group.number, _ROWS):
        yield without_views(batch.select(columns))


def parts_of_batch(size: int, world: int) -> list[tuple[int, int]]:
    """Where the part of each process begins and ends in a batch.

    >>> parts_of_batch(9, 2)
    [(0, 4), (4, 9)]
    """
    return [(size * rank // world, size * (rank + 1) // world) for rank in range(world)]


def _permutation(count: int, seed: int, number: int) -> np.ndarray:
    """The one of this number of all that the seed names."""
    word = int(philox_raw(seed, SHUFFLE, 1, first_block=number)[0])
    return torch.randperm(count, generator=torch.Generator().manual_seed(word)).numpy()


def row_groups(paths: Sequence[Path]) -> list[Group]:
    """Those of all files, in their order."""
    groups: list[Group] = []
    first = 0
    for path in paths:
        with parquet_file(path) as file:
            sizes = [
                file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)
            ]
        for number, rows in enumerate(sizes):
            groups.append(Group(path, number, first, rows))
            first += rows
    return groups


class _Pass:
    """A pass over all rows, which now and then logs how far it is."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.began = self.said = time.monotonic()

    def on_rows(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said >= _SECONDS_BETWEEN:
            self.said, left = now, timedelta(seconds=round((now - self.began) * (self.rows / done - 1)))
            read = f"{done:,} of {self.rows:,} rows read, about {left} left"
            logging.getLogger("xorflow").info("learning the columns: %s", read)


_SECONDS_BETWEEN = 20.0


def stream_dataset(data: Any, name: str, parts: Parts, *, wishes: Mapping[str, Wish], rare: int) -> Dataset:
    """A data set whose training rows stay in their files; the arguments are those of `load`.

    One pass learns the schema and takes the rows that are held out, which are those of a table in memory.
    """
    source = open_table(data)
    groups = row_groups(table_files(data))
    rows_in_all = sum(group.rows for group in groups)
    last = (-1, -1) if parts.column else parts.last_words(rows_in_all)
    draw, counts = _Draw(parts, last), [Counting(column, kind) for column, kind in source.types.items()]
    held: dict[str, list[tuple[pa.RecordBatch, np.ndarray]]] = {"validation": [], "test": []}
    progress = _Pass(rows_in_all)
    for place, group in enumerate(groups):
        first = group.first
        with told(source.label):
            for batch in _batches(group, [*source.types]):
                names, order = draw.of(batch, first), words(len(batch), parts.seed, first)
                rows = batch.filter(pa.array(names == "train"))
                for counting in counts:
                    counting.add(rows[counting.name])
                for part, kept in held.items():
                    if (names == part).any():
                        kept.append((batch.filter(pa.array(names == part)), order[names == part]))
                first += len(batch)
                progress.on_rows(first)
        groups[place] = replace(group, train=counts[0].rows - sum(before.train for before in groups[:place]))
    parts.require_training(counts[0].rows)
    if parts.column is not None:
        wishes = {**wishes, parts.column: Wish(LEFT_OUT)}
    with told(source.label):
        schema = Schema.learn([each.tally() for each in counts], wishes, rare=rare, layout=source.layout)
        known = {part: scored(schema, [_in_order(kept, parts)]) for part, kept in held.items() if kept}
    stream = Stream(tuple(group for group in groups if group.train), schema, draw)
    note = f"{len(stream):,} training rows are read from {source.label} as they are trained on"
    return assembled(name, schema, parts, stream.sample(), known, [note], stream=stream)


def _in_order(kept: list[tuple[pa.RecordBatch, np.ndarray]], parts: Parts) -> pa.Table:
    """Held-out rows in the order in which a table in memory has them: that of their words, if they were drawn."""
    table = pa.Table.from_batches([batch for batch, _ in kept])
    if parts.column is not None:
        return table
    return table.take(pa.array(np.argsort(np.concatenate([order for _, order in kept]), kind="stable")))


# ---- whether memory holds a table ----

_SHARE_OF_MEMORY = 0.1
"""Of what is free: a table is streamed if its states would take more."""


def streams(data: Any, stream: str) -> bool:
    """Whether the rows of a table stay in their files: `always`, `never`, or if they would take too much memory (`auto`)."""
    if stream not in STREAM:
        raise DataError(f"stream= is one of {', '.join(STREAM)}; got {stream!r}")
    paths = [] if is_frame(data) or stream == "never" else table_files(data)
    parquet = bool(paths) and all(path.suffix.lower() == ".parquet" for path in paths)
    if stream == "always" and not parquet:
        raise DataError(
            "rows are read as they are trained on from .parquet files, and these are no such files: convert them, or leave "
            "stream out"
        )
    return parquet and (stream == "always" or _outgrows_memory(paths))


STREAM = ("auto", "always", "never")


def _outgrows_memory(paths: Sequence[Path]) -> bool:
    """By states of eight bytes each: whether they would take more than a tenth of the free memory."""
    cells = 0
    for path in paths:
        with parquet_file(path) as file:
            cells += file.metadata.num_rows * file.metadata.num_columns
    return 8 * cells > _SHARE_OF_MEMORY * free_memory()


def free_memory() -> int:
    """Bytes that this process may still take, as far as the system tells."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])]
    with suppress(OSError, ValueError):  # of a container
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free.append(limit - used)
    return max(0, min(free))
