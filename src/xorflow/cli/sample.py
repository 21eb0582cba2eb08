"""`xorflow sample`: new rows from a finished run, as an array, a table or a picture."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from xorflow import training
from xorflow._files import new_file
from xorflow._math import philox_raw
from xorflow.batch import RunModel
from xorflow.cli.parts import IN_A_FOLDER, OF_ONE_FILE, Jobs, Task, is_folder, make_files, refuse
from xorflow.cli.runs import (
    NO_ROOM,
    AsJson,
    Device,
    FlowOption,
    Force,
    RunArgument,
    Which,
    check_out,
    chosen_flow,
)
from xorflow.data import write_rows
from xorflow.data.checks import narrow
from xorflow.data.columns.types import python_values
from xorflow.data.tables import SUFFIXES
from xorflow.errors import ConfigError
from xorflow.evaluate import rows_at_a_time
from xorflow.flows import Model
from xorflow.training import Run, out_of_memory_as_error
from xorflow.training.config import MOST


def sample(
    run: RunArgument,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=MOST - 1, help="How many.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A file to write: as the data's; .png of images; or a folder, of files of 100,000 rows."
        ),
    ] = None,
    flow: FlowOption = Which.LATENT,
    device: Device = "auto",
    as_json: AsJson = False,
    force: Force = False,
    quote_formulas: Annotated[
        bool,
        typer.Option(
            "--quote-formulas", help="Put an apostrophe before cells that a spreadsheet would compute."
        ),
    ] = False,
    jobs: Jobs = None,
) -> None:
    """Draw new rows from a run."""
    if out is not None and is_folder(out):
        refuse({"--force": force, "--quote-formulas": quote_formulas}, IN_A_FOLDER)
        _sample_files(RunModel(run, flow.value, device), count, seed, out, jobs, as_json)
        return
    refuse({"--jobs": jobs}, OF_ONE_FILE)
    opened = training.open_run(run, device=device)
    if out is not None:
        check_out(out, _suffixes(opened), (opened.options.data,), force)
    elif not as_json:
        out = _free_name(opened)
    if quote_formulas and (out is None or out.suffix.lower() != ".csv"):
        raise ConfigError(
            f"--quote-formulas is for a .csv file, and the output is {out or 'JSON'}; leave it out, or give --out a .csv file"
        )
    chosen = chosen_flow(opened, flow)
    with out_of_memory_as_error("lower --count"):
        x = draw(chosen, count, seed)
    if out is not None:
        _write(out, x, opened, seed, quote_formulas)
    if as_json:
        rows = x.tolist()
        if opened.schema is not None:
            table = opened.schema.with_left_out(opened.schema.decode(x.numpy(), seed))
            rows = [*zip(*map(python_values, table.columns), strict=True)]
        typer.echo(json.dumps(rows, default=str))  # dates
    else:
        typer.echo(f"wrote {out}")


def draw(flow: Model, count: int, seed: int) -> Tensor:
    """Samples on the CPU; a flow with labels gets one label after the other."""
    generator = torch.Generator(flow.device).manual_seed(seed)
    if not flow.context_features:
        return flow().sample((count,), generator=generator).cpu()
    labels = torch.arange(count, device=flow.device) % flow.context_features
    context = torch.nn.functional.one_hot(labels, flow.context_features)
    return flow(context).sample((), generator=generator).cpu()


# ---- many files ----

PART = 100_000
"""Rows of a file in a folder."""
_SEEDS = 5
"""Which of a seed's streams has those of parts."""
_MEMORY = 2**28
"""About what a pass of samples may take: how many rows it has follows from the model alone."""


def _sample_files(model: RunModel, count: int, seed: int, out: Path, jobs: int | None, as_json: bool) -> None:
    """Files of samples, each a function of the seed and its number, so that no two have the same draws."""
    opened, _ = model.opened()
    suffix = ".npy" if opened.schema is None else ".parquet"
    numbers = range(-(-count // PART))
    tasks = [Task(f"part-{n:06d}{suffix}", n, min(PART, count - n * PART)) for n in numbers]
    about = {"run": model.sha256, "options": {"flow": model.flow, "seed": seed, "count": count}}
    make_files(out, tasks, functools.partial(_write_part, model, seed, count), about, jobs, model.device)
    said = {"rows": count, "files": len(tasks)}
    typer.echo(json.dumps(said) if as_json else f"wrote {count:,} rows in {len(tasks):,} files to {out}")


def _write_part(model: RunModel, seed: int, count: int, number: int, path: Path) -> None:
    opened, flow = model.opened()
    # seeds are 63 bits, and each pass has one of its own
    rows, at_once = min(PART, count - number * PART), rows_at_a_time(flow, _MEMORY)
    seeds = philox_raw(seed, _SEEDS, -(-rows // at_once), first_block=number * PART) >> 1
    with out_of_memory_as_error("lower --jobs"):
        drawn = [narrow(draw(flow, at_once, int(each)), flow.states.sizes) for each in seeds]
    write_rows(path, torch.cat(drawn)[:rows], opened.schema, int(seeds[0]))


def samples_beside(folder: Path) -> Path:
    """Samples of a finished run beside its other files, in the form that suits the data; drawn if they are not there."""
    if there := next(folder.glob("samples.*"), None):
        return there
    trained_on = training.read_result(folder)["device"]
    # large networks take a minute on a CPU
    on_gpu = trained_on.startswith("cuda") and torch.cuda.is_available()
    opened = training.open_run(folder, device=trained_on if on_gpu else "cpu")
    path = folder / f"samples{_suffixes(opened)[0]}"
    _write(path, draw(opened.flow, 100, seed=0), opened, seed=0)
    return path


def _free_name(opened: Run) -> Path:
    """Of a file in this folder that is not there: nobody asked to replace one."""
    first = Path(f"samples{_suffixes(opened)[0]}")
    names = (first.with_stem(f"{first.stem}-{n}") if n > 1 else first for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _suffixes(opened: Run) -> tuple[str, ...]:
    """Of files that samples can be written to; first a picture of images, a table in the format that came, or an array."""
    if opened.schema is not None:
        natural = f".{opened.schema.layout.get('format', 'parquet')}"
        return tuple(dict.fromkeys((natural, *SUFFIXES)))
    return (".png", ".npy") if len(opened.shape or ()) == 2 else (".npy",)


def _write(path: Path, x: Tensor, opened: Run, seed: int, quote_formulas: bool = False) -> None:
    if path.suffix.lower() == ".png" and opened.shape is not None:
        save_image_grid(path, x.numpy(), opened.shape, opened.flow.states.width)
    else:
        write_rows(path, x, opened.schema, seed, quote_formulas=quote_formulas)


# ---- as a picture ----


_GAP, _BETWEEN = 2, 0.25
"""Pixels, and their dark grey, between images."""


def image_grid(images: np.ndarray) -> np.ndarray:
    """One grey picture (height, width) in 0..1 of images (N, H, W) in 0..1, dark grey between them."""
    count, height, width = images.shape
    columns = max(1, round(count**0.5))
    rows = -(-count // columns)
    # every tile has a gap below and to its right, and the picture one above and to its left
    tiles = np.full((rows * columns, height + _GAP, width + _GAP), _BETWEEN)
    tiles[:count, :height, :width] = images
    grid = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2).reshape(rows * (height + _GAP), -1)
    return np.pad(grid, ((_GAP, 0), (_GAP, 0)), constant_values=_BETWEEN)


def save_image_grid(path: Path, x: np.ndarray, shape: tuple[int, ...], categories: int) -> None:
    """Write states (N, D) of an image of `shape` as a PNG, category 0 black and the last one white."""
    from matplotlib.image import imsave

    images = x.reshape(-1, shape[0], shape[1]) / (categories - 1)
    grid = np.kron(image_grid(images), np.ones((2, 2)))
    with new_file(path, NO_ROOM) as stream:
        imsave(stream, grid, cmap="gray", vmin=0, vmax=1, format="png")
