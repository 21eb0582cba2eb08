"""Leave-one-out: expectations over all tuples of samples, and its identities sample by sample."""

import pytest
import torch

import zoo
from enumeration import all_choices, all_states, gradient
from expectations import (
    EXACT,
    bound_gradient,
    evidence_gradient,
    expected_gradient,
    few,
    gap,
    per_draw,
    score_function,
    state,
    trainable,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import Analytic


def pairs_fit(flow: LatentFlow) -> bool:
    """At most some thousand pairs of all that is drawn, before the last layer or with it."""
    return few(2)(flow)


def earlier_fit(flow: LatentFlow) -> bool:
    return (
        flow.last_layer_summable
        and 1 < flow.depth < 4
        and len(all_choices(flow, flow.depth - 1)) ** 2 <= 8192
    )


PAIRED = zoo.names(pairs_fit)
SUMMED = zoo.names(earlier_fit)
INFERRED = zoo.names(lambda flow: flow.has_posterior and pairs_fit(flow))


def test_the_members_cover_both_variants_to_depth_three():
    for names in (PAIRED, INFERRED):
        found = {(zoo.make(name).depth, zoo.make(name).is_chain) for name in names}
        assert found >= {(1, False), (2, True), (2, False), (3, True)}


@pytest.mark.parametrize("name", PAIRED)
def test_it_is_unbiased(name):
    assert (
        gap(
            expected_gradient(score_function("baseline=leave-one-out,samples=2"), zoo.make(name)),
            bound_gradient(name),
        )
        < EXACT
    )


@pytest.mark.parametrize("name", ["D2", "K3 D1", "D1 depth 2", "D2 linear, context"])
def test_three_samples_and_all_rewards_are_unbiased(name):
    flow = zoo.make(name)
    for estimator in (
        score_function("baseline=leave-one-out,samples=3"),
        score_function("credit=all,baseline=leave-one-out,samples=3"),
    ):
        assert gap(expected_gradient(estimator, flow), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", SUMMED)
def test_with_the_last_layer_summed_out_it_is_unbiased(name):
    found = expected_gradient(
        score_function("baseline=leave-one-out,samples=2,sum_last=true"), zoo.make(name)
    )
    assert gap(found, bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", INFERRED)
def test_samples_of_the_posterior_are_unbiased_for_the_evidence_lower_bound(name):
    flow = zoo.make(name)
    assert (
        gap(
            expected_gradient(score_function("objective=elbo,baseline=leave-one-out,samples=2"), flow, "q"),
            evidence_gradient(name),
        )
        < EXACT
    )
    vanilla = score_function("objective=elbo,divergence=sampled,credit=all,baseline=leave-one-out,samples=2")
    assert gap(expected_gradient(vanilla, flow, "q"), evidence_gradient(name)) < EXACT
    if flow.depth > 1 and flow.last_layer_summable:
        summed = score_function("objective=elbo,baseline=leave-one-out,samples=2,sum_last=true")
        assert gap(expected_gradient(summed, flow, "q"), evidence_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ["D2", "chain D2 depth 3", "D3 depth 2 own"])
def test_entropy_joins_the_objective(name):
    flow = zoo.make(name)
    if pairs_fit(flow):
        found = expected_gradient(
            score_function("baseline=leave-one-out,samples=2,entropy=0.4,earlier=0.5"), flow
        )
        assert gap(found, bound_gradient(name, 0.4, 0.5)) < EXACT


@pytest.mark.parametrize(
    "name", ["D3 reversed", "D3 depth 2 reversed", "chain D2 depth 3", "D4 own", "K3 depth 2"]
)
def test_two_samples_are_half_the_product_of_differences(name):
    """With all rewards, sample by sample: (F_1 - F_2) (s_1 - s_2) / 2 and the mean gradient of the rewards."""
    flow, row = zoo.make(name), 1
    u = all_choices(flow)
    generator = torch.Generator().manual_seed(0)
    for first, second in torch.randint(len(u), (20, 2), generator=generator).tolist():
        pair = u[[first, second]]
        trace = flow.run(flow.start(state(flow, row), zoo.context(flow)), draws=pair[:, None])
        rewards = flow.base.log_prob(trace.end.state).sum(-1)[:, 0]
        log_p = trace.log_p().sum((-1, -2))[:, 0]
        apart = 0.5 * (rewards[0] - rewards[1]).detach() * (log_p[0] - log_p[1]) + rewards.mean()
        found = per_draw(
            score_function("credit=all,baseline=leave-one-out,samples=2"), flow, row, pair[None]
        )[0]
        assert abs(float((found - apart).detach())) < 1e-12
        each, expected = (gradient(value, trainable(flow)) for value in (found, apart))
        assert gap(each, expected) < 1e-14 * max(1.0, float(expected.abs().max()))


def test_at_depth_one_the_formula_by_feature_to_the_last_digit():
    """g_d = (r_d(u_1) - r_d(u_2)) (u_1 - u_2) / 2 in the logits."""
    flow, row = zoo.make("D3 linear"), 5
    x = state(flow, row)
    logits = flow.layers[0].conditioner({"state": x})
    for pair in torch.randint(2, (10, 2, 1, 3), generator=torch.Generator().manual_seed(1)):
        rewards = flow.base.log_prob(flow.run(x, draws=pair[:, None]).end.state)[:, 0]
        formula = 0.5 * (rewards[0] - rewards[1]) * (pair[0, 0] - pair[1, 0])
        expected = gradient((formula.detach() * logits).sum(), list(flow.layers.parameters()))
        found = gradient(
            per_draw(score_function("baseline=leave-one-out,samples=2"), flow, row, pair[None])[0],
            list(flow.layers.parameters()),
        )
        assert gap(found, expected) < 1e-14


def test_the_bound_is_the_mean_of_the_samples():
    flow, x = zoo.make("D3 depth 2 reversed"), all_states((2, 2, 2))
    draws = torch.rand(5, 8, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = flow.base.log_prob(flow.run(x, draws=draws).end.state).sum(-1).mean()
    torch.testing.assert_close(
        score_function("baseline=leave-one-out,samples=5")(flow, x, draws=draws).bound, expected
    )


def test_one_layer_summed_out_is_the_analytic_gradient():
    flow, x = zoo.make("D4 random"), all_states((2,) * 4)
    estimator = score_function("baseline=leave-one-out,samples=2,sum_last=true")
    assert estimator.noise_shape(flow) is None
    found, exact = (gradient(e(flow, x).surrogate, trainable(flow)) for e in (estimator, Analytic()))
    assert gap(found, exact) < 1e-14


def test_more_samples_have_less_variance():
    """The mean square of one example's gradient, over 200 draws of 2 and of 6 samples: here it falls to about a third."""
    flow, row = zoo.make("D3 depth 2 reversed"), 3
    squares = {}
    for samples in (2, 6):
        generator = torch.Generator().manual_seed(0)
        draws = torch.rand(200, samples, 2, 3, dtype=torch.float64, generator=generator)
        each = per_draw(score_function(f"baseline=leave-one-out,samples={samples}"), flow, row, draws)
        squares[samples] = torch.stack([gradient(value, trainable(flow)) for value in each]).var(0).sum()
    assert float(squares[6]) < 0.6 * float(squares[2])


def test_noise_and_capturing():
    flow = zoo.make("D2 depth 3 posterior sees x, previous")  # its layers see their own u
    assert score_function("baseline=leave-one-out,samples=3").noise_shape(flow) == (3, 3, 2)
    assert score_function("baseline=leave-one-out,samples=3").not_capturable(flow) is not None
    assert score_function("objective=elbo,baseline=leave-one-out,samples=3").not_capturable(flow) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("baseline=leave-one-out,samples=1", "leaves none of 1: leave-one-out needs samples=2 or more"),
        ("baseline=leave-one-out,objective=r", "objective is one of bound, elbo"),
        ("baseline=leave-one-out,objective=elbo,entropy=1.0", "takes objective, .*; got 'entropy=1.0'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        score_function(options)


def test_bad_flows():
    with pytest.raises(ModelError, match="must not see its own u"):
        score_function("baseline=leave-one-out,sum_last=true")(
            zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64)
        )
    with pytest.raises(ModelError, match="needs a posterior in every layer"):
        score_function("objective=elbo,baseline=leave-one-out")(
            zoo.make("D2"), torch.zeros(1, 2, dtype=torch.int64)
        )
