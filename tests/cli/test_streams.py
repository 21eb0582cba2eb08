"""Standard output that is full, closed, or lacks letters: one line and code 2, or what could be said; never a traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import XORFLOW, Command, Outcome, finish
from xorflow.cli import main


def begin(command: str, **environment: str) -> Outcome:
    """A command of a shell; `xorflow` in it is the installed one."""
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XORFLOW": XORFLOW[0]} | environment,
    )
    return finish(process)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("--version > /dev/full", "No space left on device"),
        ("--help > /dev/full", "No space left on device"),
        ("--version >&-", "it is closed"),
    ],
)
def test_output_that_cannot_be_written_is_told(command: str, reason: str, unbuffered: str) -> None:
    said = begin(f"$XORFLOW {command}", PYTHONUNBUFFERED=unbuffered).refused()
    assert f"standard output cannot be written: {reason}; send it elsewhere" in said


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    assert begin("$XORFLOW --help | true") == Outcome(0, "", "")


@pytest.mark.parametrize("place", ["2>&-", "2> /dev/full", ">&- 2>&-"])
def test_an_error_that_nobody_can_read_is_an_error_all_the_same(place: str) -> None:
    assert begin(f"$XORFLOW dance {place}") == Outcome(2, "", "")


class Full(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "arguments",
    ["sample RUN --json", "sample RUN --out OUT", "score RUN --data DATA", "evaluate RUN --json", "recipes"],
)
def test_every_command_tells_it(
    people: Path, tmp_path: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    named = {"RUN": people / "run", "DATA": people / "people.csv", "OUT": tmp_path / "new.csv"}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        said = xorflow(*(named.get(word, word) for word in arguments.split()))
    assert "standard output cannot be written: No space left on device" in said.refused()
    assert ("OUT" in arguments) == (tmp_path / "new.csv").exists()


@pytest.mark.parametrize("name", ["кот", "b\udce9d"])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_letters_that_the_output_lacks_are_escaped(
    people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(people / "run"), "--out", str(tmp_path / f"{name}.csv")])
    assert ended.value.code == 0
    assert (tmp_path / f"{name}.csv").exists()
    written = stream.buffer.getvalue().decode(encoding)  # pyright: ignore[reportAttributeAccessIssue]
    shown = name.encode(encoding, "backslashreplace").decode(encoding)
    assert written == f"wrote {tmp_path / shown}.csv\n"


def test_the_figures_of_a_run_are_shown_where_there_is_only_ascii(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(people / "run")])
    assert ended.value.code == 0
    assert b"negative log-likelihood" in stream.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_other_errors_of_the_system_are_not_of_the_output(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*arguments: object) -> None:
        raise BrokenPipeError(32, "a pipe of ours")

    monkeypatch.setattr("xorflow.cli.sample.draw", fault)
    before = sys.stdout, sys.stderr
    with pytest.raises(BrokenPipeError):
        main(["sample", str(people / "run"), "--json"])
    assert (sys.stdout, sys.stderr) == before
