"""Training on rows that are read from their files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiny_runs import StopAt, assert_same_run, continue_run, train_run
from xorflow.data import stream
from xorflow.errors import ConfigError
from xorflow.training import Interrupted, Options, open_run


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Two files of 300 rows; the second column is a noisy copy of the first."""
    rng, folder = np.random.default_rng(0), tmp_path / "rows"
    folder.mkdir()
    for number in range(2):
        first = rng.integers(0, 4, 300)
        table = pa.table(
            {"a": first, "b": (first + (rng.random(300) < 0.1)) % 4, "c": rng.standard_normal(300)}
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=70)
    return Options(
        data=f"{folder}/*.parquet",
        stream="always",
        conditioner="made:hidden=8",
        epochs=3,
        batch_size=32,
        device="cpu",
    )


def test_an_interrupted_run_goes_on_at_the_row_where_it_stopped(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_MOST_ROWS", 100)
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "parts", StopAt({3, 19}))
    with pytest.raises(Interrupted):
        continue_run(tmp_path / "parts", {}, StopAt({19}))
    continue_run(tmp_path / "parts", {})
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_stream_learns_what_memory_does(options: Options, tmp_path: Path) -> None:
    """The same schema, the same test rows, and the same likelihood to its standard error."""
    options = options.replace(epochs=20, lr=0.01)
    streamed = train_run(options, tmp_path / "streamed")
    whole = train_run(options.replace(stream="never"), tmp_path / "whole")
    assert streamed["data"] == whole["data"] | {"name": streamed["data"]["name"]}
    assert abs(streamed["test"]["nll"] - whole["test"]["nll"]) < whole["test"]["stderr"]
    assert streamed["test"]["nll"] < streamed["independent_nll"] - 0.3


def test_how_much_memory_there_is_decides_once(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "free_memory", lambda: 0)
    train_run(options.replace(stream="auto", epochs=1), tmp_path / "run")
    monkeypatch.setattr(stream, "free_memory", lambda: 2**40)
    opened = open_run(tmp_path / "run").data()
    assert opened.stream is not None
    path = Path(options.data).parent / "1.parquet"
    pq.write_table(pq.read_table(path).slice(0, 299), path)
    with pytest.raises(ConfigError, match="different now"):
        open_run(tmp_path / "run").data()
