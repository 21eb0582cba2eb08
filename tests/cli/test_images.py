"""Samples as a picture."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from xorflow.cli.sample import image_grid, save_image_grid
from xorflow.errors import CheckpointError


def test_every_image_is_in_its_place() -> None:
    images = np.stack([np.full((2, 3), value) for value in (0.0, 0.5, 1.0)])
    grid = image_grid(images, columns=2, gap=1)
    assert grid.shape == (7, 9)
    assert (grid[1:3, 1:4] == 0.0).all()
    assert (grid[1:3, 5:8] == 0.5).all()
    assert (grid[4:6, 1:4] == 1.0).all()
    assert (grid[4:6, 5:8] == 0.25).all()  # nothing there


@pytest.mark.parametrize(("count", "shape"), [(1, (4, 4)), (4, (7, 7)), (10, (13, 10)), (100, (31, 31))])
def test_the_grid_is_nearly_square(count: int, shape: tuple[int, int]) -> None:
    assert image_grid(np.zeros((count, 2, 2)), gap=1).shape == shape


def test_a_png_with_category_0_black_and_the_last_one_white(tmp_path: Path) -> None:
    x = np.array([[0, 1, 2, 2, 1, 0]])
    save_image_grid(tmp_path / "x.png", x, (2, 3), categories=3, scale=2)
    picture = imread(tmp_path / "x.png")
    assert picture.shape[:2] == (12, 14)
    grey = picture[5::2, 5::2, 0][:2, :3] if picture.ndim == 3 else picture[5::2, 5::2][:2, :3]
    assert grey.ravel().tolist() == pytest.approx([0, 0.5, 1, 1, 0.5, 0], abs=0.01)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Not a directory; choose a folder"):
        save_image_grid(tmp_path / "file" / "x.png", np.zeros((1, 4)), (2, 2), categories=2)
