"""The scripts in examples/ run as they are, on small data."""

import runpy
from pathlib import Path

import pytest

from test_documentation import small_world  # noqa: F401  # pyright: ignore[reportUnusedImport]

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.usefixtures("small_world")
def test_an_example_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script))
    assert "nats" in capsys.readouterr().out
