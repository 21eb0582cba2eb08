"""Tables of mixed columns: the same cells for all, four models in processes of their own, and pairs that never occur."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

from research.mixed import cells, command, fit, study
from research.mixed.cells import read_cells
from research.mixed.study import CHOW_LIU, MODELS, has_pair, never_together
from xorflow import auto_fit

RULES = {"split_seed": 0, "train": 0.7, "validation": 0.15, "bins": 8, "rare": 10, "samples": 500}
TABLE = {"package": "none", "version": "1", "file": "none/tiny.csv"}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A table of 400 rows: a number, two categories of which one never has b with z, and a rare category."""
    generator = np.random.default_rng(0)
    lines = ["size,kind,letter"]
    for row in range(400):
        kind = "ab"[generator.integers(2)]
        letter = "rare" if row == 7 else "yz"[generator.integers(2)] if kind == "a" else "y"
        lines.append(f"{generator.normal() + (kind == 'b'):.3f},{kind},{letter}")
    (tmp_path / "none").mkdir()
    (tmp_path / "none/tiny.csv").write_text("\n".join(lines))
    for module in (cells, command):
        monkeypatch.setattr(module, "plan", lambda: RULES | {"tiny": TABLE})
    return tmp_path


def test_numbers_are_in_bins_and_rare_categories_in_one_state(data):
    given = read_cells(data, "tiny")
    assert given["sizes"].tolist() == [8, 3, 3]
    assert given["ordered"].tolist() == [0]
    assert [len(given[part]) for part in ("train", "validation", "test")] == [280, 60, 60]
    everything = np.concatenate([given[part] for part in ("train", "validation", "test")])
    assert (everything.min(0) >= 0).all()
    assert (everything.max(0) < given["sizes"]).all()
    assert (everything == 0).sum(0)[1:].tolist() == [0, 1]
    assert np.bincount(given["train"][:, 0], minlength=8).min() >= 10
    assert (read_cells(data, "tiny")["test"] == given["test"]).all()


def test_a_skewed_number_has_bins_of_enough_rows():
    number = np.concatenate([np.zeros(180), np.arange(1, 21)])
    np.random.default_rng(0).shuffle(number)
    state, size = cells.bins(number, 200, RULES | {"bins": 16})
    assert size == 2
    assert state.max() == 1
    assert np.bincount(state).min() >= 10
    assert number[state == 0].max() < number[state == 1].min()


def test_pairs_that_never_occur_though_expected():
    rows = np.array([[0, 2]] * 40 + [[0, 3]] * 40 + [[1, 2]] * 40)
    never = never_together(rows, 4)
    assert never[1, 3]
    assert never[3, 1]
    assert not never[:2, 2].any()
    assert has_pair(np.array([[0, 2], [1, 3]]), never).tolist() == [False, True]
    assert not never_together(rows[::12], 4).any()  # too few to expect any


def test_a_tree_is_sampled_by_its_probabilities(data):
    given = read_cells(data, "tiny")
    log_prob, sample, _ = fit.fit(CHOW_LIU, given)
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*map(range, given["sizes"]), indexing="ij")], 1)
    p = log_prob(torch.from_numpy(grid)).exp().numpy()
    assert abs(p.sum() - 1) < 1e-9
    drawn = sample(20_000).numpy()
    counts = np.array([(drawn == row).all(1).sum() for row in grid])
    assert (abs(counts - 20_000 * p) < 5 * np.sqrt(20_000 * p) + 1).all()


@pytest.mark.parametrize("name", MODELS[:3])
def test_each_model_scores_and_samples(name, data, monkeypatch):
    monkeypatch.setattr(fit, "auto_fit", partial(auto_fit, orderings=1))
    given = read_cells(data, "tiny")
    np.savez(data / "cells.npz", **given)
    fit.main(name, str(data / "cells.npz"), str(data / "fitted.npz"))
    fitted = np.load(data / "fitted.npz")
    assert fitted["log_p"].shape == (60,)
    assert fitted["samples"].shape == (500, 3)
    assert (fitted["samples"] < given["sizes"]).all()
    assert fitted["cpu_seconds"] > 0
    even = -np.log(given["sizes"].astype(float)).sum()
    assert fitted["log_p"].mean() > even + 0.5


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In place of every interpreter: equal probabilities, of which those of mostlyai-engine are a little smaller."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "import numpy as np\n"
        "given = np.load(sys.argv[-2])\n"
        "log_p = np.full(len(given['test']), -np.log(given['sizes'].astype(float)).sum())\n"
        "samples = np.random.default_rng(0).integers(0, given['sizes'], (500, len(given['sizes'])))\n"
        "log_p -= 'mostly.py' in sys.argv[1]\n"
        "np.savez(sys.argv[-1], log_p=log_p, samples=samples, cpu_seconds=1, megabytes=20, orderings=1)\n"
    )
    path.chmod(0o755)
    monkeypatch.setattr(study.sys, "executable", str(path))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "out")
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    return path


def test_a_table_is_compared_once(research, data, stand_in, monkeypatch):
    options = ("--data", data, "--mostlyai", stand_in)
    done = research("mixed", *options)
    assert done.code == 0
    assert "mostlyai-engine" in done.out
    (row,) = json.loads((data / "out/mixed/table.json").read_text())["rows"]
    assert row["rows"] == 400
    assert row["columns"] == 3
    assert [model["model"] for model in row["models"]] == [*MODELS]
    assert [round(model["less"][0], 6) for model in row["models"]] == [0, 0, 0, 1]
    assert all(model["impossible"][0] > 0.05 and model["megabytes"] > 1 for model in row["models"])
    monkeypatch.setattr(study, "read_cells", None)  # the record is there
    assert research("mixed", *options).code == 0


def test_mistakes_are_said(research, data, stand_in):
    options = ("--mostlyai", stand_in)
    absent = research("mixed", "--data", data / "absent", *options)
    assert absent.code == 2
    assert "pip install --no-deps --target" in absent.err
    stand_in.write_text("#!/bin/sh\nexit 3\n")
    failed = research("mixed", "--data", data, *options)
    assert failed.code == 2
    assert "ended with 3" in failed.err
