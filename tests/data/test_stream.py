"""Rows that stay in their files: the same table as in memory, each row once an epoch, from any batch on."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch

from xorflow.data import Dataset, load
from xorflow.data import stream as module
from xorflow.data.columns import Category, Column
from xorflow.data.columns.tally import Tally
from xorflow.data.stream import Stream
from xorflow.errors import ConfigError, DataError, UserError


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three files of 203 to 205 rows, in row groups of 37."""
    rng = np.random.default_rng(0)
    for number in range(3):
        count = 203 + number
        letters = rng.choice(list("abcdefg"), count)
        table = {
            "letter": [
                None if chance < 0.1 else letter
                for letter, chance in zip(letters, rng.random(count), strict=True)
            ],
            "number": rng.standard_normal(count),
            "few": rng.integers(0, 5, count),
            "id": np.arange(count) + 1000 * number,
            "part": rng.choice(["train", "Valid", "test"], count, p=[0.8, 0.1, 0.1]),
        }
        pq.write_table(pa.table(table), tmp_path / f"{number}.parquet", row_group_size=37)
    return tmp_path


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """States as they are, none of which shows what was never seen."""
    monkeypatch.setattr(Column, "show_unseen", lambda self, codes, generator: None)
    monkeypatch.setattr(Column, "with_unseen", lambda self, codes, generator: codes)


def streamed(path: Path | str, **options) -> Dataset:
    return load(path, stream="always", **options)


def stream_of(data: Dataset) -> Stream:
    assert data.stream is not None
    return data.stream


def counted(values: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(map(tuple, values.tolist()))


@pytest.mark.parametrize(
    "options",
    [{}, {"part": "part"}, {"validation": 0, "test": 7, "seed": 3}, {"validation": 0.3, "rare": 80}],
)
def test_it_is_the_table_that_memory_would_hold(rows: Path, shown: None, options: dict) -> None:
    whole, data = load(rows / "*.parquet", stream="never", **options), streamed(rows, **options)
    assert data.schema == whole.schema
    assert data.describe()["sizes"] == whole.describe()["sizes"]
    for name in ("validation", "test"):
        one, other = data.parts.get(name), whole.parts.get(name)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.values.equal(other.values)
            assert one.log_density is not None
            assert one.log_density.equal(other.log_density)
    every = torch.cat([*stream_of(data).batches(1, 0, 0)])
    assert counted(every) == counted(whole.train.values) == counted(data.train.values)


@pytest.mark.parametrize("buffer", [1, 50, 2**20])
def test_an_epoch_goes_on_at_any_batch(rows: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    stream = stream_of(streamed(rows))
    monkeypatch.setattr(Stream, "buffer", buffer)
    batches = [*stream.batches(16, 5, 2)]
    assert len(batches) == len(stream) // 16
    assert all(len(batch) == 16 for batch in batches)
    for first in (1, 7, len(batches) - 1, len(batches)):
        rest = [*stream.batches(16, 5, 2, first)]
        assert len(rest) == len(batches) - first
        assert all(one.equal(other) for one, other in zip(rest, batches[first:], strict=True))
    other = torch.cat([*stream.batches(16, 5, 3)])
    assert not other.equal(torch.cat(batches))


def test_processes_share_row_groups(rows: Path, shown: None) -> None:
    stream = stream_of(streamed(rows))
    shares = [stream.share(rank, 2) for rank in range(2)]
    assert sorted([*shares[0], *shares[1]], key=lambda group: group.first) == [*stream.groups]
    each = [torch.cat([*stream.batches(2, 0, 4, rank=rank, world=2)]) for rank in range(2)]
    assert counted(torch.cat(each)) == counted(torch.cat([*stream.batches(1, 0, 0)]))
    assert stream.steps(2, 2) == min(map(len, each))
    thirds = [next(stream.batches(10, 0, 4, rank=rank, world=3)) for rank in range(3)]
    assert [len(part) for part in thirds] == [3, 3, 4]
    with pytest.raises(DataError, match="there are 18 for 19: begin fewer processes"):
        stream.steps(19, 19)


def test_rows_show_what_was_never_seen_at_its_rate() -> None:
    """200 batches of 1,000 rows: the count is binomial, so within five standard deviations."""
    column = Category.learn(Tally.of("word", pa.array(["a", "b"] * 40 + ["c"])))
    codes, generator = np.zeros(200_000, np.int64), np.random.default_rng(0)
    for part in np.array_split(codes, 200):
        column.show_unseen(part, generator)
    (rate,) = column.reserved.values()
    assert rate == 2 / 81
    assert abs((codes == column.unseen).sum() - 200_000 * rate) < 5 * np.sqrt(200_000 * rate)


def test_frames_of_polars_stream(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"a": ["x", "y", None] * 50, "c": pl.Series(["u", "v", "w"] * 50, dtype=pl.Categorical)}
    )
    frame.write_parquet(tmp_path / "x.parquet")
    views = pa.table({"a": pa.array(["x", "y", None] * 50, pa.string_view()), "c": ["u", "v", "w"] * 50})
    pq.write_table(views, tmp_path / "views.parquet")
    for name in ("x.parquet", "views.parquet"):
        assert streamed(tmp_path / name).categories == (4, 4)


def test_auto_streams_what_outgrows_memory(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(rows).stream is None
    assert module.free_memory() > 2**20
    monkeypatch.setattr(module, "free_memory", lambda: 8 * 612 * 5 * 10 - 1)
    assert load(rows).stream is not None
    monkeypatch.setattr(module, "free_memory", lambda: 8 * 612 * 5 * 10)
    assert load(rows).stream is None


def test_files_have_a_digest(rows: Path) -> None:
    before = stream_of(streamed(rows)).sha256
    assert stream_of(streamed(rows)).sha256 == before
    pq.write_table(pq.read_table(rows / "1.parquet").slice(1), rows / "1.parquet")
    assert stream_of(streamed(rows)).sha256 != before


def test_what_is_refused(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("refused")
    pacsv.write_csv(pa.table({"a": [1, 2] * 50}), folder / "x.csv")

    def refused(message: str, call) -> None:
        with pytest.raises(UserError, match=message):
            call()

    refused("names no data: it is a file, a folder of .parquet files", lambda: load(folder))
    refused("names no data", lambda: load(folder / "*.parquet"))
    refused("read as they are trained on from .parquet files", lambda: streamed(folder / "x.csv"))
    refused("data files end here in .parquet", lambda: load(folder / "*.csv"))
    refused("one of auto, always, never; got 'yes'", lambda: load(rows, stream="yes"))  # pyright: ignore[reportArgumentType]
    pq.write_table(pq.read_table(rows / "1.parquet").drop(["few"]), rows / "4.parquet")
    refused("4.parquet differs from .*0.parquet in 'few'", lambda: streamed(rows))
    (rows / "4.parquet").write_bytes(b"PAR1" * 9)
    refused("4.parquet cannot be read as parquet", lambda: streamed(rows))
    (rows / "4.parquet").unlink()
    for path in rows.glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.set_column(4, "part", pa.array(["test"] * len(table))), path)
    refused("no row is to train", lambda: streamed(rows, part="part"))
    structs = pa.array([{"a": 1}] * 3)
    refused(
        "its cells are struct<a: int64>",
        lambda: load(pa.table({"x": ["a", "b", "a"], "part": structs}), part="part"),
    )


def test_the_recipe_auto_has_all_rows_in_memory(rows: Path) -> None:
    from xorflow import auto_fit

    with pytest.raises(ConfigError, match="it has all rows in memory, and these are read from their files"):
        auto_fit(streamed(rows))


def test_bad_types_are_named(rows: Path) -> None:
    with pytest.raises(DataError, match="words"):
        streamed(rows, schema={"columns": {"words": {"kind": "number"}}})


def test_a_long_pass_says_how_far_it_is(
    rows: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN", 0)
    with caplog.at_level("INFO", logger="xorflow"):
        streamed(rows)
    first, last = caplog.messages[0], caplog.messages[-1]
    assert first.startswith("learning the columns: 37 of 612 rows read, about ")
    assert last == "learning the columns: 612 of 612 rows read, about 0:00:00 left"
