"""Files that are there stay as they are, unless that was said; what a command reads is never replaced."""

import os
import shutil
from pathlib import Path

import pytest

from command_line import Command
from tiny_runs import people_file


@pytest.fixture
def folder(people: Path, tmp_path: Path) -> Path:
    """One's own data, beside the run."""
    people_file(tmp_path / "new.csv", rows=20, seed=1)
    return tmp_path


@pytest.mark.parametrize("how", ["itself", "a link", "a hard link"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_scores_never_replace_the_rows_that_are_scored(
    people: Path, folder: Path, xorflow: Command, how: str, force: tuple[str, ...]
) -> None:
    data, out = folder / "new.csv", folder / "out.csv"
    if how == "itself":
        out = folder / ".." / folder.name / "new.csv"
    else:
        (os.symlink if how == "a link" else os.link)(data, out)
    before = data.read_bytes()
    said = xorflow("score", people / "run", "--data", data, "--out", out, *force).refused()
    assert "--out never replaces what the command reads" in said
    assert data.read_bytes() == before


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_neither_does_the_file_that_a_run_was_trained_on_go(
    people: Path, xorflow: Command, force: tuple[str, ...]
) -> None:
    data = people / "people.csv"
    before = data.read_bytes()
    for command in (("sample", people / "run"), ("score", people / "run", "--data", data)):
        assert "never replaces" in xorflow(*command, "--out", data, *force).refused()
    assert data.read_bytes() == before


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
def test_other_files_go_only_with_force(people: Path, folder: Path, xorflow: Command, suffix: str) -> None:
    out = folder / f"out{suffix}"
    commands = [("score", people / "run", "--data", folder / "new.csv")]
    for command in commands + [("sample", people / "run")] * (suffix != ".npy"):
        out.write_text("mine")
        assert "--out replaces a file only with --force" in xorflow(*command, "--out", out).refused()
        assert out.read_text() == "mine"
        assert xorflow(*command, "--out", out, "--force").code == 0
        assert out.read_bytes() != b"mine"
    out.unlink()
    out.symlink_to(folder / "nowhere")
    assert "only with --force" in xorflow(*commands[0], "--out", out).refused()


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_computed(
    people: Path, folder: Path, xorflow: Command
) -> None:
    (folder / "a folder.csv").mkdir()
    for name, message in (
        ("a folder.csv", "is a folder"),
        ("none/x.csv", "lies in a folder that is there"),
        (f"{'x' * 300}.csv", "File name too long"),
    ):
        assert message in xorflow("sample", people / "run", "--out", folder / name).refused()
    assert xorflow("sample", people / "run", "--out", folder / f"{'x' * 250}.csv").code == 0


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_new_files_are_for_whom_the_umask_says(
    people: Path, folder: Path, xorflow: Command, mask: int
) -> None:
    before = os.umask(mask)
    try:
        for name in ("x.csv", "x.feather"):
            assert xorflow("sample", people / "run", "--out", folder / name).code == 0
        assert (
            xorflow("score", people / "run", "--data", folder / "new.csv", "--out", folder / "y.csv").code
            == 0
        )
        shutil.copytree(people / "run", folder / "run")
        assert xorflow("combine", folder / "run", folder / "run", "--out", folder / "both").code == 0
    finally:
        os.umask(before)
    made = [
        folder / name
        for name in ("x.csv", "x.feather", "y.csv", "both/config.json", "both/weights.safetensors")
    ]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o666 & ~mask}
