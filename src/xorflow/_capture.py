"""What every capture of launches on a CUDA device needs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CAPTURING = threading.Lock()


@contextmanager
def capturing() -> Iterator[None]:
    """Within this block a device's launches may be captured: by one thread at a time, and nothing is collected.

    Among the cycles of objects that would be collected may be earlier graphs, and destroying one is not allowed during a
    capture.
    """
    with _CAPTURING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()
