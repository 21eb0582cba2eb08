"""One layer in closed form: against enumeration, and against the estimators that draw."""

import pytest
import torch

import zoo
from enumeration import all_states, gradient
from expectations import (
    bound,
    bound_gradient,
    evidence,
    evidence_gradient,
    expected_gradient,
    gap,
    rows,
    score_function,
    trainable,
)
from xorflow import ConfigError, ModelError
from xorflow.estimators import ELBO, Analytic, Bound, StraightThrough
from xorflow.training import build_estimator

CLOSED = zoo.names(zoo.closed_form)
INFERRED = zoo.names(lambda flow: flow.has_closed_form and flow.has_posterior)
CLOSE = 1e-12


@pytest.mark.parametrize("name", CLOSED)
def test_it_is_the_gradient_of_the_bound(name):
    flow = zoo.make(name)
    assert gap(expected_gradient(Analytic(), flow), bound_gradient(name)) < CLOSE


@pytest.mark.parametrize("name", INFERRED)
def test_it_is_the_gradient_of_the_evidence_lower_bound(name):
    flow = zoo.make(name)
    assert gap(expected_gradient(Analytic(ELBO()), flow), evidence_gradient(name)) < CLOSE


@pytest.mark.parametrize(("objective", "reference"), [(Bound(), bound), (ELBO(), evidence)])
def test_its_value_is_the_objective(objective, reference):
    flow = zoo.make("D3 posterior")
    index = [row for row, _ in rows(flow)]
    shares = torch.tensor([share for _, share in rows(flow)], dtype=torch.float64)
    values = [Analytic(objective)(flow, all_states((2, 2, 2))[row][None]).bound for row in index]
    assert abs(float((shares * torch.stack(values)).sum() - reference(flow).detach())) < CLOSE


@pytest.mark.parametrize("name", ["D4 random", "K 2, 3, 4", "D3 learned base", "D3 context"])
def test_it_is_what_summing_the_last_layer_out_gives(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    found, summed = (
        gradient(estimator(flow, x, context).surrogate, trainable(flow))
        for estimator in (Analytic(), score_function("baseline=none,sum_last=true"))
    )
    assert gap(found, summed) < CLOSE


def test_the_evidence_lower_bound_too():
    flow = zoo.make("D3 posterior")
    x = all_states((2, 2, 2))
    found, summed = (
        gradient(estimator(flow, x).surrogate, trainable(flow))
        for estimator in (Analytic(ELBO()), score_function("objective=elbo,baseline=none,sum_last=true"))
    )
    assert gap(found, summed) < CLOSE


def test_the_straight_through_gradient_is_the_same_at_depth_one():
    flow = zoo.make("D4 random")
    x = all_states(flow.states.sizes)
    networks = list(flow.layers.parameters())
    found, through = (
        gradient(estimator(flow, x).surrogate, networks)
        for estimator in (Analytic(Bound(entropy=0.3)), StraightThrough(entropy=0.3))
    )
    assert gap(found, through) < CLOSE


def test_entropy_and_its_end():
    flow = zoo.make("D2")
    assert gap(expected_gradient(Analytic(Bound(entropy=0.7)), flow), bound_gradient("D2", 0.7)) < CLOSE
    fading = Analytic(Bound(entropy=0.7, anneal=0.0))
    fading.prepare(flow, total_steps=2)
    for left in (1.0, 0.5, 0.0):
        assert gap(expected_gradient(fading, flow), bound_gradient("D2", 0.7 * left)) < CLOSE
        fading.update({})


def test_nothing_is_drawn():
    assert Analytic().noise_shape(zoo.make("D2")) is None


def test_more_layers_are_refused_with_the_reason():
    with pytest.raises(
        ModelError, match=r"needs one layer; with 2 layers the sum .* score-function:sum_last=true"
    ):
        Analytic()(zoo.make("D3 depth 2 reversed"), torch.zeros(1, 3, dtype=torch.int64))


def test_own_choices_are_refused():
    with pytest.raises(ModelError, match="this layer sees its own u"):
        Analytic()(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))


def test_the_evidence_needs_a_posterior():
    with pytest.raises(ModelError, match="needs a posterior"):
        Analytic(ELBO())(zoo.make("D2"), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("objective=greedy", "one of bound, elbo"),
        ("objective=elbo,entropy=1.0", "takes objective, .*; got 'entropy=1.0'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        build_estimator(f"analytic:{options}")
