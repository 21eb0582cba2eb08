"""The commands of research in this process, as `python -m research` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Command, Outcome
from research.__main__ import main


@pytest.fixture
def research(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command of research in this process."""

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return run
