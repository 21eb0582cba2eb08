"""Marked blocks of documents: what is between the markers is replaced, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from research.documents import DOCUMENTS, fill, filled_document, update_documents
from xorflow import DataError

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
