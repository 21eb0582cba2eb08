"""Tables of runs: what they share, what each has of its own, and every mistake found when they are read."""

from pathlib import Path
from typing import Any

import pytest

from xorflow.cli.several import plan, read_table
from xorflow.errors import ConfigError
from xorflow.training import Job, Options, Outcome, summarise

TABLE = """
epochs = 20
conditioner = "made:hidden=64"

[[runs]]
name = "wide"
conditioner = "made:hidden=2048"

[[runs]]
name = "lr=0.01,deep"
layers = 2
epochs = 5
"""


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_runs_share_what_is_above_and_add_their_own(tmp_path: Path) -> None:
    assert read_table(table(tmp_path, TABLE)) == {
        "wide": Options(epochs=20, conditioner="made:hidden=2048"),
        "lr=0.01,deep": Options(epochs=5, conditioner="made:hidden=64", layers=2),
    }


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    assert read_table(table(tmp_path, "epochs = 20")) is None
    assert read_table(tmp_path / "config.json") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs = 3", "runs is a list of tables, each begun by [[runs]]; got 3"),
        ("runs = []", "runs is a list of tables"),
        ("runs = [1]", "runs is a list of tables"),
        ("epoch = 2\n[[runs]]\nname = 'a'", "table.toml: there is no option 'epoch'"),
        ("[[runs]]\nepochs = 2", "entry 1 of [[runs]]: every run needs a name"),
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'A'", "entry 2 of [[runs]]: every run needs a name of its own"),
        ("[[runs]]\nname = 'a'\nepoch = 2", "run 'a': there is no option 'epoch'; did you mean 'epochs'?"),
        ("[[runs]]\nname = 'a'\nepochs = '2'", "run 'a': epochs is a whole number; got '2'"),
        ("[[runs]]\nname = 'a'\nepochs = 0", "run 'a': epochs is at least 1; got 0"),
        ("[[runs]]\nname = 'a'\nseeds = [1]", "run 'a': there is no option 'seeds'"),
        (
            "[[runs]]\nname = 'a'\nlr = 0\n[[runs]]\nname = 'b'\n[[runs]]\nname = 'c'\nlr = 0",
            "run 'a': lr is greater than 0; got 0.0; there are problems in run 'c' too",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_the_run(tmp_path: Path, text: str, words: str) -> None:
    path = table(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_table(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../up", "a/b", "/top", ".hidden", "-rf", "a b", "a\\b", "a\nb", "config.json", "a.",
     "ö", "x" * 101, 3],
)  # fmt: skip
def test_names_that_are_no_safe_folders(tmp_path: Path, name: object) -> None:
    written = (
        str(name) if isinstance(name, int) else '"' + name.replace("\\", "\\\\").replace("\n", "\\n") + '"'
    )
    with pytest.raises(ConfigError, match=r"entry 1 of \[\[runs\]\]: a name is at most 100 letters"):
        read_table(table(tmp_path, f"[[runs]]\nname = {written}"))


def test_a_plan_is_a_job_for_each_entry_and_seed(tmp_path: Path) -> None:
    entries = {"a": Options(lr=0.1), "b": Options(seed=7)}
    assert plan(tmp_path, entries) == [
        Job(Options(lr=0.1), tmp_path / "a", "a"),
        Job(Options(seed=7), tmp_path / "b", "b"),
    ]
    made = plan(tmp_path, entries, [3, 1])
    assert [(job.name, job.options.seed) for job in made] == [("a", 3), ("a", 1), ("b", 3), ("b", 1)]
    assert made[3] == Job(Options(seed=1), tmp_path / "b/seed-1", "b")
    assert [job.out for job in plan(tmp_path, {"": Options()}, [5])] == [tmp_path / "seed-5"]


def result(nll: float, part: str = "test") -> dict[str, Any]:
    figures = {"nll": nll, "kind": "exact", "stderr": 0.5, "refit_nll": nll + 10, "floor": 1.0}
    return {part: figures, "seconds": 2.5, "seed": 0}


def test_a_summary_has_a_row_for_each_run_and_the_spread_over_seeds(tmp_path: Path) -> None:
    jobs = plan(tmp_path, {"a": Options(), "b": Options()}, [0, 1, 2])
    (tmp_path / "b/seed-1").mkdir(parents=True)
    (tmp_path / "b/seed-1/config.json").touch()
    found = [
        Outcome(jobs[1], result(3.0), None),  # in the order in which they ended
        Outcome(jobs[0], result(1.0), None),
        Outcome(jobs[2], None, "broke"),
        Outcome(jobs[3], result(5.0, "validation"), None),
    ]
    summary = summarise(tmp_path, jobs, found)
    assert summary["runs"][0] == {
        "name": "a", "seed": 0, "folder": "a/seed-0", "part": "test", "nll": 1.0, "kind": "exact",
        "stderr": 0.5, "refit_nll": 11.0, "seconds": 2.5, "error": None,
    }  # fmt: skip
    assert [row["error"] for row in summary["runs"]] == [
        None, None, "broke", None, "interrupted", "not begun"
    ]  # fmt: skip
    assert [row["nll"] for row in summary["runs"]] == [1.0, 3.0, None, 5.0, None, None]
    assert summary["groups"] == [
        {
            "name": "a", "n": 2, "failed": 1, "kind": "exact",
            "nll": {"mean": 2.0, "std": 2**0.5, "min": 1.0, "max": 3.0},
            "refit_nll": {"mean": 12.0, "std": 2**0.5, "min": 11.0, "max": 13.0},
        },
        {
            "name": "b", "n": 1, "failed": 2, "kind": "exact",
            "nll": {"mean": 5.0, "std": None, "min": 5.0, "max": 5.0},
            "refit_nll": {"mean": 15.0, "std": None, "min": 15.0, "max": 15.0},
        },
    ]  # fmt: skip


def test_runs_without_held_out_data_have_no_likelihood(tmp_path: Path) -> None:
    jobs = plan(tmp_path, {"": Options()}, [0])
    summary = summarise(tmp_path, jobs, [Outcome(jobs[0], {"seconds": 1.0}, None)])
    assert summary["runs"][0] == {
        "name": tmp_path.name, "seed": 0, "folder": "seed-0", "part": None, "nll": None, "kind": None,
        "stderr": None, "refit_nll": None, "seconds": 1.0, "error": None,
    }  # fmt: skip
    assert summary["groups"][0]["nll"] is None
