"""`xorflow sample`: new rows from a finished run, as an array, a table or a picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from xorflow import training
from xorflow._files import write_bytes
from xorflow.cli.arguments import AsJson, Device, Force, RunArgument, Which, check_out, chosen_flow
from xorflow.data import write_rows
from xorflow.errors import ConfigError
from xorflow.flows import Flow, LatentFlow, Mixture
from xorflow.training import Run, out_of_memory_as_error

EXAMPLES = """
[bold]Examples[/bold]

xorflow sample runs/demo --count 64 --out digits.png

xorflow sample runs/people --count 1000 --out people.csv

xorflow sample runs/demo --flow refitted --out bijection.png
"""


def sample(
    run: RunArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A .png (images), .npy or .csv file to write.")] = None,
    flow: Which = "latent",
    device: Device = "auto",
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Draw new rows from a run."""
    if count < 1:
        raise ConfigError(f"--count is at least 1; got {count}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is at least 0 and below 2^63; got {seed}")
    opened = training.open_run(run, device=device)
    if out is not None:
        suffixes = (".npy", ".csv", ".png") if _is_image(opened) else (".npy", ".csv")
        check_out(out, suffixes, (opened.options.data,), force)
    chosen = chosen_flow(opened, flow)
    with out_of_memory_as_error("lower --count"):
        x = draw(chosen, count, seed)
    if out is not None:
        _write(out, x, opened)
    if as_json:
        typer.echo(json.dumps(x.tolist() if opened.codec is None else opened.codec.decode(x.numpy())))
    elif out is None:
        typer.echo(f"wrote {_write_new(x, opened)}")
    else:
        typer.echo(f"wrote {out}")


def draw(flow: Flow | LatentFlow | Mixture, count: int, seed: int) -> Tensor:
    """Samples on the CPU; a flow with labels gets one label after the other."""
    generator = torch.Generator(flow.device).manual_seed(seed)
    if not flow.context_features:
        return flow().sample((count,), generator=generator).cpu()
    labels = torch.arange(count, device=flow.device) % flow.context_features
    context = torch.nn.functional.one_hot(labels, flow.context_features)
    return flow(context).sample((), generator=generator).cpu()


def write_samples(folder: Path, count: int, seed: int) -> Path:
    """Samples of a finished run, in the form that suits the data, beside its other files."""
    trained_on = training.read_result(folder)["device"]
    on_gpu = (
        trained_on.startswith("cuda") and torch.cuda.is_available()
    )  # large networks take a minute on a CPU
    opened = training.open_run(folder, device=trained_on if on_gpu else "cpu")
    path = folder / _natural_name(opened)
    _write(path, draw(opened.flow, count, seed), opened)
    return path


def _write_new(x: Tensor, opened: Run) -> Path:
    """Samples in this folder, under a name that is free: nobody asked to replace a file."""
    first = Path(_natural_name(opened))
    names = (first.with_stem(f"{first.stem}-{n}") if n > 1 else first for n in range(1, 10_000))
    path = next(name for name in names if not name.exists())
    _write(path, x, opened)
    return path


def _natural_name(opened: Run) -> str:
    """A picture of images, a table where categories have names, an array otherwise."""
    if _is_image(opened):
        return "samples.png"
    return "samples.npy" if opened.codec is None else "samples.csv"


def _is_image(opened: Run) -> bool:
    return opened.shape is not None and len(opened.shape) == 2


def _write(path: Path, x: Tensor, opened: Run) -> None:
    if path.suffix.lower() == ".png" and opened.shape is not None:
        save_image_grid(path, x.numpy(), opened.shape, opened.flow.states.width)
    else:
        write_rows(path, x, opened.codec)


# ---- as a picture ----


def image_grid(images: np.ndarray, columns: int | None = None, gap: int = 2) -> np.ndarray:
    """One grey picture (height, width) in 0..1 of images (N, H, W) in 0..1, dark grey between them."""
    count, height, width = images.shape
    columns = columns or max(1, round(count**0.5))
    rows = -(-count // columns)
    canvas = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap), 0.25)
    for index, image in enumerate(images):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image
    return canvas


def save_image_grid(
    path: Path, x: np.ndarray, shape: tuple[int, ...], categories: int, *, scale: int = 2
) -> None:
    """Write states (N, D) of an image of `shape` as a PNG, category 0 black and the last one white."""
    from matplotlib.image import imsave

    images = x.reshape(-1, shape[0], shape[1]) / (categories - 1)
    grid = np.kron(image_grid(images), np.ones((scale, scale)))
    buffer = io.BytesIO()
    imsave(buffer, grid, cmap="gray", vmin=0, vmax=1, format="png")
    write_bytes(path, buffer.getvalue(), "choose a folder that can be written and has room")
