"""MNIST from the files that come with the package.

The images are by Yann LeCun, Corinna Cortes and Christopher J. C. Burges, under CC BY-SA 3.0 (see NOTICE).
"""

import gzip
import hashlib
import zlib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from xorflow.data.dataset import TEST, VALIDATION, Dataset, Split
from xorflow.errors import DataError

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the four files once decompressed: idx files of bytes, four bytes of which say how many sizes follow."""

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
    return Dataset(
        name="mnist",
        train=train[:cut],
        validation=train[cut:].frozen(seed, VALIDATION) if validation else None,
        test=test.frozen(seed, TEST),
        categories=(2,) * SIDE**2,
        shape=(SIDE, SIDE),
        seed=seed,
    )


def _split(source: Traversable, part: str, labels: bool) -> Split:
    images = _read(source, f"{part}-images-idx3-ubyte").reshape(-1, SIDE**2)
    digits = _read(source, f"{part}-labels-idx1-ubyte").to(torch.int64) if labels else None
    context = None if digits is None else torch.nn.functional.one_hot(digits, 10).to(torch.float32)
    return Split(images, context, stochastic=True)


def _read(source: Traversable, name: str) -> Tensor:
    """The bytes of a file below its header; who has the digest has the sizes, too."""
    file = source / f"{name}.gz"
    try:
        raw = gzip.decompress(file.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"MNIST needs the file {file}, which is missing; re-install, or mend folder="
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file} is truncated or damaged ({error}); fetch it again or re-install") from None
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHA256[name]:
        raise DataError(
            f"the content of {file} is not MNIST's: its SHA-256 is {digest}, expected {SHA256[name]}"
            "; fetch it again or re-install"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=4 + 4 * raw[3])
