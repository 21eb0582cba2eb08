"""The rows of the reproduction: what they are called, what they leave to us, and their figures."""

import dataclasses
import math

import pytest
import torch

import xorflow as xf
from research.budgets import BUDGETS, find_budget
from research.experiment import Trained
from research.paper.rows import PAPER_TABLE, REFERENCES, ROWS
from research.paper.score import posterior_argmax, reference, score
from research.rows import VARIANTS, chosen
from research.samples import draw_samples, unpacked
from xorflow import evaluate
from xorflow.cli.train import PAPER_NLL
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.training import build_estimator, report

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


# ---- figures: what each row's headline is, levels that need no training, and a score that is no likelihood ----


FEATURES = 12
BUDGET = dataclasses.replace(find_budget("smoke"), samples=50)
BY_ID = {row.id: row for row in ROWS}


def make(depth: int = 1, *, posterior: bool = False) -> xf.LatentFlow:
    torch.manual_seed(0)
    orders = ("natural", "reversed")
    layers = [
        xf.Layer(
            xf.MADE(FEATURES, (8,), order=orders[i % 2]),
            posterior=xf.MLP(FEATURES, (8,)) if posterior else None,
        )
        for i in range(depth)
    ]
    return xf.LatentFlow(layers, xf.FactorisedBase(FEATURES))


def states(count: int = 40) -> Split:
    generator = torch.Generator().manual_seed(1)
    return Split(torch.randint(0, 2, (count, FEATURES), generator=generator, dtype=torch.uint8))


def scored(name: str, flow: xf.LatentFlow) -> dict:
    data = xf.data.Dataset("x", states(), None, states(), categories=(2,) * FEATURES)
    known = report(flow, data, 1, ("test",))["test"]
    assert data.test is not None
    return score(Trained(BY_ID[name], flow, data.test, data.train, known, BUDGET))


def test_a_straight_through_row_is_its_bijection() -> None:
    flow = make()
    found = scored("ste-1", flow)
    greedy = evaluate.greedy(flow, states())
    assert found["nll"] == found["greedy"] == found["exact"] == greedy.nll
    assert (found["kind"], found["stderr"], found["samples"]) == ("exact", greedy.stderr, None)
    assert found["latent"]["exact"] == evaluate.exact(flow, states()).nll
    assert found["latent"]["bound"]["kind"] == "lower bound"
    assert found["elbo"] is None


@pytest.mark.parametrize(("name", "depth"), [("sfe-special-running", 1), ("sfe-special-running-2", 2)])
def test_a_special_case_row_is_bounded_with_every_layer_sampled(name: str, depth: int) -> None:
    flow = make(depth)
    found = scored(name, flow)
    bound = evaluate.importance(flow, states(), samples=50, sum_last=False)
    assert (found["nll"], found["kind"], found["samples"]) == (bound.nll, "lower bound", 50)
    assert found["bound"]["proposal"] == "p"
    assert found["elbo"] > found["nll"]
    assert (found["exact"] is None) == (depth > 1)
    assert depth > 1 or found["exact"] < found["nll"]
    assert len(found["layers"]) == depth
    assert found["argmax_posterior"] is None


def test_a_full_posterior_row_is_bounded_from_its_posterior() -> None:
    flow = make(posterior=True)
    found = scored("sfe-posterior-greedy", flow)
    bound = evaluate.importance(flow, states(), samples=50, sum_last=False, proposal="q")
    assert (found["nll"], found["bound"]["proposal"]) == (bound.nll, "q")
    assert found["argmax_posterior"] == {"value": posterior_argmax(flow, states()), "is": "not a likelihood"}


def test_the_marginal_row_is_exact() -> None:
    flow = make()
    found = scored("marginal", flow)
    assert (found["nll"], found["kind"]) == (evaluate.exact(flow, states()).nll, "exact")
    assert found["nll"] < found["bound"]["nll"] < found["elbo"]


def test_the_argmax_of_a_posterior_can_be_the_floor_for_every_image() -> None:
    """One that copies x: far below the model's own likelihoods, and below what any distribution could give all rows."""
    flow = make()
    copy = xf.MLP(FEATURES, hidden=())
    with torch.no_grad():
        copy.net.layers[-1].weight.copy_(40 * torch.eye(FEATURES))
        copy.net.layers[-1].bias.fill_(-20)
    flow = xf.LatentFlow([xf.Layer(flow.layers[0].conditioner, posterior=copy)], flow.base)
    floor = float(flow.base.floor())
    assert posterior_argmax(flow, states()) == pytest.approx(floor, abs=1e-5)
    everything = Split(torch.cartesian_prod(*[torch.arange(2, dtype=torch.uint8)] * FEATURES))
    assert posterior_argmax(flow, everything) < FEATURES * math.log(2)  # what a uniform distribution has
    assert evaluate.greedy(flow, everything).nll >= FEATURES * math.log(2)
    assert isinstance(posterior_argmax(flow, states()), float)  # never a LogLikelihood


def test_samples_are_those_of_the_rows_flow() -> None:
    flow = make(2)
    packed = {
        name: draw_samples(BY_ID[name].flow, flow, (3, 4)) for name in ("ste-2", "sfe-special-running-2")
    }
    for (name, kept), model in zip(packed.items(), (flow.greedy(), flow), strict=True):
        generator = torch.Generator().manual_seed(0)
        expected = model().sample((100,), generator=generator).reshape(100, 3, 4)
        assert torch.equal(torch.from_numpy(unpacked(kept)).long(), expected), name
    assert [kept["flow"] for kept in packed.values()] == ["deterministic", "latent"]


def test_the_levels_of_mnist() -> None:
    mnist = xf.data.mnist(validation=0)
    found = {row.id: reference(row, mnist) for row in REFERENCES}
    assert found["independent-pixels"]["nll"] == pytest.approx(205.8, abs=0.06)
    assert found["identity"]["nll"] == pytest.approx(310.9, abs=0.2)
    assert found["floor"]["nll"] == pytest.approx(82.603, abs=1e-3)
    assert {row["kind"] for row in found.values()} == {"exact"}
