"""Commands as processes of their own, whose streams are full, closed, left by their reader or lack letters; files may wait."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path

from attack.rule import contents, require
from attack.world import FINISHED, World
from command_line import XORFLOW

PATIENT = 120

OUT = (
    "",
    "> /dev/full",
    ">&-",
    "| true",
    "| head -c 10",
    "> out.txt",
    "2> /dev/full",
    "2>&-",
    ">&- 2>&-",
    "< /dev/null",
    "<&-",
)
ENVIRONMENTS = (
    {},
    {"LC_ALL": "C"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONUNBUFFERED": "1"},
    {"COLUMNS": "1"},
    {"TERM": "dumb"},
)


def try_stream(world: World, chance: random.Random, folder: Path) -> str:
    """One command with a strange stream; returns what it was."""
    kind = chance.choice(FINISHED)
    run = shlex.quote(str(world.copy(kind, folder / "run")))
    rows = {"images": world.images}.get(
        kind, world.people if kind in ("table", "mixture", "combined") else world.rows
    )
    os.mkfifo(folder / "waits.csv")
    command = chance.choice(
        (
            f"evaluate {run} --samples 2",
            f"evaluate {run} --json --samples 2",
            f"sample {run} --json --count 3",
            f"sample {run} --out é🙂.csv",
            f"score {run} --data {rows} --samples 2",
            f"score {run} --data waits.csv",
            f"score {run} --data <(cat {rows})",
            f"train --data {rows} --epochs 1 --conditioner made:hidden=8 --out new",
            "train --config waits.csv",
            "recipes",
            "--help",
            "danse",
        )
    )
    stream, environment = chance.choice(OUT), chance.choice(ENVIRONMENTS)
    what = f"{kind}: xorflow {command} {stream} with {environment}"
    before = contents(folder)
    line = f'set -o pipefail; "$XORFLOW" {command} {stream}'
    process = subprocess.Popen(
        ("bash", "-c", line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
        env=os.environ | {"XORFLOW": XORFLOW[0], "OMP_NUM_THREADS": "1"} | environment, start_new_session=True,
    )  # fmt: skip
    try:
        _, err = process.communicate(timeout=PATIENT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        require(False, "hang", what)
        raise
    said = err.decode(errors="replace")
    require(process.returncode in (0, 2), "code", f"{process.returncode} of {what}: {said[-300:]}")
    require("Traceback" not in said and "Error in" not in said, "traceback", f"{what}: {said[-500:]}")
    if process.returncode == 2 and "2>" not in stream and ">&- 2" not in stream:
        require(said.startswith("error: ") and said.count("\n") == 1, "message", f"{what}: {said[:500]}")
    after = contents(folder)
    require(all(after.get(name) == digest for name, digest in before.items()), "changed", what)
    left = [name for name in after if name.endswith((".tmp", "/.lock"))]
    require(not left, "made", f"{left} of {what}")
    return what


def try_streams(world: World, chance: random.Random, number: int) -> str:
    folder = world.scratch / f"stream-{number}"
    folder.mkdir()
    try:
        return try_stream(world, chance, folder)
    finally:
        shutil.rmtree(folder)
