"""Local expectations: exact over the intervals of their uniforms, analytic where nothing else changes, and their limit."""

from functools import partial

import pytest
import torch

import zoo
from enumeration import all_states, gradient
from expectations import (
    EXACT,
    bound,
    bound_gradient,
    drawn_rules,
    expected_over,
    gap,
    local,
    one_by_one,
    product,
    rows,
    trainable,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import Analytic, LocalExpectation

ONE_LAYER = zoo.names(zoo.closed_form)
FLOWS = {
    "depth 2": lambda: zoo.make("D2 depth 2 context"),
    "learned base": lambda: zoo.make("D3 depth 2 learned base"),
    "chain": lambda: local(
        partial(zoo.made, 2, sees={"x": "before"}), partial(zoo.made, 2, sees={"previous": "up to"})
    ),
    "depth 3": lambda: zoo.make("D2 depth 3"),
    "depth 3, one order": lambda: zoo.make("D2 depth 3 one order"),
    "coupling": lambda: zoo.make("made and coupling"),
    "three categories": lambda: zoo.make("K3 depth 2"),
    "mixed categories": lambda: local(
        partial(zoo.made, 2, categories=(2, 3)), partial(zoo.made, 2, "reversed", categories=(2, 3))
    ),
}
OWN = {
    "one layer": lambda: local(partial(zoo.made, 3, "reversed", sees=zoo.OWN)),
    "own first": lambda: local(partial(zoo.made, 2, sees=zoo.OWN), partial(zoo.made, 2, "reversed")),
    "own last": lambda: local(partial(zoo.made, 2), partial(zoo.made, 2, sees=zoo.OWN), learned=True),
    "chain": lambda: local(*zoo_chain(2)),
    "three categories": lambda: local(partial(zoo.made, 2, categories=3, sees=zoo.OWN)),
}


def zoo_chain(features: int) -> list:
    first = partial(zoo.made, features, sees={"x": "before", "own": "before"})
    return [first, partial(zoo.made, features, sees=zoo.CHAIN)]


def rules(flow: LatentFlow, layers: int, row: int) -> dict:
    return drawn_rules(flow, row, 0, range(layers))


@pytest.mark.parametrize("name", ONE_LAYER)
def test_at_depth_one_it_is_the_analytic_gradient_of_every_draw(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    networks = list(flow.layers.parameters())
    found = LocalExpectation()(flow, x, context, generator=torch.Generator().manual_seed(0))
    exact = Analytic()(flow, x, context)
    assert gap(gradient(found.surrogate, networks), gradient(exact.surrogate, networks)) < 1e-12


@pytest.mark.parametrize("sum_last", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_it_is_unbiased(name, sum_last):
    flow = FLOWS[name]()
    found = expected_over(LocalExpectation(sum_last), flow, partial(rules, flow, flow.depth - sum_last))
    expected = gradient(bound(flow), trainable(flow))
    assert gap(found, expected) < EXACT
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("name", OWN)
def test_it_is_unbiased_for_layers_that_see_their_own_choices(name):
    flow, estimator = OWN[name](), LocalExpectation()
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        draws, weights = product(estimator.noise_shape(flow) or (), rules(flow, flow.depth, row))
        total = total + share * (weights * one_by_one(estimator, flow, row, draws)).sum()
    assert gap(gradient(total, trainable(flow)), gradient(bound(flow), trainable(flow))) < EXACT


def test_keeping_later_choices_would_be_biased(monkeypatch):
    """The power of the test above: as if the layer did not see its own choices."""
    flow, estimator = OWN["one layer"](), LocalExpectation()

    monkeypatch.setattr(LocalExpectation, "_redrawn", lambda self, step, changed, kept: changed)
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        draws, weights = product(estimator.noise_shape(flow) or (), rules(flow, 1, row))
        total = total + share * (weights * one_by_one(estimator, flow, row, draws)).sum()
    assert gap(gradient(total, trainable(flow)), gradient(bound(flow), trainable(flow))) > 1e-3


def test_the_last_layer_is_analytic_given_what_came_before():
    flow = zoo.make("D3 depth 2 reversed")
    x = all_states((2, 2, 2))
    estimator = LocalExpectation()
    estimator.prepare(flow)
    draws = estimator.draw(flow, 8, torch.Generator().manual_seed(0))
    assert draws is not None
    last = list(flow.layers[1].parameters())
    found = -gradient(estimator.loss(flow, flow.start(x), draws).surrogate, last)
    choices, outcomes = flow.last_choices(flow.run(x, draws=draws[0], stop=1).end)
    assert gap(found, gradient(choices.expectation(outcomes).sum(-1).mean(), last)) < 1e-12


def test_summed_out_at_depth_one_it_draws_nothing():
    flow = zoo.make("D4 random")
    assert LocalExpectation(sum_last=True).noise_shape(flow) is None
    x = all_states(flow.states.sizes)
    found, exact = (e(flow, x).surrogate for e in (LocalExpectation(sum_last=True), Analytic()))
    assert gap(gradient(found, trainable(flow)), gradient(exact, trainable(flow))) < 1e-12
    assert bound_gradient("D4 random").shape == gradient(found, trainable(flow)).shape


def test_many_features_are_refused_unless_they_do_not_meet():
    flow = zoo.make("D3 depth 2 reversed")
    with pytest.raises(ModelError, match=r"the 3 features of layer 1 one by one.* the limit is 2"):
        LocalExpectation(limit=2)(flow, torch.zeros(1, 3, dtype=torch.int64))
    LocalExpectation(limit=1)(
        zoo.make("D4 random"), torch.zeros(1, 4, dtype=torch.int64)
    ).surrogate.backward()


def test_bad_options_and_flows():
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        LocalExpectation(limit=0)
    with pytest.raises(ModelError, match="must not see its own u"):
        LocalExpectation(sum_last=True)(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))
