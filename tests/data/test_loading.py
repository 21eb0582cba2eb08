"""Files of one's own: what comes out of good ones."""

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from xorflow.data import Dataset, load
from xorflow.errors import DataError


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def grid(n: int, *kinds: int) -> np.ndarray:
    """Rows that take every value of every feature, and tell the row they came from."""
    return np.stack([np.arange(n) // int(np.prod(kinds[:d])) % k for d, k in enumerate(kinds)], axis=1)


def rows_of(data: Dataset) -> list[list[int]]:
    return sorted(row for split in data.parts.values() for row in split.values.tolist())


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.int16, np.uint32, np.int64, np.float32, ">i4", "f8"]
)
def test_npy_of_any_type(tmp_path: Path, dtype) -> None:
    x = grid(20, 2, 2, 2)
    data = load(save(tmp_path / "x.npy", x.astype(dtype)))
    assert data.categories == (2, 2, 2)
    assert {name: len(split) for name, split in data.parts.items()} == {
        "train": 16,
        "validation": 2,
        "test": 2,
    }
    assert data.train.values.dtype == torch.uint8
    assert rows_of(data) == sorted(x.tolist())
    assert data.schema is None
    assert data.name == "x.npy"


def test_own_number_of_categories_for_each_feature(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", grid(60, 2, 5, 3))
    assert load(path).categories == (2, 5, 3)
    assert load(path, categories=7).categories == (7, 7, 7)
    assert load(path, categories=[2, 5, 4]).categories == (2, 5, 4)


def test_many_categories_are_kept_in_int64(tmp_path: Path) -> None:
    data = load(save(tmp_path / "x.npy", grid(400, 300, 2)))
    assert data.categories == (300, 2)
    assert data.train.values.dtype == torch.int64
    byte = load(save(tmp_path / "y.npy", grid(512, 256, 2)))
    assert byte.train.values.dtype == torch.uint8


def test_images_keep_their_shape(tmp_path: Path) -> None:
    x = (np.arange(10 * 3 * 4) % 7 % 2).reshape(10, 3, 4)
    data = load(save(tmp_path / "x.npy", x))
    assert data.shape == (3, 4)
    assert data.features == 12
    assert rows_of(data) == sorted(x.reshape(10, 12).tolist())


def test_splits_follow_the_seed(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", grid(200, 100, 2))
    one, again, other = load(path, seed=1), load(path, seed=1), load(path, seed=2)
    assert torch.equal(one.train.values, again.train.values)
    assert not torch.equal(one.train.values, other.train.values)
    more = load(path, seed=1, validation=50)
    assert more.describe()["sha256"]["test"] == one.describe()["sha256"]["test"]
    assert one.test is not None
    assert one.describe()["sha256"]["test"] == one.test.sha256


@pytest.mark.parametrize(
    ("validation", "test", "sizes"),
    [
        (0.25, 0.5, {"train": 5, "validation": 5, "test": 10}),
        (3, 4, {"train": 13, "validation": 3, "test": 4}),
        (0, 0, {"train": 20}),
        (0.0, 1, {"train": 19, "test": 1}),
        (0.001, 0.001, {"train": 18, "validation": 1, "test": 1}),
    ],
)
def test_fractions_and_counts(tmp_path: Path, validation, test, sizes) -> None:
    data = load(save(tmp_path / "x.npy", grid(20, 2, 2)), validation=validation, test=test)
    assert data.describe()["sizes"] == sizes


def test_npz_with_one_array_or_with_parts(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, anything=grid(20, 2, 3))
    assert load(path).categories == (2, 3)
    np.savez(path, x=grid(20, 2, 3), y=np.zeros(20))
    assert load(path).categories == (2, 3)
    np.savez(path, train=grid(6, 2, 3), test=grid(6, 2, 3) + np.array([0, 1]))
    data = load(path)
    assert data.describe()["sizes"] == {"train": 6, "test": 6}
    assert data.categories == (2, 4)  # over the whole file
    assert data.validation is None
    assert data.train.values.tolist() == grid(6, 2, 3).tolist()


def test_csv_with_header_text_and_integers(write) -> None:
    lines = [f'{"red" if n % 2 else "blue"},{n % 3 * 5 - 5},"a, b{n % 2}"' for n in range(30)]
    data = load(write("x.csv", "colour,size,note\n" + "\n".join(lines) + "\n\n"))
    assert data.schema is not None
    assert data.schema.names == ("colour", "size", "note")
    assert data.categories == (3, 4, 3)
    assert data.notes[0].endswith("x.csv names the columns (--no-header if it is a row)")
    held_out = [data.parts[name].values.numpy() for name in ("validation", "test")]
    cells = [tuple(row.values()) for part in held_out for row in data.schema.decode(part).to_pylist()]
    assert {*cells} <= {("red" if n % 2 else "blue", n % 3 * 5 - 5, f"a, b{n % 2}") for n in range(30)}


def test_header_can_be_stated(write) -> None:
    path = write("x.csv", "0,1\n" + "0,1\n1,0\n" * 3)
    assert sum(map(len, load(path).parts.values())) == 7
    stated = load(path, header=True)
    assert sum(map(len, stated.parts.values())) == 6
    assert stated.schema is not None
    assert stated.schema.names == ("0", "1")


TEXT = "word,number\n" + "".join(f"{'ab'[n % 2]},{n % 3}\n" for n in range(30))


@pytest.mark.parametrize(
    ("data", "message"),
    [([[1, 0], [1]], "rectangular"), ([["a", "b"]] * 9, "got an array of <U1"), (3, "must have shape")],
)
def test_lists_that_are_no_rows(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(data)


def test_parts_are_files(write, tmp_path: Path) -> None:
    test = write("test.csv", "number,extra,word\n2,1,b\n7,1,c\n")
    data = load(write("x.csv", TEXT), test_data=test)
    assert data.describe()["sizes"] == {"train": 27, "validation": 3, "test": 2}
    assert data.test is not None
    assert data.test.values.tolist() == [[1, 2], [2, 3]]
    assert data.notes[1].endswith("test.csv has columns that are ignored: 'extra'")
    pd.read_csv(test).to_parquet(tmp_path / "test.parquet")
    same = load(
        pd.read_csv(write("x.csv", TEXT)), test_data=tmp_path / "test.parquet", validation_data=str(test)
    )
    assert same.describe()["sizes"] == {"train": 30, "validation": 2, "test": 2}
    np.save(tmp_path / "a.npy", grid(20, 2, 2))
    np.save(tmp_path / "b.npy", grid(8, 2, 2))
    arrays = load(tmp_path / "a.npy", test_data=tmp_path / "b.npy")
    assert arrays.describe()["sizes"] == {"train": 18, "validation": 2, "test": 8}
    np.savez(tmp_path / "parts.npz", train=grid(20, 2, 2), test=grid(8, 2, 2))
    with pytest.raises(DataError, match="has its parts inside"):
        load(tmp_path / "parts.npz", validation=0.2)


def test_parts_are_named_by_a_column(write) -> None:
    rows = [f"{'ab'[n % 2]},{'dev' if n < 4 else 'Test' if n < 10 else 'training'}" for n in range(30)]
    data = load(write("x.csv", "word,part\n" + "\n".join(rows)), part="part")
    assert data.describe()["sizes"] == {"train": 20, "validation": 4, "test": 6}
    assert data.schema is not None
    assert [*data.schema.left_out] == ["part"]


def test_frames_arrays_and_tensors_are_loaded() -> None:
    for values in (grid(20, 2, 3), torch.from_numpy(grid(20, 2, 3)), grid(20, 2, 3).tolist()):
        assert load(values).categories == (2, 3)
    data = load(pd.DataFrame({"a": ["x", "y"] * 15}), rare=20)
    assert data.name == "frame"
    assert data.categories == (2,)


def test_ten_thousand_csv_rows_are_quick(write) -> None:
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, 12, (10_000, 16))
    path = write("x.csv", "\n".join(",".join(map(str, row)) for row in draws.tolist()))
    start = time.perf_counter()
    data = load(path)
    assert time.perf_counter() - start < 2  # 0.03 s on an idle core; the rest is for busy ones
    assert data.schema is not None
    assert data.test is not None
    assert data.schema.decode(data.test.values.numpy()).num_rows == 1000
