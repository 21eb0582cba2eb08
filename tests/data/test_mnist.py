"""The bundled digits: content, splits, pinned draws, and damaged files."""

import gzip
import shutil
from pathlib import Path

import pytest
import torch

import xorflow.data
from xorflow.data import Dataset, mnist
from xorflow.data.bundled import SHA256
from xorflow.errors import DataError

FILES = Path(xorflow.data.__file__).parent / "mnist_files"


def test_sizes_and_description(digits: Dataset) -> None:
    told = digits.describe()
    assert told["sizes"] == {"train": 50_000, "validation": 10_000, "test": 10_000}
    assert told["categories"] == 2
    assert told["shape"] == [28, 28]
    assert told["context"] == {"features": 10}
    assert "seed 0" in told["binarisation"]
    assert digits.features == 784
    assert digits.train.stochastic


def test_evaluation_draws_are_pinned(digits: Dataset) -> None:
    assert digits.describe()["sha256"] == {
        "validation": "2d6b175e6cab3041a971983f975974eabc91c0700baa1b3aa6019368d7b59210",
        "test": "7bc203c30d5ca4d2cd5413a7f440411e54b5166a8bdf546b448aee8af100f2f6",
    }


def test_labels_are_one_hot_and_belong_to_their_images(digits: Dataset) -> None:
    context = digits.train.context
    assert context is not None
    assert context.dtype == torch.float32
    assert context[:10].argmax(1).tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # the well-known beginning
    assert torch.equal(context.sum(1), torch.ones(50_000))
    assert digits.test is not None
    assert digits.test.context is not None
    assert digits.test.context[:5].argmax(1).tolist() == [7, 2, 1, 0, 4]


def test_all_images_train_without_validation(digits: Dataset) -> None:
    whole = mnist(validation=0, seed=1)
    assert whole.validation is None
    assert len(whole.train) == 60_000
    assert torch.equal(whole.train.values[:50_000], digits.train.values)
    assert whole.context_features == 0
    assert whole.test is not None
    assert digits.test is not None
    assert whole.test.sha256 != digits.test.sha256  # another seed
    assert digits.validation is not None
    last = whole.train.values[50_000:]
    black, white = digits.validation.values[last == 0], digits.validation.values[last == 255]
    assert black.sum() == 0
    assert white.all()


def test_training_batches_are_fresh(digits: Dataset) -> None:
    rows, generator = torch.arange(100), torch.Generator().manual_seed(0)
    first, second = (digits.train.gather(rows, generator=generator).x for _ in range(2))
    assert set(first.unique().tolist()) == {0, 1}
    assert not torch.equal(first, second)


def copy_of_files(tmp_path: Path) -> Path:
    for name in SHA256:
        shutil.copy(FILES / f"{name}.gz", tmp_path)
    return tmp_path


def test_folder_with_the_same_files(tmp_path: Path) -> None:
    folder = copy_of_files(tmp_path)
    (folder / "train-labels-idx1-ubyte.gz").unlink()  # labels are read only when asked for
    assert mnist(folder=folder).validation is not None
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz, which is missing"):
        mnist(folder=folder, context="label")


def small_change(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "truncated or damaged"),
        (lambda data: data[:1000] + b"\x55\xaa" + data[1002:], "truncated or damaged"),
        (lambda _: b"plain text", "truncated or damaged"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1], 1), "SHA-256"),
        (lambda data: gzip.compress(small_change(gzip.decompress(data)), 1), "SHA-256"),
    ],
)
def test_damaged_file(tmp_path: Path, damage, message: str) -> None:
    file = copy_of_files(tmp_path) / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        mnist(folder=tmp_path, context="label")


def test_arguments_are_checked() -> None:
    with pytest.raises(DataError, match="0 to 59999"):
        mnist(validation=60_000)
    with pytest.raises(DataError, match="None or 'label'"):
        mnist(context="digit")  # pyright: ignore[reportArgumentType]
