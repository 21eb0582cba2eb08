"""How long a command takes to begin, beside `import torch`, which takes a second or two.

    python benchmarks/startup.py [--out benchmarks/startup.json]

CPU seconds of one process each, the median of nine turns, and the ratio to `import torch`. `xorflow --help` and `--version` are to
take less than half of it, `import xorflow` at most 1.2 times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

CASES = {
    "import torch": ["-c", "import torch"],
    "import xorflow": ["-c", "import xorflow"],
    "from xorflow import LatentFlow": ["-c", "from xorflow import LatentFlow"],
    "xorflow --version": ["-m", "xorflow", "--version"],
    "xorflow --help": ["-m", "xorflow", "--help"],
    "xorflow train --help": ["-m", "xorflow", "train", "--help"],
}
"""What is given to python. The names of the package, and torch, come when a first one is asked for."""

TURNS = 9


def seconds(arguments: list[str]) -> float:
    """CPU seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    out = parser.parse_args().out
    for arguments in CASES.values():  # byte code is compiled, files are in memory
        seconds(arguments)
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(TURNS):
        for name, arguments in CASES.items():
            taken[name].append(seconds(arguments))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    rows = [
        {"what": name, "s": round(median, 3), "of import torch": round(median / medians["import torch"], 3)}
        for name, median in medians.items()
    ]
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print("  ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
