"""The rows of the reproduction: what they are called, that their recipes mean something, and what they leave to us."""

import pytest

from research.budgets import BUDGETS, find_budget
from research.paper.rows import PAPER_TABLE, REFERENCES, ROWS
from research.rows import VARIANTS, chosen
from xorflow.cli.train import PAPER_NLL
from xorflow.errors import ConfigError
from xorflow.training import build_estimator

RECIPES = [(row, variant) for row in ROWS for variant in VARIANTS if variant in row.recipes]


def test_the_rows_are_the_papers_and_what_it_speaks_of() -> None:
    assert tuple(row.id for row in (*ROWS, *REFERENCES)) == (
        "ste-1", "ste-2", "ste-4", "ste-8", "sfe-posterior-greedy", "sfe-posterior-running", "sfe-special-greedy",
        "sfe-special-running", "sfe-special-running-2", "sfe-special-running-4", "marginal", "independent-pixels",
        "identity", "floor",
    )  # fmt: skip
    for printed in PAPER_TABLE:
        row = next(row for row in ROWS if row.id == printed.id)
        assert (row.paper, row.depth) == ({"nll": printed.nll, "greedy": printed.greedy}, printed.depth)
    silent = [row for row in ROWS if row.paper["nll"] is None]
    assert [row.id for row in silent] == ["sfe-special-running-2", "sfe-special-running-4", "marginal"]


def test_what_the_paper_fixes_is_fixed() -> None:
    for row, variant in RECIPES:
        options = row.options(variant)
        fixed = (
            options.data,
            options.conditioner.partition(":")[0],
            options.base,
            options.optimiser,
            options.lr,
        )
        assert fixed == ("mnist", "made", "fixed", "adam", 1e-3)
        assert options.layers == row.depth
        assert (options.posterior != "none") == (row.family == "full posterior")
        assert options.select == row.metric
        assert options.transform == "shift"


def test_the_estimators_are_those_of_the_families() -> None:
    for row, variant in RECIPES:
        text = row.options(variant).estimator
        families = {"full posterior": "score-function:objective=elbo", "special case": "score-function"}
        assert text.startswith(families.get(row.family, row.family.replace(" ", "-")))
        settings = build_estimator(text).config()
        if row.family in ("straight-through", "special case"):
            with_bonus = settings.get("objective", build_estimator(text))
            assert (with_bonus.entropy > 0) == (variant == "improved")
        if row.family == "full posterior":
            assert settings["sum_last"] == (variant == "improved")
    assert [row.id for row in ROWS if "improved" not in row.recipes] == ["marginal"]


def test_rows_by_name() -> None:
    everything = (*ROWS, *REFERENCES)
    assert tuple(chosen(None, everything)) == everything
    rows = chosen(" floor, marginal ,ste-[28]", everything)
    assert [row.id for row in rows] == ["ste-2", "ste-8", "marginal", "floor"]
    for text in ("ste-3", "ste-1,nothing", "", ","):
        with pytest.raises(ConfigError, match="--rows names rows of ste-1, "):
            chosen(text, everything)


def test_budgets() -> None:
    assert [budget.name for budget in BUDGETS] == ["smoke", "quick", "full"]
    full, recipe = find_budget("full"), ROWS[0].options("ours")
    assert (full.samples, full.seeds, full.rows) == (1000, 3, None)
    assert full.options(recipe, "select", None) == recipe.replace(validation=10_000.0)
    assert full.options(recipe, "final", None) == recipe.replace(validation=0.0)
    assert "not converged" in find_budget("quick").description
    with pytest.raises(ConfigError, match="--budget is one of smoke, quick, full; got 'huge'"):
        find_budget("huge")


# ---- the paper's table, number by number ----


def test_the_numbers_are_the_papers() -> None:
    straight = {row.depth: row.nll for row in PAPER_TABLE if row.title == "straight-through"}
    assert straight == {1: 222.1, 2: 211.2, 4: 205.6, 8: 209.1}
    latent = {row.id: (row.nll, row.greedy) for row in PAPER_TABLE if row.title != "straight-through"}
    assert latent == {
        "sfe-posterior-greedy": (293.7, 205.3),
        "sfe-posterior-running": (242.4, 207.3),
        "sfe-special-greedy": (267.9, 267.7),
        "sfe-special-running": (190.1, 189.6),
    }
    assert all(row.greedy is None for row in PAPER_TABLE if row.title == "straight-through")


def test_the_best_is_what_the_command_line_shows() -> None:
    assert min(row.nll for row in PAPER_TABLE) == PAPER_NLL


def test_ids_are_unique() -> None:
    assert len({row.id for row in PAPER_TABLE}) == len(PAPER_TABLE) == 8
