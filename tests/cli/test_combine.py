"""`combine`: several runs as one, which is then a run like any other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import xorflow as xf
from command_line import SMALL, Command
from tiny_runs import people_file, read, rows_file
from xorflow.training import mixture_of


@pytest.fixture
def seeds(xorflow: Command, tmp_path: Path) -> list[Path]:
    """Two runs on the same rows."""
    out = tmp_path / "runs"
    data = rows_file(tmp_path / "rows.npy")
    assert xorflow("train", "--data", data, "--seeds", "0,1", "--out", out, *SMALL).code == 0
    return [out / "seed-0", out / "seed-1"]


def test_it_is_a_run_like_any_other(xorflow: Command, seeds: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "together"
    said = xorflow("combine", *seeds, "--out", out, "--device", "cpu")
    assert said.code == 0
    assert said.err == ""
    result = read(out / "result.json")
    assert f"{result['test']['nll']:.3f}" in said.out
    members = [read(seed / "result.json") for seed in seeds]
    mean = sum(member["test"]["nll"] for member in members) / 2
    assert f"{members[1]['test']['nll']:.3f}" in said.out
    assert result["test"]["nll"] < mean + 0.01
    assert result["test"]["kind"] == "exact"
    assert (result["how"], result["seeds"]) == ("mixture", [0, 1])
    assert result["seconds"] == pytest.approx(sum(member["seconds"] for member in members), abs=0.01)
    found = json.loads(xorflow("evaluate", out, "--json", "--device", "cpu").out)
    assert found["test"]["nll"] == pytest.approx(result["test"]["nll"], abs=1e-6)
    assert xorflow("sample", out, "--count", "5", "--out", tmp_path / "x.npy").code == 0
    assert np.load(tmp_path / "x.npy").shape == (5, 6)
    assert xorflow("score", out, "--data", tmp_path / "rows.npy", "--out", tmp_path / "s.csv").code == 0
    flows = [xf.load(seed) for seed in seeds]
    expected = mixture_of(flows)
    x = torch.from_numpy(np.load(tmp_path / "rows.npy")).long()[:20]
    torch.testing.assert_close(xf.load(out)().log_prob(x), expected().log_prob(x))


def test_runs_that_were_combined_are_combined_again(
    xorflow: Command, seeds: list[Path], tmp_path: Path
) -> None:
    """As mixtures, whose components keep their shares."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert xorflow("combine", *seeds, "--out", first).code == 0
    assert xorflow("combine", first, seeds[0], "--out", second).code == 0
    assert read(second / "result.json")["seeds"] == [0, 1, 0]
    mixture = xf.load(second)
    assert isinstance(mixture, xf.Mixture)
    torch.testing.assert_close(mixture.log_weights().exp(), torch.tensor([0.25, 0.25, 0.5]))


def test_refusals(xorflow: Command, seeds: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "together"
    data = tmp_path / "rows.npy"
    others = {
        "reversed": ("--data", data, "--set", "order=reversed"),
        "deep": ("--data", data, "--layers", "2"),
        "wide": ("--data", data, "--set", "precision=64-true"),
        "people": ("--data", people_file(tmp_path / "people.csv")),
        "held": ("--data", data, "--set", "test=7"),
    }
    for name, options in others.items():
        assert xorflow("train", *options, "--out", tmp_path / name, *SMALL).code == 0
    for runs, words in (
        (seeds[:1], "at least two runs are combined, and got 1"),
        ([seeds[0], tmp_path / "deep"], "one of these has only a bound"),
        ([seeds[0], tmp_path / "people"], "runs on the same data are combined"),
        ([seeds[0], tmp_path / "held"], "the sizes is different; give the same data"),
        ([seeds[0], tmp_path / "nowhere"], "there is no folder"),
    ):
        assert words in xorflow("combine", *runs, "--out", out).refused()
        assert not out.exists()
    taken = xorflow("combine", *seeds, "--out", seeds[0]).refused()
    assert "--out must be a new or an empty folder" in taken
    assert "--resume" not in taken
    assert xorflow("combine", seeds[0], tmp_path / "wide", "--out", tmp_path / "both").code == 0
    again = xorflow("train", "--out", tmp_path / "both", "--resume").refused()
    assert "combines other runs, and there is nothing to resume" in again
    mixed = xorflow("combine", seeds[0], tmp_path / "reversed", "--out", out)
    assert mixed.code == 0


def test_a_damaged_result_is_found_before_anything_is_evaluated(
    xorflow: Command, seeds: list[Path], tmp_path: Path
) -> None:
    path = seeds[1] / "result.json"
    path.write_text(json.dumps({key: value for key, value in read(path).items() if key != "seconds"}))
    said = xorflow("combine", *seeds, "--out", tmp_path / "together").refused()
    assert "is damaged: 'seconds' is not there" in said


def test_without_held_out_data_there_is_nothing_to_report(
    xorflow: Command, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    nothing = ("--set", "validation=0", "--set", "test=0")
    assert xorflow("train", "--data", rows, "--seeds", "0,1", *nothing, "--out", out, *SMALL).code == 0
    said = xorflow("combine", out / "seed-0", out / "seed-1", "--out", tmp_path / "together")
    assert (said.code, said.err) == (0, "")
    assert "No data were held out" in said.out
