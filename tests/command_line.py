"""The command line: called in this process as the installed command calls it, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = (
    "--conditioner",
    "made:hidden=16",
    "--epochs",
    "2",
    "--batch-size",
    "32",
    "--device",
    "cpu",
    "--set",
    "evaluation_samples=8",
)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The line that says why: exit code 2, one line on stderr, nothing on stdout, no traceback."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err


Command = Callable[..., Outcome]


XORFLOW = (str(Path(sys.executable).with_name("xorflow")),)
RESEARCH = (sys.executable, "-m", "research")


def start(*arguments: str | Path, program: tuple[str, ...] = XORFLOW) -> subprocess.Popen[str]:
    """The installed command, or another program, as a process of its own, in the root of the project."""
    command = [*program, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def finish(process: subprocess.Popen[str], patience: float = 120) -> Outcome:
    out, err = process.communicate(timeout=patience)
    return Outcome(process.returncode, out, err)
