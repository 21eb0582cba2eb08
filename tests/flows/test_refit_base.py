"""`refit_base` against counting by hand."""

import math

import pytest
import torch

import zoo
from xorflow import MADE, FactorisedBase, Flow, Layer, evaluate, refit_base


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
