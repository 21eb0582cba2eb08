"""`xorflow train`: flags for the options that most people set, made from their declarations, and `--set` for all others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow._distributed import rank, under_torchrun
from xorflow.cli import several
from xorflow.cli.auto import show_auto, show_data
from xorflow.cli.progress import AutoDisplay, TrainingDisplay
from xorflow.cli.runs import NOTHING_HELD_OUT, say
from xorflow.cli.sample import samples_beside
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.training import OPTIONS, Interrupted, Job, Options
from xorflow.training.config import Option, read_texts, with_default_recipe
from xorflow.training.folder import holds_several, reported_part, require_free
from xorflow.training.jobs import begin_job, finish_job
from xorflow.training.recipes import AUTO, NONE, RECIPES
from xorflow.training.run import options_of_run

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
        job, dataset = _begun(folder, (options.to_json() if config else {}) | given), None
    else:
        job, dataset = _new(folder, options.replace(**given), model, by_default)
    _train_in_all(processes, job, dataset)


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


def _train_one(job: Job, dataset: Dataset | None) -> None:
    """Make a run, or what is left of it, and show what it reached."""
    if rank():
        _train_along(job)
        return
    display = (AutoDisplay if job.options.is_auto else TrainingDisplay)(Console(stderr=True))
    try:
        with display:
            left = begin_job(job, display, dataset)
            if left is not None and left.dataset.schema is not None:
                show_data(Console(), left.dataset)
            result = finish_job(job, left)
    except (Interrupted, KeyboardInterrupt) as stop:  # the latter before or after the loop, or a second time
        saved = isinstance(stop, Interrupted) and not job.options.is_auto
        if os.path.exists(job.out / "result.json"):
            typer.echo(f"stopped; the model is kept: xorflow evaluate {job.out}", err=True)
        elif job.begun:
            how = " and saved" if saved else "; what was saved is kept"
            typer.echo(f"stopped{how}; continue with: {_command({}, {'--out': job.out})}", err=True)
        raise typer.Exit(130) from None
    show = show_auto if "auto" in result else show_summary
    show(Console(), job.out, result, samples_beside(job.out))


def _train_along(job: Job) -> None:
    """What all processes of a run but the first do."""
    try:
        left = begin_job(job)
        if isinstance(left, training.Trainer):
            training.train_along(left)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)


def _train_in_all(processes: int | None, job: Job, dataset: Dataset | None) -> None:
    """In this process or, if that is asked for, in several."""
    alone = processes is None and not under_torchrun()
    if job.options.is_auto and not alone:
        raise ConfigError(
            "the recipe auto is made by one process, with a thread for each core; leave --processes out, or add --recipe none"
        )
    if alone or (processes == 1 and not under_torchrun()):
        _train_one(job, dataset)
        return
    with training.together(processes, functools.partial(_train_along, job)):
        _train_one(job, dataset)


def _for_data(options: Options, dataset: Dataset) -> Options:
    """Options without the recipe auto, if it is not for these data; that is said."""
    problem = training.unsuitable(dataset)
    if problem is None and dataset.shape is not None:
        problem = "these are images"
    if problem is None:
        return options
    typer.echo(f"a plain run, not one of the recipe auto, for tables of fixed values: {problem}", err=True)
    return options.replace(recipe=NONE)


def _begun(folder: Path, changes: Mapping[str, Any]) -> Job:
    """A run that goes on."""
    if not os.path.exists(folder / "config.json") and holds_several(folder):
        raise ConfigError(
            f"--resume continues one run here, and {folder} holds several: repeat the command that began them, "
            "with its --seeds or --config, and add --resume"
        )
    return Job(options_of_run(folder, changes)[0], folder)


def _new(
    folder: Path, options: Options, model: dict[str, Any] | None, by_default: bool
) -> tuple[Job, Dataset | None]:
    """A new run; where the recipe auto is only the default, it gives way to data, then loaded, that it is not for."""
    require_free(folder)
    dataset = training.build_data(options) if by_default else None
    return Job(_for_data(options, dataset) if dataset else options, folder, model=model), dataset


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
        images = f"{recipe.images:,}" if recipe.images else "-"
        minutes = "-" if recipe.minutes is None else f"{recipe.minutes:.1f}"
        nats = "-" if recipe.nll is None else f"{recipe.nll:.2f}"
        summary = Text(f"{recipe.summary} For {recipe.machine}.")
        table.add_row(recipe.label, recipe.data, images, minutes, nats, summary)
    console.print(table)
    console.print(
        "nats: the exact NLL of test images after training on so many images. By default 10,000 validate, and 50,000 are left; "
        "validation=0 trains on all 60,000."
    )


# ---- what a person sees at its end ----


def show_summary(console: Console, folder: Path, result: dict[str, Any], samples: Path) -> None:
    """The end of a run: what was reached, beside what it is to be measured by, and what each number is."""
    part = reported_part(result)
    if part is None:
        console.print(NOTHING_HELD_OUT)
    else:
        console.print(f"Negative log-likelihood of the {part} data, in nats (lower is better)", style="bold")
        table, sentences = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        for figure in run_figures(result, part):
            table.add_row(figure.name, figure.value, figure.stderr)
            sentences.add_row("-", figure.meaning)
        console.print(table, "", sentences, "", sep="\n")
    if "warning" in result:
        line = Text.assemble(("warning: ", "bold yellow"), result["warning"])
        console.print(line, "", sep="\n", soft_wrap=True, highlight=False)
    epochs = f"{result['epochs']} epoch{'s' if result['epochs'] != 1 else ''}"
    say(
        console,
        f"{result['parameters']:,} weights, {epochs}, {result['seconds']:.1f} s on {result['device']}",
        f"run      {folder}",
        f"samples  {samples}",
    )


# ---- the figures of a finished run ----

PAPER_NLL = 190.1
"""The best figure of Hesselink and Aziz (2020), in nats on binarised MNIST."""


class Figure(NamedTuple):
    """A negative log-likelihood in nats: what to call it, its text, that of its standard error, and what it is."""

    name: str
    value: str
    stderr: str
    meaning: str


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
