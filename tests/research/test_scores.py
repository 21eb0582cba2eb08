"""The figures of the table: what each row's headline is, levels that need no training, and a score that is no likelihood."""

import dataclasses
import math

import pytest
import torch

import xorflow as xf
from research.budgets import find_budget
from research.experiment import Trained
from research.paper.rows import REFERENCES, ROWS
from research.paper.score import posterior_argmax, reference, score
from research.samples import draw_samples, unpacked
from xorflow import evaluate
from xorflow.data import Split
from xorflow.training import report

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


def rows(count: int = 40) -> Split:
    generator = torch.Generator().manual_seed(1)
    return Split(torch.randint(0, 2, (count, FEATURES), generator=generator, dtype=torch.uint8))


def scored(name: str, flow: xf.LatentFlow) -> dict:
    data = xf.data.Dataset("x", rows(), None, rows(), categories=(2,) * FEATURES)
    known = report(flow, data, 1, ("test",))["test"]
    assert data.test is not None
    return score(Trained(BY_ID[name], flow, data.test, data.train, known, BUDGET))


def test_a_straight_through_row_is_its_bijection() -> None:
    flow = make()
    found = scored("ste-1", flow)
    greedy = evaluate.greedy(flow, rows())
    assert found["nll"] == found["greedy"] == found["exact"] == greedy.nll
    assert (found["kind"], found["stderr"], found["samples"]) == ("exact", greedy.stderr, None)
    assert found["latent"]["exact"] == evaluate.exact(flow, rows()).nll
    assert found["latent"]["bound"]["kind"] == "lower bound"
    assert found["elbo"] is None


@pytest.mark.parametrize(("name", "depth"), [("sfe-special-running", 1), ("sfe-special-running-2", 2)])
def test_a_special_case_row_is_bounded_with_every_layer_sampled(name: str, depth: int) -> None:
    flow = make(depth)
    found = scored(name, flow)
    bound = evaluate.importance(flow, rows(), samples=50, sum_last=False)
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
    bound = evaluate.importance(flow, rows(), samples=50, sum_last=False, proposal="q")
    assert (found["nll"], found["bound"]["proposal"]) == (bound.nll, "q")
    assert found["argmax_posterior"] == {"value": posterior_argmax(flow, rows()), "is": "not a likelihood"}


def test_the_marginal_row_is_exact() -> None:
    flow = make()
    found = scored("marginal", flow)
    assert (found["nll"], found["kind"]) == (evaluate.exact(flow, rows()).nll, "exact")
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
    assert posterior_argmax(flow, rows()) == pytest.approx(floor, abs=1e-5)
    everything = Split(torch.cartesian_prod(*[torch.arange(2, dtype=torch.uint8)] * FEATURES))
    assert posterior_argmax(flow, everything) < FEATURES * math.log(2)  # what a uniform distribution has
    assert evaluate.greedy(flow, everything).nll >= FEATURES * math.log(2)
    assert isinstance(posterior_argmax(flow, rows()), float)  # never a LogLikelihood


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
