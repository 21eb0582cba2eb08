"""Prefixes from a proposal: unbiased with their weights, and drawn from the law that the weights suppose."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, gradient, probabilities
from expectations import EXACT, bound_gradient, few, gap, per_draw, rows, score_function, state, trainable
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import ProposalPrefix

NAMES = zoo.names(lambda flow: flow.layers[-1].conditioner.order is not None and few(2)(flow))
ONE_LAYER = zoo.names(
    lambda flow: flow.depth == 1 and flow.layers[0].conditioner.order is not None and few(2)(flow)
)
MIXES = [0.0, 0.3, 1.0]


def proposal(flow: LatentFlow, row: int, mix: float) -> Tensor:
    """rho(v) for every v, (T,): a share of the generator's conditionals and a share of uniform ones."""
    v = all_choices(flow)
    log_p = flow.run(flow.start(state(flow, row), zoo.rows_of_context(flow, 1)), draws=v[:, None]).log_p()
    sizes = torch.tensor([layer.transform.choices.sizes for layer in flow.layers], dtype=torch.float64)
    return ((1 - mix) * log_p.detach().exp() + mix / sizes).prod(-1).prod(-1).reshape(-1).expand(len(v))


def pairs(flow: LatentFlow, row: int, mix: float) -> tuple[Tensor, Tensor]:
    """Every (v, u) (N, 2, L, D) and its probability (N,): v from rho, each last u_d from p given what v has before d."""
    v, layer = all_choices(flow), flow.layers[-1]
    x, context = state(flow, row).expand(len(v), -1), zoo.rows_of_context(flow, len(v))
    point = flow.run(flow.start(x, context), draws=v, stop=flow.depth - 1).end
    choices = layer.generator_choices(point, v[:, -1])
    given = probabilities(choices).detach().expand(len(v), -1, -1)  # (V, D, U)
    u = all_states(layer.transform.choices.sizes)
    chosen = given[:, None, torch.arange(flow.features), u[None]]  # (V, 1, U', D), for each v and u
    probability = proposal(flow, row, mix)[:, None] * chosen.reshape(len(v), len(u), -1).prod(-1)
    padded = torch.zeros(
        len(u), flow.depth, flow.features, dtype=u.dtype
    )  # only the last layer's is looked at
    padded[:, -1] = u
    draws = torch.stack(torch.broadcast_tensors(v[:, None], padded[None]), 2)
    return draws.flatten(0, 1), probability.flatten()


def expectation(estimator: ProposalPrefix, flow: LatentFlow) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        draws, probability = pairs(flow, row, estimator.mix)
        assert abs(float(probability.sum()) - 1) < 1e-12
        total = total + share * (probability * per_draw(estimator, flow, row, draws)).sum()
    return gradient(total, trainable(flow))


@pytest.mark.parametrize("sum_last", [False, True])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_unbiased_for_every_mixture(name, mix, sum_last):
    assert gap(expectation(ProposalPrefix(mix, sum_last), zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ["D4 own", "D3 depth 2 reversed", "K 3, 1, 2 own"])
def test_summed_out_it_is_the_mean_over_the_last_choices(name):
    """So that its variance is smaller: what is left is the prefix."""
    flow = zoo.make(name)
    row = rows(flow)[0][0]
    draws, probability = pairs(flow, row, 0.3)
    each = [per_draw(ProposalPrefix(0.3, sum_last), flow, row, draws) for sum_last in (False, True)]
    prefixes = len(all_choices(flow))
    of_prefix = probability.reshape(prefixes, -1)
    drawn, summed = (values.reshape(prefixes, -1) for values in each)
    weights = torch.linspace(-1, 2, prefixes, dtype=torch.float64)
    slopes = [
        gradient((weights * (of_prefix * found).sum(-1)).sum(), trainable(flow)) for found in (drawn, summed)
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-11)
    assert (summed - summed[:, :1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["D4 own", "K 3, 1, 2 own", "D3 own, posterior"])
def test_without_the_weights_it_would_be_biased(name, monkeypatch):
    """Where a choice sees those before it, whose law is another one under the proposal."""
    flow = zoo.make(name)
    monkeypatch.setattr(
        ProposalPrefix, "log_rho", lambda self, choices, v, layout: choices.log_prob(v).detach()
    )
    assert gap(expectation(ProposalPrefix(0.0), flow), bound_gradient(name)) < EXACT
    assert gap(expectation(ProposalPrefix(0.3), flow), bound_gradient(name)) > 1e-3


@pytest.mark.parametrize("name", ONE_LAYER)
def test_on_one_path_and_without_mixing_it_is_the_two_terms(name):
    """With the same draw for the prefix and the choice, value and gradient are those of the special case."""
    flow = zoo.make(name)
    two_terms = score_function("credit=two-term,baseline=none")
    for row, _ in rows(flow):
        u = all_choices(flow)[:, None]
        found = per_draw(ProposalPrefix(0.0), flow, row, u.expand(-1, 2, -1, -1))
        expected = per_draw(two_terms, flow, row, u)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        weights = torch.linspace(-1, 2, len(u), dtype=torch.float64)
        slopes = [gradient((weights * each).sum(), trainable(flow)) for each in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mix", MIXES)
def test_its_bound_is_that_of_the_special_case(mix):
    """With the weights, in expectation."""
    flow = zoo.make("D4 own")
    row = rows(flow)[0][0]
    draws, probability = pairs(flow, row, mix)
    x, estimator = state(flow, row), ProposalPrefix(mix)
    with torch.no_grad():
        each = torch.func.vmap(lambda one: estimator.loss(flow, flow.start(x), one[:, None]).bound)(draws)
        trace = flow.run(x, draws=all_choices(flow)[:, None])
        value = flow.base.log_prob(trace.end.state).sum(-1)
        expected = (trace.log_p().sum((-1, -2)).exp() * value).sum()
    torch.testing.assert_close((probability * each).sum(), expected, rtol=0, atol=EXACT)


COUNT = 100_000


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["D4 own", "K 3, 1, 2 own", "D3 context", "K3 posterior"])
def test_prefixes_drawn_from_uniforms_have_the_law_of_the_proposal(name, mix):
    """Every frequency among 100,000 within 4.5 of its standard errors."""
    flow, estimator = zoo.make(name), ProposalPrefix(mix)
    row, context = rows(flow)[0][0], zoo.rows_of_context(flow, COUNT)
    x = state(flow, row)
    point = flow.start(x.expand(COUNT, -1), context)
    uniforms = torch.rand(
        COUNT, flow.features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    layer = flow.layers[0]
    v, *_ = estimator._prefix(layer, point, uniforms)
    every, expected = all_choices(flow)[:, 0], proposal(flow, row, mix)
    frequency = torch.stack([(v == one).all(-1).double().mean() for one in every])
    error = (expected * (1 - expected) / COUNT).sqrt()
    assert bool(((frequency - expected).abs() <= 4.5 * error + 1e-12).all())
    assert float(frequency.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["D4 own", "K 3, 1, 2 own", "D3 context"])
def test_without_mixing_prefixes_are_the_generators_own_draws(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    uniforms = torch.rand(
        len(x), 1, flow.features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    v, *_ = ProposalPrefix()._prefix(flow.layers[0], flow.start(x, context), uniforms[:, 0])
    expected = flow.run(flow.start(x, context), draws=uniforms).us[0]
    assert torch.equal(v, expected)


def test_the_models_are_of_both_variants_and_several_depths():
    made = [zoo.make(name) for name in NAMES]
    assert {flow.depth for flow in made} >= {1, 2, 3}
    assert any(name.startswith("chain") for name in NAMES)
    assert any(flow.depth > 1 and any(layer.autoregressive_in_u for layer in flow.layers) for flow in made)


def test_a_last_layer_without_an_ordering_is_refused():
    flow = zoo.make("coupling D2")
    with pytest.raises(ModelError, match="a last layer with an ordering"):
        ProposalPrefix()(flow, all_states(flow.states.sizes))


@pytest.mark.parametrize("mix", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_zero_to_one(mix):
    with pytest.raises(ConfigError, match="a number from 0 to 1"):
        ProposalPrefix(mix)
