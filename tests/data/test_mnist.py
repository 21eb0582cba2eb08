"""The bundled digits, and draws that are pinned for ever."""

import gzip
import hashlib
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xorflow.data
from xorflow._math import philox_raw
from xorflow.data import Dataset, binarise, mnist
from xorflow.data.bundled import SHA256
from xorflow.data.parts import shuffled
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


# ---- binarisation: raw Philox words, compared as integers ----


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """One block of Philox4x64-10 (Salmon et al. 2011), written from the definition: an independent oracle."""
    mask = 2**64 - 1
    c = [(counter >> (64 * i)) & mask for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(right >> 64) ^ c[1] ^ k0, right & mask, (left >> 64) ^ c[3] ^ k1, left & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (0, 2), (7, 1), (2**64 - 1, 3)])
def test_raw_words_are_philox_of_the_key_seed_and_stream(seed: int, stream: int) -> None:
    # numpy counts before it draws, so the first block is that of counter 1.
    expected = [word for block in range(1, 4) for word in philox4x64(block, (seed, stream))]
    assert philox_raw(seed, stream, 12).tolist() == expected


def test_halves_are_taken_low_first_and_compared_as_integers() -> None:
    grey = np.random.Generator(np.random.PCG64(0)).integers(0, 256, 41).astype(np.uint8)
    halves = [half for word in philox_raw(5, 1, 21).tolist() for half in (word % 2**32, word >> 32)][:41]
    expected = [
        int(v > 0 and half * 255 <= v * (2**32 - 1)) for half, v in zip(halves, grey.tolist(), strict=True)
    ]
    assert binarise(grey, 5, 1).tolist() == expected


@pytest.mark.parametrize(
    ("seed", "stream", "digest"),
    [
        (0, 0, "279ccb11db41a0dc23c9890c783304d48509b506f2a451b9dff946fb7132bf2f"),
        (0, 1, "f0e7db57edb20a42112011d79ef4db931b7eabb9ab113fdce6bf46153220730e"),
        (1, 0, "9aa87dc8d5f6664fc8f24ad9145951e74968f82e4e9ce059377b769ce4f9233d"),
        (2**64 - 1, 2, "99c9342d6caf08aa22ed1d3bff0388eb6a87495a896447991a6cfba312c35c51"),
    ],
)
def test_small_cases_are_pinned(seed: int, stream: int, digest: str) -> None:
    grey = np.arange(256, dtype=np.uint8).repeat(3)[:-1].reshape(13, 59)
    assert hashlib.sha256(binarise(grey, seed, stream).tobytes()).hexdigest() == digest


def test_black_is_never_one_and_white_always() -> None:
    assert binarise(np.zeros(100_000, np.uint8), 0, 0).sum() == 0
    assert binarise(np.full(100_000, 255, np.uint8), 0, 0).sum() == 100_000


@pytest.mark.parametrize("v", [1, 77, 128, 254])
def test_frequency_is_v_over_255(v: int) -> None:
    n, p = 400_000, v / 255
    mean = binarise(np.full(n, v, np.uint8), 3, 0).mean()
    assert abs(mean - p) < 4 * math.sqrt(p * (1 - p) / n)  # four standard errors, fixed seed


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_first_rows_do_not_depend_on_how_many_follow(rows: int, width: int, seed: int) -> None:
    grey = (np.arange(rows * width, dtype=np.int64) % 256).astype(np.uint8).reshape(rows, width)
    half = (rows + 1) // 2
    assert (binarise(grey, seed, 0)[:half] == binarise(grey[:half], seed, 0)).all()


def test_layout_in_memory_does_not_matter() -> None:
    grey = np.arange(200, dtype=np.uint8).reshape(10, 20)
    assert (binarise(np.asfortranarray(grey), 0, 0) == binarise(grey, 0, 0)).all()


def test_refuses_other_types_and_seeds() -> None:
    with pytest.raises(DataError, match="uint8 intensities"):
        binarise(np.zeros(3), 0, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"0\.\.2\^64 - 1"):
        binarise(np.zeros(3, np.uint8), -1, 0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(count, seed).tolist()) == list(range(count))


def test_shuffled_is_pinned() -> None:
    assert shuffled(10, 0).tolist() == [5, 4, 6, 7, 9, 0, 1, 2, 3, 8]
