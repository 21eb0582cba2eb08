"""The entropy bonus: its gradient, its optimum, its schedule."""

import pytest
import torch

import zoo
from enumeration import all_states, gradient
from expectations import (
    EXACT,
    bound,
    bound_gradient,
    everything,
    expected_gradient,
    few,
    gap,
    networks,
    rows,
    score_function,
    with_a_past,
)
from xorflow import MADE, ConfigError, FactorisedBase, LatentFlow, Layer
from xorflow.estimators import Bound, ScoreFunction, StraightThrough
from xorflow.estimators.entropy import EntropyBonus

W = 0.7


def with_entropy(**options) -> ScoreFunction:
    return ScoreFunction(Bound(**options))


def bonus_of(estimator) -> EntropyBonus:
    return estimator.objective.bonus if isinstance(estimator, ScoreFunction) else estimator.bonus


SINGLE = zoo.names(few(1))
PAIRED = zoo.names(few(2))
CLOSED = zoo.names(zoo.closed_form)


# the gradient


@pytest.mark.parametrize("name", SINGLE)
def test_the_bonus_is_unbiased(name):
    """For the gradient of L + w E[sum_l H_l]: a layer's entropy changes with the choices that it sees."""
    flow = zoo.make(name)
    assert (
        gap(expected_gradient(score_function(f"baseline=none,entropy={W}"), flow), bound_gradient(name, W))
        < EXACT
    )
    if flow.depth > 1:
        estimator = with_a_past(score_function(f"credit=all,entropy={W},earlier=0.2"), flow)
        assert gap(expected_gradient(estimator, flow), bound_gradient(name, W, 0.2)) < EXACT


@pytest.mark.parametrize("name", PAIRED)
def test_the_bonus_is_unbiased_with_critics(name):
    flow = zoo.make(name)
    for baseline in ("greedy", "sampled"):
        estimator = score_function(f"baseline={baseline},entropy={W},earlier=0.2")
        assert gap(expected_gradient(estimator, flow), bound_gradient(name, W, 0.2)) < EXACT


@pytest.mark.parametrize("name", ["D3 depth 2 reversed", "D2 depth 3", "D4 own", "chain D2 depth 3"])
def test_without_the_scores_of_later_entropies_it_would_be_biased(name):
    """At depth 1 without own u autograd of H is enough; elsewhere the law of what a layer sees changes too."""
    flow = zoo.make(name)
    parameters = networks(flow)
    rewards = expected_gradient(score_function("baseline=none"), flow, parameters=parameters)
    exact = gradient(bound(flow, W), parameters)
    alone = expected_gradient(score_function(f"baseline=none,entropy={W}"), flow, parameters=parameters)
    assert gap(alone, exact) < EXACT
    assert gap(rewards + direct_entropy(flow), exact) > 1e-3


def direct_entropy(flow: LatentFlow) -> torch.Tensor:
    """w times the mean of the entropies' own gradients, all choices held."""
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "p")
        probability = trace.log_p().detach().sum((-1, -2)).exp()
        for choices in trace.generator:
            total = total + W * share * (probability * choices.entropy().sum(-1)).sum()
    return gradient(total, networks(flow))


# straight through


@pytest.mark.parametrize("name", CLOSED)
def test_straight_through_with_it_is_exact_at_depth_one(name):
    flow = zoo.make(name)
    parameters = networks(flow)
    found = expected_gradient(StraightThrough(entropy=W), flow, parameters=parameters)
    torch.testing.assert_close(found, gradient(bound(flow, W), parameters), rtol=0, atol=1e-12)


@pytest.mark.parametrize("earlier", [1.0, 0.3])
def test_straight_through_adds_the_entropies_of_the_greedy_pass(earlier):
    for name in ("D3 depth 2 reversed", "D3 depth 3", "K3 depth 2"):
        flow = zoo.make(name)
        x = all_states(flow.states.sizes)
        without, with_it = StraightThrough()(flow, x), StraightThrough(W, earlier=earlier)(flow, x)
        greedy = flow.run(x, draws="greedy")
        weights = [W * earlier] * (flow.depth - 1) + [W]
        bonus = sum(
            w * choices.entropy().sum(-1).mean() for w, choices in zip(weights, greedy.generator, strict=True)
        )
        torch.testing.assert_close(with_it.surrogate, without.surrogate - bonus, rtol=0, atol=1e-12)
        assert torch.equal(with_it.bound, without.bound)


# the optimum


def optimal(joint: torch.Tensor, w: float) -> LatentFlow:
    """Two features whose logits are the stated optimum for data of this law (2, 2)."""
    net = MADE(2, hidden=())
    flow = LatentFlow(
        [Layer(net)], FactorisedBase(2, probabilities=torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    ).double()
    (table,) = flow.base.log_table()
    gain = (table[:, 0] - table[:, 1]) / w  # log((1 - beta) / beta) / w
    first, second = joint.sum(1)[1], joint[:, 1] / joint.sum(1)
    at = (2 * second - 1) * gain[1]  # the second feature's logits, by the first
    linear = net.net.layers[-1]
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[1, 0] = at[1] - at[0]
        linear.bias.copy_(torch.stack([(2 * first - 1) * gain[0], at[0]]))
    return flow


def slope(estimator, flow: LatentFlow, joint: torch.Tensor) -> torch.Tensor:
    """The expected gradient over data and choices, the biases' last."""
    total = torch.zeros((), dtype=torch.float64)
    states = all_states((2, 2))
    for x, share in zip(states, joint.flatten(), strict=True):
        if estimator.noise_shape(flow) is None:
            total = total - share * estimator(flow, x[None]).surrogate
            continue
        log_p = flow.run(x[None], draws=states[:, None, None]).log_p().sum((-1, -2))
        for u, probability in zip(states, log_p.detach().exp()[:, 0], strict=True):
            loss = estimator(flow, x[None], draws=u[None, None, None])
            total = total - share * probability * loss.surrogate
    return gradient(total, networks(flow))


JOINT = torch.tensor([[0.4, 0.1], [0.15, 0.35]], dtype=torch.float64)


@pytest.mark.parametrize("estimator", [StraightThrough(0.5), score_function("baseline=none,entropy=0.5")])
def test_the_optimum_at_depth_one(estimator):
    r"""f = sigmoid((2P - 1) log((1 - beta) / beta) / w): there the gradient is zero, and all around it leads back."""
    flow = optimal(JOINT, 0.5)
    assert float(slope(estimator, flow, JOINT).abs().max()) < 1e-12
    bias = flow.layers[0].conditioner.net.layers[-1].bias
    for feature in range(2):
        for step in (0.1, -0.1):
            with torch.no_grad():
                bias[feature] += step
            assert float(slope(estimator, flow, JOINT)[-2:][feature]) * step < -1e-4
            with torch.no_grad():
                bias[feature] -= step


def test_at_the_optimum_the_most_probable_choice_is_right():
    """Greedy leads each feature, given what came before, to the base's more probable value as often as can be."""
    flow, states = optimal(JOINT, 0.5), all_states((2, 2))
    choices = flow.run(states, draws="greedy").u[:, 0].bool()
    often = (
        torch.stack([JOINT.sum(1)[1].expand(2), JOINT[:, 1] / JOINT.sum(1)], -1) > 0.5
    )  # by the first feature
    expected = often[states[:, 0]] ^ torch.tensor([False, True])  # the second feature's base prefers a one
    assert torch.equal(choices, expected)


# the schedule


def weights(bonus: EntropyBonus, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(bonus.value(torch.zeros((), dtype=torch.float64))))
        bonus.update()
    return found


def test_the_weight_falls_from_a_fraction_of_training_on():
    bonus = EntropyBonus(0.8, anneal=0.5)
    bonus.prepare(torch.zeros(()), 10)
    expected = [0.8 * min(1.0, 2 * (1 - step / 10)) for step in range(10)] + [0.0, 0.0]
    torch.testing.assert_close(torch.tensor(weights(bonus, 12)), torch.tensor(expected))


def test_the_weight_falls_from_the_beginning():
    bonus = EntropyBonus(0.8, anneal=0.0)
    bonus.prepare(torch.zeros(()), 4)
    torch.testing.assert_close(torch.tensor(weights(bonus, 5)), 0.8 * torch.tensor([1, 0.75, 0.5, 0.25, 0]))


def test_without_an_end_or_without_annealing_the_weight_stays():
    endless, kept = EntropyBonus(0.8, anneal=0.2), EntropyBonus(0.8)
    endless.prepare(torch.zeros(()), None)
    kept.prepare(torch.zeros(()), 4)
    assert weights(endless, 5) == weights(kept, 5) == [0.8] * 5
    assert kept.state_dict() == {}  # nothing to keep


@pytest.mark.parametrize("kind", [StraightThrough, with_entropy])
def test_the_schedule_is_saved_and_loaded(kind):
    flow = zoo.make("D3 depth 2 reversed")
    x = all_states(flow.states.sizes)
    first, resumed = kind(entropy=0.8, anneal=0.25), kind(entropy=0.8, anneal=0.25)
    first.prepare(flow, total_steps=8)
    resumed.prepare(flow, total_steps=8)
    for _ in range(5):
        first.update(first(flow, x, generator=torch.Generator().manual_seed(0)).stats)
    resumed.load_state_dict(first.state_dict())
    like = torch.zeros((), dtype=torch.float64)
    assert (
        float(bonus_of(first).value(like))
        == float(bonus_of(resumed).value(like))
        == pytest.approx(0.8 * 3 / 8 / 0.75)
    )
    losses = [e(flow, x, generator=torch.Generator().manual_seed(1)).surrogate for e in (first, resumed)]
    assert torch.equal(*losses)


def test_the_weight_in_use_is_the_one_of_the_step():
    """Half way down, the gradient is that of half the bonus."""
    flow = zoo.make("chain D3 depth 2")
    estimator = score_function(f"baseline=none,entropy={2 * W},anneal=0.0")
    estimator.prepare(flow, total_steps=2)
    estimator.objective.bonus.update()
    assert gap(expected_gradient(estimator, flow), bound_gradient("chain D3 depth 2", W)) < EXACT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entropy": -1}, "entropy, the weight of the bonus, is at least 0; got -1"),
        ({"entropy": float("nan")}, "at least 0; got nan"),
        ({"anneal": 1.5}, "a fraction of training from 0 to 1; got 1.5"),
        ({"earlier": -1}, "earlier, a factor of the bonus, is at least 0; got -1"),
        ({"anneal": 0.5}, "anneal and earlier change the entropy bonus, whose weight entropy is 0"),
        ({"earlier": 0.0}, "leave them out, or raise entropy"),
    ],
)
def test_bad_weights_are_refused(options, words):
    for kind in (StraightThrough, with_entropy):
        with pytest.raises(ConfigError, match=words):
            kind(**options)
