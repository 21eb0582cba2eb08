"""The bar of much work: what is done, in part too, the time left, and what was done last."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from xorflow.cli import progress
from xorflow.cli.progress import Display, Planned
from xorflow.training import Job, Options, Outcome


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
