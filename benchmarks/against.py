"""CPU speed beside that of another state of the repository: a worktree of it, in turns with this one.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--turns 15]

Each state runs in a process of its own with one thread; they take turns, and what counts is CPU seconds, so that other work on
the machine disturbs little. A ratio is this state's time over the other's: below 1, this one is faster. Printed are the median
of the turns and the interval that holds their middle half.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CASES = (
    "step",
    "sampling",
    "scoring",
    "score function step",
    "K=50: step",
    "K=50: two layers",
    "K=50: straight-through",
)


def work() -> None:
    """Time the cases whose names come on standard input, one a line."""
    import torch

    import xorflow as xf
    from xorflow import estimators

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # the state that is compared with may be older than these names
    likelihood = getattr(estimators, "MaximumLikelihood", None) or estimators.Marginal
    score_function = getattr(estimators, "ScoreFunction", None) or estimators.SpecialCase

    def made(features: int, hidden: int, categories: int, depth: int = 1) -> xf.LatentFlow:
        orders = ("natural", "reversed")
        layers = [
            xf.Layer(xf.MADE(features, (hidden,), categories=categories, order=orders[i % 2]))
            for i in range(depth)
        ]
        return xf.LatentFlow(layers, xf.FactorisedBase(features, categories=categories, learned=True))

    def step_of(
        flow: xf.LatentFlow, x: torch.Tensor, estimator: estimators.Estimator
    ) -> Callable[[], object]:
        optimiser = torch.optim.Adam(flow.parameters(), fused=True)

        def step() -> None:
            estimator(flow, x).surrogate.backward()
            optimiser.step()
            optimiser.zero_grad()

        return step

    image, images = made(784, 1024, 2), torch.randint(2, (4_000, 784))
    rows = torch.randint(50, (128, 20))
    actions = {
        "step": step_of(made(784, 1024, 2), images[:128], likelihood()),
        "sampling": lambda: image().sample((64,)),
        "scoring": lambda: xf.evaluate.exact(image, images),
        "score function step": step_of(made(784, 256, 2, depth=2), images[:128], score_function()),
        "K=50: step": step_of(made(20, 512, 50), rows, likelihood()),
        "K=50: two layers": step_of(made(20, 512, 50, depth=2), rows, likelihood()),
        "K=50: straight-through": step_of(made(20, 512, 50), rows, estimators.StraightThrough()),
    }
    for line in sys.stdin:
        action = actions[line.strip()]
        began = time.process_time()
        action()
        print(time.process_time() - began, flush=True)


def start(tree: Path) -> subprocess.Popen[str]:
    """A process that works with the package of a tree."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--work"],
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seconds(process: subprocess.Popen[str], case: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(case + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", help="the other state")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5, help="of a case within a turn")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if arguments.tree is None or not (arguments.tree / "src/xorflow").is_dir():
        parser.error("give the folder of another state, which has src/xorflow")
    ours, theirs = start(Path(__file__).parents[1]), start(arguments.tree)
    for case in CASES:
        ratios = []
        for turn in range(arguments.turns + 1):  # the first warms up
            times = {}
            for process in (ours, theirs) if turn % 2 else (theirs, ours):
                times[process] = min(seconds(process, case) for _ in range(arguments.repeats))
            ratios.append(times[ours] / times[theirs])
        low, middle, high = statistics.quantiles(ratios[1:], n=4)
        print(f"{case}: {middle:.3f} ({low:.3f} to {high:.3f})")
    for process in (ours, theirs):
        process.kill()


main()
