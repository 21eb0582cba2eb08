"""MNIST from the files that come with the package.

The images are by Yann LeCun, Corinna Cortes and Christopher J. C. Burges, under CC BY-SA 3.0 (see NOTICE).
"""

import gzip
import hashlib
import struct
import zlib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from xorflow.data.binarisation import TEST, VALIDATION
from xorflow.data.datasets import Dataset
from xorflow.data.splits import Split
from xorflow.errors import DataError

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the four files once decompressed."""

ROWS = 60_000
SIDE = 28


def mnist(
    *,
    validation: int = 10_000,
    seed: int = 0,
    context: Literal["label"] | None = None,
    folder: Path | None = None,
) -> Dataset:
    """Binarised MNIST, 50,000 / 10,000 / 10,000 images of 28 x 28 pixels, K = 2.

    The last `validation` training images validate; with 0, all 60,000 train. Training batches are binarised
    afresh, validation and test once from `seed`. `context="label"` adds the digit as a one-hot vector.
    `folder` reads the four .gz files from there instead of from the package; their content must be the same.
    """
    if not 0 <= validation < ROWS:
        raise DataError(f"validation takes 0 to {ROWS - 1} of the {ROWS} training images, got {validation}")
    if context not in (None, "label"):
        raise DataError(f"the context of MNIST is None or 'label', got {context!r}")
    source = resources.files("xorflow.data") / "mnist_files" if folder is None else Path(folder)
    train = _split(source, "train", labels=context is not None)
    test = _split(source, "t10k", labels=context is not None)
    cut = ROWS - validation
    held_out = _tail(train, cut).frozen(seed, VALIDATION) if validation else None
    return Dataset(
        name="mnist",
        train=train.subset(cut),
        validation=held_out,
        test=test.frozen(seed, TEST),
        categories=(2,) * SIDE**2,
        shape=(SIDE, SIDE),
        seed=seed,
    )


def _split(source: Traversable, part: str, labels: bool) -> Split:
    images = torch.from_numpy(_read(source, f"{part}-images-idx3-ubyte").reshape(-1, SIDE**2))
    if not labels:
        return Split(images, stochastic=True)
    digits = torch.from_numpy(_read(source, f"{part}-labels-idx1-ubyte")).to(torch.int64)
    return Split(images, torch.nn.functional.one_hot(digits, 10).to(torch.float32), stochastic=True)


def _tail(split: Split, start: int) -> Split:
    context = None if split.context is None else split.context[start:]
    return Split(split.values[start:], context, stochastic=True)


def _read(source: Traversable, name: str) -> np.ndarray:
    file = source / f"{name}.gz"
    try:
        raw = gzip.decompress(file.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"MNIST needs the file {file}, which is missing; re-install, or mend folder="
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file} is truncated or damaged ({error}); fetch it again or re-install") from None
    array = parse_idx(raw, str(file))
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHA256[name]:
        raise DataError(
            f"the content of {file} is not MNIST's: its SHA-256 is {digest}, expected {SHA256[name]}"
            "; fetch it again or re-install"
        )
    return array


def parse_idx(raw: bytes, name: str) -> np.ndarray:
    """The array in an idx file of unsigned bytes: 0, 0, type 8, ndim, big-endian sizes, then the values."""
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is no idx file of bytes: it begins with {raw[:4].hex(' ') or 'nothing'}")
    ndim = raw[3]
    start = 4 + 4 * ndim
    if len(raw) < start:
        raise DataError(f"{name} ends within its header of {start} bytes; fetch it again")
    shape = struct.unpack(f">{ndim}I", raw[4:start])
    expected = start + int(np.prod(shape, dtype=object))
    if len(raw) != expected:
        raise DataError(
            f"{name} states the sizes {shape}, {expected} bytes, but has {len(raw)}; fetch it again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()  # torch wants writable memory
