"""Likelihoods of data: exact, greedy and importance-sampled."""

import inspect
import itertools
import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, enumerated
from xorflow import (
    MADE,
    ConfigError,
    DataError,
    FactorisedBase,
    Flow,
    Intractable,
    LatentFlow,
    Layer,
    LogLikelihood,
    Mixture,
    ModelError,
    evaluate,
)
from xorflow._math import philox_uniforms
from xorflow._states import Layout
from xorflow.conditioners import Conditioner, Source
from xorflow.data import Split
from xorflow.evaluate import _IMPORTANCE_STREAM, _log_weights, bytes_of_a_draw, rows_at_a_time
from xorflow.flows.choices import outcomes

SMALL = ["D2", "K3 posterior", "D3 posterior", "D2 depth 3", "D3 depth 2 posterior", "chain posterior",
         "coupling D2", "K 3, 1, 2 own", "D2 depth 2 context", "affine K3 posterior"]  # fmt: skip


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def all_weights(flow: LatentFlow, proposal: str, stop: int) -> tuple[Tensor, Tensor]:
    """For each u of the layers before `stop`: log proposal(u given x) and the log weight, both (T, X)."""
    x, u = all_states(flow.states.sizes), all_choices(flow, stop)
    context = zoo.context(flow)
    draws = u[:, None].expand(-1, len(x), -1, -1)
    with torch.no_grad():
        weights = _log_weights(flow, flow.start(x, context), draws, stop, proposal)
        if stop == 0:
            return torch.zeros_like(weights), weights
        trace = flow.run(flow.start(x, context), draws=draws, stop=stop, proposal=proposal)
        chosen = trace.log_q() if proposal == "q" else trace.log_p()
    return chosen.sum((-1, -2)).expand_as(weights), weights


def cases() -> list[tuple[str, str, bool]]:
    found = []
    for name in SMALL:
        flow = zoo.make(name)
        proposals = ("p", "q") if flow.has_posterior else ("p",)
        summed = (True, False) if flow.last_layer_summable else (False,)
        found += [(name, proposal, last) for proposal in proposals for last in summed]
    return found


@pytest.mark.parametrize(("name", "proposal", "sum_last"), cases())
def test_weights_are_unbiased_for_the_likelihood(name, proposal, sum_last):
    flow = zoo.make(name)
    log_proposal, log_weights = all_weights(flow, proposal, flow.depth - sum_last)
    close((log_proposal + log_weights).exp().sum(0), enumerated(name).log_p.exp())


@pytest.mark.parametrize(("name", "proposal", "sum_last"), cases())
def test_the_bound_rises_with_the_samples(name, proposal, sum_last):
    """E[log mean of K weights] over all K-tuples of choices, K = 1, 2, 3, and log p above them."""
    flow = zoo.make(name)
    log_proposal, log_weights = (t[:, -1].numpy() for t in all_weights(flow, proposal, flow.depth - sum_last))
    p, w = np.exp(log_proposal), np.exp(log_weights)
    bounds = []
    for samples in (1, 2, 3) if len(p) <= 40 else (1, 2):
        total = 0.0
        probability, mean = np.ones(1), np.zeros(1)
        for _ in range(samples):
            probability = np.multiply.outer(probability, p).ravel()
            mean = np.add.outer(mean, w / samples).ravel()
        total = float((probability * np.log(mean)).sum())
        bounds.append(total)
    highest = float(enumerated(name).log_p[-1])
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise([*bounds, highest]))


class ExactPosterior(Conditioner):
    """q(u given x) of a depth-1 flow in closed form."""

    def __init__(self, layer: Layer, base: FactorisedBase) -> None:
        net = layer.conditioner
        super().__init__(
            net.features,
            categories=net.states.sizes,
            choices=net.choices.sizes,
            sees={"x": "all"},
            order=None,
            context=0,
        )
        self.parts = (net, layer.transform, base)

    def forward(self, inputs, context=None):
        net, transform, base = self.parts
        logits = net({Source.STATE: inputs[Source.X]}, context)
        rewards = [
            part[..., 1] - part[..., 0] if part.shape[-1] == 2 else part
            for part in outcomes(transform, base, inputs[Source.X])
        ]
        return logits + Layout(net.choices).packed(rewards)

    def start_at(self, logits):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["D4 random", "K 2, 3, 4", "affine K5", "D1"])
def test_the_exact_posterior_has_constant_weights(name):
    flow = zoo.make(name)
    layer = flow.layers[0]
    posterior = ExactPosterior(layer, flow.base)
    better = LatentFlow([Layer(layer.conditioner, layer.transform, posterior)], flow.base)
    x = all_states(flow.states.sizes)
    found = evaluate.importance(better, x, samples=7, proposal="q", sum_last=False)
    close(found.values, enumerated(name).log_p)
    close(found.effective_samples, torch.full((len(x),), 7.0).double(), atol=1e-9)


@pytest.mark.parametrize(
    "name", ["D3 depth 2 posterior", "K 2, 3 depth 3", "K 3, 1, 2 own", "D2 depth 2 context"]
)
@pytest.mark.parametrize("sum_last", [True, False])
def test_samples_are_those_of_the_stated_noise(name, sum_last):
    """All noise at once, by hand, against the streamed evaluation in small pieces."""
    flow, samples, seed = zoo.make(name), 23, 5
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    stop = flow.depth - (sum_last and flow.last_layer_summable)
    size = (samples, len(x), stop, flow.features)
    uniforms = philox_uniforms(seed, _IMPORTANCE_STREAM, 0, math.prod(size))
    noise = torch.from_numpy(uniforms).reshape(size).double()
    with torch.no_grad():
        weights = _log_weights(flow, flow.start(x, context), noise, stop, "p")
    expected = torch.logsumexp(weights, 0) - math.log(samples)
    of_one = bytes_of_a_draw(flow, stop)
    for memory in (of_one, 3 * of_one, 5 * len(x) * of_one, 2**28):
        found = evaluate.importance(
            flow, x, context, samples=samples, seed=seed, sum_last=sum_last, memory=memory
        )
        close(found.values, expected)
        w = (weights - weights.amax(0)).exp()
        close(found.effective_samples, w.sum(0) ** 2 / (w**2).sum(0), atol=1e-9)


def test_no_more_is_drawn_at_a_time_than_memory_allows(monkeypatch):
    flow, drawn = zoo.make("D3 depth 2 posterior"), []
    noise = evaluate._noise
    monkeypatch.setattr(
        evaluate, "_noise", lambda *given: drawn.append(noise(*given).shape[:2]) or noise(*given)
    )
    of_one = bytes_of_a_draw(flow, 2)
    assert of_one > 8 * 2 * 3  # noise alone
    for most in (1, 5, 20, 10**6):
        drawn.clear()
        evaluate.importance(flow, all_states((2,) * 3), samples=23, sum_last=False, memory=most * of_one)
        assert sum(draws * rows for draws, rows in drawn) == 23 * 8
        assert max(draws * rows for draws, rows in drawn) <= most


@pytest.mark.parametrize("most", [1, 3, 10**6])
@pytest.mark.parametrize("measure", [evaluate.exact, evaluate.greedy, evaluate.layer_use])
def test_no_more_rows_pass_at_a_time_than_memory_allows(measure, most):
    flow, x = zoo.make("D3 posterior"), all_states((2,) * 3)
    expected, rows = measure(flow, x), []
    flow.layers[0].conditioner.register_forward_hook(lambda net, inputs, output: rows.append(len(output)))
    found = measure(flow, x, memory=most * bytes_of_a_draw(flow, flow.depth))
    assert 1 <= max(rows) <= most
    if measure is evaluate.layer_use:
        assert astuple(found[0]) == pytest.approx(astuple(expected[0]), abs=1e-12)
    else:
        close(found.values, expected.values)


@pytest.mark.parametrize(
    "measure", [evaluate.exact, evaluate.greedy, evaluate.layer_use, evaluate.importance]
)
def test_memory_that_one_row_does_not_fit_into_is_refused(measure):
    flow = zoo.make("D3 posterior")
    enough = bytes_of_a_draw(flow, flow.depth - (measure is evaluate.importance))
    measure(flow, all_states((2,) * 3), memory=enough)
    words = (
        rf"one row takes about {enough:,} bytes, and memory allows {enough - 1:,}; allow at least {enough:,}$"
    )
    with pytest.raises(ConfigError, match=words):
        measure(flow, all_states((2,) * 3), memory=enough - 1)


def test_a_mixture_takes_what_its_largest_component_takes():
    small, large = zoo.make("D3 linear"), zoo.make("D3 posterior")
    of_one = bytes_of_a_draw(large, 1)
    assert of_one > bytes_of_a_draw(small, 1)
    mixture = Mixture([small, large])
    assert rows_at_a_time(mixture, 5 * of_one, 100) == 5
    assert rows_at_a_time(mixture, 500 * of_one, 100) == 100
    assert rows_at_a_time(mixture, None, 100) == 100


@pytest.mark.parametrize("proposal", ["p", "q"])
def test_many_samples_come_near_the_likelihood(proposal):
    """The mean of 4000 weights within five standard errors of p(x), these known by enumeration."""
    name, x = "D3 depth 2 posterior", all_states((2,) * 3)
    flow, p = zoo.make(name), enumerated(name).log_p.exp()
    log_proposal, log_weights = all_weights(flow, proposal, 1)
    variance = (log_proposal + 2 * log_weights).exp().sum(0) - p**2
    found = evaluate.importance(flow, x, samples=4000, proposal=proposal)
    assert bool(((found.values.exp() - p).abs() < 5 * (variance / 4000).sqrt()).all())
    again = evaluate.importance(flow, x, samples=4000, proposal=proposal, seed=1)
    assert not torch.equal(found.values, again.values)


def test_at_depth_one_importance_is_exact_with_the_layer_summed_out():
    found = evaluate.importance(zoo.make("K 2, 3, 4"), all_states((2, 3, 4)), samples=3)
    close(found.values, enumerated("K 2, 3, 4").log_p)
    assert found.kind == "lower bound"
    assert found.ess == pytest.approx(3)


@pytest.mark.parametrize("name", zoo.names())
def test_exact_and_greedy(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    exact, greedy = evaluate.exact(flow, x, context, batch_size=3), evaluate.greedy(flow, x, context)
    close(exact.values, enumerated(name).log_p)
    assert exact.kind == greedy.kind == "exact"
    assert abs(float(greedy.values.exp().sum()) - 1) < 1e-10
    close(greedy.values, evaluate.exact(flow.greedy(), x, context).values)
    for found in (exact, greedy, evaluate.importance(flow, x, context, samples=2)):
        assert bool((found.values <= -flow.base.floor() + 1e-12).all())


@pytest.mark.parametrize("name", SMALL)
def test_models_that_share_layers_are_evaluated_as_each_by_itself(name):
    flow = zoo.make(name)
    x, context = all_states(flow.states.sizes), zoo.context(flow)
    other = FactorisedBase(flow.features, 0.7, categories=flow.states.sizes).double()
    models = [flow, flow.greedy(), Flow(flow.layers, other)]
    together = evaluate.exact_each(models, x, context, batch_size=5)
    for model, found in zip(models, together, strict=True):
        assert torch.equal(found.values, evaluate.exact(model, x, context, batch_size=5).values)


def test_a_shared_layer_is_evaluated_once():
    parts = [
        LatentFlow([Layer(MADE(3, hidden=(8,), order=order))], FactorisedBase(3)).double()
        for order in ("natural", "reversed")
    ]
    mixture = Mixture(parts).double()
    passes = []
    for part in parts:
        part.layers[0].conditioner.register_forward_hook(lambda *_: passes.append(1))
    x = all_states((2,) * 3)
    values = [found.values for found in evaluate.exact_each([mixture, *parts, mixture.greedy()], x)]
    assert len(passes) == len(parts)
    close(values[0], torch.logaddexp(values[1], values[2]) - math.log(2))


def test_models_that_share_layers_take_no_more_than_the_largest_of_them():
    parts = [LatentFlow([Layer(MADE(3, hidden=(8,)))], FactorisedBase(3)).double() for _ in range(5)]
    mixture, x = Mixture(parts).double(), all_states((2,) * 3)
    of_one = bytes_of_a_draw(parts[0], 1)
    evaluate.exact(mixture, x, memory=of_one)
    for models in ([parts[0], parts[0].greedy()], [mixture, mixture.greedy()]):
        evaluate.exact_each(models, x, memory=of_one)
        with pytest.raises(ConfigError, match=f"allow at least {of_one:,}$"):
            evaluate.exact_each(models, x, memory=of_one - 1)


def test_models_that_take_other_rows_are_not_evaluated_together():
    flows = [LatentFlow([Layer(MADE(d, hidden=(8,)))], FactorisedBase(d)) for d in (3, 4)]
    with pytest.raises(ModelError, match="model 1 has 3, and model 2 has 4; build them alike"):
        evaluate.exact_each(flows, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ModelError, match="give at least one"):
        evaluate.exact_each([], torch.zeros(2, 3, dtype=torch.int64))


def test_greedy_reads_the_generator_alone():
    """The most probable u of a posterior gives no likelihood: nothing here offers it."""
    flow = zoo.make("D3 depth 2 posterior")
    x = all_states((2,) * 3)
    before = evaluate.greedy(flow, x).values
    with torch.no_grad():
        for layer in flow.layers:
            for parameter in layer.posterior.parameters():
                parameter.normal_()
    assert torch.equal(evaluate.greedy(flow, x).values, before)
    assert "proposal" not in inspect.signature(evaluate.greedy).parameters
    assert "proposal" not in inspect.signature(evaluate.exact).parameters


def test_the_fields_of_a_result():
    values = torch.tensor([-1.0, -2.0, -6.0], dtype=torch.float64)
    found = LogLikelihood(values, "lower bound", 4, 10, torch.tensor([1.0, 2.0, 3.0]))
    assert found.nll == 3
    assert found.bits_per_dim == pytest.approx(3 / (4 * math.log(2)))
    assert found.stderr == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert found.ess == 2
    assert found.summary() == {
        "nll": 3.0,
        "kind": "lower bound",
        "stderr": found.stderr,
        "bits_per_dim": found.bits_per_dim,
        "rows": 3,
        "samples": 10,
        "ess": 2.0,
    }
    single = LogLikelihood(values[:1], "exact", 4)
    assert math.isnan(single.stderr)
    assert single.ess is None
    assert single.summary()["stderr"] is None


@pytest.mark.parametrize("how", [evaluate.importance, evaluate.elbo])
def test_samples_of_choices_are_of_one_latent_flow(how):
    flow = zoo.make("D2")
    for other in (flow.greedy(), Mixture([flow, flow])):
        with pytest.raises(ModelError, match=f"of one latent flow, and got a {type(other).__name__}"):
            how(other, all_states(flow.states.sizes))


@pytest.mark.parametrize("how", [evaluate.exact, evaluate.greedy, evaluate.importance])
def test_rows_and_splits(how):
    flow = zoo.make("K 2, 3, 4")
    x = all_states((2, 3, 4)).to(torch.uint8)
    assert torch.equal(how(flow, Split(x)).values, how(flow, x).values)
    assert how(flow, x[:1]).values.shape == (1,)
    with_context = zoo.make("D3 context")
    rows, context = all_states((2,) * 3), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    both = [how(with_context, Split(rows, context)), how(with_context, rows, context)]
    assert torch.equal(both[0].values, both[1].values)
    assert torch.equal(
        how(zoo.make("D3 linear"), Split(rows, context)).values, how(zoo.make("D3 linear"), rows).values
    )


@pytest.mark.parametrize("how", [evaluate.exact, evaluate.greedy, evaluate.importance])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(0, 3, dtype=torch.int64), "at least one row"),
        (torch.zeros(2, 4, dtype=torch.int64), "D = 3"),
        (torch.zeros(3, dtype=torch.int64), r"table \(N, D\), and got shape \(3,\)"),
        (torch.full((2, 3), 2), "K = 2"),
        (torch.full((2, 3), 0.5), "integers"),
        (
            Split(torch.zeros(2, 4, dtype=torch.uint8)),
            "D = 3 features, got",
        ),
        (Split(torch.full((2, 3), 2, dtype=torch.uint8)), "K = 2"),
    ],
)
def test_bad_data_are_refused(how, data, words):
    with pytest.raises(DataError, match=words):
        how(zoo.make("D3 linear"), data)


def test_what_cannot_be_had_is_refused():
    x = all_states((2,) * 3)
    with pytest.raises(ConfigError, match="at least one sample, and got samples=0"):
        evaluate.importance(zoo.make("D3 reversed"), x, samples=0)
    with pytest.raises(ModelError, match="posterior in every layer"):
        evaluate.importance(zoo.make("D3 depth 3"), x, proposal="q")
    with pytest.raises(ModelError, match="context features, and got 0"):
        evaluate.exact(zoo.make("D3 context"), x)
    layers = [Layer(MADE(30, (4,), order=order)) for order in ("natural", "reversed")]
    with pytest.raises(Intractable, match=r"importance\(\).*greedy\(\)"):
        evaluate.exact(LatentFlow(layers, FactorisedBase(30)), torch.zeros(1, 30, dtype=torch.int64))


def test_an_unknown_proposal_is_refused() -> None:
    flow = LatentFlow([Layer(MADE(2, hidden=(4,)))], FactorisedBase(2))
    with pytest.raises(ConfigError, match=r"'p' .* or 'q'"):
        evaluate.importance(flow, torch.zeros(1, 2, dtype=torch.int64), proposal="r")


@pytest.mark.parametrize("name", [name for name in SMALL if zoo.make(name).has_posterior])
@pytest.mark.parametrize("proposal", ["p", "q"])
def test_the_elbo_is_the_mean_log_weight(name: str, proposal: str) -> None:
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    log_draw, log_weight = all_weights(flow, proposal, flow.depth)
    expected = (log_draw.exp() * log_weight).sum(0)
    found = evaluate.elbo(flow, x, zoo.rows_of_context(flow, len(x)), samples=4000, proposal=proposal)
    spread = ((log_draw.exp() * log_weight.square()).sum(0) - expected.square()).clamp_min(0)
    assert bool(
        ((found.values - expected).abs() <= 5 * (spread / 4000).sqrt() + 1e-9).all()
    )  # 5 standard errors
    assert found.kind == "lower bound"


def test_what_each_layer_does() -> None:
    layers = [Layer(MADE(4, hidden=())) for _ in range(2)]
    with torch.no_grad():
        for layer, logit in zip(layers, (-40.0, 1.0), strict=True):
            layer.conditioner.net.layers[0].weight.zero_()
            layer.conditioner.start_at(torch.full((4,), logit))
    flow = LatentFlow(layers, FactorisedBase(4))
    first, second = evaluate.layer_use(flow, torch.zeros(2000, 4, dtype=torch.int64))
    assert (first.flip_rate, first.greedy_flip_rate) == (0, 0)
    assert first.entropy < 1e-9
    p = 1 / (1 + math.exp(-1))
    assert second.greedy_flip_rate == 1
    assert abs(second.flip_rate - p) < 5 * math.sqrt(p * (1 - p) / 8000)  # 5 standard errors
    assert second.entropy == pytest.approx(4 * -(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-4)
