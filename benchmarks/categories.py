"""How time and memory of training, scoring and sampling grow with categories, features and rows.

    python benchmarks/categories.py [--out benchmarks/categories.json]

Each line is a process of its own: a MADE of 64 units on a tied base, rows drawn at random; CPU seconds of one thread, and what the process
takes beyond torch itself. First K grows, then D, then rows; all should grow in proportion. The weights do, too: 64 K D in and out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "K": [(100, 20, 256), (1_000, 20, 256), (10_000, 20, 256)],
    "D": [(100, 10, 256), (100, 100, 256), (100, 1_000, 256)],
    "rows": [(1_000, 20, 64), (1_000, 20, 512), (1_000, 20, 4_096)],
}


def measure(categories: int, features: int, rows: int) -> dict[str, float]:
    """In this process."""
    import torch

    import xorflow as xf
    from xorflow.estimators import MaximumLikelihood

    def seconds(action) -> float:
        action()
        began = time.process_time()
        action()
        return time.process_time() - began

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    base = xf.FactorisedBase(features, categories=categories, learned=True, tied=True)
    flow = xf.LatentFlow([xf.Layer(xf.MADE(features, (64,), categories=categories))], base)
    built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.randint(categories, (rows, features))
    estimator, optimiser = MaximumLikelihood(), torch.optim.Adam(flow.parameters(), fused=True)

    def step() -> None:
        optimiser.zero_grad()
        estimator(flow, x).surrogate.backward()
        optimiser.step()

    figures = {
        "training step, s": seconds(step),
        "scoring, s": seconds(lambda: xf.evaluate.exact(flow, x)),
        "sampling, s": seconds(lambda: flow().sample((rows,))),
        "weights": sum(p.numel() for p in flow.parameters()),
    }
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return figures | {"built, MB": (built - before) / 1024, "in all, MB": (after - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, nargs=3)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    rows = []
    for grows, cases in CASES.items():
        for case in cases:
            command = [sys.executable, __file__, "--one", *map(str, case)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row = {"grows": grows, "K": case[0], "D": case[1], "rows": case[2], **json.loads(said)}
            rows.append(row)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
