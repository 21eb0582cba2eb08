"""One run in a process of its own, started by `run_jobs`.

The job comes on standard input, and the run goes on for as long as that is open: once the other end closes it, on purpose or by
dying, the run saves and stops, as after Ctrl-C. So no run outlives the command that began it, or has two processes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from xorflow.errors import UserError
from xorflow.training.jobs import job_from_bytes, make_run
from xorflow.training.loop import Interrupted
from xorflow.training.processes import INTERRUPTED


def main() -> int:
    """Make the run; the exit code and the last line on stderr tell the other process how it went."""
    logging.getLogger("lightning_fabric.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        job = job_from_bytes(sys.stdin.buffer.readline())
        threading.Thread(target=_stop_with_the_line, daemon=True).start()
        make_run(job)
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except UserError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 2
    return 0


def _stop_with_the_line() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
