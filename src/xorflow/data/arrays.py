"""Files of numpy arrays, and the checks that every data file must pass before it is opened."""

import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from xorflow._files import require_plain
from xorflow.data.checks import LIMIT, constant, require_in_range, stated, to_tensor, whole
from xorflow.errors import DataError

ARRAYS = (".npy", ".npz")
"""Suffixes of files that hold arrays."""

_HEADER = re.compile(
    r"\{'descr': '([<>|=]?)([biufcmMSUV])([0-9]{0,4})', 'fortran_order': (True|False), "
    r"'shape': \(([0-9]{0,15}(?:, ?[0-9]{1,15}){0,31}),?\),? ?\} *\n?"
)
"""What numpy, and all others that we know of, write before an array of a plain type."""

_DEFLATED = 1100
"""A compressed byte stands for at most about so many."""


def check_path(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """The path of a plain file that is not empty, and has one of these suffixes."""
    path = Path(path)
    if os.path.isdir(path):
        raise DataError(f"a data file was expected, but {path} is a folder; name one file in it")
    if path.suffix.lower() not in suffixes:
        raise DataError(
            f"data files end here in {', '.join(suffixes)}, got {path}; convert it to one of these"
        )
    try:
        size = require_plain(path).st_size
    except FileNotFoundError:
        raise DataError(f"the data file {path} does not exist; check the path") from None
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}; check the path") from None
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes): data must have at least one row")
    return path


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npy file (one, named 'x') or of a .npz file. Nothing in them is unpickled."""
    try:
        with _reading():
            file = path.open("rb")
        with file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                return {"x": _read_array(file, os.fstat(file.fileno()).st_size)}
            return _read_members(file)
    except _Damaged as error:
        raise DataError(
            f"{path} cannot be read as plain arrays ({error}); it is truncated, damaged, or holds Python "
            "objects, which are refused because unpickling can run code; save integers with numpy.save"
        ) from None


class _Damaged(Exception):
    """What a file holds is not what its format says, or cannot be read."""


@contextmanager
def _reading() -> Iterator[None]:
    """Around lines that read, and nothing else: what goes wrong there is the file's fault."""
    # of zip files: RuntimeError if they are encrypted, NotImplementedError if of a newer kind
    try:
        yield
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise _Damaged(str(error)) from None


def _read(stream: IO[bytes], count: int) -> bytes:
    with _reading():
        return stream.read(count)


def _read_members(file: IO[bytes]) -> dict[str, np.ndarray]:
    arrays = {}
    with _reading():
        archive = zipfile.ZipFile(file)
    for member in archive.infolist():
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _Damaged(f"{member.filename!r} is compressed as numpy never does")
        if member.file_size > _DEFLATED * member.compress_size:
            raise _Damaged(f"{member.filename!r} says that it has {member.file_size:,} bytes")
        with _reading():
            stream = archive.open(member)
        arrays[member.filename.removesuffix(".npy")] = _read_array(stream, member.file_size)
        if _read(stream, 1):  # the end, where the checksum is compared
            raise _Damaged(f"{member.filename!r} is longer than it says")
    return arrays


def _read_array(stream: IO[bytes], size: int) -> np.ndarray:
    """The array in a .npy file of so many bytes, whose header is checked before anything of its size is made."""
    start = _read(stream, 8)
    if start[:6] != b"\x93NUMPY" or start[6:7] not in (b"\1", b"\2", b"\3"):
        raise _Damaged(f"it begins with {start!r}, which is no array")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(_read(stream, width), "little")
    header = _read(stream, min(length, 10_000)).decode("latin-1")
    match = _HEADER.fullmatch(header)
    if match is None:
        raise _Damaged(f"its header is {header[:200]!r}")
    dtype = _type(match[1], match[2], match[3])
    shape = tuple(int(number) for number in match[5].split(",") if number.strip())
    came = size - 8 - width - length
    if math.prod(shape) * dtype.itemsize != came or dtype.itemsize == 0:
        raise _Damaged(f"an array {shape} of {dtype} does not have {came:,} bytes")
    try:
        content = np.empty(came, np.uint8)
    except MemoryError:
        raise _Damaged(f"its {came:,} bytes do not fit into memory") from None
    with _reading():
        read = stream.readinto(content)  # pyright: ignore[reportAttributeAccessIssue]
    if read != came:
        raise _Damaged(f"it says that it has {came:,} bytes, and has {read:,}")
    return content.view(dtype).reshape(shape, order="F" if match[4] == "True" else "C")


def _type(order: str, kind: str, width: str) -> np.dtype:
    try:
        return np.dtype(f"{order}{kind}{width}")
    except TypeError as error:
        raise _Damaged(str(error)) from None


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


def read_parts(path: Path) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """The arrays 'train', 'validation' and 'test' of a .npz file, or one as 'x'; and the shape of a row that is no vector."""
    arrays = read_arrays(path)
    if "train" not in arrays:
        arrays = {"x": single_array(arrays, path)}
    elif extra := sorted(set(arrays) - {"train", "validation", "test"}):
        raise DataError(f"beside 'train', {path} may hold 'validation' and 'test', got {', '.join(extra)}")
    shapes = {name: array.shape[1:] for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"all arrays of {path} must have rows of one shape, got {shapes}")
    rows = {name: as_rows(array, f"array {name!r} of {path}") for name, array in arrays.items()}
    return {name: values for name, (values, _) in rows.items()}, next(iter(rows.values()))[1]


def as_rows(array: np.ndarray | Tensor, label: str) -> tuple[Tensor, tuple[int, ...] | None]:
    """Integers (N, D), and the shape (H, W) of one row where the array had three axes, as images do."""
    if array.ndim < 2:
        raise DataError(
            f"{label} must have shape (N, D) or, for images, (N, H, W), got {tuple(array.shape)}"
            "; reshape a single feature to (N, 1)"
        )
    if array.ndim > 3:
        width = math.prod(array.shape[1:])
        raise DataError(
            f"{label} must have shape (N, D) or, for images with one value a pixel, (N, H, W), got {tuple(array.shape)}; "
            f"to model each of its {width} values as a feature of its own, as unordered categories, reshape it to "
            f"({array.shape[0]}, {width}); of colours, one value a pixel could be a grey level or an index into a palette"
        )
    if 0 in array.shape:
        raise DataError(f"{label} must have at least one row and one feature, got shape {tuple(array.shape)}")
    values = whole(to_tensor(array)).reshape(len(array), -1)
    return values, tuple(array.shape[1:]) if array.ndim > 2 else None


def array_categories(arrays: dict[str, Tensor], explicit: int | Sequence[int] | None) -> tuple[int, ...]:
    """K_d as stated, after a check that the data obeys it, or else the maximum over all arrays + 1."""
    ends = [torch.aminmax(array, dim=0) for array in arrays.values()]
    low = torch.stack([end.min.to(torch.int64) for end in ends]).amin(0)  # (D,)
    high = torch.stack([end.max.to(torch.int64) for end in ends]).amax(0)  # (D,)
    if explicit is not None:
        categories = stated(explicit, len(low))
        for array in arrays.values():
            require_in_range(array, categories)
        return categories
    if int(low.min()) < 0:
        d = int(low.argmin())
        raise DataError(f"categories count from 0, but feature {d} holds {int(low[d])}; re-code it as 0..K-1")
    same = (low == high).nonzero()[:, 0].tolist()
    if same:
        raise constant(len(same), len(low), f"feature {same[0]} (from 0)", int(low[same[0]]))
    if int(high.max()) >= LIMIT:
        d = int(high.argmax())
        raise DataError(
            f"feature {d} reaches {int(high[d])}, which would make more than {LIMIT} categories"
            "; re-code it as 0..K-1, or state categories="
        )
    return tuple((high + 1).tolist())
