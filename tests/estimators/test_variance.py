"""Variances at depth 1, logit by logit, in closed form and by enumeration."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states
from expectations import score_function
from xorflow import LatentFlow, Layer
from xorflow.conditioners import Conditioner, Source
from xorflow.estimators import (
    ARMS,
    All,
    Baseline,
    DisARM,
    DoubleCV,
    Estimator,
    GreedyCritic,
    NoBaseline,
    SampledCritic,
    ScoreFunction,
    StraightThrough,
)

FEATURES = 3


class Logits(Conditioner):
    """Logits linear in what came before, plus a context: its gradient is that in the logits of each example."""

    def __init__(self) -> None:
        super().__init__(
            FEATURES,
            categories=2,
            choices=None,
            sees={"state": "before"},
            order=tuple(range(FEATURES)),
            context=FEATURES,
        )
        generator = torch.Generator().manual_seed(3)
        self.slopes = 2 * torch.randn(FEATURES, FEATURES, dtype=torch.float64, generator=generator).triu(1)
        self.offsets = torch.tensor([0.8, -0.4, 1.5], dtype=torch.float64)

    def forward(self, inputs, context=None):
        return inputs[Source.STATE].double() @ self.slopes + self.offsets + context

    def start_at(self, logits):
        raise NotImplementedError


@pytest.fixture
def flow() -> LatentFlow:
    torch.manual_seed(0)
    return zoo.flow(Layer(Logits())).double()


class Known(Baseline):
    """A baseline from the probabilities f and the rewards r (..., D, 2) of both choices."""

    def __init__(self, formula) -> None:
        super().__init__()
        self.formula = formula

    def expected(self, inputs):
        choices, (rewards,) = inputs.flow.last_choices(inputs.start)
        return self.formula(choices.mean, rewards[..., 0], rewards[..., 1]).detach()[:, None]


MEAN = Known(lambda f, low, high: (1 - f) * low + f * high)
BEST = Known(lambda f, low, high: (1 - f) * high + f * low)


def constant(value: float) -> Known:
    return Known(lambda f, low, high: torch.full_like(f, value))


def in_logits(estimator, flow: LatentFlow, x: Tensor, draws: Tensor | None) -> Tensor:
    """The gradient of what is maximised in the logits of every example, (B, D)."""
    context = torch.zeros(x.shape, dtype=torch.float64, requires_grad=True)
    loss = estimator(flow, x, context, draws=draws)
    (found,) = torch.autograd.grad(-len(x) * loss.surrogate, context)
    return found


def moments(estimator: Estimator, flow: LatentFlow, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the gradient in the logits of one x, (D,), over all tuples of samples."""
    samples = estimator.noise_shape(flow)[0]
    u = all_states((2,) * FEATURES)
    index = torch.cartesian_prod(*[torch.arange(len(u))] * samples).reshape(-1, samples)
    draws = u[index].transpose(0, 1)[:, :, None]  # (S, N, 1, D)
    trace = flow.run(flow.start(x[None], torch.zeros(1, FEATURES, dtype=torch.float64)), draws=draws)
    probability = trace.log_p().sum((-1, -2)).exp().prod(0)  # (N,)
    each = in_logits(estimator, flow, x.expand(len(index), -1), draws)
    mean = probability @ each
    return mean, probability @ (each - mean).square()


def known(flow: LatentFlow, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, r(0), r(1) of each feature of x."""
    choices, (rewards,) = flow.last_choices(
        flow.start(x[None], torch.zeros(1, FEATURES, dtype=torch.float64))
    )
    return choices.mean[0], rewards[0, :, 0], rewards[0, :, 1]


def least(f: Tensor) -> Tensor:
    return torch.minimum(f, 1 - f)


# by name: the baseline, and the variance as a function of f, r(0), r(1)
FORMULAS = {
    "no baseline": (NoBaseline(), lambda f, low, high: f * (1 - f) * ((1 - f) * high + f * low).square()),
    "a constant": (constant(-0.7), lambda f, low, high: f * (1 - f) * ((1 - f) * high + f * low + 0.7).square()),
    "the mean": (MEAN, lambda f, low, high: f * (1 - f) * (1 - 2 * f).square() * (high - low).square()),
    "the best": (BEST, lambda f, low, high: torch.zeros_like(f)),
    "greedy critic": (GreedyCritic(), lambda f, low, high: least(f) * (1 - least(f)) ** 3 * (high - low).square()),
    "sampled critic": (
        SampledCritic(),
        lambda f, low, high: (
            (f * (1 - f) * (1 - 2 * f).square() + (f * (1 - f)).square()) * (high - low).square()
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_variance_of_each_baseline(flow, name):
    baseline, formula = FORMULAS[name]
    for x in all_states((2,) * FEATURES):
        f, low, high = known(flow, x)
        mean, variance = moments(ScoreFunction(baseline=baseline), flow, x)
        torch.testing.assert_close(mean, f * (1 - f) * (high - low), rtol=0, atol=1e-12)
        torch.testing.assert_close(variance, formula(f, low, high), rtol=0, atol=1e-12)


def test_the_variance_of_two_samples_and_of_antithetic_pairs(flow):
    """Leave-one-out over all pairs; DisARM over the three intervals of each uniform."""
    for x in all_states((2,) * FEATURES):
        f, low, high = known(flow, x)
        v, m, squared = f * (1 - f), least(f), (high - low).square()
        mean, variance = moments(score_function("baseline=leave-one-out,samples=2"), flow, x)
        torch.testing.assert_close(mean, v * (high - low), rtol=0, atol=1e-12)
        torch.testing.assert_close(variance, v * (1 - 2 * v) / 2 * squared, rtol=0, atol=1e-12)
        # an interval at either end, as long as the rarer value is probable, where the arms differ; between, they agree
        lengths = torch.stack((m, 1 - 2 * m, m))
        middles = torch.stack((m / 2, torch.full_like(m, 0.5), 1 - m / 2)).detach()
        each = in_logits(DisARM(), flow, x.expand(3, -1), middles[None, :, None])
        mean = (lengths * each).sum(0)
        torch.testing.assert_close(mean, v * (high - low), rtol=0, atol=1e-12)
        variance = (lengths * (each - mean).square()).sum(0)
        torch.testing.assert_close(variance, m * (1 - m) ** 2 * (1 - 2 * m) / 2 * squared, rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [2, 4])
def test_antithetic_choices_vary_less_than_independent_ones(flow, samples):
    """100,000 draws each; two samples as in the closed forms, and four."""
    x = torch.tensor([1, 0, 1])
    spread = []
    for estimator in (
        ARMS(samples),
        score_function(f"baseline=leave-one-out,samples={samples}"),
        DoubleCV(samples),
    ):
        draws = estimator.draw(flow, 100_000, torch.Generator().manual_seed(0))
        spread.append(in_logits(estimator, flow, x.expand(100_000, -1), draws).var(0))
    arms, independent, linear = spread
    assert bool((arms < 0.9 * independent).all())
    assert float(linear.max()) < 1e-24  # rewards are linear in the choices


def test_the_best_constant_leaves_no_variance_sample_by_sample(flow):
    """It is not the mean: r(1) counts with the probability of a zero. Every draw gives the analytic gradient."""
    u = all_states((2,) * FEATURES)
    for x in u:
        f, low, high = known(flow, x)
        each = in_logits(ScoreFunction(baseline=BEST), flow, x.expand(len(u), -1), u[None, :, None])
        torch.testing.assert_close(each, (f * (1 - f) * (high - low)).expand(8, -1), rtol=0, atol=1e-14)
        analytic = in_logits(StraightThrough(), flow, x[None], None)[0]
        torch.testing.assert_close(each[0], analytic, rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_the_variance_of_all_rewards_together(flow, value):
    """The other rewards come in with their mean, and each with its own variance."""
    for x in all_states((2,) * FEATURES):
        f, low, high = known(flow, x)
        v, means = f * (1 - f), (1 - f) * low + f * high
        spread = v * (high - low).square()  # the variance of each reward
        best = (1 - f) * high + f * low
        others = means.sum() - means
        expected = v * (best - FEATURES * value + others).square() + v * (spread.sum() - spread)
        estimator = ScoreFunction(credit=All(), baseline=constant(value))
        mean, variance = moments(estimator, flow, x)
        torch.testing.assert_close(mean, v * (high - low), rtol=0, atol=1e-12)
        torch.testing.assert_close(variance, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["no baseline", "the mean", "greedy critic", "sampled critic"])
def test_the_variance_of_draws_from_uniforms(flow, name):
    """200,000 of them: the standard error of a variance, from the fourth moment, is below one per cent of it."""
    baseline, formula = FORMULAS[name]
    estimator, x = ScoreFunction(baseline=baseline), torch.tensor([1, 0, 1])
    draws = estimator.draw(flow, 200_000, torch.Generator().manual_seed(0))
    each = in_logits(estimator, flow, x.expand(200_000, -1), draws)
    square = (each - each.mean(0)).square()
    error = square.std(0) / 200_000**0.5
    expected = formula(*known(flow, x))
    assert bool((error < 0.01 * expected).all())
    assert bool(((square.mean(0) - expected).abs() < 4.5 * error).all())
