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

xorflow train --out runs/demo --resume
"""

_PANELS = {
    "Data": "data validation test data_seed label",
    "Model": "layers conditioner hidden order mask direct transform base p0 start",
    "Training": "estimator epochs batch_size lr schedule warmup optimiser weight_decay clip average "
    "validate_every precision",
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
            typer.Option(help="Options from a .toml file or a run's config.json.", rich_help_panel="Run"),
        ),
        _keyword(
            "out", Path | None, typer.Option(help="Folder of the run, new or empty.", rich_help_panel="Run")
        ),
        _keyword(
            "resume",
            bool,
            typer.Option("--resume", help="Continue the run in --out.", rich_help_panel="Run"),
            False,
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
    shown = "" if default is None or default is False else f" [dim]\\[default: {default}][/dim]"
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
    lines = re.findall(r"^\s+(\w+): (.+)$", inspect.getdoc(Options) or "", flags=re.MULTILINE)
    # a text that begins with a value, such as `mnist`, keeps its small letter: that is how it is typed
    capital = {name: text if text.startswith("`") else text[0].upper() + text[1:] for name, text in lines}
    return {name: text.replace("`", "").replace("[", "\\[") for name, text in capital.items()}


def _train(*, config: Path | None, out: Path | None, resume: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    if "hidden" in given:
        given["hidden"] = _widths(given["hidden"])
    options, model = training.read_config(config) if config else (None, None)
    folder = _folder(out, resume, given.get("data", (options or Options()).data))
    again = f"xorflow train --out {shlex.quote(str(folder))} --resume"
    try:
        with TrainingDisplay(Console(stderr=True)) as display:
            if resume:
                kept = options.to_json() if options else {}
                result = training.resume_run(folder, kept | given, display)
            else:
                result = _begin(folder, options or Options(), model, given, display)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:  # before or after the loop, or a second time
        if (folder / "config.json").exists():
            typer.echo(f"stopped; continue from the last checkpoint with: {again}", err=True)
        raise typer.Exit(130) from None
    pictures = write_samples(training.open_run(folder), folder, count=100, seed=0)
    show_summary(Console(), folder, result, pictures)


def _begin(
    folder: Path, options: Options, model: dict | None, given: dict[str, Any], display: TrainingDisplay
) -> dict[str, Any]:
    clash = [name for name in OF_A_MODEL if name in given]
    if options.layers is None and clash:
        flag = clash[0].replace("_", "-")
        raise ConfigError(f"--config holds a model that was built in Python: --{flag} does not apply to it")
    return training.train_run(options.replace(**given), folder, display, model=model)


def _folder(out: Path | None, resume: bool, data: str) -> Path:
    if out is not None:
        return out
    if resume:
        raise ConfigError(
            "--resume continues the run in --out: name its folder, as in --out runs/demo --resume"
        )
    stem = Path(data).stem
    return next(path for n in range(1, 10_000) if not (path := Path("runs") / f"{stem}-{n}").exists())


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--hidden is one or more widths, as in 1024 or 512,512; got {text!r}") from None
