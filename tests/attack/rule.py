"""The rule that every case obeys, what is right where one ended well, and what a case has: folder, chance, command line."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from attack.world import World
from xorflow import Intractable, evaluate
from xorflow.cli import main
from xorflow.errors import UserError
from xorflow.training import open_run

LONGEST_LINE = 2200
"""The most characters of an error's line: what `in_one_line` leaves, and what stands before it."""

PATIENT = 60.0
"""After so many seconds a case hangs; the machine may be busy with others."""

_MEMORY = 3 * 2**30
"""So many bytes a case may ask for, beside what the process has."""


class Broken(AssertionError):
    """A case that broke the rule: in which way, and where."""

    def __init__(self, kind: str, what: str, place: str = "") -> None:
        super().__init__(kind, what, place)
        self.kind, self.what, self.place = kind, what, place
        self.notes: list[str] = []

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.what}", *self.notes])


class Hang(BaseException):
    """What the alarm raises; no handler of errors takes it."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed, which has only numbers that are numbers."""
        return strict_json(self.out)


@dataclass
class Case:
    """One case of a door: everything in it follows from `chance`."""

    world: World
    folder: Path
    chance: random.Random
    notes: list[str] = field(default_factory=list)
    patience: float = PATIENT

    def note(self, *what: object) -> None:
        """What was done, for whom it fails."""
        self.notes.append(" ".join(str(part)[:300] for part in what))

    def command(self, *arguments: object, writes: tuple[str, ...] = (), stop_after: float = 0.0) -> Outcome:
        """Call the command line, and check all of the rule that does not need to know what is right.

        Args:
            arguments: of the command.
            writes: names in the folder of the case that it may make or change; what is below them is theirs.
            stop_after: seconds after which Ctrl-C is pressed, for commands that may be asked for years of work; 130 is then as
                good an end as others.
        """
        words = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments]
        self.note("xorflow", *words)
        before = contents(self.folder)
        outcome = self._called(words, stop_after)
        after = contents(self.folder)
        self._require_said(outcome, stopped=stop_after > 0)
        self._require_kept(before, after, writes, outcome)
        return outcome

    def python(
        self, call: Callable[[], Any], also: tuple[type[Exception], ...] = (), writes: tuple[str, ...] = ()
    ) -> Any:
        """The result of a call, or the error on purpose that it raised, or one of `also`; anything else breaks the rule."""
        before = contents(self.folder)
        result: Any = None
        try:
            with _limited(), _alarm(self.patience, 0.0), _strict_warnings():
                result = call()
        except (UserError, *also) as error:
            require(len(str(error)) > 10, "message", repr(error))
            result = error
        except Hang:
            raise Broken("hang", f"more than {self.patience:.0f} s") from None
        except Exception as error:
            # in Python, memory that is not there is an error of torch's, as everywhere
            if not re.search(
                "can't allocate memory|size calculation overflowed|Overflow when unpacking", str(error)
            ):
                raise _traceback(error) from error
            result = error
        self._require_kept(before, contents(self.folder), writes, None)
        return result

    def _called(self, words: list[str], stop_after: float) -> Outcome:
        # as in a terminal: what can't be encoded is an error on stdout, and shown by its number on stderr
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            alarm = _alarm(self.patience, stop_after)
            with redirect_stdout(out), redirect_stderr(err), _limited(), _strict_warnings(), alarm:
                main(words)
            raise Broken("traceback", "main() returned, and did not exit")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else -1
        except Hang:
            raise Broken("hang", f"more than {self.patience:.0f} s", " ".join(words[:1])) from None
        except KeyboardInterrupt as error:
            raise _traceback(error) from error
        except Exception as error:
            raise _traceback(error) from error
        finally:
            os.chdir(here)
        texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # pyright: ignore[reportAttributeAccessIssue]
        return Outcome(code, *texts)

    def _require_said(self, outcome: Outcome, *, stopped: bool) -> None:
        if outcome.code == 130 and stopped:
            return
        require(outcome.code in (0, 2), "code", f"exit code {outcome.code}: {outcome.err[-300:]}")
        require("Traceback" not in outcome.err, "traceback", outcome.err[-300:])
        if outcome.code == 2:
            require(outcome.out == "", "message", f"stdout of an error: {outcome.out[:200]!r}")
            line = outcome.err
            good = line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n")
            require(good and 20 < len(line) < LONGEST_LINE, "message", f"not one line: {line[:400]!r}")
            require(line[:-1].isprintable(), "message", f"a terminal obeys this: {line[:400]!r}")

    def _require_kept(
        self,
        before: dict[str, str],
        after: dict[str, str],
        writes: tuple[str, ...],
        outcome: Outcome | None,
    ) -> None:
        def may(name: str) -> bool:
            return any(name == own or name.startswith(f"{own}/") for own in writes)

        changed = [name for name, digest in before.items() if after.get(name) != digest and not may(name)]
        require(not changed, "changed", f"{changed[:3]}")
        made = [name for name in after if name not in before and not may(name)]
        require(not made, "made", f"{made[:3]}")
        if outcome is not None and outcome.code == 2:
            left = [name for name in after if name not in before and name.endswith((".tmp", "/.lock"))]
            require(not left, "made", f"left over: {left[:3]}")


def require(good: bool, kind: str, what: str) -> None:
    if not good:
        raise Broken(kind, what)


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise Broken("wrong", f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def contents(folder: Path) -> dict[str, str]:
    """By name below a folder: the digest of each file, the target of each link, the kind of anything else."""
    found: dict[str, str] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            found[name] = f"link {os.readlink(path)}"
        elif stat.S_ISREG(state.st_mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = f"kind {stat.S_IFMT(state.st_mode)}"
    return found


def _traceback(error: BaseException) -> Broken:
    """Where an error came from: the last line of xorflow that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/xorflow/" in frame.filename and "/attack/" not in frame.filename]
    last = ours[-1] if ours else frames[-1]
    place = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    return Broken("traceback", f"{type(error).__name__}: {str(error)[:300]} at {place}", place)


@contextmanager
def _strict_warnings() -> Iterator[None]:
    """A warning is a second line that nobody asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*", category=DeprecationWarning)
        warnings.filterwarnings(
            "ignore", message="X (has|does not have valid) feature names"
        )  # scikit-learn's own
        warnings.filterwarnings("ignore", message="unclosed", category=ResourceWarning)
        yield


@contextmanager
def _limited() -> Iterator[None]:
    """Within this block the process gets only so much more memory: who wants all of it has an error, not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _alarm(patience: float, stop_after: float) -> Iterator[None]:
    """Within this block Ctrl-C is pressed after `stop_after` seconds, if that is not 0, and `Hang` raised after `patience`."""
    pressed = stop_after == 0

    def ring(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise Hang
        pressed = True
        signal.setitimer(signal.ITIMER_REAL, patience, 5)
        signal.raise_signal(signal.SIGINT)

    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
    }
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, stop_after or patience, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        require(all(kept[n] == handlers[n] for n in kept), "changed", "a handler of signals stayed")


# ---- a case, made and run ----

Door = Callable[[Case], None]


def run_case(world: World, door: Door, name: str, number: int, seed: int) -> Case:
    """Make a case in a folder of its own, and run it; a `Broken` that it raises has its notes."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=world.scratch))
    case = Case(world, folder, random.Random(f"{seed} {name} {number}"))
    try:
        door(case)
    except Broken as broken:
        broken.notes += case.notes
        raise
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    return case


# ---- what is right, where something ended well: finite likelihoods, that sum to one where the space is small ----


FEW = 4096
"""So many rows are a small space."""


def require_sums_to_one(flow: Any) -> None:
    """The probabilities of all rows, if they are few: of the model, or, where it has only bounds, of its deterministic flow."""
    sizes = flow.states.sizes
    if math.prod(sizes) > FEW or flow.context_features:
        return
    every = torch.tensor(list(itertools.product(*map(range, sizes))))
    try:
        log_p = evaluate.exact(flow, every).values
    except Intractable:
        log_p = evaluate.greedy(flow, every).values
    total = float(log_p.double().exp().sum())
    require(math.isfinite(total) and abs(total - 1) < 1e-4, "wrong", f"probabilities sum to {total}")


def require_trained(case: Case, run: Path) -> None:
    """The folder of a run that ended well can be opened, its model is a distribution, and its result has only numbers."""
    opened = case.python(lambda: open_run(run))
    require(not isinstance(opened, Exception), "wrong", f"the run is trained, and cannot be opened: {opened}")
    require_sums_to_one(opened.flow)
    result = strict_json((run / "result.json").read_text(encoding="utf-8"))
    require_finite(result)


def require_finite(value: Any) -> None:
    """No number in a JSON value is NaN or infinite."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            require_finite(item)
    elif isinstance(value, float):
        require(math.isfinite(value), "wrong", f"a number is {value}")


def require_finite_scores(scores: Mapping[str, Any]) -> None:
    """Of `score --json`: log p is finite and, where it is of masses alone, not above 0 but for rounding."""
    log_p = scores["log_prob"]
    require(len(log_p) == scores["rows"], "wrong", "not a number for each row")
    of_masses = set(scores.get("measures", {}).values()) <= {"mass"}
    bound = 1e-4 if scores["kind"] == "exact" and of_masses else math.inf
    require(all(math.isfinite(v) and v <= bound for v in log_p), "wrong", f"log p of {log_p[:5]}")
