"""`xorflow train`: one command-line option for every field of `Options`, and its documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xorflow import training
from xorflow.cli import several
from xorflow.cli.display import TrainingDisplay, show_summary
from xorflow.cli.reading import write_samples
from xorflow.errors import ConfigError
from xorflow.training import Interrupted, Options
from xorflow.training.options import OF_A_MODEL

EXAMPLES = """
[bold]Examples[/bold]

xorflow train --out runs/demo

xorflow train --data people.csv --hidden 256 --out runs/people

xorflow train --layers 2 --order alternating --base fixed --out runs/deep

xorflow train --recipe transformer-pair --out runs/strong

xorflow train --out runs/demo --resume

xorflow train --seeds 0-7 --jobs 8 --out runs/spread

xorflow train --config table.toml --seeds 0,1,2 --jobs 4 --out runs/table

[bold]A table of runs[/bold] is a .toml file. The options at its top are shared; each [bold][\\[runs]][/bold] has a name, \
that of its folder, and options of its own. What is given here overrides both.
"""

_PANELS = {
    "Data": "data categories validation test data_seed label",
    "Model": "recipe layers conditioner hidden width blocks heads cell dropout rotary skip reach order mixture "
    "shared mask direct variant own posterior transform base p0 init",
    "Training": "estimator epochs batch_size accumulate lr schedule warmup optimiser weight_decay clip average "
    "validate_every select precision compile",
    "Run": "seed device checkpoint_seconds evaluation_samples tensorboard",
}


def command() -> Callable[..., None]:
    """The function that typer reads the options off."""

    def train(**given: Any) -> None:
        """Train a latent flow; the defaults are an exact depth-1 model of bundled MNIST."""
        _train(**given)

    parameters = [_parameter(field) for field in dataclasses.fields(Options)] + [
        _keyword(
            "config",
            Path | None,
            typer.Option(
                help="Options from a .toml file, also a table of runs, or from a run's config.json.",
                rich_help_panel="Run",
            ),
        ),
        _keyword(
            "out", Path | None, typer.Option(help="Folder of the run, new or empty.", rich_help_panel="Run")
        ),
        _keyword(
            "resume",
            bool,
            typer.Option(
                "--resume", help="Continue the run in --out, or all of several.", rich_help_panel="Run"
            ),
            False,
        ),
        _keyword(
            "seeds",
            str | None,
            typer.Option(help="One run for each, as in 0,1,2 or 0-7.", rich_help_panel="Several runs"),
        ),
        _keyword(
            "jobs",
            int,
            typer.Option(
                help="How many runs at once, each a process.",
                rich_help_panel="Several runs",
            ),
            1,
        ),
    ]
    train.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """An option whose default here is None: what the user gave can be told from what `Options` supplies."""
    panel = next(name for name, members in _PANELS.items() if field.name in members.split())
    kinds = {"bool": bool, "int": int, "float": float, "str": str, "tuple[int, ...]": str}
    kind = kinds[str(field.type).removesuffix(" | None")]
    flag = "--" + field.name.replace("_", "-")
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    shown = "" if default in (None, False, "") else f" [dim]\\[default: {default}][/dim]"
    option = typer.Option(
        *(
            [f"{flag}/{flag.replace('--', '--no-', 1)}"] if kind is bool else []
        ),  # a file may have it switched on
        help=_help_texts()[field.name] + shown,
        rich_help_panel=panel,
        show_default=False,
    )
    return _keyword(field.name, kind | None, option)


def _keyword(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _help_texts() -> dict[str, str]:
    """The lines of `Options`' docstring, by field."""
    fields = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(Options) or "", flags=re.MULTILINE)
    lines = [(name, " ".join(text.split())) for name, text in fields]
    # a text that begins with a value, such as `mnist`, keeps its small letter: that is how it is typed
    capital = {name: text if text.startswith("`") else text[0].upper() + text[1:] for name, text in lines}
    return {name: text.replace("`", "").replace("[", "\\[") for name, text in capital.items()}


def _train(
    *, config: Path | None, out: Path | None, resume: bool, seeds: str | None, jobs: int, **flags: Any
) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    if "hidden" in given:
        given["hidden"] = _widths(given["hidden"])
    table = training.read_table(config) if config else None
    options, model = training.read_config(config) if config and table is None else (None, None)
    if seeds is None and table is None:
        if jobs != 1:
            raise ConfigError(
                f"--jobs is how many of several runs train at once, and this is one run; got {jobs}: "
                "add --seeds, or [[runs]] to the .toml file of --config"
            )
        folder = _folder(out, resume, Path(given.get("data", (options or Options()).data)).stem)
        _train_one(folder, resume, options, model, given)
        return
    Options().replace(**given)  # what is wrong with them is not the fault of any one run
    common = {"": options or Options()}
    entries = {name: _combined(entry, given) for name, entry in (table or common).items()}
    first = next(iter(entries.values()))
    model = model if first.layers is None else None
    folder = _folder(out, resume, config.stem if config and table else Path(first.data).stem)
    several.train(
        several.Plan(folder, entries, several.parse_seeds(seeds, given), model, jobs, resume),
        again=_command(
            flags | {"config": config, "seeds": seeds, "jobs": jobs if jobs > 1 else None, "out": folder}
        ),
    )


def _train_one(
    folder: Path, resume: bool, options: Options | None, model: dict | None, given: dict[str, Any]
) -> None:
    again = _command({"out": folder})
    try:
        with TrainingDisplay(Console(stderr=True)) as display:
            if resume:
                several.require_one(folder)
                kept = options.to_json() if options else {}
                trainer = training.resume_run(folder, kept | given, display)
            else:
                chosen = _combined(options or Options(), given)
                trainer = training.create_run(chosen, folder, display, model=model)
            result = training.read_result(folder) if trainer is None else training.finish_run(trainer)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:  # before or after the loop, or a second time
        if (folder / "config.json").exists():
            typer.echo(f"stopped; continue from the last checkpoint with: {again}", err=True)
        raise typer.Exit(130) from None
    pictures = write_samples(folder, count=100, seed=0)
    show_summary(Console(), folder, result, pictures)


def _combined(options: Options, given: dict[str, Any]) -> Options:
    clash = [name for name in OF_A_MODEL if name in given]
    if options.layers is None and clash:
        flag = clash[0].replace("_", "-")
        raise ConfigError(f"--config holds a model that was built in Python: --{flag} does not apply to it")
    return options.replace(**given)


def _command(given: dict[str, Any]) -> str:
    """What to type to continue with these options."""
    command = ["xorflow", "train"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            whole = isinstance(value, float) and value.is_integer()
            command += [flag, str(int(value) if whole else value)]
    return shlex.join([*command, "--resume"])


def _folder(out: Path | None, resume: bool, stem: str) -> Path:
    if out is not None:
        return out
    if resume:
        raise ConfigError(
            "--resume continues the run in --out: name its folder, as in --out runs/demo --resume"
        )
    return next(path for n in range(1, 10_000) if not (path := Path("runs") / f"{stem}-{n}").exists())


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--hidden is one or more widths, as in 1024 or 512,512; got {text!r}") from None
