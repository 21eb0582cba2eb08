"""The records of a study: a JSON file for each finished run while work goes on, and one `runs.jsonl.gz` once it is packed.

A record is known by its file, `runs/NAME.json` below the folder of the study, whether that file is there or packed. If both,
the file counts.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import xorflow
from xorflow import CheckpointError, ConfigError, DataError, UserError

VERSION = 1
"""Of records and tables; others are refused."""

PACK = "runs.jsonl.gz"

Record = dict[str, Any]


# ---- records ----


def read(path: Path, command: str, keys: tuple[str, ...] = ()) -> Record:
    """A record by its file, of our version, with these keys; `command` is the study that writes it."""
    record = _packed_record(path) if not path.exists() else parsed(path)
    version = record.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        reason = "a newer version wrote it" if newer else f"research {command} did not write it"
        raise ConfigError(
            f"{path} has version {version!r}, and version {VERSION} is read here; {reason}: choose another --out"
        )
    lacking = next((key for key in keys if key not in record), None)
    if lacking is not None:
        raise damaged(path, f"it lacks {lacking!r}")
    return record


def exists(path: Path) -> bool:
    """Whether there is a record, packed or not."""
    return path.exists() or _key(path) in _packed(_study(path))


def records(folder: Path, kind: str) -> list[Path]:
    """The files of all records of a kind, such as `runs`, in the order of their names."""
    loose = {path.name for path in (folder / kind).glob("*.json")}
    packed = {Path(name).name for name in _packed(folder) if Path(name).parent == Path(kind)}
    return [folder / kind / name for name in sorted(loose | packed)]


def write(path: Path, record: Record) -> None:
    """A record as JSON."""
    write_bytes(path, by_line(record).encode())


def by_line(record: Record) -> str:
    """JSON with one line for each key, and for each entry of a list: short, and its changes can be read line by line."""
    entries = []
    for key, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        entries.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def keep(path: Path, record: Record) -> None:
    """A record of finished work, with what it was made with."""
    write(path, {"version": VERSION, **record, "versions": versions()})


def damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {problem}; remove it, and it is made again")


def parsed(path: Path) -> Record:
    """What a file of JSON holds."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise damaged(path, "it holds no JSON object")
    return record


# ---- the pack ----


def pack(folder: Path) -> None:
    """Put all records of a study into its one file, and remove theirs; the same records make the same bytes."""
    loose = {_key(path): path for path in folder.glob("**/*.json") if _is_record(path, folder)}
    if not loose:
        return
    everything = _packed(folder) | {key: parsed(path) for key, path in loose.items()}
    write_pack(folder, everything)
    for path in loose.values():
        path.unlink()
        with suppress(OSError):  # other records are in it
            path.parent.rmdir()


def write_pack(folder: Path, everything: Mapping[str, Record]) -> None:
    """One line for each record, sorted by the names of their files."""
    lines = [json.dumps({"file": key, "record": record}) for key, record in sorted(everything.items())]
    write_bytes(folder / PACK, gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0))


def _is_record(path: Path, folder: Path) -> bool:
    return path.name == "plan.json" if path.parent == folder else path.parent.parent == folder


def _study(path: Path) -> Path:
    """The folder of the study that a record belongs to."""
    return path.parent if path.name == "plan.json" else path.parent.parent


def _key(path: Path) -> str:
    return path.relative_to(_study(path)).as_posix()


def _packed_record(path: Path) -> Record:
    record = _packed(_study(path)).get(_key(path))
    if record is None:
        raise DataError(f"there is no record {path}, packed or not; make it with the command that writes it")
    return record


def _packed(folder: Path) -> dict[str, Record]:
    path = folder / PACK
    return _unpacked(path, path.stat().st_mtime_ns) if path.exists() else {}


@functools.lru_cache(maxsize=8)
def _unpacked(path: Path, changed: int) -> dict[str, Record]:
    del changed  # a part of the key of the cache: a file that was written anew is read anew
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        return {entry["file"]: entry["record"] for entry in map(json.loads, lines)}
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__} {error}); restore it") from None


# ---- all records of an experiment ----


@dataclass(frozen=True)
class Results:
    """The plan of an experiment and its finished runs."""

    plan: Record
    runs: tuple[Record, ...]

    def of(self, row: str, phase: str, variant: str = "ours") -> list[Record]:
        """The runs of one phase, by seed."""
        runs = [r for r in self.runs if (r["row"], r.get("variant"), r["phase"]) == (row, variant, phase)]
        return sorted(runs, key=lambda run: run["seed"])

    def computed(self, row: str) -> Record | None:
        """The record of a row that is not trained."""
        return next((run for run in self.runs if run["row"] == row), None)

    def selection(self, row: str, variant: str) -> Record | None:
        """The run that is best on validation data, of the seeds whose final run is there."""
        finished = {run["seed"] for run in self.of(row, "final", variant)}
        choices = [run for run in self.of(row, "select", variant) if run["seed"] in finished]
        return min(choices, key=lambda run: run["selection"]["nll"], default=None)

    def selected(self, row: str, variant: str = "ours") -> Record | None:
        """The final run of that seed, which is what is reported."""
        best = self.selection(row, variant)
        finals = self.of(row, "final", variant)
        return None if best is None else next(run for run in finals if run["seed"] == best["seed"])


def read_results(folder: Path, command: str) -> Results:
    """What an experiment left in a folder."""
    keys = ("row", "phase", "evaluation")
    return Results(read(folder / "plan.json", command, ("rows",)), read_all(folder, "runs", command, keys))


def read_all(folder: Path, kind: str, command: str, keys: tuple[str, ...] = ()) -> tuple[Record, ...]:
    """All records of a kind."""
    return tuple(read(path, command, keys) for path in records(folder, kind))


def assembled(results: Results, row_of: Callable[[Results, Record], Record | None]) -> Record:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan, and what is not."""
    rows = [row_of(results, planned) for planned in results.plan["rows"]]
    return {
        "version": VERSION,
        "budget": results.plan["budget"],
        "description": results.plan["description"],
        "rows": [row for row in rows if row is not None],
        "missing": [p["id"] for p, row in zip(results.plan["rows"], rows, strict=True) if row is None],
    }


def write_table(
    folder: Path,
    make: Callable[[], Record],
    markdown: Callable[[Record], str] | None = None,
    dump: Callable[[Record], str] = lambda table: json.dumps(table, indent=2) + "\n",
) -> Record:
    """Make `table.json`, and `table.md` if it has more than documents show, in the folder of a study; returns the table."""
    with damage_as_error(f"a record in {folder}"):
        table = make()
        texts = {"json": dump(table)} | ({"md": f"{markdown(table)}\n"} if markdown else {})
    for ending, text in texts.items():
        write_bytes(folder / f"table.{ending}", text.encode())
    return table


@contextmanager
def damage_as_error(what: str) -> Iterator[None]:
    """Records that were damaged by hand break what is made of them; one line says so, and `what` they are."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"{what} is damaged ({type(error).__name__} {error}); restore it, or remove it to make it anew"
        ) from None


def share_of_seconds(run: Record) -> float:
    """How long a run trained; of runs that were trained as one, each has its part."""
    return run["seconds"] / run.get("together", 1)


# ---- files, and what they were made with ----


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there wholly or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as stream:
            stream.write(content)
        os.chmod(stream.name, 0o644)
        os.replace(stream.name, path)
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror}; choose a folder that can be written and has room"
        ) from error


def device_name(device: torch.device) -> str:
    """What a device is called: times on different ones are not to be compared."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


@functools.cache
def versions() -> dict[str, str]:
    """What figures were made with; `source` tells two states of the library's code apart."""
    digest, root = hashlib.sha256(), Path(xorflow.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return {
        "xorflow": xorflow.__version__,
        "source": digest.hexdigest()[:12],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
