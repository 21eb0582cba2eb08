"""Baselines and scales: what leaves the expectation alone, what changes it and how, and their state."""

import itertools

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
    few,
    gap,
    networks,
    per_draw,
    rows,
    score_function,
    tuples,
    with_a_past,
)
from xorflow import ConfigError, LatentFlow
from xorflow.estimators import Baseline, FeatureScale, OneScale, RunningMean, ScoreFunction
from xorflow.estimators.baselines import BaselineInputs
from xorflow.flows import Point

SINGLE = zoo.names(few(1))
PAIRED = zoo.names(few(2))


# baselines


@pytest.mark.parametrize("name", SINGLE)
def test_the_greedy_critic_is_unbiased(name):
    assert (
        gap(expected_gradient(score_function("baseline=greedy"), zoo.make(name)), bound_gradient(name))
        < EXACT
    )


@pytest.mark.parametrize("name", PAIRED)
def test_the_sampled_critic_is_unbiased(name):
    """Over all pairs of samples."""
    flow, estimator = zoo.make(name), score_function("baseline=sampled")
    assert estimator.noise_shape(flow) == (2, flow.depth, flow.features)
    assert gap(expected_gradient(estimator, flow), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", SINGLE)
def test_a_running_mean_of_any_past_is_unbiased(name):
    """Fresh, with one example in the batch, and after an arbitrary past."""
    flow = zoo.make(name)
    fresh = score_function("baseline=running-mean")
    assert gap(expected_gradient(fresh, flow), bound_gradient(name)) < 1e-12
    later = with_a_past(score_function("baseline=running-mean"), flow)
    assert float(later.baseline.mean.abs().max()) > 0.1
    assert gap(expected_gradient(later, flow), bound_gradient(name)) < EXACT


class Constants(Baseline):
    """One of the user's own."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def expected(self, inputs: BaselineInputs) -> Tensor:
        assert inputs.signal.shape[-2:] == (1, inputs.flow.features)
        return self.values


class OfTheData(Baseline):
    """Looks at x and at the model, as any baseline may."""

    def expected(self, inputs: BaselineInputs) -> Tensor:
        return (inputs.start.x * 0.7 - 1.3).to(inputs.flow.dtype)[:, None]


@pytest.mark.parametrize("name", ["D4 random", "D4 own", "D3 depth 2 reversed", "chain K3 depth 2"])
def test_users_can_bring_their_own(name):
    flow = zoo.make(name)
    values = torch.linspace(-2, 3, flow.features, dtype=torch.float64)
    for baseline in (Constants(values), OfTheData()):
        estimator = ScoreFunction(baseline=baseline)
        assert gap(expected_gradient(estimator, flow), bound_gradient(name)) < EXACT
        assert estimator.config()["baseline"] is baseline


def mean_over_batches(
    estimator: ScoreFunction, flow: LatentFlow, row: int, size: int, *, late: bool
) -> Tensor:
    """E[gradient] over all batches of some examples, the state updated after use or, wrongly, before."""
    x = all_states(flow.states.sizes)[row].expand(size, -1)
    draws, probability = tuples(flow, row, "p", 1)
    state = {key: value.clone() for key, value in estimator.state_dict().items()}
    total = torch.zeros((), dtype=torch.float64)
    for index in itertools.product(range(len(draws)), repeat=size):
        chosen = draws[list(index), 0][None]
        estimator.load_state_dict(state)
        if not late:
            estimator.update(estimator(flow, x, draws=chosen).stats)
        total = total - probability[list(index)].prod() * estimator(flow, x, draws=chosen).surrogate
    estimator.load_state_dict(state)
    return gradient(total, networks(flow))


@pytest.mark.parametrize("name", ["D2", "D1 depth 2"])
@pytest.mark.parametrize("past", [False, True])
def test_a_mean_with_the_batch_at_hand_in_it_would_shrink_the_gradient(name, past):
    """By a / B, with a its weight in the mean: with one example and no past, nothing is left.

    So the state changes after the backward pass only.
    """
    flow, row = zoo.make(name), 0
    estimator = ScoreFunction(baseline=RunningMean(0.9))
    estimator.prepare(flow)
    weight = 0.8 if past else 0.0
    if past:
        with_a_past(estimator, flow)
    share = 0.1 / (0.9 * weight + 0.1)
    for size in (1, 2):
        right = mean_over_batches(estimator, flow, row, size, late=True)
        wrong = mean_over_batches(estimator, flow, row, size, late=False)
        torch.testing.assert_close(wrong, (1 - share / size) * right, rtol=0, atol=1e-12)
        assert float(right.abs().max()) > 1e-2


# scales


SCALED = [
    "D4 random",
    "D4 own",
    "D3 depth 2 learned base",
    "D2 depth 3 one order",
    "chain D3 depth 2",
    "chain D2 depth 3",
    "K3 depth 2",
]


def deviations(estimator: ScoreFunction) -> Tensor:
    """(T, D), from the moving estimates."""
    kept = estimator.standardise
    mean = kept.mean / kept.weight
    return (kept.square / kept.weight - mean.square()).sqrt()


@pytest.mark.parametrize("entropy", [0.0, 0.7])
@pytest.mark.parametrize("name", SCALED)
def test_one_scale_for_all_rescales_the_gradient(name, entropy):
    """Its direction is kept: of the scores, of the bonus and of a learned base."""
    flow = zoo.make(name)
    estimator = with_a_past(score_function(f"standardise=one,entropy={entropy}"), flow)
    scale = deviations(estimator).square().sum(0).mean().sqrt()
    found = expected_gradient(estimator, flow)
    torch.testing.assert_close(found, bound_gradient(name, entropy) / scale, rtol=0, atol=EXACT)
    assert float(scale) > 1.5


@pytest.mark.parametrize("baseline", ["none", "greedy", "running-mean"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_for_each_feature_is_the_gradient_of_another_objective(name, baseline):
    """Of the rewards, each divided by its own deviation; and that is another direction. A base has no score to scale."""
    flow = zoo.make(name)
    estimator = with_a_past(score_function(f"baseline={baseline},standardise=feature"), flow)
    found = expected_gradient(estimator, flow, parameters=networks(flow))
    other = gradient(bound(flow, scales=deviations(estimator)[0]), networks(flow))
    torch.testing.assert_close(found, other, rtol=0, atol=EXACT)
    assert cosine(found, gradient(bound(flow), networks(flow))) < 1 - BIASED


@pytest.mark.parametrize("name", ["D1", "K3 D1", "D1 depth 2"])
def test_one_feature_has_one_scale(name):
    flow = zoo.make(name)
    found = expected_gradient(with_a_past(score_function("standardise=feature"), flow), flow)
    assert cosine(found, bound_gradient(name)) > 1 - 1e-12


@pytest.mark.parametrize("kind", ["one", "feature"])
def test_a_fresh_scale_is_one(kind):
    flow = zoo.make("chain D3 depth 2")
    found = expected_gradient(score_function(f"standardise={kind}"), flow)
    assert gap(found, bound_gradient("chain D3 depth 2")) < EXACT


def test_what_is_divided_by_has_a_floor():
    like = torch.zeros((), dtype=torch.float64)
    for kind, shape in ((OneScale, ()), (FeatureScale, (1, 2))):
        scale = kind(decay=0.5, floor=0.25)
        scale.prepare(1, 2, like)
        scale.update(torch.ones(1, 2), torch.ones(1, 2))  # no spread at all
        rest, deviation = scale(torch.ones(3, 1, 2, dtype=torch.float64))
        assert torch.equal(rest, torch.zeros(3, 1, 2, dtype=torch.float64))
        assert torch.equal(deviation, torch.full(shape, 0.25, dtype=torch.float64))


# state


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 6, 2, 3, dtype=torch.float64, generator=generator) for _ in range(count)]


def test_moving_estimates_are_weighted_means_of_the_past():
    """Weights fall by the decay from batch to batch, and sum to one from the first on."""
    estimator, seen = (
        ScoreFunction(baseline=RunningMean(0.8), standardise=FeatureScale(0.8, 0.01)),
        batches(5),
    )
    for part in (estimator.baseline, estimator.standardise):
        part.prepare(2, 3, seen[0])
    rests = []
    for number, batch in enumerate(seen):
        inputs = BaselineInputs(zoo.make("D2"), Point(batch, batch), batch, lambda _: seen[0])
        weights = 0.8 ** torch.arange(number - 1.0, -1, -1, dtype=torch.float64)
        weights = weights / weights.sum()
        expected = sum((w * b.mean((0, 1)) for w, b in zip(weights, seen, strict=False)), torch.zeros(2, 3))
        torch.testing.assert_close(estimator.baseline.expected(inputs), expected.double(), rtol=0, atol=1e-12)
        centred, deviation, stats = estimator.centred(inputs)
        rest = batch - expected
        mean = sum((w * r.mean((0, 1)) for w, r in zip(weights, rests, strict=False)), torch.zeros(2, 3))
        squares = (w * r.square().mean((0, 1)) for w, r in zip(weights, rests, strict=False))
        square = sum(squares, torch.zeros(2, 3))
        torch.testing.assert_close(centred, rest - mean, rtol=0, atol=1e-12)
        if number:
            torch.testing.assert_close(deviation, (square - mean.square()).sqrt(), rtol=0, atol=1e-12)
        rests.append(rest)
        estimator.update(stats)


STATEFUL = [
    "baseline=running-mean",
    "baseline=none,standardise=one",
    "baseline=greedy,standardise=feature",
    "baseline=running-mean,standardise=one,entropy=0.5,anneal=0.5",
]


@pytest.mark.parametrize("options", STATEFUL)
def test_state_is_saved_and_loaded(options):
    flow = zoo.make("D3 depth 2 reversed")
    x, generator = all_states(flow.states.sizes), torch.Generator().manual_seed(0)
    trained, resumed = score_function(options), score_function(options)
    trained.prepare(flow, total_steps=10)
    fresh = {key: value.clone() for key, value in trained.state_dict().items()}
    for _ in range(7):
        trained.update(trained(flow, x, generator=generator).stats)
    assert fresh.keys() == trained.state_dict().keys()
    assert len(fresh) >= 2
    assert not any(
        torch.equal(fresh[key], value) for key, value in trained.state_dict().items() if "total" not in key
    )
    resumed.prepare(flow, total_steps=10)
    resumed.load_state_dict(trained.state_dict())
    draws = trained.draw(flow, len(x), generator)
    before, after = trained(flow, x, draws=draws), resumed(flow, x, draws=draws)
    assert torch.equal(before.surrogate, after.surrogate)
    assert not torch.equal(before.surrogate, score_function(options)(flow, x, draws=draws).surrogate)


@pytest.mark.parametrize("options", STATEFUL)
def test_a_loss_changes_no_state_and_preparing_again_keeps_it(options):
    """What a batch is measured against cannot depend on the batch."""
    flow = zoo.make("chain D3 depth 2")
    x = all_states(flow.states.sizes)
    estimator = score_function(options)
    estimator.prepare(flow, total_steps=10)
    estimator.update(estimator(flow, x, generator=torch.Generator().manual_seed(0)).stats)
    kept = {key: value.clone() for key, value in estimator.state_dict().items()}
    draws = estimator.draw(flow, len(x), torch.Generator().manual_seed(1))
    first, again = (estimator(flow, x, draws=draws).surrogate for _ in range(2))
    assert torch.equal(first, again)
    estimator.prepare(flow)
    assert all(torch.equal(kept[key], value) for key, value in estimator.state_dict().items())


def test_nothing_without_state_is_saved():
    estimator = score_function("baseline=greedy")
    estimator.prepare(zoo.make("D3 depth 2 reversed"))
    assert estimator.state_dict() == {}


def test_statistics_carry_no_gradient():
    flow = zoo.make("D3 depth 2 learned base")
    loss = score_function("entropy=0.5")(flow, all_states(flow.states.sizes))
    assert set(loss.stats) == {"signal", "rest", "rest_square"}
    assert all(value.shape == (3, 3) and not value.requires_grad for value in loss.stats.values())


def test_a_baseline_by_name_or_as_it_is():
    own = RunningMean(0.5)
    assert ScoreFunction(baseline=own).baseline is own
    assert score_function("baseline=running-mean,decay=0.7").baseline.decay == 0.7
    with pytest.raises(ConfigError, match="decay, the weight of the past"):
        RunningMean(-0.1)


def test_uniforms_and_integers_mean_the_same_draws():
    flow = zoo.make("K3 depth 2")
    x, estimator = all_states(flow.states.sizes), score_function("baseline=sampled")
    uniforms = estimator.draw(flow, len(x), torch.Generator().manual_seed(0))
    chosen = torch.cat([flow.run(x, draws=part[None]).u for part in uniforms])
    assert torch.equal(
        estimator(flow, x, draws=uniforms).surrogate, estimator(flow, x, draws=chosen).surrogate
    )


def test_the_critic_is_not_the_sample_itself():
    """With the same draw for both, nothing would be left of the score."""
    flow, estimator = zoo.make("D3 depth 2 reversed"), score_function("baseline=sampled")
    row = rows(flow)[0][0]
    same = all_choices(flow)[:, None].expand(-1, 2, -1, -1)
    assert float(gradient(per_draw(estimator, flow, row, same).sum(), networks(flow)).abs().max()) == 0
