"""Every figure of a result with one sentence that says what it is, and that is true of it."""

import pytest

from xorflow.cli.train import reported_part, run_figures

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
