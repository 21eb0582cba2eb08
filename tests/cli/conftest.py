"""The command line in this process, and small runs to work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import SMALL, Command, Outcome
from tiny_runs import people_file, rows_file
from xorflow.cli import main


@pytest.fixture
def xorflow(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process: the code of the installed command, without its start."""

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return run


def _train(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *map(str, arguments), *SMALL])
    assert stop.value.code == 0


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with people.csv and a run trained on it."""
    folder = tmp_path_factory.mktemp("people")
    _train("--data", people_file(folder / "people.csv"), "--out", folder / "run")
    return folder


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.npy and a run of two layers trained on it."""
    folder = tmp_path_factory.mktemp("deep")
    _train("--data", rows_file(folder / "rows.npy"), "--out", folder / "run", "--layers", "2")
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "rows.npy")
