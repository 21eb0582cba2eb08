"""The marginal likelihood and its gradient, in expectation over all choices."""

import itertools

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, enumerated, gradient, joint
from expectations import score_function
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.data import Batch
from xorflow.estimators import Loss, MaximumLikelihood
from xorflow.flows import Choices

CLOSED = zoo.names(zoo.closed_form)
DEEP = ["D3 depth 2 reversed", "D3 depth 2 learned base", "D2 depth 3", "K3 depth 2", "chain summable",
        "D3 depth 2 own first", "D2 depth 2 context", "coupling K3 twice", "D2 depth 3 one order",
        "chain sees all that it may"]  # fmt: skip


def trainable(flow: LatentFlow) -> list[Tensor]:
    found = [p for layer in flow.layers for p in layer.conditioner.parameters()]
    return [*found, flow.base.logits] if flow.base.learned else found


def objective(flow: LatentFlow, row: int) -> Tensor:
    """E[log M] of one state, with graph, by plain sums over all choices."""
    everything = joint(flow)
    last = all_states(flow.layers[-1].transform.choices.sizes)
    whole = (everything.log_p_u + everything.rewards.sum(-1))[:, row].reshape(-1, len(last))
    log_u = torch.logsumexp(
        everything.log_p_u[:, row].reshape(-1, len(last)), 1
    )  # the choices before the last
    return (log_u.exp() * (torch.logsumexp(whole, 1) - log_u)).sum()


@pytest.mark.parametrize("name", CLOSED)
def test_at_depth_one_it_is_the_gradient_of_the_likelihood(name):
    flow = zoo.make(name)
    everything = joint(flow)
    loss = MaximumLikelihood()(flow, everything.x, zoo.rows_of_context(flow, len(everything.x)))
    expected = gradient(everything.log_p.mean(), trainable(flow))
    torch.testing.assert_close(-gradient(loss.surrogate, trainable(flow)), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss.bound, everything.log_p.mean().detach(), rtol=0, atol=1e-12)
    assert not loss.bound.requires_grad


@pytest.mark.parametrize("name", [name for name in CLOSED if zoo.binary(zoo.make(name))])
def test_its_gradient_in_a_logit_is_posterior_less_prior(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    choices, rewards = flow.last_choices(flow.start(x, zoo.context(flow)))
    logits = (
        choices.logits.detach().expand(len(x), -1).clone().requires_grad_()
    )  # one for each x: D = 1 sees none
    mixture = Choices(logits, flow.layers[0].layout).log_mixture(rewards)
    (slope,) = torch.autograd.grad(mixture.sum(), logits)
    posterior = torch.sigmoid(logits + rewards[0][..., 1] - rewards[0][..., 0])
    torch.testing.assert_close(slope, posterior - torch.sigmoid(logits), rtol=0, atol=1e-12)


def expectation(flow: LatentFlow, row: int, samples: int) -> tuple[Tensor, Tensor]:
    """The mean gradient of the surrogate, and the mean bound, over all tuples of draws."""
    x = all_states(flow.states.sizes)[row : row + 1]
    context, parameters = zoo.context(flow), trainable(flow)
    earlier = all_choices(flow, flow.depth - 1)
    with torch.no_grad():
        trace = flow.run(flow.start(x, context), draws=earlier, stop=flow.depth - 1)
        p = trace.log_p().sum((-1, -2)).exp().expand(len(earlier))
    possible = p.nonzero()[:, 0].tolist()
    total, bound = 0.0, 0.0
    for chosen in itertools.product(possible, repeat=samples):
        weight = p[list(chosen)].prod()
        loss = MaximumLikelihood(samples)(flow, x, context, draws=earlier[list(chosen)][:, None])
        total, bound = total - weight * loss.surrogate, bound + weight * loss.bound
    assert isinstance(total, Tensor)
    assert isinstance(bound, Tensor)
    return gradient(total, parameters), bound


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", DEEP)
def test_deeper_it_is_unbiased(name, samples):
    flow = zoo.make(name)
    few = len(all_choices(flow, flow.depth - 1)) ** samples <= 300
    row = len(all_states(flow.states.sizes)) - 2
    assert few
    found, bound = expectation(flow, row, samples)
    value = objective(flow, row)
    torch.testing.assert_close(found, gradient(value, trainable(flow)), rtol=0, atol=1e-10)
    torch.testing.assert_close(bound, value.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.last_layer_summable and 1 < flow.depth < 4))
def test_the_objective_lies_between_the_bound_and_the_likelihood(name):
    flow, everything = zoo.make(name), enumerated(name)
    with torch.no_grad():
        for row in range(len(everything.x)):
            value = float(objective(flow, row))
            assert float(everything.bound[row]) <= value + 1e-12
            assert value <= float(everything.log_p[row]) + 1e-12


def test_noise_and_generators():
    flow = zoo.make("D3 depth 3")
    x = all_states(flow.states.sizes)
    estimator = MaximumLikelihood(samples=5)
    assert estimator.noise_shape(flow) == (5, 2, 3)
    assert MaximumLikelihood().noise_shape(zoo.make("D2")) is None
    draws = estimator.draw(flow, len(x), torch.Generator().manual_seed(3))
    assert draws.shape == (5, 8, 2, 3)
    given = estimator(flow, x, draws=draws)
    drawn = estimator(flow, x, generator=torch.Generator().manual_seed(3))
    assert isinstance(given, Loss)
    assert torch.equal(given.surrogate, drawn.surrogate)
    assert torch.equal(given.bound, drawn.bound)


def test_a_batch_brings_its_context():
    flow = zoo.make("D3 context")
    x, context = all_states(flow.states.sizes), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    apart = MaximumLikelihood()(flow, x, context)
    together = MaximumLikelihood()(flow, Batch(x.to(torch.uint8), context))
    assert torch.equal(apart.surrogate, together.surrogate)


def test_integers_and_uniforms_mean_the_same_draws():
    flow = zoo.make("K 2, 3 depth 3")
    x = all_states(flow.states.sizes)
    estimator = MaximumLikelihood(samples=3)
    uniforms = estimator.draw(flow, len(x), torch.Generator().manual_seed(0))
    chosen = flow.run(x, draws=uniforms, stop=2).u
    by_choice = estimator(flow, x, draws=chosen)
    assert torch.equal(by_choice.surrogate, estimator(flow, x, draws=uniforms).surrogate)


def test_one_example_and_one_sample():
    flow = zoo.make("D3 depth 2 reversed")
    loss = MaximumLikelihood(samples=1)(flow, torch.zeros(1, 3, dtype=torch.bool))
    loss.surrogate.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in flow.layers.parameters())


@pytest.mark.parametrize("name", ["D4 own", "D3 depth 2 own", "chain D3 depth 2"])
def test_a_last_layer_that_sees_its_own_choice_is_refused(name):
    flow = zoo.make(name)
    with pytest.raises(ModelError, match="must not see its own u"):
        MaximumLikelihood()(flow, all_states(flow.states.sizes))


# ---- grey values: probabilities with which data are drawn ----


def some_chances(flow: LatentFlow, rows: int = 1) -> Tensor:
    """Certain, impossible and in between."""
    found = torch.rand(rows, flow.features, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found[:, 0] = torch.arange(rows) % 3 / 2
    return found


def probabilities_of(probabilities: Tensor, x: Tensor) -> Tensor:
    """Of every state x (N, D), given probabilities (1, D): (N,)."""
    return torch.where(x == 1, probabilities, 1 - probabilities).prod(-1)


@pytest.mark.parametrize("name", [name for name in CLOSED if zoo.binary(zoo.make(name))])
def test_soft_targets_have_the_gradient_of_the_likelihood_in_expectation(name):
    """Over every draw of the data: each weighs as much as it is probable."""
    flow = zoo.make(name)
    x, context, parameters = all_states(flow.states.sizes), zoo.context(flow), trainable(flow)
    probabilities = some_chances(flow)
    soft, hard, bound = 0.0, 0.0, 0.0
    for row, p in zip(x, probabilities_of(probabilities, x), strict=True):
        one = MaximumLikelihood(soft_targets=True)(flow, row[None], context, probabilities=probabilities)
        soft, bound = soft + p * one.surrogate, bound + p * one.bound
        hard = hard + p * MaximumLikelihood()(flow, row[None], context).surrogate
    assert isinstance(soft, Tensor)
    assert isinstance(hard, Tensor)
    torch.testing.assert_close(gradient(soft, parameters), gradient(hard, parameters), rtol=0, atol=1e-10)
    torch.testing.assert_close(bound, -hard.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in CLOSED if zoo.binary(zoo.make(name))])
def test_certain_soft_targets_are_the_likelihood(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    soft = MaximumLikelihood(soft_targets=True)(flow, x, context, probabilities=x.double())
    torch.testing.assert_close(soft.bound, MaximumLikelihood()(flow, x, context).bound, rtol=0, atol=1e-12)


def test_a_feature_s_own_draw_is_gone_from_its_term():
    flow = zoo.make("D1")
    probabilities = torch.tensor([[0.3]], dtype=torch.float64)
    zero, one = (
        MaximumLikelihood(soft_targets=True)(
            flow, torch.tensor([[value]]), probabilities=probabilities
        ).surrogate
        for value in (0, 1)
    )
    assert torch.equal(zero, one)


def test_soft_targets_where_they_mean_nothing_are_refused():
    for name in ("D3 depth 2 reversed", "K3 D3"):
        flow = zoo.make(name)
        with pytest.raises(ModelError, match="binary features in flows of depth 1"):
            MaximumLikelihood(soft_targets=True)(flow, torch.zeros(1, flow.features, dtype=torch.int64))
    flow = zoo.make("D2")
    with pytest.raises(ModelError, match="give probabilities, those with which x was drawn"):
        MaximumLikelihood(soft_targets=True)(flow, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ModelError, match="ScoreFunction takes no soft targets"):
        score_function().soft_target_loss(flow, flow.start(torch.zeros(1, 2)), torch.zeros(1, 2))
    with pytest.raises(ModelError, match="split_batch is for the components of a mixture"):
        MaximumLikelihood(split_batch=True)(flow, torch.zeros(1, 2, dtype=torch.int64))


def test_no_samples_are_refused():
    with pytest.raises(ConfigError, match="at least one sample, and got samples=0"):
        MaximumLikelihood(samples=0)
