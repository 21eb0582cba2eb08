"""The result files of an experiment: one for each finished run, and the plan that they belong to."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

import xorflow
from xorflow.errors import CheckpointError, ConfigError
from xorflow.experiments.budgets import Budget, Phase
from xorflow.experiments.rows import REFERENCES, ROWS, VARIANTS, Recipe, Row, Variant, choices
from xorflow.experiments.schema import damage_of_result, damage_of_run
from xorflow.training.folder import read_result
from xorflow.training.metrics import read_metrics
from xorflow.training.options import HARMLESS, Options
from xorflow.training.storage import read_json, write_bytes

RESULT_VERSION = 1
"""Of the files below; a file of another version is refused."""


class TrainedRow(Protocol):
    """What an experiment asks of a row that is trained; `Row` says what each is."""

    @property
    def id(self) -> str: ...
    @property
    def metric(self) -> Literal["greedy", "likelihood"]: ...
    @property
    def reading(self) -> Literal["deterministic", "latent"]: ...
    def recipe(self, variant: Variant) -> Recipe | None: ...
    def options(self, variant: Variant) -> Options: ...


@dataclass(frozen=True)
class RunName:
    """Which of the runs of an experiment."""

    row: TrainedRow
    variant: Variant
    seed: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.row.id}.{self.variant}.seed{self.seed}.{self.phase}"

    def file(self, out: Path) -> Path:
        return out / "runs" / f"{self}.json"

    def folder(self, work: Path) -> Path:
        return work / f"{self.row.id}.{self.variant}" / f"seed{self.seed}" / self.phase


def plan(budget: Budget) -> dict[str, Any]:
    """What `plan.json` holds: all that a report must know about the rows."""
    rows = [_planned(row) for row in ROWS]
    rows += [
        {"id": r.id, "title": r.title, "words": r.words, "family": "reference", "paper": _NOTHING}
        for r in REFERENCES
    ]
    return {
        "version": RESULT_VERSION,
        "budget": budget.name,
        "words": budget.words,
        "samples": budget.samples,
        "rows": rows,
    }


_NOTHING = {"nll": None, "greedy": None}


def _planned(row: Row) -> dict[str, Any]:
    recipes = {v: row.options(v) for v in VARIANTS if row.recipe(v) is not None}
    return {
        "id": row.id,
        "title": row.title,
        "family": row.family,
        "depth": row.depth,
        "reading": row.reading,
        "metric": row.metric,
        "paper": row.paper,
        "choices": {variant: choices(options) for variant, options in recipes.items()},
        "cure": row.cure or None,
        "attempts": list(row.attempts),
    }


def open_results(out: Path, budget: Budget, planned: Mapping[str, Any], command: str) -> None:
    """Make the folder of results, or check that it is one, of this budget and version, and whole.

    Args:
        out: the folder.
        budget: of the results.
        planned: what `plan.json` is to hold.
        command: whose results they are.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is a folder, and {out} is a file; choose another --out")
    plan_file = out / "plan.json"
    if plan_file.exists():
        held = _of_this_version(plan_file, command)
        lacking = next((key for key in ("budget", "rows") if key not in held), None)
        if lacking is not None:
            raise _damaged(plan_file, f"it lacks {lacking!r}")
        if held.get("experiment", "reproduce") != command:
            raise ConfigError(
                f"{out} holds results of xorflow {held.get('experiment', 'reproduce')}, and this is xorflow {command}: "
                "choose another --out"
            )
        if held["budget"] != budget.name:
            raise ConfigError(
                f"{out} holds results of the budget {held['budget']!r}, and this is {budget.name!r}: "
                f"choose another --out, as in --out {out.parent / f'{out.name}-{budget.name}'}"
            )
    elif out.is_dir() and any(out.iterdir()) and not (out / "runs").is_dir():
        raise ConfigError(
            f"{out} is not empty, and holds no results of xorflow {command}; choose another --out"
        )
    for path, run in finished_files(out, command):
        if run["budget"] != budget.name:
            raise ConfigError(
                f"{path} is of the budget {run['budget']!r}; remove it, or choose another --out"
            )
    write_compact(plan_file, planned)


def finished_files(out: Path, command: str = "reproduce") -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file of a finished run, and its content, which has the right version and is whole."""
    for path in sorted((out / "runs").glob("*.json")):
        yield path, _whole_run(path, command)


def read_finished(
    name: RunName,
    out: Path,
    config: Mapping[str, Any],
    *,
    but: tuple[str, ...] = (),
    command: str = "reproduce",
) -> dict[str, Any] | None:
    """What a finished run found, or None; it must have been made with these options, `but` some."""
    path = name.file(out)
    if not path.exists():
        return None
    run = _whole_run(path, command)
    held = Options().to_json() | run["config"]  # an option that is newer than the file had its default
    for key, value in config.items():
        if key not in (*HARMLESS, "data", *but) and held[key] != value:
            raise ConfigError(
                f"{path} was made with {key} {held[key]!r}, and the row now says {value!r}: "
                "remove that file, or choose another --out"
            )
    return run


def write_run(path: Path, content: Mapping[str, Any], command: str, folder: Path) -> None:
    """The file of a finished run; one that no report could read is never written.

    Args:
        path: the file.
        content: what it is to hold.
        command: whose results they are.
        folder: where the run itself lies.
    """
    problem = damage_of_run(content, command)
    if problem is not None:
        raise CheckpointError(
            f"the run in {folder} can't be reported: {problem}; remove that folder, and it is made again"
        )
    write_compact(path, content)


def read_trained(folder: Path, part: str) -> dict[str, Any]:
    """The `result.json` of a run, with all that is to be known about one part of its data."""
    result = read_result(folder)
    problem = damage_of_result(result, part)
    if problem is not None:
        raise CheckpointError(
            f"{folder / 'result.json'} is damaged: {problem}; remove {folder}, and the run is made again"
        )
    return result


def read_curves(folder: Path, epochs: int) -> dict[str, list[float | int | None]]:
    """The records of each epoch of a run, as columns; those of the last epoch must be there."""
    path = folder / "metrics.jsonl"
    try:
        records = read_metrics(path)
        columns = {
            "epoch": [record["epoch"] for record in records],
            "train_nll": [_rounded(record["train_nll"]) for record in records],
            "validation_nll": [_rounded(record.get("validation_nll")) for record in records],
        }
    except OSError as error:
        problem = f"it can't be read ({error.strerror})"
    except (KeyError, TypeError) as error:
        problem = f"a record has no figures of training ({type(error).__name__}: {error})"
    else:
        if columns["epoch"] and columns["epoch"][-1] == epochs:
            return columns
        last = f"of epoch {columns['epoch'][-1]}" if columns["epoch"] else "not there"
        problem = f"its last record is to be of epoch {epochs}, and is {last}"
    raise CheckpointError(f"{path} is damaged: {problem}; remove {folder}, and the run is made again")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _whole_run(path: Path, command: str) -> dict[str, Any]:
    content = _of_this_version(path, command)
    problem = damage_of_run(content, command)
    if problem is None and path.name != _file_name(content):
        problem = f"it holds the run of {_file_name(content)}"
    if problem is not None:
        raise _damaged(path, problem)
    return content


def _file_name(run: Mapping[str, Any]) -> str:
    """What the file of a run is called."""
    if "variant" not in run:
        return f"{run['row']}.json"
    return f"{run['row']}.{run['variant']}.seed{run['seed']}.{run['phase']}.json"


def _of_this_version(path: Path, command: str) -> dict[str, Any]:
    try:
        content = read_json(path, "a file of results")
    except CheckpointError:
        raise _damaged(path, "it holds no JSON object") from None
    version = content.get("version")
    if version != RESULT_VERSION:
        newer = isinstance(version, int) and version > RESULT_VERSION
        reason = "a newer xorflow wrote it: install that" if newer else f"xorflow {command} did not write it"
        raise ConfigError(
            f"{path} has version {version!r}, this xorflow reads version {RESULT_VERSION}; {reason}, "
            "or choose another --out"
        )
    return content


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {problem}; remove it, and it is made again")


def write_compact(path: Path, content: Mapping[str, Any]) -> None:
    """JSON with one line for each key: short, and its changes can be read line by line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    write_bytes(path, f"{{\n{lines}\n}}\n".encode(), "choose a folder that can be written and has room")


def device_name(device: torch.device) -> str:
    """What a device is called: times on different ones are not to be compared."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


@functools.cache
def source_digest() -> str:
    """The first letters of a SHA-256 of this package's source: two files with the same were made by the same code."""
    digest, root = hashlib.sha256(), Path(xorflow.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "xorflow": xorflow.__version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
