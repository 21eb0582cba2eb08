"""Standard output and standard error while a command runs: a disk that is full, a reader that left, letters they lack."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from xorflow.errors import UserError


class ReaderGone(Exception):
    """Who reads the pipe that standard output is has seen enough."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within this block what standard output cannot take is a UserError or ReaderGone, and what standard error can't is lost.

    Only writing to them is guarded: any other OSError is still one.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout), _Messages(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Output:
    """A text stream that writes a letter which its encoding lacks as an escape, like \\xb1; all else is that of the stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._reason: OSError | None = None if stream else OSError(errno.EBADF, "it is closed")

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # typer would write there, past all this, where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._there().write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._failed(error)
            return 0

    def flush(self) -> None:
        try:
            self._there().flush()
        except OSError as error:
            self._failed(error)

    def _there(self) -> TextIO:
        """The stream; once it has failed it fails always, for who tried it first may have ignored that."""
        if self._reason is not None:
            raise self._reason
        assert self._stream is not None
        return self._stream

    def _failed(self, error: OSError) -> None:
        real = self._stream is not None and self._stream in (sys.__stdout__, sys.__stderr__)
        if real and self._reason is None:  # what it still holds would fail once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        self._reason = error
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone
        raise UserError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere; what was to be written to files is there"
        ) from error


class _Messages(_Output):
    def _tell(self, error: OSError) -> None:
        """There is nobody to tell."""
