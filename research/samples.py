"""Samples of a model, packed into a record, and as pictures."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.results import Record, damage_as_error, write_bytes
from xorflow import LatentFlow, Mixture

SAMPLES = 100
"""How many samples of a final model are kept, as in the paper's figure."""
_COLUMNS, _GAP, _BETWEEN = 10, 2, 0.25


def draw_samples(
    kind: Literal["deterministic", "latent"], flow: LatentFlow | Mixture, shape: tuple[int, ...] | None
) -> Record:
    """Samples of a latent flow, or of the deterministic one with its weights, eight pixels to a byte."""
    model = flow.greedy() if kind == "deterministic" else flow
    generator = torch.Generator(flow.device).manual_seed(0)
    x = model().sample((SAMPLES,), generator=generator).cpu().numpy().astype(np.uint8)
    size = list(shape or (flow.features,))
    return {
        "flow": kind,
        "shape": [SAMPLES, *size],
        "bits": base64.b64encode(np.packbits(x).tobytes()).decode(),
    }


def seconds_of_samples(flow: LatentFlow | Mixture, count: int) -> float:
    """What some samples take, by the library's own sampler, after a first one, for which kernels may have to be built."""
    generator = torch.Generator(flow.device).manual_seed(0)
    flow().sample((1,), generator=generator)
    began = time.monotonic()
    flow().sample((count,), generator=generator).cpu()
    return time.monotonic() - began


def unpacked(samples: Record) -> np.ndarray:
    """Images (N, H, W) in 0..1 from the bits in a record; rows that are no images are one pixel high."""
    shape = samples["shape"] if len(samples["shape"]) == 3 else [samples["shape"][0], 1, samples["shape"][1]]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(samples["bits"]), np.uint8))
    return bits[: int(np.prod(shape))].reshape(shape).astype(float)


def show_samples(axes: Axes, title: str, run: Record | None) -> None:
    """A grid of the samples of a run."""
    axes.set_axis_off()
    axes.set_title(title, fontsize=9)
    if run is not None:
        with damage_as_error(f"the record of a run of {run['row']}"):
            edge = ((0, 0), (0, _GAP), (0, _GAP))
            images = np.pad(unpacked(run["samples"]), edge, constant_values=_BETWEEN)
            height, width = images.shape[1:]
            grid = images.reshape(-1, _COLUMNS, height, width).swapaxes(1, 2).reshape(-1, _COLUMNS * width)
            grid = np.pad(grid, ((_GAP, 0), (_GAP, 0)), constant_values=_BETWEEN)
        axes.imshow(grid, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def save_figure(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Write a figure as a PNG, whole, and with the same bytes for the same picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
