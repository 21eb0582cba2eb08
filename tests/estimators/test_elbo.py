"""The full posterior: each expectation over all choices against autograd of the enumerated evidence bound."""

import math

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, enumerated, gradient
from expectations import (
    BIASED,
    EXACT,
    cosine,
    everything,
    evidence_gradient,
    expected_gradient,
    few,
    gap,
    per_draw,
    rows,
    score_function,
    state,
    trainable,
    tuples,
    with_a_past,
)
from xorflow import MADE, MLP, ConfigError, FactorisedBase, Flow, LatentFlow, Layer, ModelError, evaluate
from xorflow.conditioners import Source
from xorflow.estimators import ScoreFunction
from xorflow.flows import GREEDY


def inferred(flow: LatentFlow) -> bool:
    return flow.has_posterior and few(1)(flow)


NAMES = zoo.names(inferred)
DEPTH = {
    depth: zoo.names(lambda flow, depth=depth: inferred(flow) and flow.depth == depth) for depth in (1, 2, 3)
}
DEEP = [*DEPTH[2], *DEPTH[3]]
CLOSED = zoo.names(lambda flow: inferred(flow) and flow.last_layer_summable)


def plain(text: str = "") -> ScoreFunction:
    return score_function(f"objective=elbo,baseline=none,{text}")


def expectation(estimator: ScoreFunction, flow: LatentFlow, parameters: list[Tensor] | None = None) -> Tensor:
    return expected_gradient(estimator, flow, "q", parameters)


def test_the_members_cover_what_a_posterior_may_see():
    flows = [zoo.make(name) for name in NAMES]
    kinds = {(flow.depth, flow.is_chain) for flow in flows}
    assert kinds == {(1, False), (2, False), (2, True), (3, False), (3, True)}
    deep = [flow for flow in flows if flow.depth == 3 and not flow.layers[0].relative]
    seen = {(flow.is_chain, tuple(flow.layers[-1].posterior.sees)) for flow in deep}
    sees = [(Source.X,), (Source.X, Source.PREVIOUS), (Source.STATE,)]
    assert seen == {(chain, sources) for chain in (True, False) for sources in sees}
    of_a_layer = (lambda layer: layer.autoregressive_in_u, lambda layer: layer.relative)
    traits = [lambda f, t=trait: any(map(t, f.layers)) for trait in of_a_layer]
    for trait in (lambda f: f.base.learned, *traits):
        assert {trait(flow) for flow in flows} == {True, False}


# unbiased, in generators, posteriors and a learned base


@pytest.mark.parametrize(
    "kl", ["divergence=analytic", "divergence=cross-entropy", "divergence=sampled,credit=all"]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_the_divergence_is_unbiased(name, kl):
    flow = zoo.make(name)
    expected = evidence_gradient(name)
    assert len(expected) == sum(parameter.numel() for parameter in trainable(flow))
    assert gap(expectation(plain(kl), flow), expected) < EXACT
    assert gap(expectation(with_a_past(score_function(f"objective=elbo,{kl}"), flow), flow), expected) < EXACT
    assert gap(expectation(score_function(f"objective=elbo,{kl},baseline=greedy"), flow), expected) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_the_sampled_critic_is_unbiased(name):
    flow = zoo.make(name)
    assert few(2)(flow)
    for kl in ("divergence=analytic", "divergence=cross-entropy"):
        found = expectation(score_function(f"objective=elbo,{kl},baseline=sampled"), flow)
        assert gap(found, evidence_gradient(name)) < EXACT


@pytest.mark.parametrize("name", CLOSED)
def test_with_the_last_layer_summed_out_it_is_unbiased(name):
    flow = zoo.make(name)
    for baseline in ("none", "greedy", "sampled"):
        estimator = score_function(f"objective=elbo,baseline={baseline},sum_last=true")
        assert gap(expectation(estimator, flow), evidence_gradient(name)) < EXACT
    assert (estimator.noise_shape(flow) is None) == (flow.depth == 1)


@pytest.mark.parametrize("name", NAMES)
def test_its_value_is_the_evidence_bound_in_expectation(name):
    flow = zoo.make(name)
    context = zoo.rows_of_context(flow, 1)
    for kl in ("divergence=analytic", "divergence=cross-entropy", "divergence=sampled,credit=all"):
        estimator = plain(kl)
        estimator.prepare(flow)
        for row, _ in rows(flow):
            trace = everything(flow, row, "q")
            log_p, log_q = (log_probs.detach().sum((-1, -2)) for log_probs in (trace.log_p(), trace.log_q()))
            reward = flow.base.log_prob(trace.end.state).detach().sum(-1)
            expected = (log_q.exp() * (reward + log_p - log_q)).sum()
            draws, probability = tuples(flow, row, "q", 1)
            x = state(flow, row)
            with torch.no_grad():
                each = torch.func.vmap(
                    lambda u, x=x, e=estimator: e.loss(flow, flow.start(x, context), u[:, None]).bound
                )(draws)
            torch.testing.assert_close((probability * each).sum(), expected, rtol=0, atol=EXACT)
            assert float(expected) < float(enumerated(name).log_p[row])


# the paper's variants


@pytest.mark.parametrize("name", [*DEPTH[1], *DEPTH[2]])
def test_two_layers_of_the_divergence_are_exact_to_depth_two(name):
    for kl in ("divergence=analytic", "divergence=cross-entropy"):
        assert (
            gap(expectation(plain(f"{kl},credit=local-divergence"), zoo.make(name)), evidence_gradient(name))
            < EXACT
        )


IGNORANT = "chain depth 3 posterior sees x"


@pytest.mark.parametrize("name", [name for name in DEPTH[3] if name != IGNORANT])
def test_two_layers_of_the_divergence_are_biased_at_depth_three(name):
    """The third layer's divergence depends on the first choice too, through the second or through the state."""
    for kl in ("divergence=analytic", "divergence=cross-entropy"):
        assert (
            gap(expectation(plain(f"{kl},credit=local-divergence"), zoo.make(name)), evidence_gradient(name))
            > BIASED
        )


def test_two_layers_are_enough_where_nobody_looks_further():
    """A chain whose posteriors ignore earlier choices."""
    found = expectation(plain("credit=local-divergence"), zoo.make(IGNORANT))
    assert gap(found, evidence_gradient(IGNORANT)) < EXACT


@pytest.mark.parametrize("gamma", [0.5, 0.0, 2.0])
@pytest.mark.parametrize("name", DEEP)
def test_other_constants_of_later_divergences_are_biased(name, gamma):
    assert (
        gap(
            expectation(plain(f"credit=local-divergence,reach=none,gamma={gamma}"), zoo.make(name)),
            evidence_gradient(name),
        )
        > BIASED
    )


@pytest.mark.parametrize("name", DEPTH[1])
def test_the_constant_is_idle_at_depth_one(name):
    assert (
        gap(
            expectation(plain("credit=local-divergence,reach=none,gamma=0.3"), zoo.make(name)),
            evidence_gradient(name),
        )
        < EXACT
    )


@pytest.mark.parametrize("name", DEPTH[1])
def test_own_rewards_alone_are_exact_at_depth_one(name):
    assert gap(expectation(plain("credit=impatient"), zoo.make(name)), evidence_gradient(name)) < EXACT


@pytest.mark.parametrize("name", [name for name in DEEP if zoo.make(name).features > 1])
def test_own_rewards_alone_are_biased_before_the_last_layer(name):
    """What a later posterior sees of a choice leads to every reward; where it sees x alone, nothing is lost."""
    flow = zoo.make(name)
    for index, layer in enumerate(flow.layers):
        parameters = list(layer.posterior.parameters())
        found = expectation(plain("credit=impatient"), flow, parameters)
        exact = expectation(plain(), flow, parameters)
        later = flow.layers[index + 1 :]
        if all(tuple(n.posterior.sees) == (Source.X,) and not n.relative for n in later):
            assert gap(found, exact) < EXACT
        else:
            assert gap(found, exact) > BIASED


@pytest.mark.parametrize(
    "name", [name for name in NAMES if zoo.make(name).features > 1 and "coupling" not in name]
)  # the printed form follows an ordering
def test_the_suffix_with_the_score_of_the_whole_layer_is_biased(name):
    """As printed; the d-th suffix belongs to the d-th score alone."""
    found = expectation(plain("divergence=cross-entropy,credit=printed-divergence"), zoo.make(name))
    assert gap(found, evidence_gradient(name)) > BIASED
    assert (
        gap(expectation(plain("divergence=cross-entropy"), zoo.make(name)), evidence_gradient(name)) < EXACT
    )


@pytest.mark.parametrize("name", ["D3 posterior", "D3 own, posterior", "K3 posterior"])
def test_what_the_printed_form_is_instead(name):
    """At depth 1: the gradient of H, plus E[sum_k k log p_k times the layer's score], plus the rewards'."""
    flow = zoo.make(name)
    parameters = list(flow.layers[0].posterior.parameters())
    order = torch.tensor(flow.layers[0].conditioner.order)
    places = torch.empty(flow.features, dtype=torch.float64)
    places[order] = torch.arange(1.0, flow.features + 1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "q")
        log_q = trace.log_q().sum((-1, -2))
        signal = (places * trace.log_p()).sum((-1, -2)) + flow.base.log_prob(trace.end.state).sum(-1)
        total = total + share * (log_q.detach().exp() * signal.detach() * log_q).sum()
        total = total + share * trace.posterior[0].entropy().sum()
    found = expectation(plain("divergence=cross-entropy,credit=printed-divergence"), flow, parameters)
    torch.testing.assert_close(found, gradient(total, parameters), rtol=0, atol=EXACT)


# signs


def divergence(flow: LatentFlow, row: int) -> Tensor:
    """KL(q || p) of all choices, with graph."""
    trace = everything(flow, row, "q")
    log_p, log_q = trace.log_p().sum((-1, -2)), trace.log_q().sum((-1, -2))
    return (log_q.exp() * (log_q - log_p)).sum()


@pytest.mark.parametrize(
    "name", ["D3 posterior", "D3 own, posterior", "D3 depth 2 posterior", "chain posterior"]
)
def test_the_sign_of_the_paper_raises_the_divergence(name):
    """E[log(p / q) score] is minus the gradient of KL(q || p): taken with a minus, as printed, ascent raises it."""
    flow = zoo.make(name)
    parameters = [p for layer in flow.layers for p in layer.posterior.parameters()]
    row = rows(flow)[0][0]
    trace = everything(flow, row, "q")
    log_p, log_q = trace.log_p().sum((-1, -2)), trace.log_q().sum((-1, -2))
    reward = flow.base.log_prob(trace.end.state).sum(-1)
    weight = log_q.detach().exp()
    ratio = gradient((weight * (log_p - log_q).detach() * log_q).sum(), parameters)
    rewards = gradient((weight * reward.detach() * log_q).sum(), parameters)
    rising = gradient(divergence(flow, row), parameters)
    torch.testing.assert_close(ratio, -rising, rtol=0, atol=EXACT)
    draws, probability = tuples(flow, row, "q", 1)
    found = gradient((probability * per_draw(plain(), flow, row, draws)).sum(), parameters)
    torch.testing.assert_close(found, rewards + ratio, rtol=0, atol=EXACT)
    assert gap(found, rewards - ratio) > 1e-2
    before = float(divergence(flow, row).detach())
    for sign, falls in ((1, True), (-1, False)):
        step = (sign * 1e-4 * ratio).split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, step, strict=True):
                parameter += part.reshape(parameter.shape)
            assert (float(divergence(flow, row)) < before) == falls
            for parameter, part in zip(parameters, step, strict=True):
                parameter -= part.reshape(parameter.shape)


# scales


def deviations(estimator: ScoreFunction) -> Tensor:
    kept = estimator.standardise
    mean = kept.mean / kept.weight
    return (kept.square / kept.weight - mean.square()).sqrt()


@pytest.mark.parametrize("kl", ["divergence=analytic", "divergence=cross-entropy"])
@pytest.mark.parametrize("name", NAMES)
def test_one_scale_for_all_rescales_the_gradient(name, kl):
    flow = zoo.make(name)
    estimator = with_a_past(score_function(f"objective=elbo,{kl},standardise=one"), flow)
    scale = deviations(estimator).square().sum(0).mean().sqrt()
    torch.testing.assert_close(
        expectation(estimator, flow), evidence_gradient(name) / scale, rtol=0, atol=EXACT
    )


@pytest.mark.parametrize(
    "name",
    [
        "D3 posterior",
        "D3 depth 2 posterior",
        "D2 depth 3 posterior sees x",
        "D2 depth 3 posterior sees state",
        "chain posterior",
        "chain depth 3 posterior sees x, previous",
    ],
)
def test_a_scale_for_each_feature_is_another_direction(name):
    flow = zoo.make(name)
    parameters = [p for layer in flow.layers for p in layer.posterior.parameters()]
    estimator = with_a_past(score_function("objective=elbo,standardise=feature"), flow)
    found, exact = expectation(estimator, flow, parameters), expectation(plain(), flow, parameters)
    assert cosine(found, exact) < 1 - BIASED
    generators = [p for layer in flow.layers for p in layer.conditioner.parameters()]
    rest = [*generators, flow.base.logits] if flow.base.learned else generators
    assert gap(expectation(estimator, flow, rest), expectation(plain(), flow, rest)) < EXACT


@pytest.mark.parametrize("name", ["D3 relative posterior", "chain depth 2 relative posterior"])
def test_a_relative_posterior_hands_that_direction_on_to_its_generator(name):
    """Whose logits it shares."""
    flow = zoo.make(name)
    generators = [p for layer in flow.layers for p in layer.conditioner.parameters()]
    estimator = with_a_past(score_function("objective=elbo,standardise=feature"), flow)
    found, exact = expectation(estimator, flow, generators), expectation(plain(), flow, generators)
    assert cosine(found, exact) < 1 - BIASED


def test_a_scale_for_each_feature_at_depth_one_written_out():
    """The rewards each over its deviation, against the unscaled divergence: another bargain between the two."""
    flow = zoo.make("D3 posterior")
    parameters = list(flow.layers[0].posterior.parameters())
    estimator = with_a_past(score_function("objective=elbo,standardise=feature"), flow)
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "q")
        rewards = flow.base.log_prob(trace.end.state) / deviations(estimator)[0]
        total = total + share * (trace.log_q().sum((-1, -2)).exp() * rewards.sum(-1)).sum()
        total = total - share * divergence(flow, row)
    found = expectation(estimator, flow, parameters)
    torch.testing.assert_close(found, gradient(total, parameters), rtol=0, atol=EXACT)


# variance


@pytest.mark.parametrize("name", ["D3 posterior", "D3 depth 2 posterior", "D2 depth 3 posterior sees state"])
def test_what_is_in_closed_form_takes_variance_away(name):
    """From the posterior's gradient: here the analytic form has the least."""
    flow = zoo.make(name)
    parameters = [p for layer in flow.layers for p in layer.posterior.parameters()]
    row, found = rows(flow)[0][0], {}
    draws, probability = tuples(flow, row, "q", 1)
    for kl in ("divergence=analytic", "divergence=cross-entropy", "divergence=sampled,credit=all"):
        values = per_draw(plain(kl), flow, row, draws)
        each = torch.stack([gradient(value, parameters) for value in values])
        found[kl] = float((probability @ (each - probability @ each).square()).sum())
    assert found["divergence=analytic"] < 0.95 * min(
        v for kl, v in found.items() if kl != "divergence=analytic"
    )


# state, words


def test_state_is_saved_and_loaded():
    flow = zoo.make("chain posterior")
    x, options = all_states(flow.states.sizes), "decay=0.5,standardise=feature,decay=0.5"
    trained, resumed = (
        score_function(f"objective=elbo,{options}"),
        score_function(f"objective=elbo,{options}"),
    )
    for step in range(4):
        trained.update(trained(flow, x, generator=torch.Generator().manual_seed(step)).stats)
    resumed.prepare(flow)
    resumed.load_state_dict(trained.state_dict())
    losses = [e(flow, x, generator=torch.Generator().manual_seed(9)) for e in (trained, resumed)]
    assert torch.equal(losses[0].surrogate, losses[1].surrogate)
    assert all(value.shape == (4, 2) and not value.requires_grad for value in losses[0].stats.values())


def test_what_it_is_not_defined_for_is_refused():
    flow = zoo.make("D2")
    with pytest.raises(ModelError, match="needs a posterior in every layer"):
        score_function("objective=elbo")(flow, all_states((2, 2)))
    with pytest.raises(ConfigError, match=r"divergence of .* is one of analytic, .*; got 'exact'"):
        score_function("objective=elbo,divergence=exact")
    chain = zoo.make("chain posterior")
    with pytest.raises(ModelError, match="must not see its own u"):
        score_function("objective=elbo,sum_last=true")(chain, all_states(chain.states.sizes))


# what a posterior is not


@pytest.mark.parametrize("features", [1, 2, 4])
def test_the_most_probable_choice_of_a_posterior_gives_no_likelihood(features):
    """A posterior that says u = x leads every x to y = 0, and the base's values there sum to prod_d 2 (1 - beta_d)."""
    torch.manual_seed(features)
    posterior = MLP(features, hidden=())
    base = FactorisedBase(features, p0=0.9)
    flow = LatentFlow([Layer(MADE(features, hidden=(8,)), posterior=posterior)], base).double()
    with torch.no_grad():
        flow.base.logits.fill_(math.log(0.1 / 0.9))  # which it keeps in float32
        posterior.net.layers[-1].weight.copy_(40 * torch.eye(features))
        posterior.net.layers[-1].bias.fill_(-20)
    x = all_states((2,) * features)
    reached = flow.run(x, draws="greedy", proposal="q").end.state
    assert not bool(reached.any())
    claimed = float(flow.base.log_prob(reached).sum(-1).exp().sum())
    assert claimed == pytest.approx((2 * 0.9) ** features, rel=0, abs=1e-12)
    assert abs(claimed - 1) > 0.5
    for honest in (evaluate.greedy(flow, x), evaluate.exact(flow, x)):  # the generator's own are likelihoods
        assert abs(float(honest.values.exp().sum()) - 1) < 1e-10
    assert bool((evaluate.importance(flow, x, samples=20, proposal="q").values.exp() < 1.0).all())


def test_nothing_calls_the_most_probable_choice_of_a_posterior_a_likelihood():
    """No evaluation takes it, and a flow whose generator would be such a posterior is refused."""
    base, posterior = FactorisedBase(3), MLP(3, hidden=())
    flow = LatentFlow([Layer(MADE(3, hidden=(8,)), posterior=posterior)], base).double()
    x = all_states((2, 2, 2))
    for choice in ("argmax", GREEDY):
        for evaluation in (evaluate.importance, evaluate.elbo):
            with pytest.raises(
                ConfigError, match=r"proposal is 'p' \(the generator\) or 'q' \(the posterior\)"
            ):
                evaluation(flow, x, samples=2, proposal=choice)
    for kind in (Flow, LatentFlow):
        with pytest.raises(ModelError, match="so the likelihood would not be normalised"):
            kind([Layer(posterior)], base)
    # what is called greedy is the generator's, and knows nothing of the posterior
    before = evaluate.greedy(flow, x).values
    with torch.no_grad():
        posterior.net.layers[-1].weight.add_(1.0)
    assert torch.equal(evaluate.greedy(flow, x).values, before)
