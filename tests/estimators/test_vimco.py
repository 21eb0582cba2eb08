"""Bounds of several samples: values and gradients over all tuples of samples."""

import math

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, enumerated, gradient
from expectations import (
    EXACT,
    everything,
    expected_gradient,
    few,
    gap,
    rows,
    score_function,
    trainable,
    tuples,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import VIMCO, MaximumLikelihood
from xorflow.estimators.descendants import Drawn
from xorflow.estimators.importance import vimco


def bound_of_tuples(flow: LatentFlow, samples: int, drawn: Drawn, sum_last: bool) -> Tensor:
    """E[log mean_k w_k] of the two states, with graph, as a plain sum over all tuples of choices."""
    stop = flow.depth - sum_last
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, drawn, stop)
        ends = flow.log_marginal(trace.end) if sum_last else flow.base.log_prob(trace.end.state)
        log_w = ends.sum(-1)[:, 0]
        log_u = trace.log_p().sum((-1, -2)).expand(len(log_w), 1)[:, 0]
        if drawn == "q":
            log_q = trace.log_q().sum((-1, -2)).expand(len(log_w), 1)[:, 0]
            log_w, log_u = log_w + log_u - log_q, log_q
        index = torch.cartesian_prod(*[torch.arange(len(log_w))] * samples).reshape(-1, samples)
        value = torch.logsumexp(log_w[index], 1) - math.log(samples)
        total = total + share * (log_u[index].sum(1).exp() * value).sum()
    return total


def earlier_fit(flow: LatentFlow) -> bool:
    return (
        flow.last_layer_summable
        and 1 < flow.depth < 4
        and len(all_choices(flow, flow.depth - 1)) ** 2 <= 8192
    )


TRIPLES = ["D2", "D1 depth 2", "K3 D1", "D1 depth 3 posterior"]


@pytest.mark.parametrize("name", zoo.names(few(2)))
def test_two_samples_of_the_generator(name):
    flow = zoo.make(name)
    expected = gradient(bound_of_tuples(flow, 2, "p", False), trainable(flow))
    assert gap(expected_gradient(VIMCO(2), flow), expected) < EXACT


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.has_posterior and few(2)(flow)))
def test_two_samples_of_the_posterior(name):
    flow = zoo.make(name)
    expected = gradient(bound_of_tuples(flow, 2, "q", False), trainable(flow))
    assert gap(expected_gradient(VIMCO(2, "q"), flow, "q"), expected) < EXACT


@pytest.mark.parametrize("name", zoo.names(earlier_fit))
def test_the_last_layer_summed_out(name):
    flow = zoo.make(name)
    drawn: list[Drawn] = ["p", "q"] if flow.has_posterior else ["p"]
    for one in drawn:
        expected = gradient(bound_of_tuples(flow, 2, one, True), trainable(flow))
        found = expected_gradient(VIMCO(2, one, sum_last=True), flow, one)
        assert gap(found, expected) < EXACT


@pytest.mark.parametrize("name", TRIPLES)
def test_three_samples(name):
    flow = zoo.make(name)
    drawn: list[Drawn] = ["p", "q"] if flow.has_posterior else ["p"]
    for one in drawn:
        expected = gradient(bound_of_tuples(flow, 3, one, False), trainable(flow))
        assert gap(expected_gradient(VIMCO(3, one), flow, one), expected) < EXACT


@pytest.mark.parametrize("name", ["D2", "D1 depth 2", "D2 depth 2 context"])
def test_bounds_grow_with_the_samples_and_when_the_last_layer_is_summed_out(name):
    flow = zoo.make(name)
    with torch.no_grad():
        plain = [float(bound_of_tuples(flow, samples, "p", False)) for samples in (1, 2, 3)]
    exact = sum(share * float(enumerated(name).log_p[row]) for row, share in rows(flow))
    assert plain[0] < plain[1] < plain[2] < exact
    if flow.depth > 1:
        with torch.no_grad():
            summed = [float(bound_of_tuples(flow, samples, "p", True)) for samples in (1, 2, 3)]
        # a first layer on D = 1 sees nothing: every sample has the same weight
        assert summed[0] <= summed[1] + 1e-12 <= summed[2] + 2e-12 <= exact + 3e-12
        assert all(low < high for low, high in zip(plain, summed, strict=True))


@pytest.mark.parametrize("sum_last", [False, True])
def test_what_is_reported_is_the_bound(sum_last):
    flow, total = zoo.make("D2 depth 2 context"), 0.0
    estimator = VIMCO(2, sum_last=sum_last)
    estimator.prepare(flow)
    context = zoo.rows_of_context(flow, 1)
    for row, share in rows(flow):
        draws, probability = tuples(flow, row, "p", 2, 2 - sum_last)
        x = all_states((2, 2))[row][None]
        with torch.no_grad():
            value = torch.func.vmap(
                lambda u, x=x: estimator.loss(flow, flow.start(x, context), u[:, None]).bound
            )(draws)
        total += share * float((probability * value).sum())
    assert abs(total - float(bound_of_tuples(flow, 2, "p", sum_last).detach())) < EXACT


def test_it_is_another_gradient_than_that_of_one_sample():
    flow = zoo.make("D2")
    gaps = gap(
        expected_gradient(VIMCO(2), flow),
        expected_gradient(score_function("baseline=leave-one-out,samples=2"), flow),
    )
    assert gaps > 1e-2


def test_one_layer_summed_out_is_the_marginal():
    flow, x = zoo.make("D4 random"), all_states((2,) * 4)
    assert VIMCO(sum_last=True).noise_shape(flow) is None
    ours, marginal = (estimator(flow, x) for estimator in (VIMCO(sum_last=True), MaximumLikelihood()))
    assert torch.equal(ours.surrogate, marginal.surrogate)
    assert torch.equal(ours.bound, marginal.bound)


def test_the_control_variate_by_hand():
    log_w = torch.tensor([[0.3, -1.0], [0.1, 2.0], [-0.7, 0.4]], dtype=torch.float64)
    bound, signal = vimco(log_w)
    for column in range(2):
        w = [math.exp(v) for v in log_w[:, column].tolist()]
        assert abs(float(bound[column]) - math.log(sum(w) / 3)) < 1e-14
        for k in range(3):
            others = [w[j] for j in range(3) if j != k]
            without = math.log((sum(others) + math.prod(others) ** 0.5) / 3)
            assert abs(float(signal[k, column]) - (float(bound[column]) - without)) < 1e-14


def test_it_stays_finite_far_out():
    bound, signal = vimco(torch.tensor([-2000.0, -1.0, -3000.0]))
    assert bool(bound.isfinite() & signal.isfinite().all())


def test_noise_and_capturing():
    flow = zoo.make("D2 depth 3 posterior sees x, previous")
    assert VIMCO(7).noise_shape(flow) == (7, 3, 2)
    assert VIMCO(7).not_capturable(flow) is not None
    assert VIMCO(7, "q").not_capturable(flow) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"samples": 1}, "samples is at least 2; got 1"), ({"proposal": "r"}, "proposal is p")],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        VIMCO(**options)


def test_bad_flows():
    with pytest.raises(ModelError, match="must not see its own u"):
        VIMCO(sum_last=True)(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="needs a posterior in every layer"):
        VIMCO(proposal="q")(zoo.make("D2"), torch.zeros(1, 2, dtype=torch.int64))
