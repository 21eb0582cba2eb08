"""`xorflow train`: flags for the options that most people set, made from their declarations, and `--set` for all others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow._distributed import rank, under_torchrun
from xorflow.cli import several
from xorflow.cli.auto import show_data, train_auto
from xorflow.cli.runs import NOTHING_HELD_OUT
from xorflow.cli.sample import write_samples
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.training import OPTIONS, Interrupted, Observer, Options
from xorflow.training.config import Option, read_texts, with_default_recipe
from xorflow.training.folder import holds_several
from xorflow.training.recipes import AUTO, NONE, RECIPES, Recipe

_option = functools.partial(typer.Option, show_default=False)
"""Defaults are in the help; some versions of typer would add None."""


def train(
    *,
    settings: Annotated[
        list[str] | None,
        _option("--set", metavar="TEXT", help="another option, KEY=VALUE; again for each"),
    ] = None,
    config: Annotated[
        Path | None, _option(metavar="FILE", help="a .toml file of options, or a config.json")
    ] = None,
    out: Annotated[Path | None, _option(metavar="FILE", help="of the run, new or empty")] = None,
    resume: Annotated[bool, _option("--resume", help="continue what is in --out")] = False,
    seeds: Annotated[str | None, _option(metavar="TEXT", help="a run for each, as in 0,1,2 or 0-7")] = None,
    header: Annotated[
        bool | None,
        typer.Option("--header/--no-header", hidden=True),  # what is shown of a file names it
    ] = None,
    jobs: Annotated[
        int | None, _option(metavar="INT", help="of runs at once, each a process [dim]\\[1][/dim]")
    ] = None,
    processes: Annotated[
        int | None, _option(metavar="INT", help="that make one run on this machine [dim]\\[1][/dim]")
    ] = None,
    **flags: str | None,
) -> None:
    """Train a model: the best exact density of a table, or a latent flow, by default an exact one of bundled MNIST."""
    texts = _texts(flags, settings or ()) | ({} if header is None else {"header": str(header).lower()})
    given = read_texts(texts)
    alone = processes is None and not under_torchrun()
    new = config is None and alone and (seeds is not None or not resume)  # a run that goes on has its recipe
    chosen = with_default_recipe(given) if new else given
    by_default, given = chosen != given, chosen
    table = several.read_table(config) if config else None
    options, model = training.read_config(config) if config and table is None else (Options(), None)
    if seeds is not None or table is not None:
        if not alone:
            raise ConfigError(
                "--processes and torchrun make one run; leave them out, and set --jobs for several"
            )
        entries = {name: entry.replace(**given) for name, entry in (table or {"": options}).items()}
        first = next(iter(entries.values()))
        if by_default:
            entries = {"": _for_data(first, training.build_data(first))}
        folder = _folder(out, resume, config.stem if config and table else _stem(first.data))
        planned = several.plan(
            folder, entries, several.parse_seeds(seeds, given), model=model if first.layers is None else None
        )
        again = _command(texts, {"--config": config, "--seeds": seeds, "--jobs": jobs, "--out": folder})
        several.train(planned, folder, 1 if jobs is None else jobs, resume=resume, again=again)
        return
    if jobs not in (None, 1):
        raise ConfigError(
            f"--jobs is how many of several runs train at once, and this is one run; got {jobs}: "
            "add --seeds, or [[runs]] to the .toml file of --config"
        )
    folder = _folder(out, resume, _stem(given.get("data", options.data)))
    if resume:
        _go_on(folder, (options.to_json() if config else {}) | given, processes)
    else:
        _train_new(folder, options.replace(**given), model, by_default, processes)


_FEW = 5
"""So many names fit on a line."""


def _flag(option: Option) -> Any:
    """All are texts here: `read_texts` reads them, as it does what --set names."""
    names = [*(option.registry or ())]
    meaning = ", ".join(names) if 0 < len(names) <= _FEW else option.help.replace("`", "")
    kinds = {int: "INT", int | None: "INT", float: "FLOAT", float | None: "FLOAT"}
    default = "" if option.default is None else f" [dim]\\[{option.default}][/dim]"
    return _option(metavar="NAME" if names else kinds.get(option.type, "TEXT"), help=meaning + default)


def _declare_flags() -> None:
    """Put a flag for each option that has one before the arguments that `train` names itself: typer reads its signature."""
    arguments = inspect.signature(train, eval_str=True).parameters.values()
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _flag(option)],
        )
        for name, option in OPTIONS.items()
        if option.flag
    ]
    parameters = [*flags, *(p for p in arguments if p.kind is not inspect.Parameter.VAR_KEYWORD)]
    train.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    train.__annotations__ = {p.name: p.annotation for p in parameters}


_declare_flags()


def _texts(flags: Mapping[str, str | None], settings: Sequence[str]) -> dict[str, str]:
    """What was typed, by the names of options."""
    texts = {name: text for name, text in flags.items() if text is not None}
    for item in settings:
        name, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(f"--set is KEY=VALUE, as in --set order=random; got {item!r}")
        texts[name.strip().replace("-", "_")] = text
    return texts


def _train_one(folder: Path, begin: Callable[[Observer | None], training.Trainer | None]) -> None:
    if rank():
        _train_along(begin)
        return
    again = _command({}, {"--out": folder})
    try:
        with TrainingDisplay(Console(stderr=True)) as display:
            trainer = begin(display)
            if trainer is not None and trainer.dataset.schema is not None:
                show_data(Console(), trainer.dataset)
            result = training.finished_result(folder) if trainer is None else training.finish_run(trainer)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:  # before or after the loop, or a second time
        if os.path.exists(folder / "config.json"):
            typer.echo(f"stopped; continue from the last checkpoint with: {again}", err=True)
        raise typer.Exit(130) from None
    pictures = write_samples(folder, count=100, seed=0)
    show_summary(Console(), folder, result, pictures)


def _train_along(begin: Callable[[Observer | None], training.Trainer | None]) -> None:
    """What all processes of a run but the first do."""
    try:
        trainer = begin(None)
        if trainer is not None:
            training.train_along(trainer)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)


def _train_new(
    folder: Path, options: Options, model: dict[str, Any] | None, by_default: bool, processes: int | None
) -> None:
    """A new run, of the recipe auto or not; where that recipe is only the default, it gives way to data that it is not for."""
    dataset = None
    if by_default:
        dataset = training.build_data(options)
        options = _for_data(options, dataset)
    if options.is_auto:
        _require_one_process(processes)
        train_auto(folder, lambda display: training.begin_auto(options, folder, display, dataset))
        return
    begin = functools.partial(training.create_run, options, folder, model=model, dataset=dataset)
    _train_in_all(processes, folder, begin)


def _go_on(folder: Path, changes: dict[str, Any], processes: int | None) -> None:
    """What is left of a run that was interrupted."""
    if training.is_auto_run(folder):
        _require_one_process(processes)
        train_auto(folder, lambda display: training.resume_auto(folder, changes, display))
        return
    begin = functools.partial(_resumed, folder, changes)
    _train_in_all(processes, folder, begin)


def _train_in_all(
    processes: int | None, folder: Path, begin: Callable[[Observer | None], training.Trainer | None]
) -> None:
    """In this process or, if that is asked for, in several."""
    if processes in (None, 1) and not under_torchrun():
        _train_one(folder, begin)
        return
    with training.together(processes, functools.partial(_train_along, begin)):
        _train_one(folder, begin)


def _require_one_process(processes: int | None) -> None:
    if processes is not None or under_torchrun():
        raise ConfigError(
            "the recipe auto is made by one process, with a thread for each core; leave --processes out, or add --recipe none"
        )


def _for_data(options: Options, dataset: Dataset) -> Options:
    """Options without the recipe auto, if it is not for these data; that is said."""
    problem = training.unsuitable(dataset)
    if problem is None and dataset.shape is not None:
        problem = "these are images"
    if problem is None:
        return options
    typer.echo(f"a plain run, not one of the recipe auto, for tables of fixed values: {problem}", err=True)
    return options.replace(recipe=NONE)


def _resumed(folder: Path, given: dict[str, Any], display: Observer | None) -> training.Trainer | None:
    if not os.path.exists(folder / "config.json") and holds_several(folder):
        raise ConfigError(
            f"--resume continues one run here, and {folder} holds several: repeat the command that began them, "
            "with its --seeds or --config, and add --resume"
        )
    return training.resume_run(folder, given, display)


def _command(texts: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """What to type to continue."""
    command = ["xorflow", "train"]
    for name, text in texts.items():
        command += (
            [f"--{name.replace('_', '-')}", text] if OPTIONS[name].flag else ["--set", f"{name}={text}"]
        )
    for flag, value in given.items():
        command += [] if value is None else [flag, str(value)]
    return shlex.join([*command, "--resume"])


def _folder(out: Path | None, resume: bool, stem: str) -> Path:
    if out is not None:
        return out
    if resume:
        raise ConfigError(
            "--resume continues the run in --out: name its folder, as in --out runs/demo --resume"
        )
    return next(path for n in range(1, 10_000) if not (path := Path("runs") / f"{stem}-{n}").exists())


def _stem(data: str) -> str:
    """What a run on these data is called: of a pattern, which is no path that there is, by its folder."""
    path = Path(data)
    return path.stem if data == "mnist" or os.path.lexists(path) else path.parent.name or "table"


# ---- recipes ----


def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all options.")] = False,
) -> None:
    """Named sets of options: what each is for, and what to expect of it."""
    if as_json:
        every = (AUTO, *RECIPES.values())
        typer.echo(json.dumps([dataclasses.asdict(recipe) for recipe in every], indent=2))
        return
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "data"):
        table.add_column(column, no_wrap=True)
    for column in ("images", "minutes", "nats"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("what it is")
    for recipe in (AUTO, *RECIPES.values()):
        table.add_row(
            recipe.label, recipe.data, *_expected(recipe), Text(f"{recipe.summary} For {recipe.machine}.")
        )
    console.print(table)
    console.print(
        "nats: the exact NLL of test images after training on so many images. By default 10,000 validate, and 50,000 are left; "
        "validation=0 trains on all 60,000."
    )


def _expected(recipe: Recipe) -> tuple[str, str, str]:
    minutes = "-" if recipe.minutes is None else f"{recipe.minutes:.1f}"
    return (
        f"{recipe.images:,}" if recipe.images else "-",
        minutes,
        "-" if recipe.nll is None else f"{recipe.nll:.2f}",
    )


# ---- what a person sees while a run trains ----

_REFRESH_SECONDS = 0.2


class TrainingDisplay:
    """A progress bar with the time left and the latest likelihoods; within its block nothing where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
        )
        self._task: TaskID | None = None
        self._shown = 0.0

    def __enter__(self) -> Self | None:
        self._bar.start()
        return None if self._bar.disable else self

    def __exit__(self, *details: object) -> None:
        self._bar.stop()

    def on_start(self, total_steps: int, progress: training.Progress) -> None:
        self._task = self._bar.add_task("training", total=total_steps, completed=progress.step, status="")

    def on_step(self, step: int) -> None:
        now = time.monotonic()
        if self._task is not None and now - self._shown > _REFRESH_SECONDS:
            self._bar.update(self._task, completed=step)
            self._shown = now

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._task is None:
            return
        status = f"train {record['train_nll']:.2f}"
        if "validation_nll" in record:
            status += f" validation {record['validation_nll']:.2f}"
        description = f"epoch {record['epoch']}"
        self._bar.update(self._task, completed=record["step"], description=description, status=status)


def show_summary(console: Console, folder: Path, result: dict[str, Any], samples: Path) -> None:
    """The end of a run: what was reached, beside what it is to be measured by, and what each number is."""
    part = reported_part(result)
    if part is None:
        console.print(NOTHING_HELD_OUT)
    else:
        _show_figures(console, part, run_figures(result, part))
    if "warning" in result:
        line = Text.assemble(("warning: ", "bold yellow"), result["warning"])
        console.print(line, "", sep="\n", soft_wrap=True, highlight=False)
    epochs = f"{result['epochs']} epoch{'s' if result['epochs'] != 1 else ''}"
    lines = (
        f"{result['parameters']:,} weights, {epochs}, {result['seconds']:.1f} s on {result['device']}",
        f"run      {folder}",
        f"samples  {samples}",
    )
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _show_figures(console: Console, part: str, figures: list[Figure]) -> None:
    """The figures one below the other, and below them what each is, wrapped to the width of the console."""
    console.print(f"Negative log-likelihood of the {part} data, in nats (lower is better)", style="bold")
    table, sentences = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(figure.name, figure.value, figure.stderr)
        sentences.add_row("-", figure.meaning)
    console.print(table, "", sentences, "", sep="\n")


# ---- the figures of a finished run ----

PAPER_NLL = 190.1
"""The best figure of Hesselink and Aziz (2020), in nats on binarised MNIST."""


class Figure(NamedTuple):
    """A negative log-likelihood in nats: what to call it, its text, that of its standard error, and what it is."""

    name: str
    value: str
    stderr: str
    meaning: str


def reported_part(result: dict[str, Any]) -> str | None:
    """The held-out part that a result is about: test data if there are any, otherwise validation data."""
    return next((part for part in ("test", "validation") if part in result), None)


def run_figures(result: dict[str, Any], part: str) -> list[Figure]:
    """The likelihoods of a `result.json` on `test` or `validation`, beside what they are to be measured by."""
    likelihoods, data = result[part], result["data"]
    features = "pixels" if len(data.get("shape") or ()) == 2 else "features"
    latent = "The latent flow draws its transformation from a distribution; "
    latent += (
        "its likelihood is exact, with all of them summed out."
        if likelihoods["kind"] == "exact"
        else f"this is an upper bound, on average, from {likelihoods['samples']:,} samples a row."
    )
    paper = _figure(
        "the paper's best",
        PAPER_NLL,
        "The paper's best is the lowest in the NLL column of Hesselink and Aziz (2020); it is an upper bound from samples, for "
        "a flow on a fixed base.",
    )
    return [
        _figure("this flow, latent", likelihoods["nll"], latent, likelihoods["stderr"]),
        _figure(
            "this flow, deterministic",
            likelihoods["refit_nll"],
            "The deterministic flow takes the most probable transformation every time; its likelihood is exact, on a base "
            "refitted to the training data.",
            likelihoods["refit_stderr"],
        ),
        _figure(
            f"independent {features}",
            result["independent_nll"],
            f"Independent {features} have the frequencies of the training data and ignore each other; this is exact, and what "
            "a flow must beat.",
        ),
        *([paper] if data["name"] == "mnist" else []),
    ]


def _figure(name: str, nll: float, meaning: str, stderr: float | None = None) -> Figure:
    return Figure(name, f"{nll:.2f}", "" if stderr is None else f"± {stderr:.2f}", meaning)
