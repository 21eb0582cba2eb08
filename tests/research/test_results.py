"""Packed records: the committed tables come out of them byte for byte, studies go on from them, documents say what they say."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from command_line import Command
from research import results
from research.__main__ import tables
from research.budgets import find_budget
from research.depth.study import DEPTH
from research.documents import DOCUMENTS, fill, filled_document, update_documents
from research.experiment import Experiment, Request
from research.paper.study import PAPER
from research.runner import Runner
from research.strong.study import STRONG
from tiny_runs import read
from xorflow import ConfigError, DataError

COMMITTED = Path(__file__).parents[2] / "research/results"
STUDIES = ("paper", "depth", "estimators", "strong", "debd", "mixed")


def test_there_are_few_files() -> None:
    assert sum(path.is_file() for path in COMMITTED.rglob("*")) < 60


def test_the_tables_come_out_of_the_packed_records_byte_for_byte(tmp_path: Path) -> None:
    for name in STUDIES:
        (tmp_path / name).mkdir()
        shutil.copy(COMMITTED / name / results.PACK, tmp_path / name)
    tables(tmp_path)
    for name in STUDIES:
        for committed in (COMMITTED / name).glob("table.*"):
            made = tmp_path / name / committed.name
            assert made.read_bytes() == committed.read_bytes(), "run: make docs"
        assert {p.name for p in (tmp_path / name).iterdir()} == {p.name for p in (COMMITTED / name).iterdir()}


@pytest.mark.parametrize("name", STUDIES)
def test_a_pack_is_sorted_and_the_same_records_make_the_same_bytes(name: str, tmp_path: Path) -> None:
    packed = (COMMITTED / name / results.PACK).read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    files = [json.loads(line)["file"] for line in lines]
    assert files == sorted(files)
    for content in map(json.loads, lines):
        results.write(tmp_path / content["file"], content["record"])
    results.pack(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [results.PACK]
    made = (tmp_path / results.PACK).read_bytes()
    assert gzip.decompress(made) == gzip.decompress(packed)
    results.write_pack(tmp_path, {entry["file"]: entry["record"] for entry in map(json.loads, lines[::-1])})
    assert (tmp_path / results.PACK).read_bytes() == made


EXPERIMENTS = pytest.mark.parametrize(
    "experiment", [PAPER, DEPTH, STRONG], ids=lambda experiment: experiment.name
)


@EXPERIMENTS
def test_nothing_that_is_packed_is_made_again(experiment: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(COMMITTED / experiment.name / results.PACK, out)
    full = find_budget("full", experiment.budgets)
    made = Runner(Request(experiment, experiment.rows, full, out, tmp_path / "work", device="cpu"))
    assert made.planned == []
    assert made.waiting() == []
    assert [path.name for path in out.iterdir()] == [results.PACK]  # not even the plan is written


@EXPERIMENTS
def test_the_committed_plans_are_those_of_the_rows(experiment: Experiment) -> None:
    made = experiment.plan(find_budget("full", experiment.budgets))
    assert results.read(COMMITTED / experiment.name / "plan.json", experiment.name) == made


def test_a_file_comes_before_the_packed_record(tmp_path: Path) -> None:
    path = tmp_path / "runs/a.json"
    results.write(path, {"version": 1, "value": 1})
    results.write(tmp_path / "runs/b.json", {"version": 1, "value": 2})
    results.pack(tmp_path)
    assert not path.exists()
    assert results.exists(path)
    assert results.read(path, "paper")["value"] == 1
    results.write(path, {"version": 1, "value": 3})
    assert results.read(path, "paper")["value"] == 3
    assert [file.name for file in results.records(tmp_path, "runs")] == ["a.json", "b.json"]
    results.pack(tmp_path)
    assert [results.read(file, "paper")["value"] for file in results.records(tmp_path, "runs")] == [3, 2]


def test_a_packed_study_goes_on(research: Command, tmp_path: Path) -> None:
    given = ("--budget", "smoke", "--device", "cpu", "--seeds", "1", "--work", tmp_path / "work")
    out = tmp_path / "results/paper"
    assert research("paper", *given, "--rows", "marginal", "--out", out).code == 0
    before = read(out / "table.json")
    assert research("tables", "--folder", tmp_path / "results").code == 0
    assert not (out / "runs").exists()
    assert read(out / "table.json") == before
    assert research("paper", *given, "--rows", "marginal,floor", "--out", out).code == 0
    assert [path.name for path in (out / "runs").iterdir()] == ["floor.json"]
    assert [row["id"] for row in read(out / "table.json")["rows"]] == ["marginal", "floor"]


def test_damaged_packs_and_records(tmp_path: Path) -> None:
    path = tmp_path / "runs/a.json"
    for content in (b"", b"x", gzip.compress(b"{"), gzip.compress(b"[]\n")):
        (tmp_path / results.PACK).write_bytes(content)
        results._unpacked.cache_clear()
        with pytest.raises(DataError, match=r"runs\.jsonl\.gz is damaged|there is no record"):
            results.read(path, "paper")
    (tmp_path / results.PACK).unlink()
    with pytest.raises(DataError, match="there is no record"):
        results.read(path, "paper")
    for version, words in ((7, "a newer version wrote it"), ("x", "research paper did not write it")):
        results.write(path, {"version": version})
        with pytest.raises(ConfigError, match=words):
            results.read(path, "paper")


# ---- marked blocks of documents: what is between the markers is replaced, and nothing else ----


ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents and the results, to be changed."""
    shutil.copytree(ROOT / "research/results", tmp_path / "research/results")
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_committed_documents_say_what_the_results_say(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == filled_document(ROOT, name), "run: make docs"


def test_other_results_make_other_documents(copy: Path) -> None:
    assert update_documents(copy) == []
    path = copy / "research/results/demo/result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result["test"]["nll"] = 12.345678
    path.write_text(json.dumps(result), encoding="utf-8")
    assert update_documents(copy) == [copy / "README.md"]
    assert "12.35 ±" in (copy / "README.md").read_text(encoding="utf-8")
    assert update_documents(copy) == []


BROKEN = {
    "no block": "",
    "no end": "<!-- x:begin -->\n",
    "twice": "<!-- x:begin -->\n<!-- x:end -->\n" * 2,
    "upside down": "<!-- x:end -->\n<!-- x:begin -->\n",
}


@pytest.mark.parametrize("case", BROKEN)
def test_markers_that_are_not_a_pair(case: str) -> None:
    with pytest.raises(DataError, match="once each, in this order"):
        fill(BROKEN[case], "x", "new")


def test_filling_changes_the_block_alone_and_twice_is_once() -> None:
    text = "a\n<!-- x:begin -->\nold\n\nolder\n<!-- x:end -->\n\n<!-- y:begin -->\nkept\n<!-- y:end -->\n"
    once = fill(text, "x", "new\nlines")
    assert once == text.replace("old\n\nolder", "new\nlines")
    assert fill(once, "x", "new\nlines") == once
