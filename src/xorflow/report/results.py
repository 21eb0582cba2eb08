"""The result files of an experiment, read, and the table that is written beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xorflow.errors import DataError, UserError
from xorflow.training.storage import read_json, write_bytes, write_json

RESULT_VERSION = 1
"""The version of result files that is read here, and of the table that is written."""


@dataclass(frozen=True)
class Results:
    """The plan of an experiment and its finished runs, as their files hold them."""

    plan: dict[str, Any]
    runs: tuple[dict[str, Any], ...]

    def of(self, row: str, variant: str, phase: str) -> list[dict[str, Any]]:
        """The runs of one phase, by seed."""
        found = [
            run
            for run in self.runs
            if (run["row"], run.get("variant"), run["phase"]) == (row, variant, phase)
        ]
        return sorted(found, key=lambda run: run["seed"])

    def selection(self, row: str, variant: str) -> dict[str, Any] | None:
        """The run that is best on validation data, of the seeds whose final run is there."""
        finished = {run["seed"] for run in self.of(row, variant, "final")}
        choices = [run for run in self.of(row, variant, "select") if run["seed"] in finished]
        return min(choices, key=lambda run: run["selection"]["nll"], default=None)

    def selected(self, row: str, variant: str) -> dict[str, Any] | None:
        """The final run of that seed, which is what is reported."""
        best = self.selection(row, variant)
        finals = self.of(row, variant, "final")
        return None if best is None else next(run for run in finals if run["seed"] == best["seed"])


def read_results(folder: Path) -> Results:
    """What an experiment left in a folder."""
    plan = _read(folder / "plan.json")
    return Results(plan, tuple(_read(path) for path in sorted((folder / "runs").glob("*.json"))))


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path, "a file of results")
    if content.get("version") != RESULT_VERSION:
        raise DataError(
            f"{path} has version {content.get('version')!r}, and reports are made from version {RESULT_VERSION}; "
            "make it anew with the command that wrote it"
        )
    return content


def assembled(
    results: Results, row_of: Callable[[Results, dict[str, Any]], dict[str, Any] | None]
) -> dict[str, Any]:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan, and what is not."""
    rows = [row_of(results, planned) for planned in results.plan["rows"]]
    return {
        "version": RESULT_VERSION,
        "budget": results.plan["budget"],
        "words": results.plan["words"],
        "rows": [row for row in rows if row is not None],
        "missing": [p["id"] for p, row in zip(results.plan["rows"], rows, strict=True) if row is None],
    }


def write_table(
    folder: Path, make: Callable[[Results], dict[str, Any]], markdown: Callable[[dict[str, Any]], str]
) -> tuple[Results, dict[str, Any]]:
    """Write `table.json` and `table.md` from the result files in a folder; returns what was read and the table."""
    results = read_results(folder)
    with damage_as_error(f"a file in {folder / 'runs'}"):
        table = make(results)
        text = f"{table['words']}\n\n{markdown(table)}\n"
    write_json(folder / "table.json", table)
    write_bytes(folder / "table.md", text.encode(), "choose a folder that can be written")
    return results, table


@contextmanager
def damage_as_error(what: str) -> Iterator[None]:
    """Files that were damaged by hand break what is made of them; one line says so, and `what` they are."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"{what} is damaged ({type(error).__name__} {error}); restore it, or remove it to make it anew"
        ) from None


def share_of_seconds(run: dict[str, Any]) -> float:
    """How long a run trained; of runs that were trained as one, each has its part."""
    return run["seconds"] / run["together"]
