"""Concrete, straight-through Gumbel and ReinMax: unbiased where the theory says so, and biased where it says that."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, gradient
from expectations import (
    BIASED,
    EXACT,
    bound,
    bound_gradient,
    cosine,
    expected_gradient,
    expected_over,
    few,
    gap,
    gauss,
    local,
    per_draw,
    state,
)
from xorflow import ConfigError, FactorisedBase, LatentFlow, ModelError
from xorflow.estimators import Analytic, Concrete, ReinMax, StraightThroughGumbel
from xorflow.flows.choices import outcomes

SOFT = [Concrete, StraightThroughGumbel]
THROUGH = zoo.names(lambda flow: few(1)(flow) and not any(layer.autoregressive_in_u for layer in flow.layers))
SHALLOW = [name for name in THROUGH if zoo.make(name).depth == 1]
DEEP = [name for name in THROUGH if zoo.make(name).depth > 1 and zoo.make(name).features > 1]


def one_feature(logit: float) -> LatentFlow:
    """D = 1, with this logit everywhere, and a reward of 1 less for u = 1 at x = 0."""
    base = FactorisedBase(1, 1 / (1 + math.exp(-1)))
    flow = LatentFlow([zoo.made(1, hidden=())], base).double()
    flow.layers[0].conditioner.start_at(torch.tensor([logit]))
    return flow


def slope(estimator, flow: LatentFlow) -> float:
    """The expected gradient in the logit at x = 0, by quadrature."""
    at, weights = gauss((), 200)
    value = (weights * per_draw(estimator, flow, 0, at[:, None, None, None])).sum()
    return float(gradient(value, [flow.layers[0].conditioner.net.layers[-1].bias]))


@pytest.mark.parametrize("kind", SOFT)
def test_at_depth_one_the_scale_is_wrong_and_the_sign_right(kind):
    """E[sigma'(z / tau) / tau] in place of f (1 - f), times the difference of the rewards."""
    assert abs(slope(kind(tau=1.0), one_feature(0.0)) + 1 / 6) < 1e-6  # and not 1/4
    flow = one_feature(-3.0)
    assert abs(slope(kind(tau=1.0), flow) + 0.0725) < 5e-5
    exact = -float(
        gradient(
            Analytic()(flow, all_states((2,))[:1]).surrogate, [flow.layers[0].conditioner.net.layers[-1].bias]
        )
    )
    assert abs(exact + 0.0452) < 5e-5


@pytest.mark.parametrize("kind", SOFT)
def test_cold_choices_come_close(kind):
    flow = one_feature(0.4)
    f = 1 / (1 + math.exp(-0.4))
    gaps = [abs(slope(kind(tau=tau), flow) + f * (1 - f)) for tau in (1.0, 0.5, 0.2)]
    assert gaps[0] > 4 * gaps[2]
    assert gaps == sorted(gaps, reverse=True)


def rules(flow: LatentFlow, points: int, row: int) -> dict:
    del row
    return {(0, layer, d): gauss((), points) for layer in range(flow.depth) for d in range(flow.features)}


def test_they_agree_at_depth_one_and_part_at_depth_two():
    flow = zoo.make("D2")
    soft, hard = (expected_over(kind(tau=0.8), flow, partial(rules, flow, 40)) for kind in SOFT)
    assert gap(soft, hard) < 1e-6
    assert gap(soft, gradient(bound(flow), list(flow.layers.parameters()))) > BIASED
    deep = local(partial(zoo.made, 1), partial(zoo.made, 1, sees={"previous": "up to"}, hidden=()))
    soft, hard = (expected_over(kind(tau=0.8), deep, partial(rules, deep, 40)) for kind in SOFT)
    exact = gradient(bound(deep), list(deep.layers.parameters()))
    assert min(gap(soft, hard), gap(soft, exact), gap(hard, exact)) > BIASED


def exact_bound(flow: LatentFlow, x: Tensor) -> Tensor:
    """E[log p_Y] of one state, with graph, as a sum over all choices."""
    trace = flow.run(x, draws=all_choices(flow)[:, None])
    return (trace.log_p().sum((-1, -2)).exp() * flow.base.log_prob(trace.end.state).sum(-1)).sum()


def mean_gradient(estimator, flow: LatentFlow, row: int, count: int) -> tuple[Tensor, Tensor]:
    """The mean of so many gradients in the networks' weights, and its standard error."""
    x = state(flow, row)
    generator = torch.Generator().manual_seed(0)
    networks, batches = list(flow.layers.parameters()), 50
    found = []
    for _ in range(batches):
        draws = estimator.draw(flow, count // batches, generator)
        loss = estimator.loss(flow, flow.start(x.expand(count // batches, -1)), draws)
        found.append(-gradient(loss.surrogate, networks))
    each = torch.stack(found)
    return each.mean(0), each.std(0) / batches**0.5


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("name", ["K3 D3", "K 2, 3, 4", "K3 depth 2", "D3 depth 2 reversed"])
def test_the_bias_is_seen_for_more_categories_and_layers(name, kind):
    """20,000 samples: some coordinate is at least 6 standard errors off, and the direction is kept."""
    flow, row = zoo.make(name), 1
    mean, error = mean_gradient(kind(tau=1.0), flow, row, 20_000)
    x = all_states(flow.states.sizes)[row][None]
    exact = gradient(exact_bound(flow, x), list(flow.layers.parameters()))
    varies = error > 1e-12
    assert float(((mean - exact).abs() / error)[varies].max()) > 6
    assert cosine(mean, exact) > 0.5


@pytest.mark.parametrize("name", ["D3 reversed", "K3 D3", "K 2, 3, 4", "D3 depth 2 reversed", "K3 depth 2"])
def test_hard_choices_have_the_right_law(name):
    """What is reported is the bound of a hard sample: its mean over 40,000 is the bound within 4.5 standard errors."""
    flow, row = zoo.make(name), 1
    x = state(flow, row).expand(200, -1)
    exact = float(exact_bound(flow, state(flow, row)).detach())
    for estimator in (Concrete(), StraightThroughGumbel(), ReinMax()):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            found = torch.stack(
                [
                    estimator.loss(flow, flow.start(x), estimator.draw(flow, 200, generator)).bound
                    for _ in range(200)
                ]
            )
        assert abs(float(found.mean()) - exact) < 4.5 * float(found.std()) / 200**0.5


def test_a_hard_forward_pass_is_exactly_hard():
    flow = zoo.make("D3 depth 2 reversed").float()
    x = all_states((2, 2, 2))
    for estimator in (StraightThroughGumbel(0.3), ReinMax()):
        draws = estimator.draw(flow, 8, torch.Generator().manual_seed(0))
        loss = estimator.loss(flow, flow.start(x), draws)
        assert draws is not None
        expected = flow.base.log_prob(flow.run(x, draws=draws[0]).end.state).sum(-1).mean()
        torch.testing.assert_close(loss.bound, expected.detach(), rtol=0, atol=1e-6)


# ReinMax


@pytest.mark.parametrize("name", SHALLOW)
def test_reinmax_is_unbiased_at_depth_one(name):
    """For every number of categories, and for a learned base."""
    assert gap(expected_gradient(ReinMax(), zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", DEEP)
def test_reinmax_is_unbiased_in_the_last_layer_and_biased_before_it(name):
    flow = zoo.make(name)
    last = list(flow.layers[-1].conditioner.parameters())
    first = list(flow.layers[0].conditioner.parameters())
    assert gap(expected_gradient(ReinMax(), flow, parameters=last), gradient(bound(flow), last)) < EXACT
    assert gap(expected_gradient(ReinMax(), flow, parameters=first), gradient(bound(flow), first)) > BIASED


def test_reinmax_at_another_temperature_is_biased_at_depth_one_too():
    assert (
        gap(expected_gradient(ReinMax(tau=2.0), zoo.make("D3 reversed")), bound_gradient("D3 reversed"))
        > BIASED
    )


def test_reinmax_by_its_definition():
    """2 d pi_1 - d pi / 2 with pi_1 the softmax through the point halfway between sample and probabilities."""
    flow, row = zoo.make("K3 D3"), 4
    x = state(flow, row)
    u = torch.tensor([[2, 0, 1]])
    layer = flow.layers[0]
    logits = layer.generator_choices(flow.start(x)).logits.unflatten(-1, (3, 3))
    hard = torch.nn.functional.one_hot(u, 3).double()
    pi = torch.softmax(logits, -1)
    between = ((hard + pi) / 2).detach()
    moved = torch.softmax(logits + (between.log() - logits).detach(), -1)
    weight = 2 * moved - pi / 2
    choice = hard + weight - weight.detach()
    (rewards,) = outcomes(layer.transform, flow.base, x)
    expected = gradient((choice * rewards).sum(), list(flow.layers.parameters()))
    found = gradient(per_draw(ReinMax(), flow, row, u[None, None])[0], list(flow.layers.parameters()))
    assert gap(found, expected) < 1e-12


# refusals and noise


@pytest.mark.parametrize("estimator", [Concrete(), StraightThroughGumbel(), ReinMax()])
def test_layers_that_see_their_own_choices_are_refused(estimator):
    with pytest.raises(ModelError, match="takes gradients through all choices of a layer at once"):
        estimator(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("kind", [Concrete, StraightThroughGumbel, ReinMax])
def test_a_temperature_is_positive(kind):
    with pytest.raises(ConfigError, match="greater than 0; got -1"):
        kind(tau=-1)


def test_noise():
    assert Concrete().noise_shape(zoo.make("D3 depth 3")) == (1, 3, 3)
    assert StraightThroughGumbel().noise_shape(zoo.make("K 2, 3, 4")) == (4, 1, 3)
    assert ReinMax().noise_shape(zoo.make("K 2, 3, 4")) == (1, 1, 3)
