"""`python -m research paper` as a person types it: all rows in the smallest budget, refusals, Ctrl-C, a killed run."""

import io
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from command_line import RESEARCH, Command, finish, start
from research.__main__ import main
from research.command import show
from research.depth.study import DEPTH
from research.experiment import Experiment
from research.paper.rows import ROWS
from research.paper.study import PAPER
from research.strong.study import STRONG
from tiny_runs import read

SMOKE = ("paper", "--budget", "smoke", "--device", "cpu")


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows, one seed."""
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.raises(SystemExit) as stop:
        main([*SMOKE, "--seeds", "1", "--out", str(folder / "out"), "--work", str(folder / "work")])
    assert stop.value.code == 0
    return folder


def test_every_row_is_trained_and_shown(smoke: Path, research: Command) -> None:
    table = read(smoke / "out/table.json")
    assert [row["id"] for row in table["rows"]] == [row.id for row in PAPER.rows]
    assert (table["budget"], table["missing"]) == ("smoke", [])
    for row, planned in zip(table["rows"], ROWS, strict=False):
        for variant in ("ours", "improved"):
            found = row[variant]
            if variant not in planned.recipes:
                assert found is None
                continue
            assert found["kind"] == (
                "exact" if planned.family in ("straight-through", "maximum likelihood") else "lower bound"
            )
            assert 6 < found["nll"] < 200
            assert len(found["layers"]) == planned.depth
            assert (found["argmax_posterior"] is not None) == (planned.family == "full posterior")
            assert row["config"][variant]["layers"] == planned.depth
    assert {path.name for path in (smoke / "out").iterdir()} == {
        "plan.json", "runs", "table.json", "table.md", "curves.png", "samples.png"
    }  # fmt: skip
    # a second time there is nothing to do, and the work folder is not even needed
    before = files(smoke / "out/runs")
    said = research(*SMOKE, "--seeds", "1", "--out", smoke / "out", "--work", smoke / "elsewhere")
    assert (said.code, said.err) == (0, "")
    assert files(smoke / "out/runs") == before
    assert "Smoke test" in said.out
    assert "\x1b" not in said.out
    for row in table["rows"]:
        assert re.search(rf"^{row['id']} .*{row['ours']['nll']:.1f}", said.out, re.MULTILINE)
    assert said.out.endswith(f"pictures {smoke / 'out/curves.png'}, {smoke / 'out/samples.png'}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("paper --rows ste-3", "--rows names rows of ste-1, ste-2, "),
        ("paper --rows ste-1,ste-x", "got 'ste-x'"),
        ("depth --rows ar-3", "--rows names rows of ar-1-marginal, "),
        ("depth --rows ar-1-marginal,x*", "or several with a *; got 'x*'"),
        ("strong --rows pixelcnn", "--rows names rows of made, made-strong, "),
        *(
            (f"{command} {arguments}", words)
            for command in ("paper", "depth", "strong")
            for arguments, words in (
                ("--seeds 0", "--seeds is how many seeds to train, at least 1; got 0"),
                ("--seeds=-2", "at least 1; got -2"),
                ("--seeds two", "Invalid value for '--seeds'"),
                ("--jobs 0", "--jobs is at least 1; got 0"),
                ("--budget huge", "--budget is one of smoke, quick, full; got 'huge'"),
                ("--device cuda:63", "device 'cuda:63' is not there"),
                ("--device magic", "device is auto, cpu, cuda, cuda:N or mps; got 'magic'"),
            )
        ),
    ],
)
def test_what_means_nothing_is_refused_before_any_work(
    research: Command, tmp_path: Path, arguments: str, words: str
) -> None:
    command, *given = arguments.split()
    folders = ("--out", tmp_path / "out", "--work", tmp_path / "work")
    assert words in research(command, "--budget", "smoke", "--device", "cpu", *folders, *given).refused()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_something_else(research: Command, tmp_path: Path, smoke: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    work = ("--work", tmp_path / "work")
    assert f"--out is a folder, and {file} is a file" in research(*SMOKE, "--out", file, *work).refused()
    below = research(*SMOKE, "--out", file / "out", *work).refused()
    assert "could not write" in below
    assert "Not a directory; choose a folder that can be written" in below
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("", encoding="utf-8")
    other = research(*SMOKE, "--out", tmp_path / "full", *work).refused()
    assert "is not empty, and holds no results of research paper; choose another --out" in other
    before = files(smoke / "out/runs")
    mixed = research("paper", "--budget", "quick", "--out", smoke / "out", *work).refused()
    assert f"{smoke / 'out'} is of the budget 'smoke', and this is 'quick': choose another --out" in mixed
    assert files(smoke / "out/runs") == before
    assert not (tmp_path / "work").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(research: Command, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        said = research(*SMOKE, "--out", tmp_path / "out", "--work", tmp_path / "work").refused()
    finally:
        tmp_path.chmod(0o700)
    assert "Permission denied; choose a folder that can be written" in said


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it holds no JSON object; remove it"),
        (lambda text: "[]", "holds no JSON object"),
        (lambda text: text.replace('"version": 1', '"version": 7', 1), "has version 7, and version 1 is read here; a newer"),
        (lambda text: text.replace('"version": 1', '"version": "x"', 1), "research paper did not write it"),
        (lambda text: text.replace('"evaluation"', '"nothing"', 1), "is damaged: it lacks 'evaluation'; remove it"),
        (lambda text: text.replace('"budget": "smoke"', '"budget": "full"', 1), "is of the budget 'full', and this is 'smoke'"),
    ],
)  # fmt: skip
def test_damaged_results_are_named_and_nothing_is_touched(
    research: Command, smoke: Path, tmp_path: Path, damage, words: str
) -> None:
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    for name in ("plan.json", "runs/floor.json", "runs/marginal.ours.seed0.final.json"):
        (out / name).write_bytes((smoke / "out" / name).read_bytes())
    path = out / "runs/marginal.ours.seed0.final.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    before = files(out / "runs")
    said = research(*SMOKE, "--rows", "floor", "--out", out, "--work", tmp_path / "work").refused()
    assert words in said
    assert str(path) in said
    assert files(out / "runs") == before


# ---- real processes ----


def wait_until(condition, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(research: Command, tmp_path: Path) -> None:
    out, work = tmp_path / "the results", tmp_path / "work"  # the command to type must quote this
    rows = "ste-1,ste-8,sfe-special-running-4"
    given = (*SMOKE, "--rows", rows, "--seeds", "2", "--out", out, "--work", work)
    process = start(*given, program=RESEARCH)
    wait_until(lambda: process.poll() is not None or len(files(out / "runs")) >= 2)
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert (said.code, said.out) == (130, "")
    stopped, again = said.err.strip().split(": ", 1)
    assert re.fullmatch(r"stopped( and saved; continue|; continue from the last checkpoints) with", stopped)
    kept = files(out / "runs")
    assert 2 <= len(kept) < 24
    assert shlex.split(again) == ["python", "-m", "research", *map(str, given)]
    assert research(*shlex.split(again)[3:]).code == 0
    assert len(files(out / "runs")) == 24
    assert kept.items() <= files(out / "runs").items()


def children_of(process: int, word: str) -> list[int]:
    """The processes that another has started, by a word of their command line, the oldest first."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            if parent == process and word in status.with_name("cmdline").read_text(encoding="utf-8"):
                found.append(int(status.parent.name))
        except (OSError, ValueError):
            continue
    return sorted(found)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process in /proc")
def test_a_killed_run_harms_no_other_and_is_made_by_the_next_command(
    research: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = (*SMOKE, "--rows", "marginal", "--seeds", "2", "--out", out, "--work", tmp_path / "work")
    process = start(*given, "--jobs", "2", program=RESEARCH)
    found: list[int] = []

    def is_there() -> bool:
        found[:] = children_of(process.pid, "spawn_main")
        return len(found) == 2 or process.poll() is not None

    wait_until(is_there)
    os.kill(found[1], signal.SIGKILL)  # seed 1, which began last
    said = finish(process)
    assert said.code == 2
    errors = [line for line in said.err.splitlines() if not line.startswith(("1 of 4", "2 of 4", "3 of 4"))]
    assert errors == [  # progress is said after half a minute, which a busy machine may take
        "error: marginal.ours.select, seed 1: its process was ended by signal 9 (by hand, or for want of memory); "
        "give the same command again"
    ]
    assert re.search(r"^marginal +– +– +\d", said.out, re.MULTILINE)
    kept = files(out / "runs")
    assert sorted(kept) == ["marginal.ours.seed0.final.json", "marginal.ours.seed0.select.json"]
    assert research(*given).code == 0
    assert len(files(out / "runs")) == 4
    assert kept.items() <= files(out / "runs").items()


# ---- what a person sees ----


@pytest.mark.parametrize("experiment", [PAPER, DEPTH, STRONG], ids=lambda experiment: experiment.name)
def test_the_tables_fit_80_columns(experiment: Experiment) -> None:
    text = io.StringIO()
    committed = Path(__file__).parents[2] / "research/results" / experiment.name / "table.json"
    show(experiment, read(committed), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text.getvalue()  # nothing is cut: what is too long goes on in the next line


def test_a_star_says_that_a_likelihood_is_a_bound(smoke: Path) -> None:
    text = io.StringIO()
    show(PAPER, read(smoke / "out/table.json"), Console(file=text, width=80))
    assert sum("*" in line for line in text.getvalue().splitlines()[3:]) == 6
