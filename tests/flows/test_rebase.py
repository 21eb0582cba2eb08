"""A model on another base: the formula against enumeration, and `refit_base` against counting by hand."""

import math

import pytest
import torch
from torch import Tensor

import zoo
from xorflow import MADE, Coupling, FactorisedBase, Flow, LatentFlow, Layer, evaluate, refit_base
from xorflow._math import enumerate_states
from xorflow.errors import ModelError
from xorflow.flows import with_base

D = 4


def model(p0: float, order: str = "random:3") -> LatentFlow:
    torch.manual_seed(1)
    flow = LatentFlow([Layer(MADE(D, (16,), order=order))], FactorisedBase(D, p0)).double()
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(8)
    return flow


def everything() -> Tensor:
    return enumerate_states([2] * D)


def conditionals(flow: LatentFlow) -> Tensor:
    """P(x_d = 1 | x before d) for every x, by sums over all that agree with it so far, (2^D, D)."""
    x = everything()
    p = flow.log_likelihood(x).exp()
    order = flow.layers[0].conditioner.order
    assert order is not None
    found = torch.empty(len(x), D, dtype=torch.float64)
    for place, feature in enumerate(order):
        before = list(order[:place])
        same = (x[:, None, before] == x[None, :, before]).all(-1).double()  # (2^D, 2^D)
        found[:, feature] = (same * x[None, :, feature]) @ p / (same @ p)
    return found


def test_the_nearest_probability_that_the_base_can_reach() -> None:
    flow, base = model(0.9999), FactorisedBase(D).double()
    read = with_base(flow, base)
    total = read.log_likelihood(everything()).exp().sum()
    assert abs(float(total.detach()) - 1) < 1e-10
    wanted = conditionals(flow)
    assert bool((wanted < 0.1).any() & (wanted > 0.9).any())
    assert bool(((wanted > 0.1) & (wanted < 0.9)).any())
    b = base.log_probs_of(0)[1].exp().detach()  # 0.1, to the digits of the base's logits
    torch.testing.assert_close(conditionals(read), wanted.clamp(b, 1 - b), rtol=0, atol=1e-10)


def test_the_same_distribution_where_nothing_is_clipped() -> None:
    flow = model(0.7)
    read = with_base(flow, FactorisedBase(D, 0.9999).double())
    x = everything()
    torch.testing.assert_close(read.log_likelihood(x), flow.log_likelihood(x), rtol=0, atol=1e-10)


def test_it_is_the_best_flip_for_data_that_follow_the_model() -> None:
    """Of all flips on the base, the clipped one has the least expected cost, feature by feature."""
    b = 0.1
    p = torch.linspace(0, 1, 21, dtype=torch.float64)[:, None]
    flips = torch.linspace(0, 1, 2001, dtype=torch.float64)[None, :]
    one = b + (1 - 2 * b) * flips
    cost = -(p * one.log() + (1 - p) * (1 - one).log())
    best = flips[0, cost.argmin(1)]
    torch.testing.assert_close(best, ((p[:, 0] - b) / (1 - 2 * b)).clamp(0, 1), rtol=0, atol=5e-4)


def test_evaluation_and_samples_work_on_it() -> None:
    read = with_base(model(0.9999).float(), FactorisedBase(D))
    x = everything()
    exact = evaluate.exact(read, x)
    assert exact.kind == "exact"
    assert evaluate.greedy(read, x).nll >= D * 0.1053
    drawn = read().sample((20_000,), generator=torch.Generator().manual_seed(0))
    index = (drawn * torch.tensor([8, 4, 2, 1])).sum(-1)
    weights = torch.tensor([8, 4, 2, 1])
    p = exact.values.exp()[(x * weights).sum(-1).argsort()]
    rates = torch.bincount(index, minlength=16) / len(drawn)
    assert bool(((rates - p).abs() < 5 * (p / len(drawn)).sqrt()).all())


DEEP = ["D3 depth 3", "D4 depth 2 random", "D3 depth 2 own first", "coupling D4 random"]


@pytest.mark.parametrize("name", DEEP)
def test_of_deeper_flows_the_last_layer_is_read(name: str) -> None:
    flow = zoo.MEMBERS[name]().double()
    x = enumerate_states([2] * flow.features)
    clipped = with_base(flow, FactorisedBase(flow.features, 0.501).double())
    assert abs(float(clipped.log_likelihood(x).exp().sum().detach()) - 1) < 1e-10
    free = with_base(
        flow, FactorisedBase(flow.features, 0.999999).double()
    )  # which can reach almost anything
    torch.testing.assert_close(free.log_likelihood(x), flow.log_likelihood(x), rtol=0, atol=1e-4)
    assert (clipped.log_likelihood(x) - flow.log_likelihood(x)).abs().max() > 1e-4


def coupling(depth: int) -> LatentFlow:
    """On a base other than the one it is to be read on, with strong weights."""
    torch.manual_seed(depth)
    layers = [Layer(Coupling(D, (8,), mask="alternate", flip=bool(index % 2))) for index in range(depth)]
    probabilities = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.9, 0.1], [0.6, 0.4]])
    flow = LatentFlow(layers, FactorisedBase(D, probabilities=probabilities)).double()
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(4)
    return flow


@pytest.mark.parametrize("depth", [1, 2])
def test_a_coupling_on_another_base_is_one_model(depth: int) -> None:
    """Its likelihood, its samples and its deterministic flow agree, for every x."""
    read, x = with_base(coupling(depth), FactorisedBase(D, 0.95).double()), everything()
    p = read().log_prob(x).detach().exp()
    assert abs(float(p.sum()) - 1) < 1e-10
    drawn = read().sample((40_000,), generator=torch.Generator().manual_seed(0))
    rates = torch.bincount((drawn * torch.tensor([8, 4, 2, 1])).sum(-1), minlength=16) / len(drawn)
    assert bool(((rates - p).abs() < 5 * (p * (1 - p) / len(drawn)).sqrt()).all())
    greedy = read.greedy()
    assert torch.equal(greedy.to_data(greedy.to_base(x)), x)
    assert torch.equal(greedy.to_base(greedy.to_data(x)), x)


def test_a_coupling_on_another_base_is_the_same_distribution_where_nothing_is_clipped() -> None:
    flow, x = coupling(1), everything()
    read = with_base(flow, FactorisedBase(D, 0.999999).double())
    torch.testing.assert_close(read().log_prob(x), flow().log_prob(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["D4 own", "D3 posterior", "K 2, 3, 4"])
def test_what_cannot_be_read(name: str) -> None:
    flow = zoo.MEMBERS[name]()
    with pytest.raises(ModelError, match="only a flow on binary data"):
        with_base(flow, FactorisedBase(flow.features))


def test_bases_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match="same features"):
        with_base(model(0.9), FactorisedBase(D + 1))
    with pytest.raises(ModelError, match="one half"):
        with_base(model(0.9), FactorisedBase(D, 0.5).double())


# ---- a base that is fitted to residuals ----


def identity(features: int, categories=2) -> Flow:
    """A flow that changes nothing."""
    flow = Flow(
        [Layer(MADE(features, (), categories=categories))], FactorisedBase(features, categories=categories)
    )
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.zero_()
    return flow.double()


def test_frequencies_with_half_a_count_added():
    x = torch.tensor([[0, 1], [0, 1], [1, 1]])
    found = torch.stack([refit_base(identity(2), x).log_probs_of(d) for d in range(2)]).exp()
    expected = torch.tensor([[2.5, 1.5], [0.5, 3.5]], dtype=torch.float64) / 4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_categories_of_their_own():
    x = torch.tensor([[0, 2, 0], [1, 2, 3]], dtype=torch.uint8)
    base = refit_base(identity(3, (2, 3, 4)), x)
    expected = torch.tensor(
        [1.5 / 3, 1.5 / 3, 0.5 / 3.5, 0.5 / 3.5, 2.5 / 3.5, 1.5 / 4, 0.5 / 4, 0.5 / 4, 1.5 / 4]
    )
    found = torch.cat([base.log_probs_of(d) for d in range(3)]).exp()
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["D3 depth 3", "K 2, 3, 4", "D3 context", "D2 depth 8", "chain K3 depth 2"])
def test_residuals_of_a_flow_counted_one_by_one(name):
    flow = zoo.make(name).greedy()
    generator = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randint(k, (50,), generator=generator) for k in flow.states.sizes], -1)
    context = zoo.rows_of_context(flow, 50)
    found = refit_base(flow, x, context, batch_size=7)
    residuals = flow.to_base(x, context).tolist()
    for d, k in enumerate(flow.states.sizes):
        for category in range(k):
            count = sum(row[d] == category for row in residuals)
            assert math.isclose(
                float(found.log_probs_of(d)[category].exp()), (count + 0.5) / (50 + k / 2), abs_tol=1e-6
            )


def test_it_is_the_best_base_for_its_data():
    """Up to smoothing: no base gives the training data a better likelihood."""
    flow = zoo.make("D3 depth 2 reversed").greedy()
    x = flow().sample((4000,), generator=torch.Generator().manual_seed(0))
    before = evaluate.exact(flow, x).nll
    refitted = Flow(flow.layers, refit_base(flow, x))
    assert evaluate.exact(refitted, x).nll <= before
    assert refitted.dtype == flow.dtype
    assert not refitted.base.logits.requires_grad
