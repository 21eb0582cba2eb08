"""`xorflow train`: flags for the options that most people set, made from their declarations, and `--set` for all others."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xorflow import training
from xorflow.cli import several
from xorflow.cli.display import TrainingDisplay, show_summary
from xorflow.cli.sample import write_samples
from xorflow.errors import ConfigError
from xorflow.training import OPTIONS, Interrupted, Observer, Options
from xorflow.training.config import OF_A_MODEL, Option, read_texts
from xorflow.training.folder import holds_several

EXAMPLES = """
[bold]Examples[/bold]

xorflow train --conditioner made:hidden=512+512 --epochs 3 --set warmup=100

xorflow train --seeds 0-2 --epochs 2 --out runs/spread

A NAME may have settings, NAME:KEY=VALUE,KEY=VALUE. All are in docs/options.md.
"""

_FEW = 5
"""So many names fit on a line."""


def _make_command() -> Callable[..., None]:
    """The function that typer reads the flags off."""

    def train(**given: Any) -> None:
        """Train a latent flow, by default an exact one of bundled MNIST."""
        _train(**given)

    own = {
        "settings": (list[str] | None, typer.Option("--set", metavar="TEXT", help="another option, KEY=VALUE; again for each")),
        "config": (Path | None, typer.Option(metavar="FILE", help="options from a .toml file, or a config.json")),
        "out": (Path | None, typer.Option(metavar="FILE", help="of the run, new or empty")),
        "resume": (bool, typer.Option("--resume", help="continue what is in --out")),
        "seeds": (str | None, typer.Option(metavar="TEXT", help="a run for each, as in 0,1,2 or 0-7")),
        "jobs": (int | None, typer.Option(metavar="INT", help="of runs at once, each a process [dim]\\[1][/dim]")),
    }  # fmt: skip
    flags = {name: (str | None, _flag(option)) for name, option in OPTIONS.items() if option.flag}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[kind, option],
        )
        for name, (kind, option) in (flags | own).items()
    ]
    train.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


def _flag(option: Option) -> Any:
    """All are texts here: `read_texts` reads them, as it does what --set names."""
    names = [*(option.registry or ())]
    words = ", ".join(names) if 0 < len(names) <= _FEW else option.help.replace("`", "")
    metavar = (
        "NAME"
        if names
        else {int: "INT", int | None: "INT", float: "FLOAT", float | None: "FLOAT"}.get(option.type, "TEXT")
    )
    default = "" if option.default is None else f" [dim]\\[{option.default}][/dim]"
    return typer.Option(metavar=metavar, help=words + default)


train = _make_command()


def _train(
    *,
    settings: Sequence[str] | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
    seeds: str | None,
    jobs: int | None,
    **flags: str | None,
) -> None:
    texts = _texts(flags, settings or ())
    given = read_texts(texts)
    table = several.read_table(config) if config else None
    options, model = training.read_config(config) if config and table is None else (Options(), None)
    if seeds is None and table is None:
        if jobs not in (None, 1):
            raise ConfigError(
                f"--jobs is how many of several runs train at once, and this is one run; got {jobs}: "
                "add --seeds, or [[runs]] to the .toml file of --config"
            )
        folder = _folder(out, resume, Path(given.get("data", options.data)).stem)
        if resume:
            kept = options.to_json() if config else {}
            _train_one(folder, lambda display: _resumed(folder, kept | given, display))
        else:
            chosen = _combined(options, given)
            _train_one(folder, lambda display: training.create_run(chosen, folder, display, model=model))
        return
    Options().replace(**given)  # what is wrong with them is not the fault of any one run
    entries = {name: _combined(entry, given) for name, entry in (table or {"": options}).items()}
    first = next(iter(entries.values()))
    folder = _folder(out, resume, config.stem if config and table else Path(first.data).stem)
    model = model if first.layers is None else None
    planned = several.plan(folder, entries, several.parse_seeds(seeds, given), model=model)
    own = {"--config": config, "--seeds": seeds, "--jobs": jobs, "--out": folder}
    several.train(planned, folder, 1 if jobs is None else jobs, resume=resume, again=_command(texts, own))


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
    again = _command({}, {"--out": folder})
    try:
        with TrainingDisplay(Console(stderr=True)) as display:
            trainer = begin(display)
            result = training.finished_result(folder) if trainer is None else training.finish_run(trainer)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:  # before or after the loop, or a second time
        if (folder / "config.json").exists():
            typer.echo(f"stopped; continue from the last checkpoint with: {again}", err=True)
        raise typer.Exit(130) from None
    pictures = write_samples(folder, count=100, seed=0)
    show_summary(Console(), folder, result, pictures)


def _resumed(folder: Path, given: dict[str, Any], display: Observer | None) -> training.Trainer | None:
    if not (folder / "config.json").exists() and holds_several(folder):
        raise ConfigError(
            f"--resume continues one run here, and {folder} holds several: repeat the command that began them, "
            "with its --seeds or --config, and add --resume"
        )
    return training.resume_run(folder, given, display)


def _combined(options: Options, given: dict[str, Any]) -> Options:
    clash = [name for name in OF_A_MODEL if name in given]
    if options.layers is None and clash:
        raise ConfigError(f"--config holds a model that was built in Python: {clash[0]} does not apply to it")
    return options.replace(**given)


def _command(texts: Mapping[str, str], own: Mapping[str, Any]) -> str:
    """What to type to continue."""
    command = ["xorflow", "train"]
    for name, text in texts.items():
        command += (
            [f"--{name.replace('_', '-')}", text] if OPTIONS[name].flag else ["--set", f"{name}={text}"]
        )
    for flag, value in own.items():
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
