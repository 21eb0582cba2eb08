"""Many runs as a table: read from a file, multiplied by seeds, and summarised when they are done."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xorflow.errors import ConfigError
from xorflow.training.config import Options, from_mapping, read_toml
from xorflow.training.jobs import Job, Outcome, first_problem

SUMMARY_VERSION = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,99}")


def read_table(path: Path) -> dict[str, Options] | None:
    """The options of each run of a table, by the run's name; None if the file is not a table.

    A table is a .toml file with `[[runs]]`: what stands above them is shared, and each has a `name` and options of its own.

    Raises:
        ConfigError: about the first entry that has a fault; it names the others.
    """
    values = read_toml(path) if path.suffix == ".toml" else {}
    if "runs" not in values:
        return None
    entries = values.pop("runs")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: runs is a list of tables, each begun by [[runs]]; got {entries!r}")
    from_mapping(values, str(path))
    table: dict[str, Options] = {}
    problems: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        where = f"entry {number} of [[runs]]"
        try:
            name = _checked_name(entry.get("name"), table)
            where = f"run {name!r}"
            table[name] = Options()
            options = {key: value for key, value in entry.items() if key != "name"}
            table[name] = from_mapping(values | options)
        except ConfigError as error:
            problems[where] = str(error)
    if problems:
        raise ConfigError(f"{path}, {first_problem(problems)}")
    return table


def _checked_name(name: object, others: Mapping[str, Options]) -> str:
    """The name of an entry, which will be that of a folder: on some systems these ignore the case of letters."""
    if name is None:
        raise ConfigError("every run needs a name, as in name = 'wide'")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith((".", ".json")):
        raise ConfigError(
            "a name is at most 100 letters, digits and . _ - + = or commas, begins with a letter or digit, "
            f"and does not end with a dot or .json; got {name!r}"
        )
    if name.casefold() in map(str.casefold, others):
        raise ConfigError(f"every run needs a name of its own, and {name!r} came before")
    return name


def plan(
    root: Path,
    entries: Mapping[str, Options],
    seeds: Sequence[int] | None = None,
    *,
    model: dict[str, Any] | None = None,
) -> list[Job]:
    """A job for each entry, or for each entry and seed, in `root/NAME/seed-K`; the name may be empty.

    >>> [str(job.out) for job in plan(Path("runs"), {"a": Options(), "b": Options()}, [0, 1])]
    ['runs/a/seed-0', 'runs/a/seed-1', 'runs/b/seed-0', 'runs/b/seed-1']
    """
    if seeds is None:
        return [Job(options, root / name, name, model) for name, options in entries.items()]
    return [
        Job(options.replace(seed=seed), root / name / f"seed-{seed}", name, model)
        for name, options in entries.items()
        for seed in seeds
    ]


def summarise(root: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `summary.json` holds: a row for each job, and for each name the mean and the spread over its seeds."""
    of_job = {outcome.job.out: outcome for outcome in outcomes}
    rows = [_row(root, job, of_job.get(job.out)) for job in jobs]
    names = dict.fromkeys(row["name"] for row in rows)
    groups = [_group(name, [row for row in rows if row["name"] == name]) for name in names]
    return {"version": SUMMARY_VERSION, "runs": rows, "groups": groups}


def _row(root: Path, job: Job, outcome: Outcome | None) -> dict[str, Any]:
    result = (outcome.result if outcome else None) or {}
    part = next((part for part in ("test", "validation") if part in result), None)
    figures: Mapping[str, Any] = result[part] if part else {}
    unfinished = "interrupted" if (job.out / "config.json").exists() else "not begun"
    return {
        "name": job.name or root.absolute().name,
        "seed": job.options.seed,
        "folder": job.out.relative_to(root).as_posix(),
        "part": part,
        **{key: figures.get(key) for key in ("nll", "kind", "stderr", "refit_nll")},
        "seconds": result.get("seconds"),
        "error": unfinished if outcome is None else outcome.error,
    }


def _group(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["error"] is None]
    return {
        "name": name,
        "n": len(good),
        "failed": len(rows) - len(good),
        "kind": good[0]["kind"] if good else None,
        "nll": spread([row["nll"] for row in good]),
        "refit_nll": spread([row["refit_nll"] for row in good]),
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Mean, standard deviation (of the sample, so None for one value), least and greatest; None without values.

    >>> spread([1.0, 2.0, 3.0])
    {'mean': 2.0, 'std': 1.0, 'min': 1.0, 'max': 3.0}
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": statistics.fmean(known),
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "min": min(known),
        "max": max(known),
    }
