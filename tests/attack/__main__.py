"""The long attack: `python -m attack --minutes 20 --kills 50 --soak 30`, from the folder of the tests. One case again:
`python -m attack --seed 0 --door npy --case 17`."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import matplotlib.image  # noqa: F401  # Ctrl-C in an import leaves half a module behind
import torch

from attack.doors import DOORS
from attack.processes import MODELS, Kills, small_disk, try_streams
from attack.rule import Broken, contents, run_case
from attack.soak import require_flat, soak
from attack.world import KINDS, World

STUCK = 600
"""After so many seconds even a case that no signal ends is ended, and its stack shown."""

MOST_MEMORY = 6 * 2**30
"""Bytes of this process, whatever a case does: the machine has others."""

Found = Counter[tuple[str, str]]
"""What broke the rule, by door and by kind and place."""


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what is in the background deaf to Ctrl-C
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    warnings.filterwarnings("ignore", message="Duplicate name")  # of archives that are made on purpose
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY,) * 2)
    os.environ |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    seed = random.randrange(2**20) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    found: Found = Counter()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        world = World(Path(folder))
        for kind in KINDS:
            world.run(kind)
        if arguments.minutes:
            numbers = itertools.count() if arguments.case is None else [arguments.case]
            found += _fuzz(world, arguments.door or [*DOORS], numbers, arguments.minutes, seed)
        if arguments.kills:
            found += _kill(world, arguments.kills, seed)
        if arguments.soak:
            _tried("soak", 0, found, lambda: print(require_flat(soak(world, arguments.soak))))
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to try cases at all doors")
    parser.add_argument("--seed", type=int, help="of all cases; by default a new one")
    parser.add_argument("--door", action="append", choices=[*DOORS], help="only this; again for each")
    parser.add_argument("--case", type=int, help="only this case of each --door")
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        help="how many kills of runs, and strange streams; with a full disk and a rival for every model",
    )
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of a soak")
    return parser.parse_args()


def _fuzz(world: World, names: list[str], numbers: Iterable[int], minutes: float, seed: int) -> Found:
    """One case of each door after the other, until the time is over; then how many there were, by door.

    They run in a process of their own, which a case may bring down.
    """
    tried: Counter[str] = Counter()
    found: Found = Counter()
    before, end = _made(world), time.monotonic() + 60 * minutes
    cases = ((name, number) for number in numbers for name in names)
    while time.monotonic() < end and (child := _Child(world, cases, seed, end)).has_begun:
        for name, number, broken in child.results():
            tried[name] += 1
            if broken is not None:
                _tell(name, number, broken, found)
    changed = [name for name, digest in _made(world).items() if before.get(name) != digest]
    if changed:
        found["all", f"data or runs outside of the cases changed: {changed[:5]}"] += 1
    print(f"\n{'door':22} {'cases':>7} {'broken':>7}")
    for name in names:
        print(f"{name:22} {tried[name]:7,} {sum(n for (door, _), n in found.items() if door == name):7,}")
    print(f"{'in all':22} {tried.total():7,} {found.total():7,}")
    for (door, what), count in found.most_common():
        print(f"  {count:5,} x {door}: {what}")
    return found


class _Child:
    """A process that runs cases, one after the other, until it is told of no more, or one of them brings it down."""

    def __init__(self, world: World, cases: Iterator[tuple[str, int]], seed: int, end: float) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._cases, self._end = cases, end
        self._process = context.Process(target=_run_cases, args=(world, other, seed), daemon=True)
        self._process.start()
        other.close()
        self._case = next(cases, None)
        self.has_begun = self._case is not None

    def results(self) -> Iterator[tuple[str, int, Broken | None]]:
        while self._case is not None and time.monotonic() < self._end:
            self._pipe.send(self._case)
            try:
                broken = self._pipe.recv()
            except EOFError:
                self._process.join()
                code = self._process.exitcode
                yield *self._case, Broken("crash", f"the process ended with {code}", f"with {code}")
                return
            yield *self._case, broken
            self._case = next(self._cases, None)
        self._pipe.close()


def _run_cases(world: World, pipe: Connection, seed: int) -> None:
    while True:
        try:
            name, number = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(STUCK, exit=True)
        pipe.send(_broken(lambda name=name, number=number: run_case(world, DOORS[name], name, number, seed)))
        faulthandler.cancel_dump_traceback_later()


def _made(world: World) -> dict[str, str]:
    return {name: digest for name, digest in contents(world.root).items() if not name.startswith("cases")}


def _kill(world: World, count: int, seed: int) -> Found:
    """So many kills over all models, five a run, and for every model a full disk and a rival."""
    killer, found, full = Kills(world, random.Random(seed)), Counter[tuple[str, str]](), 0
    each = 5
    for number, name in zip(range(0, count, each), itertools.cycle(MODELS), strict=False):
        most = min(each, count - number)
        _tried(f"kills of {name}", number, found, lambda name=name, most=most: killer.try_one(name, most))
        print(f"... {killer.tried} kills", file=sys.stderr, flush=True)
    for name in MODELS:
        _tried(f"rivals for {name}", 0, found, lambda name=name: killer.try_two(name))
    for number in range(count):
        chance = random.Random(f"{seed} stream {number}")
        _tried(
            "streams", number, found, lambda chance=chance, number=number: try_streams(world, chance, number)
        )
    with small_disk(world.root / "disk") as disk:
        for name in MODELS if disk is not None else ():
            _tried(f"full disk of {name}", 0, found, lambda name=name: killer.try_full_disk(name, disk))
        full = killer.full if disk is not None else "not tried: no file system of its own is allowed here"
    print(
        f"\n{killer.identical} of {killer.tried} kills, in {killer.runs} runs, went on to the same bits; {killer.landed}"
    )
    print(
        f"full disks: {full}; rivals: {len(MODELS)}; commands with strange streams: {count}; broken: {found.total()}"
    )
    return found


def _tried(name: str, number: int, found: Found, case: Callable[[], object]) -> None:
    """Run a case; if it breaks the rule, say so."""
    broken = _broken(case)
    if broken is not None:
        _tell(name, number, broken, found)


def _broken(case: Callable[[], object]) -> Broken | None:
    """How a case broke the rule, if it did; an error of any kind that it did not expect is one."""
    try:
        case()
    except Broken as broken:
        return broken
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Broken(
            "unexpected",
            f"{type(error).__name__}: {str(error)[:500]}",
            f"{Path(last.filename).name}:{last.lineno}",
        )
    return None


def _tell(name: str, number: int, broken: Broken, found: Found) -> None:
    """Count what broke the rule, and say how to repeat the first ones of their kind."""
    key = (name, f"{broken.kind} {broken.place}".strip())
    found[key] += 1
    if found[key] <= 3:
        print(f"--door {name!r} --case {number}: {broken}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
