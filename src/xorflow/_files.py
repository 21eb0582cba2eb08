"""Files: written wholly or not at all, read only if they are plain and of a bounded size, and the lock of a folder."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from xorflow.errors import CheckpointError, UserError

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


MOST_JSON = 64 * 2**20
"""The most bytes of a JSON file, read or written."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""Names of files that are not wholly written."""

LOCK = ".lock"
"""The file in a folder whose lock the process has that writes there."""

_KEEP = "what was saved before is untouched: make room or choose another --out, and continue with --resume"

# ---- writing ----


@contextmanager
def new_file(path: Path, advice: str = _KEEP, error: type[UserError] = CheckpointError) -> Iterator[BinaryIO]:
    """What is written within this block becomes a file, wholly once the block has ended well, and otherwise not at all."""
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # the process's umask says who may read it, as of any file
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as cause:
        raise error(f"could not write {path}: {cause.strerror or cause}; {advice}") from cause


def write_bytes(
    path: Path, content: bytes | memoryview, advice: str = _KEEP, error: type[UserError] = CheckpointError
) -> None:
    """Write a file so that it is there wholly or not at all; `advice` ends the message if it cannot be."""
    with new_file(path, advice, error) as stream:
        stream.write(content)


_BINARY = getattr(os, "O_BINARY", 0)  # of Windows


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that `read_json` reads; a number that is not finite is a fault of the caller."""
    content = (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
    if len(content) > MOST_JSON:
        raise CheckpointError(
            f"a JSON file has at most {MOST_JSON:,} bytes, and {path} would have {len(content):,}: group categories, or use "
            "fewer columns"
        )
    write_bytes(path, content)


def is_left_over(name: str) -> bool:
    """Whether a file of this name is what a killed process left: a half-written file, or a lock that nobody has."""
    return name == LOCK or _TEMPORARY.fullmatch(name) is not None


def remove_half_written(folder: Path) -> None:
    """Remove what killed processes left half written in a folder of a run that this process holds."""
    for path in (*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


# ---- reading ----


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a plain file of at most so many bytes; anything else (a pipe, a device, a folder) is an OSError."""
    require_plain(path)
    # should a pipe take the file's place meanwhile, opening it does not wait
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        content = stream.read() if most is None else stream.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content


def require_plain(path: Path) -> os.stat_result:
    """Raise an OSError, with a reason, unless this is a plain file that may be read."""
    try:
        state = os.stat(path)
    except ValueError:  # of a name that no file can have
        raise OSError(errno.EINVAL, "its name holds a zero, or is no text") from None
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file")
    return state


def inside(folder: Path, name: object) -> Path:
    """The path of what a file in `folder` names there; a name that leads out of the folder is refused."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name in ("", ".", "..")
        or any(c in name for c in "/\\:")
    ):
        raise CheckpointError(
            f"files of a run are named without folders, and one in {folder} is named {name!r}; restore it"
        )
    path = folder / name
    if Path(os.path.realpath(path)).parent != Path(os.path.realpath(folder)):
        raise CheckpointError(
            f"the files of a run lie in its folder, and {path} is a link to another place; copy the file there"
        )
    return path


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object; `what` names the file's role in error messages."""
    try:
        content = read_bytes(path, MOST_JSON)
    except FileNotFoundError:
        raise CheckpointError(
            f"{what} is missing: no file {path}; is the folder a run of xorflow train?"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {path}: {error.strerror}; restore it") from None
    try:
        value = json.loads(content.decode(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # ValueError: no text, no JSON, no number, or one too long
        raise CheckpointError(
            f"{what} is damaged: {path} is no readable JSON ({error}); restore it or train again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: {path} holds no JSON object; restore it or train again")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


# ---- one process writes ----


class Lock:
    """A hold on a folder, which is made if need be, until it is released or its process ends, however that ends.

    Raises:
        CheckpointError: if another process, or another part of this one, holds it.
        OSError: if nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._descriptor = _acquire(self._path)

    def release(self) -> None:
        """Give the folder free; one that was made for this, and is empty, goes."""
        with suppress(OSError):  # Windows keeps what is open
            self._path.unlink()  # while it is held: who has opened the file by then finds that it is gone, and makes another
        os.close(self._descriptor)
        if self._made:
            with suppress(OSError):  # it is not empty
                self._path.parent.rmdir()


def _acquire(path: Path) -> int:
    while True:
        # a link, in a folder from elsewhere, would have another file overwritten
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if not _lock(descriptor):
                raise CheckpointError(
                    f"one process at a time writes into a run's folder, and {_holder(descriptor)} has {path.parent}: wait "
                    "until it has ended, or stop it"
                )
            if _is_there(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who had it has removed it meanwhile


def _lock(descriptor: int) -> bool:
    """Whether the lock was free; where a file system has none, it is taken to be."""
    try:
        _try_lock(descriptor)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Who has a lock, as far as its file can be read: on Windows it cannot."""
    pid = "" if sys.platform == "win32" else os.pread(descriptor, 20, 0).decode(errors="replace").strip()
    return "this process" if pid == str(os.getpid()) else f"process {pid}" if pid else "another process"
