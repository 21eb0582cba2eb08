"""Samples as a picture."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from xorflow.training.storage import write_bytes


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
