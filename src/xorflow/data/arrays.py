"""Files of numpy arrays, and the checks that every data file must pass before it is opened."""

import math
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
from torch import Tensor

from xorflow.data.checks import to_tensor, whole
from xorflow.errors import DataError

READABLE = (".npy", ".npz", ".csv")


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file that exists, is not empty, and has a known suffix."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"a data file was expected, but {path} is a folder; name one file in it")
    if path.suffix.lower() not in READABLE:
        raise DataError(f"data files end in {', '.join(READABLE)}, got {path}; convert it to one of these")
    if not path.exists():
        raise DataError(f"the data file {path} does not exist; check the path")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes): data must have at least one row")
    return path


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npy file (one, named 'x') or of a .npz file. Nothing in them is unpickled."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"x": loaded}
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
        # A damaged header may claim any size, which is how a MemoryError comes about.
        raise DataError(
            f"{path} cannot be read as plain arrays ({error}); it is truncated, damaged, or holds Python "
            "objects, which are refused because unpickling can run code; save integers with numpy.save"
        ) from None


def single_array(arrays: dict[str, np.ndarray], path: Path) -> np.ndarray:
    """The only array of a file, or the one named 'x'."""
    if "x" in arrays:
        return arrays["x"]
    if len(arrays) != 1:
        raise DataError(
            f"{path} must hold one array, one named 'x', or (to train on) 'train', 'validation' and 'test'"
            f"; it holds {', '.join(map(repr, arrays)) or 'none'}"
        )
    return next(iter(arrays.values()))


def as_rows(array: np.ndarray, label: str) -> tuple[Tensor, tuple[int, ...] | None]:
    """Integers (N, D), and the shape (H, W) of one row where the array had three axes, as images do."""
    if array.ndim < 2:
        raise DataError(
            f"{label} must have shape (N, D) or, for images, (N, H, W), got {array.shape}"
            "; reshape a single feature to (N, 1)"
        )
    if array.ndim > 3:
        width = math.prod(array.shape[1:])
        raise DataError(
            f"{label} must have shape (N, D) or, for images with one value a pixel, (N, H, W), got {array.shape}; to model "
            f"each of its {width} values as a feature of its own, as unordered categories, reshape it to "
            f"({array.shape[0]}, {width}); of colours, one value a pixel could be a grey level or an index into a palette"
        )
    if array.size == 0:
        raise DataError(f"{label} must have at least one row and one feature, got shape {array.shape}")
    values = whole(to_tensor(array)).reshape(len(array), -1)
    return values, array.shape[1:] if array.ndim > 2 else None
