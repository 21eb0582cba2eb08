"""`xorflow train` with --seeds or a table of runs: many runs by one command, and what became of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from xorflow import training
from xorflow._files import write_json
from xorflow.cli.app import show_error
from xorflow.cli.progress import Display, Planned
from xorflow.cli.runs import plain_table, say
from xorflow.cli.sample import samples_beside
from xorflow.errors import ConfigError
from xorflow.training import Interrupted, Job, Options, Outcome
from xorflow.training.config import from_mapping, read_toml
from xorflow.training.folder import held, require_free
from xorflow.training.jobs import first_problem

_MOST_SEEDS = 10_000


def train(jobs: Sequence[Job], out: Path, workers: int, *, resume: bool, again: str) -> None:
    """Make all runs, show what became of them, and leave it in `summary.json`; `again` is the command that continues them."""
    _check_folder(out, resume)
    with held(out):
        planned = [
            Planned(job.out.relative_to(out).as_posix(), job.out, epochs=job.options.epochs) for job in jobs
        ]
        display = Display(Console(stderr=True), planned)
        try:
            with display:
                training.run_jobs(jobs, workers, display, finish=lambda job: samples_beside(job.out))
        except Interrupted:
            _summarise(out, jobs, display.outcomes)
            typer.echo(f"stopped and saved; continue with: {again}", err=True)
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            if display.stopping:  # otherwise nothing was begun
                typer.echo(f"stopped; continue from the last checkpoints with: {again}", err=True)
            raise
        summary = _summarise(out, jobs, display.outcomes)
        show_runs(Console(), out, summary)
        failed = [row for row in summary["runs"] if row["error"] is not None]
        for row in failed:
            show_error(f"{row['folder']}: {row['error']}")
        if failed:
            raise typer.Exit(1 if any(outcome.fault for outcome in display.outcomes) else 2)


def _summarise(out: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    summary = training.summarise(out, jobs, outcomes)
    write_json(out / "summary.json", summary)
    return summary


def _check_folder(out: Path, resume: bool) -> None:
    if not resume:
        require_free(out)
    elif not os.path.isdir(out):
        raise ConfigError(f"--resume continues the runs in --out, and there is no folder {out}; leave it out")
    elif os.path.exists(out / "config.json"):
        raise ConfigError(
            f"--out is a folder of several runs here, and {out} is that of one; choose another --out, or "
            "leave out what makes it several"
        )


# ---- what is asked for ----


def plan(
    out: Path,
    entries: Mapping[str, Options],
    seeds: Sequence[int] | None = None,
    *,
    model: dict[str, Any] | None = None,
) -> list[Job]:
    """A job for each entry, or for each entry and seed, in `out/NAME/seed-K`; the name may be empty.

    >>> [str(job.out) for job in plan(Path("runs"), {"a": Options(), "b": Options()}, [0, 1])]
    ['runs/a/seed-0', 'runs/a/seed-1', 'runs/b/seed-0', 'runs/b/seed-1']
    """
    if seeds is None:
        return [Job(options, out / name, name, model) for name, options in entries.items()]
    return [
        Job(options.replace(seed=seed), out / name / f"seed-{seed}", name, model)
        for name, options in entries.items()
        for seed in seeds
    ]


def parse_seeds(text: str | None, given: Mapping[str, Any]) -> list[int] | None:
    """The seeds that --seeds names, in its order.

    >>> parse_seeds("3, 0-2", {})
    [3, 0, 1, 2]
    """
    if text is None:
        return None
    if "seed" in given:
        raise ConfigError("--seeds names the seed of every run, and --seed came too; leave one of them out")
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last:
            raise ConfigError(
                f"--seeds is whole numbers and ranges upwards, as in 0,1,2 or 0-7; got {text!r}"
            )
        if len(seeds) + last - first >= _MOST_SEEDS:
            raise ConfigError(f"--seeds names at most {_MOST_SEEDS:,} seeds; got {text!r}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names each seed once; got {text!r}")
    return seeds


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
            name = _checked_name(entry.pop("name", None), table)
            where = f"run {name!r}"
            table[name] = Options()
            table[name] = from_mapping(values | entry)
        except ConfigError as error:
            problems[where] = str(error)
    if problems:
        raise ConfigError(f"{path}, {first_problem(problems)}")
    return table


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,99}")


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


# ---- what a person sees ----


def show_runs(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """The end of several runs: what each reached, and the spread over seeds."""
    runs, groups = summary["runs"], [group for group in summary["groups"] if group["n"] > 1 and group["nll"]]
    splits = sorted({row["part"] for row in runs if row["part"]})
    if splits:
        data = " or ".join(splits)
        console.print(f"Negative log-likelihood of the {data} data, in nats (lower is better)", style="bold")
    table = plain_table("run", "seed", "NLL", "which is", "refitted", "seconds")
    for row in runs:
        table.add_row(Text(row["name"]), str(row["seed"]), *_figures(row))
    console.print(table)
    if groups:
        table = plain_table("over seeds", "n", "mean NLL", "std", "least to greatest", "mean refitted")
        for group in groups:
            nll, refit = group["nll"], group["refit_nll"]
            reach = f"{nll['min']:.2f} to {nll['max']:.2f}"
            mean, refitted = f"{nll['mean']:.2f}", f"{refit['mean']:.2f}" if refit else "-"
            table.add_row(Text(group["name"]), str(group["n"]), mean, f"{nll['std']:.2f}", reach, refitted)
        console.print()
        console.print(table)
    say(console, f"runs     {out}", f"summary  {out / 'summary.json'}")


def _figures(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if row["error"] is not None:
        return "failed", "", "", ""
    seconds = f"{row['seconds']:.1f}"
    if row["nll"] is None:  # no data were held out
        return "-", "", "-", seconds
    stderr = "" if row["stderr"] is None else f" ± {row['stderr']:.2f}"
    kind = "exact" if row["kind"] == "exact" else "upper bound"
    refit = "-" if row["refit_nll"] is None else f"{row['refit_nll']:.2f}"
    return f"{row['nll']:.2f}{stderr}", kind, refit, seconds
