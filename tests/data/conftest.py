"""Helpers that the tests of data share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xorflow.data import Dataset, mnist


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return mnist(context="label")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """write(name, text) -> the path of a new text file."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return make
