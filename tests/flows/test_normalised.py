"""Every member of the zoo is a distribution: over x, and over u given x."""

import pytest
import torch

import zoo
from enumeration import all_states, base_table_lookup, enumerated
from xorflow import MADE, FactorisedBase, LatentFlow, Layer

NAMES = zoo.every()


@torch.no_grad()
def log_prob(flow: LatentFlow) -> torch.Tensor:
    context = zoo.context(flow)
    return flow(None if context is None else context[0]).log_prob(all_states(flow.states.sizes))


@pytest.mark.parametrize("name", NAMES)
def test_the_likelihood_sums_to_one(name):
    assert abs(enumerated(name).total - 1) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_choices_given_data_sum_to_one(name):
    totals = enumerated(name).log_p_u.exp().sum(0)  # the inference direction, for each x
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_log_prob_is_the_enumerated_sum(name):
    torch.testing.assert_close(log_prob(zoo.make(name)), enumerated(name).log_p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_deterministic_flow_sums_to_one(name):
    assert abs(float(log_prob(zoo.make(name).greedy()).exp().sum()) - 1) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_summed_over_all_data_the_bound_depends_on_the_base_alone(name):
    flow = zoo.make(name)
    expected = base_table_lookup(flow, all_states(flow.states.sizes)).sum().detach()
    torch.testing.assert_close(enumerated(name).bound.sum(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", zoo.every(lambda flow: not flow.has_closed_form and flow.features > 1))
def test_one_row_at_a_time_gives_the_same(name):
    flow = zoo.make(name)
    context = zoo.context(flow)
    dist = flow(None if context is None else context[0])
    found = torch.cat([dist.log_prob(x[None]) for x in all_states(flow.states.sizes)])
    torch.testing.assert_close(found, enumerated(name).log_p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ["natural", "random:7"])
def test_float32_sums_to_one_nearly(order):
    torch.manual_seed(0)
    base = FactorisedBase(4, probabilities=torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.6, 0.4]]))
    flow = zoo.sharpen(LatentFlow([Layer(MADE(4, (16,), order=order))], base))
    assert abs(float(log_prob(flow).exp().sum()) - 1) < 1e-5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [2, 3])
def test_any_ordering_for_each_layer_sums_to_one(depth, seed):
    torch.manual_seed(seed)
    layers = [zoo.made(3, f"random:{10 * seed + index}") for index in range(depth)]
    flow = zoo.sharpen(zoo.flow(*layers)).double()
    assert abs(float(log_prob(flow).exp().sum()) - 1) < 1e-10
