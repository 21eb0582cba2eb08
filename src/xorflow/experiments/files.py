"""The result files of an experiment: one for each finished run, and the plan that they belong to."""

from __future__ import annotations

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
from xorflow.training.options import HARMLESS, Options
from xorflow.training.storage import read_json, write_bytes

RESULT_VERSION = 1
"""Of the files below; a file of another version is refused."""

_RUN_KEYS = ("budget", "row", "evaluation")
_TRAINED = {
    "evaluation": ("nll", "kind", "stderr"),
    "config": ("estimator",),
    "metrics": ("epoch", "validation_nll"),
}
_PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "select": {**_TRAINED, "selection": ("nll",)},
    "final": {**_TRAINED, "samples": ("shape", "bits")},
    "reference": {"evaluation": ("nll", "kind")},
}
"""By phase, what a file holds at least."""


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
        held = _checked(plan_file, ("budget", "rows"), command)
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
    """Every file of a finished run, and its content, which has the right version."""
    for path in sorted((out / "runs").glob("*.json")):
        yield path, _checked(path, _RUN_KEYS, command)


def read_finished(
    name: RunName, out: Path, config: Mapping[str, Any], *, but: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """What a finished run found, or None; it must have been made with these options, `but` some."""
    path = name.file(out)
    if not path.exists():
        return None
    run = _checked(path, (*_RUN_KEYS, "config", "epochs"))
    held = Options().to_json() | run["config"]  # an option that is newer than the file had its default
    for key, value in config.items():
        if key not in (*HARMLESS, "data", *but) and held[key] != value:
            raise ConfigError(
                f"{path} was made with {key} {held[key]!r}, and the row now says {value!r}: "
                "remove that file, or choose another --out"
            )
    return run


def _checked(path: Path, keys: tuple[str, ...], command: str = "reproduce") -> dict[str, Any]:
    try:
        content = read_json(path, "a file of results")
    except CheckpointError:
        raise ConfigError(
            f"{path} is damaged: it holds no JSON object; remove it, and it is made again"
        ) from None
    version = content.get("version")
    if version != RESULT_VERSION:
        newer = isinstance(version, int) and version > RESULT_VERSION
        reason = "a newer xorflow wrote it: install that" if newer else f"xorflow {command} did not write it"
        raise ConfigError(
            f"{path} has version {version!r}, this xorflow reads version {RESULT_VERSION}; {reason}, "
            "or choose another --out"
        )
    missing = [key for key in keys if key not in content]
    if missing:
        raise ConfigError(f"{path} is damaged: it lacks {missing[0]!r}; remove it, and it is made again")
    for key, parts in _PARTS.get(content.get("phase", ""), {}).items():
        held = content.get(key)
        if not isinstance(held, dict) or any(part not in held for part in parts):
            raise ConfigError(f"{path} is damaged: its {key} is not whole; remove it, and it is made again")
    return content


def write_compact(path: Path, content: Mapping[str, Any]) -> None:
    """JSON with one line for each key: short, and its changes can be read line by line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    write_bytes(path, f"{{\n{lines}\n}}\n".encode(), "choose a folder that can be written and has room")


def device_name(device: torch.device) -> str:
    """What a device is called: times on different ones are not to be compared."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "xorflow": xorflow.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
