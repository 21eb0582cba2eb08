"""What the command line shows: the figures of a result and what each is, the bar of much work, and samples as a picture."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from xorflow.cli import progress
from xorflow.cli.progress import Display, Planned
from xorflow.cli.sample import image_grid, save_image_grid
from xorflow.cli.train import run_figures
from xorflow.errors import CheckpointError
from xorflow.training import Job, Options, Outcome
from xorflow.training.folder import reported_part

EXACT = {"nll": 90.504, "kind": "exact", "stderr": 0.236, "refit_nll": 124.906, "refit_stderr": 0.2795}
BOUND = EXACT | {"kind": "lower bound", "samples": 1000, "stderr": None}
PICTURES = {"name": "mnist", "shape": [28, 28]}
TABLE = {"name": "people.csv", "shape": None}


def result(found: dict, data: dict) -> dict:
    return {"test": found, "independent_nll": 205.758, "data": data}


@pytest.mark.parametrize("found", [EXACT, BOUND], ids=["exact", "bound"])
@pytest.mark.parametrize("data", [PICTURES, TABLE], ids=["mnist", "file"])
def test_a_meaning_is_one_sentence(found: dict, data: dict) -> None:
    for figure in run_figures(result(found, data), "test"):
        assert figure.meaning.endswith(".")
        assert figure.meaning.count(". ") == 0
        assert figure.meaning[0].isupper()


def test_the_figures_are_those_of_the_file() -> None:
    figures = run_figures(result(EXACT, PICTURES), "test")
    assert {figure.name: (figure.value, figure.stderr) for figure in figures} == {
        "this flow, latent": ("90.50", "± 0.24"),
        "this flow, deterministic": ("124.91", "± 0.28"),
        "independent pixels": ("205.76", ""),
        "the paper's best": ("190.10", ""),
    }


def test_a_bound_is_never_called_exact() -> None:
    latent = run_figures(result(BOUND, PICTURES), "test")[0]
    assert (latent.value, latent.stderr) == ("90.50", "")
    assert "upper bound, on average, from 1,000 samples" in latent.meaning
    assert "exact" in run_figures(result(EXACT, PICTURES), "test")[0].meaning


def test_the_paper_is_beside_mnist_alone() -> None:
    assert "paper" not in " ".join(f.name for f in run_figures(result(EXACT, TABLE), "test"))
    assert run_figures(result(EXACT, TABLE), "test")[-1].name == "independent features"


def test_the_test_part_comes_first() -> None:
    assert reported_part({"validation": EXACT, "test": EXACT}) == "test"
    assert reported_part({"validation": EXACT}) == "validation"
    assert reported_part({}) is None


# ---- the bar of much work: what is done, in part too, the time left, and what was done last ----


def planned(folder: Path) -> list[Planned]:
    return [Planned(f"row-{n}.[bold]seed0.select", folder / str(n), 5.0 * (n + 1), 4) for n in range(4)]


def ended(run: Planned, nll: float | None) -> Outcome:
    result = None if nll is None else {"test": {"nll": nll}}
    return Outcome(Job(Options(), run.place, "a job"), result, None if result else "broke")


@pytest.mark.parametrize("columns", [80, 120])
def test_one_bar_for_all_with_runs_under_way_in_part(tmp_path: Path, columns: int) -> None:
    text = io.StringIO()
    console = Console(file=text, width=columns, force_terminal=True, color_system=None)
    runs = planned(tmp_path)
    with Display(console, [*runs, Planned("a piece", tmp_path / "piece.json")]) as display:
        display.on_outcome(ended(runs[0], 1234.567))
        display.refresh()
        (tmp_path / "1").mkdir()
        lines = '{"epoch": 1}\n{"epoch": 2}\n{"epo'
        (tmp_path / "1/metrics.jsonl").write_text(lines, encoding="utf-8")
        display.on_done("a piece")
        assert display.cost_done() == 5.0 + 10.0 * 2 / 5 + 1.0
        display.refresh()
        assert display.tasks[0].completed == display.cost_done()
        display.on_outcome(ended(runs[2], None))
        display.refresh()
        display.on_stop()
        display.refresh()
    assert display.stopping
    assert [outcome.error for outcome in display.outcomes] == [None, "broke"]
    frames = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()))
    assert any(re.search(r"1 of 5 .* left .* 1234\.57 row-0\.\[bo", frame) for frame in frames)
    assert any(re.search(r"2 of 5 .* left .* done a piece", frame) for frame in frames)
    assert any("3 of 5" in frame and "failed row-2" in frame for frame in frames)
    assert any("stopping and saving" in frame for frame in frames)
    assert max(map(len, frames)) <= columns


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_without_a_terminal_there_is_a_line_now_and_then(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", seconds)
    text = io.StringIO()
    runs = planned(tmp_path)
    with Display(Console(file=text), runs) as display:
        display.on_stop()
        assert text.getvalue() == ""
        for run in runs:
            display.on_outcome(ended(run, 80.0))
    lines = text.getvalue().splitlines()
    if seconds:
        assert lines == []
        return
    assert len(lines) == len(runs) > 1
    expected = rf"1 of {len(runs)}: 80.00 {re.escape(runs[0].name)}, about \d+:\d\d:\d\d left"
    assert re.fullmatch(expected, lines[0])
    assert lines[-1] == f"{len(runs)} of {len(runs)}: 80.00 {runs[-1].name}"


# ---- samples as a picture ----


def test_every_image_is_in_its_place() -> None:
    images = np.stack([np.full((2, 3), value) for value in (0.0, 0.5, 1.0)])
    grid = image_grid(images)
    assert grid.shape == (10, 12)
    assert (grid[2:4, 2:5] == 0.0).all()
    assert (grid[2:4, 7:10] == 0.5).all()
    assert (grid[6:8, 2:5] == 1.0).all()
    assert (grid[6:8, 7:10] == 0.25).all()  # nothing there


@pytest.mark.parametrize(("count", "shape"), [(1, (6, 6)), (4, (10, 10)), (10, (18, 14)), (100, (42, 42))])
def test_the_grid_is_nearly_square(count: int, shape: tuple[int, int]) -> None:
    assert image_grid(np.zeros((count, 2, 2))).shape == shape


def test_a_png_with_category_0_black_and_the_last_one_white(tmp_path: Path) -> None:
    x = np.array([[0, 1, 2, 2, 1, 0]])
    save_image_grid(tmp_path / "x.png", x, (2, 3), categories=3)
    picture = imread(tmp_path / "x.png")
    assert picture.shape[:2] == (12, 14)
    grey = picture[5::2, 5::2, 0][:2, :3] if picture.ndim == 3 else picture[5::2, 5::2][:2, :3]
    assert grey.ravel().tolist() == pytest.approx([0, 0.5, 1, 1, 0.5, 0], abs=0.01)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Not a directory; choose a folder"):
        save_image_grid(tmp_path / "file" / "x.png", np.zeros((1, 4)), (2, 2), categories=2)
