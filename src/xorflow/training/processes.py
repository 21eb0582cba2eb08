"""A run in a process of its own, seen from the process that starts it; `worker.py` is the other end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from xorflow.errors import UserError
from xorflow.training.loop import Interrupted

INTERRUPTED = 130
"""The code with which a process ends that was told to stop, and has saved."""

_POLL_SECONDS = 0.2


class Child:
    """A process that makes one run, and stops once the line that it hangs on is closed: on purpose, or by our death.

    Args:
        job: what to make, as `worker.py` reads it.
        out: the run's folder, to tell processes apart in a list of them.
        threads: its share of the cores, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(self, job: bytes, out: Path, threads: int) -> None:
        hold, line = os.pipe()
        self._line = os.fdopen(line, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xorflow.training.worker", str(out)],
                env={"OMP_NUM_THREADS": str(threads)} | os.environ,
                stdin=hold,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in the terminal is for the first process alone
            )
        except BaseException:
            self._line.close()
            raise
        finally:
            os.close(hold)
        with suppress(BrokenPipeError):  # if it is dead already, its code says why
            self._line.write(job)

    def wait(self, stop: threading.Event) -> None:
        """Until the run is finished.

        Raises:
            Interrupted: if `stop` was set, and the run has saved.
            UserError: if it failed or was killed.
        """
        complaint = self._last_words(stop)
        code = self._process.returncode
        stopped = code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
        if stopped and stop.is_set():
            raise Interrupted
        if stopped:
            raise UserError("its process was told to stop; continue it with --resume")
        if code < 0:
            reason = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
            raise UserError(f"its process was ended by signal {-code}{reason}; continue it with --resume")
        if code > 0:
            lines = complaint.strip().splitlines() or [f"its process ended with code {code}"]
            raise UserError(lines[-1])

    def _last_words(self, stop: threading.Event) -> str:
        with self._line:
            while True:
                try:
                    return self._process.communicate(timeout=_POLL_SECONDS)[1]
                except subprocess.TimeoutExpired:
                    if stop.is_set():
                        self._line.close()

    def kill(self) -> None:
        self._process.kill()
