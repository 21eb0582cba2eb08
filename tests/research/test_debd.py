"""The scoreboard of binary tables: every set once, beside what is published."""

import json

import numpy as np
import pytest

from research.__main__ import main
from research.debd import command, study
from research.debd.study import debd_table, make_table

FIGURES = ("ll", "kind", "stderr", "seconds", "cpu_seconds", "device", "published", "independent", "chow_liu")


@pytest.fixture
def sets(tmp_path):
    """Two sets of three columns, one of which repeats another in nine of ten rows."""
    generator = np.random.default_rng(0)
    for name in ("dna", "own"):
        x = generator.integers(0, 2, (400, 3), dtype=np.uint8)
        x[:, 2] = x[:, 0] ^ (generator.random(400) < 0.1)
        np.savez(tmp_path / f"{name}.npz", train=x[:200], validation=x[200:300], test=x[300:])
    return tmp_path


def run(sets, *more: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(
            ["debd", "--data", str(sets), "--out", str(sets / "out"), "--minutes", "0", "--seeds", "1", *more]
        )
    return left.value.code


def test_each_set_is_trained_once(sets, monkeypatch, capsys):
    assert run(sets, "--rows", "d*") == 0
    assert run(sets) == 0
    table = json.loads((sets / "out/table.json").read_text())
    assert [row["set"] for row in table["rows"]] == ["dna", "own"]
    for row in table["rows"]:
        assert all(name in row for name in FIGURES)
        assert row["independent"] < row["chow_liu"] + 0.01
        assert row["ll"] > row["independent"] + 0.2
        assert row["seeds"] == [0]
    assert [row["published"] for row in table["rows"]] == [-79.051, None]
    monkeypatch.setattr(command, "train_and_score", None)  # all records are there
    assert run(sets) == 0
    assert make_table(sets / "out") == table
    bold = debd_table(table).splitlines()[2]
    assert bold.startswith("| dna |")
    assert "**-1." in bold
    assert "own" in capsys.readouterr().out


def test_sets_are_read_as_they_are_published(sets):
    arrays = study.read_set(sets / "dna.npz", "dna")
    arrays.train.values[:, 1] = 1  # a constant, which other parts need not know
    for name, part in (("ts", arrays.train), ("valid", arrays.validation), ("test", arrays.test)):
        np.savetxt(sets / f"text.{name}.data", part.values, fmt="%d", delimiter=",")
    found = study.read_set(study.find_sets(sets)["text"], "text")
    assert found.categories == (2, 2, 2)
    for name, part in arrays.parts.items():
        assert found.parts[name].values.equal(part.values)


def test_a_folder_without_sets_is_said(sets, capsys):
    assert run(sets / "out") == 2
    assert "is a folder of files NAME.npz or NAME.ts.data" in capsys.readouterr().err
    assert run(sets, "--rows", "nltcs") == 2
    assert "--rows names sets, which are dna, own" in capsys.readouterr().err
