"""Help that helps: every command, every option, examples; and what a person sees in a terminal."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from command_line import SMALL, Command, finish, start
from tiny_runs import read, rows_file
from xorflow import __version__
from xorflow.cli.progress import TrainingDisplay
from xorflow.cli.train import run_figures, show_summary
from xorflow.training import OPTIONS, Progress

COMMANDS = (
    "train",
    "recipes",
    "evaluate",
    "sample",
    "score",
    "combine",
)


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()], ids=str)
def test_the_first_page_names_every_command(xorflow: Command, arguments: tuple[str, ...]) -> None:
    said = xorflow(*arguments)
    assert said.code == 0
    assert all(name in said.out for name in COMMANDS)
    assert said.err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples(xorflow: Command, name: str) -> None:
    said = xorflow(name, "--help")
    assert said.code == 0
    assert "Examples" in said.out
    assert f"xorflow {name} " in said.out


@pytest.mark.parametrize("columns", ["80", "100", "120"])
def test_the_options_that_people_set_are_flags_on_one_screen(
    xorflow: Command, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    page = xorflow("train", "--help").out
    assert len(page.splitlines()) <= 45
    flags = set(re.findall(r"^│ --([a-z-]+)", page, flags=re.MULTILINE))
    assert flags == {name.replace("_", "-") for name, option in OPTIONS.items() if option.flag} | {
        *("set", "config", "out", "resume", "seeds", "jobs", "processes", "help")
    }
    assert "the highest learning rate [0.001]" in page
    assert "mnist, or a file" in page


def test_every_option_is_given_by_set(xorflow: Command, tmp_path: Path) -> None:
    given = {"tensorboard": "false", "batch-size": "16", "epochs": "1", "clip": "1.5", "categories": "none"}
    settings = [word for name, text in given.items() for word in ("--set", f"{name}={text}")]
    data = rows_file(tmp_path / "rows.npy")
    said = xorflow("train", "--data", data, "--out", tmp_path / "run", *SMALL, *settings)
    assert said.code == 0
    config = read(tmp_path / "run/config.json")
    names = ("tensorboard", "batch_size", "epochs", "clip", "categories", "evaluation_samples")
    assert [config[name] for name in names] == [False, 16, 1, 1.5, None, 8]


@pytest.mark.parametrize("words", [["--help"], ["--version"], []])
def test_the_first_page_needs_no_torch(words: list[str]) -> None:
    program = (
        "import sys\nfrom xorflow.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print({'torch', 'matplotlib', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    said = finish(start("-c", program, *words, program=(sys.executable,)))
    assert (said.code, said.err) == (0, "set()\n")


def test_the_version(xorflow: Command) -> None:
    assert xorflow("--version").out == f"xorflow {__version__}\n"


def test_without_a_terminal_there_is_no_progress(xorflow: Command, rows: Path, tmp_path: Path) -> None:
    said = xorflow("train", "--data", rows, "--out", tmp_path / "run", *SMALL)
    assert said.err == ""
    assert "\x1b" not in said.out


RESULT = {
    "test": {"nll": 1234.567, "kind": "exact", "stderr": 12.345, "refit_nll": 130.0, "refit_stderr": 1.0},
    "independent_nll": 2000.0,
    "parameters": 1_234_567,
    "epochs": 30,
    "seconds": 61.24,
    "device": "cpu",
    "data": {"name": "mnist", "shape": [28, 28]},
}
BOUND = RESULT | {
    "test": {
        "nll": 99.9,
        "kind": "lower bound",
        "samples": 1000,
        "stderr": None,
        "refit_nll": 110.0,
        "refit_stderr": None,
    }
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("result", [RESULT, BOUND], ids=["exact", "bound"])
def test_the_summary_has_each_figure_on_a_line_and_says_what_it_is(result: dict, columns: int) -> None:
    text = io.StringIO()
    show_summary(Console(file=text, width=columns), Path("runs/demo"), result, Path("runs/demo/samples.png"))
    lines, words = text.getvalue().splitlines(), " ".join(text.getvalue().split())
    assert max(map(len, lines)) <= columns
    for figure in run_figures(result, "test"):
        assert any(
            line.startswith(figure.name) and f"{figure.value} {figure.stderr}" in line for line in lines
        )
        assert f"- {figure.meaning}" in words
    assert "runs/demo/samples.png" in text.getvalue()
    assert "190.10" in text.getvalue()
    assert {line.index(".") for line in lines[1:5]} == {lines[1].index(".")}


def test_paths_are_shown_as_they_are() -> None:
    text = io.StringIO()
    show_summary(Console(file=text, width=40), Path("runs/[bold]x" + "y" * 60), RESULT, Path("s.png"))
    assert "runs/[bold]x" + "y" * 60 in text.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_progress_bar_fits_the_terminal_and_shows_time_left_and_validation(columns: int) -> None:
    text = io.StringIO()
    console = Console(file=text, width=columns, force_terminal=True, color_system=None)
    with TrainingDisplay(console) as display:
        display.on_start(11700, Progress(step=100))
        display.on_step(5000)
        display.on_epoch({"epoch": 13, "step": 5070, "train_nll": 101.234, "validation_nll": 102.351})
        display.refresh()
    frames = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()))
    last = [frame for frame in frames if "epoch 13" in frame][-1]
    assert len(last) <= columns
    for part in ("43%", "left", "train 101.23", "validation 102.35"):
        assert part in last
