"""Double control variates: unbiased over all pairs of samples whatever their factor; exact where rewards are linear."""

from functools import partial

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, gradient
from expectations import (
    EXACT,
    bound_gradient,
    expected_gradient,
    few,
    gap,
    local,
    per_draw,
    score_function,
    state,
    trainable,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import Analytic, DoubleCV
from xorflow.estimators.control_variates import local_slopes


def earlier_fit(flow: LatentFlow) -> bool:
    return (
        flow.last_layer_summable
        and 1 < flow.depth < 4
        and len(all_choices(flow, flow.depth - 1)) ** 2 <= 4096
    )


PAIRED = zoo.names(few(2))


@pytest.mark.parametrize("name", PAIRED)
def test_it_is_unbiased(name):
    """Also for more than two categories, and for layers that see their own u."""
    flow = zoo.make(name)
    assert gap(expected_gradient(DoubleCV(2, alpha=0.6), flow), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", zoo.names(earlier_fit))
def test_with_the_last_layer_summed_out_it_is_unbiased(name):
    found = expected_gradient(DoubleCV(2, alpha=1.3, sum_last=True), zoo.make(name))
    assert gap(found, bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ["D2", "D1 depth 2", "K3 D1"])
def test_three_samples_are_unbiased(name):
    assert gap(expected_gradient(DoubleCV(3, alpha=-0.4), zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ["D3 reversed", "D4 random", "K 2, 3, 4", "affine K3", "D3 context"])
def test_at_depth_one_nothing_is_left_to_vary(name):
    """Rewards are linear in the choices: each draw gives the analytic gradient of the network."""
    flow, row = zoo.make(name), 1
    networks = list(flow.layers.parameters())
    x = all_states(flow.states.sizes)[row][None]
    exact = -gradient(Analytic()(flow, x, zoo.rows_of_context(flow, 1)).surrogate, networks)
    draws = torch.rand(
        20, 2, 1, flow.features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for value in per_draw(DoubleCV(2), flow, row, draws):
        assert gap(gradient(value, networks), exact) < 1e-12


def test_a_factor_of_zero_is_leave_one_out():
    flow, row = zoo.make("D3 depth 2 reversed"), 3
    draws = torch.rand(10, 3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, plain = (
        per_draw(e, flow, row, draws)
        for e in (DoubleCV(3, alpha=0.0), score_function("baseline=leave-one-out,samples=3"))
    )
    for one, other in zip(ours, plain, strict=True):
        assert gap(gradient(one, trainable(flow)), gradient(other, trainable(flow))) < 1e-13


def test_local_slopes_by_differences():
    """The gradient of the rewards in the relaxed choices; in the last layer, of rewards that are linear in them."""
    flow = local(partial(zoo.made, 3), partial(zoo.made, 3, "reversed"))
    x = state(flow, 5)
    us = flow.run(x, draws=torch.tensor([[[1, 0, 1], [0, 1, 1]]])).us
    slopes = local_slopes(flow, flow.start(x), us)
    before, low, high = x ^ us[0], *flow.base.log_table()[0].unbind(-1)

    def rewards(u: Tensor) -> Tensor:
        y = before + u - 2 * before * u
        return (y * high + (1 - y) * low).sum()

    for d in range(3):
        step = torch.zeros(us[1].shape, dtype=torch.float64)
        step[..., d] = 0.5
        change = float((rewards(us[1] + step) - rewards(us[1] - step)).detach())
        assert abs(change - float(slopes[1][0, d])) < 1e-12
    assert not slopes[0].requires_grad
    assert float(slopes[0].abs().max()) > 1e-3


def test_in_a_hierarchy_it_has_less_variance_than_leave_one_out():
    """The mean square of 300 gradients of one example, with the same samples."""
    flow, row = zoo.make("D3 depth 2 one order"), 3
    draws = torch.rand(300, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = [
        torch.stack([gradient(value, trainable(flow)) for value in per_draw(e, flow, row, draws)])
        .var(0)
        .sum()
        for e in (DoubleCV(4), score_function("baseline=leave-one-out,samples=4"))
    ]
    assert float(spread[0]) < 0.8 * float(spread[1])


def controls(flow: LatentFlow, estimator: DoubleCV, draws: Tensor) -> Tensor:
    found = estimator(flow, all_states(flow.states.sizes), draws=draws).control
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", ["D3 depth 2 learned base", "D2 depth 3", "K3 depth 2", "D3 depth 2 own first"]
)
def test_the_control_reaches_alpha_alone_and_the_surrogate_the_flow(name):
    flow, estimator = zoo.make(name), DoubleCV(2, alpha=0.5)
    x = all_states(flow.states.sizes)
    loss = estimator(flow, x, zoo.rows_of_context(flow, len(x)), generator=torch.Generator().manual_seed(0))
    assert loss.control is not None
    reached = torch.autograd.grad(loss.control, trainable(flow), retain_graph=True, allow_unused=True)
    assert all(g is None for g in reached)
    (own,) = torch.autograd.grad(loss.control, estimator.alphas)
    assert float(own.abs().min()) > 0
    assert torch.autograd.grad(loss.surrogate, estimator.alphas, allow_unused=True) == (None,)


def test_the_control_is_the_mean_square_of_the_gradient_in_the_logits():
    """At depth 1, from the slopes of the output biases; a parabola in alpha, with its least value at 1."""
    flow, row = zoo.make("D3 linear"), 5
    estimator = DoubleCV(3, alpha=0.3)
    draws = torch.rand(3, 1, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x = all_states((2, 2, 2))[row][None]
    loss = estimator(flow, x, draws=draws)
    (slope,) = torch.autograd.grad(loss.surrogate, flow.layers[0].conditioner.net.layers[-1].bias)
    torch.testing.assert_close(loss.control, slope.square().mean(), rtol=0, atol=1e-12)
    many = torch.rand(3, 8, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    values = []
    for alpha in (0.0, 0.5, 1.0, 1.5):
        with torch.no_grad():
            estimator.alphas.fill_(alpha)
        values.append(float(controls(flow, estimator, many).detach()))
    assert values[2] == min(values)


@pytest.mark.parametrize(("options", "words"), [({"samples": 1}, "samples is at least 2; got 1")])
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        DoubleCV(**options)


def test_bad_flows():
    with pytest.raises(ModelError, match="must not see its own u"):
        DoubleCV(sum_last=True)(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="the control variate of DoubleCV without parameters; use analytic"):
        DoubleCV(sum_last=True)(zoo.make("D2"), torch.zeros(1, 2, dtype=torch.int64))
