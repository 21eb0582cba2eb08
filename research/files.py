"""Where the runs of an experiment leave what they found, and whether a folder is one of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from research import results
from research.budgets import Budget, Phase
from research.results import Record
from research.rows import TrainedRow, Variant
from xorflow import CheckpointError, ConfigError
from xorflow.training import HARMLESS, Options, read_metrics, read_result

_KEYS = ("budget", "row", "phase", "evaluation")


@dataclass(frozen=True)
class RunName:
    """Which of the runs of an experiment."""

    row: TrainedRow
    variant: Variant
    seed: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.row.id}.{self.variant}.seed{self.seed}.{self.phase}"

    @property
    def part(self) -> str:
        """On which part of its data it is evaluated."""
        return "validation" if self.phase == "select" else "test"

    def file(self, out: Path) -> Path:
        return out / "runs" / f"{self}.json"

    def folder(self, work: Path) -> Path:
        return work / f"{self.row.id}.{self.variant}" / f"seed{self.seed}" / self.phase


def open_results(out: Path, budget: Budget, planned: Record, command: str) -> None:
    """Make the folder of results, or check that it is one, of this study, budget and version, and whole.

    Args:
        out: the folder.
        budget: of the results.
        planned: what `plan.json` is to hold.
        command: whose results they are.
    """
    require_folder(out, command)
    plan = out / "plan.json"
    if results.exists(plan):
        held = results.read(plan, command, ("budget", "rows"))
        study = held.get("experiment", "paper")
        if study != command:
            raise ConfigError(
                f"{out} holds results of research {study}, and this is research {command}: choose another --out"
            )
        _require_budget(out, held, budget)
        if held == planned:
            planned = {}
    for path in results.records(out, "runs"):
        run = results.read(path, command, _KEYS)
        if path.stem != _name(run):
            raise results.damaged(path, f"it holds the run {_name(run)}")
        _require_budget(path, run, budget)
    if planned:
        results.write(plan, planned)


def require_folder(out: Path, command: str) -> None:
    """Refuse what is no folder of results, and not empty."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is a folder, and {out} is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not results.exists(out / "plan.json"):
        raise ConfigError(
            f"{out} is not empty, and holds no results of research {command}; choose another --out"
        )


def _require_budget(where: Path, held: Record, budget: Budget) -> None:
    if held["budget"] != budget.name:
        raise ConfigError(
            f"{where} is of the budget {held['budget']!r}, and this is {budget.name!r}: choose another --out"
        )


def _name(run: Record) -> str:
    which = f".{run['variant']}.seed{run['seed']}.{run['phase']}" if "variant" in run else ""
    return f"{run['row']}{which}"


def require_same(held: Record, wanted: Record, made: str, remedy: str, but: tuple[str, ...] = ()) -> None:
    """Refuse what was made with other options, `but` some and those that do no harm."""
    for key, value in wanted.items():
        if key not in (*HARMLESS, *but) and held[key] != value:
            raise ConfigError(f"{made} with {key} {held[key]!r}, and the row now says {value!r}: {remedy}")


def require_begun(folder: Path, held: Options, wanted: Options) -> None:
    """Refuse to go on with a run that was begun with other options."""
    remedy = "remove that folder, or choose another --work"
    require_same(held.to_json(), wanted.to_json(), f"the run in {folder} was begun", remedy)


def read_finished(name: RunName, out: Path, config: Record, command: str) -> Record | None:
    """The record of a finished run, or None; it must have been made with these options, but for the length of a final run."""
    path = name.file(out)
    if not results.exists(path):
        return None
    run = results.read(path, command, (*_KEYS, "config"))
    held = Options().to_json() | run["config"]  # an option that is newer than the file had its default
    but = ("data", "epochs") if name.phase == "final" else ("data",)
    remedy = "remove that record, or choose another --out"
    require_same(held, config, f"{path} was made", remedy, but)
    return run


def read_trained(folder: Path, part: str) -> Record:
    """The `result.json` of a run, which must have been evaluated on one part of its data."""
    result = read_result(folder)
    lacking = next((key for key in ("best_epoch", "parameters", "seconds", part) if key not in result), None)
    if lacking is not None:
        raise _damaged(folder / "result.json", f"it lacks {lacking!r}", folder)
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
    except (OSError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__} {error}", folder) from None
    if columns["epoch"][-1:] != [epochs]:
        raise _damaged(path, f"its last record is to be of epoch {epochs}", folder)
    return columns


def _damaged(path: Path, problem: str, folder: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {problem}; remove {folder}, and the run is made again")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
