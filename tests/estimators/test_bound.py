"""The special case: each expectation over all choices against autograd of the enumerated bound."""

import pytest
import torch

import zoo
from enumeration import all_choices, all_states, enumerated, gradient
from expectations import (
    BIASED,
    EXACT,
    bound,
    bound_gradient,
    everything,
    expected_gradient,
    few,
    gap,
    networks,
    per_draw,
    rows,
    score_function,
    small,
    state,
    trainable,
    tuples,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import ScoreFunction, TwoTerm


def plain(text: str = "") -> ScoreFunction:
    return score_function(f"baseline=none,{text}")


def patient(flow: LatentFlow) -> bool:
    """Whether some choice changes a later reward."""
    return flow.features > 1 and (flow.depth > 1 or flow.layers[0].autoregressive_in_u)


def one_order(flow: LatentFlow) -> bool:
    return flow.shares_one_order


SINGLE = zoo.names(few(1))
PAIRED = zoo.names(few(2))
ORDERED = zoo.names(lambda flow: few(1)(flow) and one_order(flow))
MIXED = zoo.names(lambda flow: few(1)(flow) and not one_order(flow))
LATER = [name for name in ORDERED if patient(zoo.make(name))]  # one ordering, and later rewards matter
ALONE = [name for name in SINGLE if zoo.make(name).depth == 1 and not patient(zoo.make(name))]


def test_the_members_cover_both_variants_to_depth_three():
    for names in (SINGLE, LATER):
        flows = [zoo.make(name) for name in names]
        found = {(flow.depth, flow.is_chain) for flow in flows}
        assert found >= {(1, False), (2, True), (2, False), (3, True), (3, False)}
        assert any(flow.layers[0].autoregressive_in_u for flow in flows)
    assert {zoo.make(name).depth for name in MIXED} >= {2, 3}


# the harness


@pytest.mark.parametrize("name", ["D3 reversed", "D3 depth 2 own", "chain D2 depth 3", "K3 depth 2"])
def test_a_batch_is_the_mean_of_its_examples(name):
    """What `per_draw` maps over, one example at a time, is what a batch averages."""
    flow, estimator = zoo.make(name), score_function("baseline=greedy,entropy=0.3")
    row, u = 1, all_choices(flow)
    x = all_states(flow.states.sizes)[row].expand(len(u), -1)
    batch = estimator(flow, x, draws=u[None])
    apart = per_draw(estimator, flow, row, u[:, None])
    torch.testing.assert_close(-batch.surrogate, apart.mean(), rtol=0, atol=1e-12)
    found, expected = (gradient(v, trainable(flow)) for v in (-batch.surrogate, apart.mean()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SINGLE)
def test_the_reference_is_the_enumerated_bound(name):
    flow, values = zoo.make(name), enumerated(name).bound
    expected = sum(share * float(values[row]) for row, share in rows(flow))
    assert abs(float(bound(flow).detach()) - expected) < 1e-10


@pytest.mark.parametrize("name", SINGLE)
def test_its_value_is_the_bound_in_expectation(name):
    flow, estimator = zoo.make(name), plain()
    estimator.prepare(flow)
    context = zoo.rows_of_context(flow, 1)
    for row, _ in rows(flow):
        draws, probability = tuples(flow, row, "p", 1)
        x = state(flow, row)
        with torch.no_grad():
            value = torch.func.vmap(
                lambda u, x=x: estimator.loss(flow, flow.start(x, context), u[:, None]).bound
            )(draws)
        torch.testing.assert_close(
            (probability * value).sum(), enumerated(name).bound[row], rtol=0, atol=EXACT
        )


# unbiased


@pytest.mark.parametrize("rewards", ["descendants", "all"])
@pytest.mark.parametrize("name", SINGLE)
def test_descendants_and_all_rewards_are_unbiased(name, rewards):
    """For every model: generators and, where it learns, the base."""
    flow = zoo.make(name)
    expected = bound_gradient(name)
    assert gap(expected_gradient(plain(f"credit={rewards}"), flow), expected) < EXACT
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("name", zoo.names(lambda flow: few(1)(flow) and flow.base.learned))
def test_a_learned_base_gets_the_gradient_of_the_rewards(name):
    flow = zoo.make(name)
    base = [flow.base.logits]
    expected = gradient(bound(flow), base)
    assert gap(expected_gradient(score_function("baseline=greedy"), flow, parameters=base), expected) < EXACT
    assert float(expected.abs().max()) > 1e-2


@pytest.mark.parametrize("name", ORDERED)
def test_two_terms_are_unbiased_in_one_ordering(name):
    assert gap(expected_gradient(plain("credit=two-term"), zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ORDERED)
def test_two_terms_are_the_rewards_to_go_sample_by_sample(name):
    r"""sum_d r_d [log p(u_d | u_<d) + log p(u_<d)], written out, for each u."""
    flow = zoo.make(name)
    order = torch.tensor(flow.layers[0].conditioner.order)
    for row, _ in rows(flow):
        trace = everything(flow, row, "p")
        rewards = flow.base.log_prob(trace.end.state)[..., order]
        log_p = trace.log_p().sum(-2).expand_as(rewards)[..., order]  # all layers at a feature
        own = (rewards.detach() * log_p).sum(-1)
        prefix = (rewards.detach() * (log_p.cumsum(-1) - log_p)).sum(-1)
        expected = (own + prefix + rewards.sum(-1))[:, 0]
        found = per_draw(plain("credit=two-term"), flow, row, all_choices(flow)[:, None])
        possible = trace.log_p().detach().sum((-1, -2)).expand(len(found), 1)[:, 0] > -100
        torch.testing.assert_close(found[possible], expected[possible], rtol=0, atol=1e-10)


@pytest.mark.parametrize("rewards", ["two-term", "printed-rewards"])
@pytest.mark.parametrize("name", MIXED)
def test_two_terms_are_refused_for_several_orderings(name, rewards):
    flow = zoo.make(name)
    with pytest.raises(ModelError, match="needs layers that share one ordering; use Descendants"):
        score_function(f"credit={rewards}")(flow, all_states(flow.states.sizes))


@pytest.mark.parametrize("name", ["D3 depth 2 reversed", "D4 depth 2 random", "D3 depth 3"])
def test_and_would_be_biased_there(name, monkeypatch):
    """Why they are refused: later in the first layer's ordering is not later in the others'."""
    monkeypatch.setattr(TwoTerm, "check", lambda *_: None)
    found = expected_gradient(plain("credit=two-term"), zoo.make(name))
    assert gap(found, bound_gradient(name)) > BIASED


@pytest.mark.parametrize("name", [name for name in PAIRED if name in ORDERED])
def test_a_sample_for_each_term_is_unbiased(name):
    estimator = plain("credit=two-term,two_samples=true")
    assert gap(expected_gradient(estimator, zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("baseline", ["greedy", "running-mean"])
@pytest.mark.parametrize(
    "name", ["D4 own", "chain posterior", "chain context", "D1 depth 2", "D2 depth 3 one order"]
)
def test_a_sample_for_each_term_with_baseline_and_entropy(name, baseline):
    estimator = score_function(f"credit=two-term,two_samples=true,baseline={baseline},entropy=0.7")
    assert gap(expected_gradient(estimator, zoo.make(name)), bound_gradient(name, 0.7)) < EXACT


def test_three_samples_with_an_independent_critic():
    """Two for the terms and one for what to expect: the critic's is the last, and shares nothing with either."""
    for name in ("D2", "D3 learned base", "K 3, 1, 2 own", "chain posterior"):
        flow, estimator = zoo.make(name), score_function("credit=two-term,two_samples=true,baseline=sampled")
        assert estimator.noise_shape(flow) == (3, flow.depth, flow.features)
        assert gap(expected_gradient(estimator, flow), bound_gradient(name)) < EXACT


SUMMED = zoo.names(lambda flow: few(1)(flow) and flow.last_layer_summable)


@pytest.mark.parametrize("rewards", ["descendants", "all"])
@pytest.mark.parametrize("name", SUMMED)
def test_with_the_last_layer_summed_out_it_is_unbiased(name, rewards):
    """Its expected rewards change with the very choices that its rewards change with."""
    flow, estimator = (
        zoo.make(name),
        score_function(f"credit={rewards},baseline=greedy,entropy=0.7,sum_last=true"),
    )
    assert gap(expected_gradient(estimator, flow), bound_gradient(name, 0.7)) < EXACT
    assert (estimator.noise_shape(flow) is None) == (flow.depth == 1)


@pytest.mark.parametrize("name", [name for name in SUMMED if name in ORDERED])
def test_two_terms_with_the_last_layer_summed_out_are_unbiased(name):
    estimator = plain("credit=two-term,sum_last=true")
    assert gap(expected_gradient(estimator, zoo.make(name)), bound_gradient(name)) < EXACT


@pytest.mark.parametrize("baseline", ["none", "running-mean", "sampled", "greedy"])
@pytest.mark.parametrize(
    "name", ["D3 x", "D3 depth 2 reversed", "D2 depth 3", "chain summable", "K3 depth 2"]
)
def test_with_the_last_layer_summed_out_any_baseline_serves(name, baseline):
    estimator = score_function(f"baseline={baseline},sum_last=true")
    assert gap(expected_gradient(estimator, zoo.make(name)), bound_gradient(name)) < EXACT


def test_a_last_layer_that_cannot_be_summed_out_is_refused():
    flow = zoo.make("chain D3 depth 2")
    with pytest.raises(ModelError, match="sum_last sums the last layer out, which must not see its own u"):
        score_function("sum_last=true")(flow, all_states(flow.states.sizes))
    with pytest.raises(ConfigError, match="sum_last leaves no second term"):
        score_function("credit=two-term,two_samples=true,sum_last=true")


# biased, or unbiased by luck


@pytest.mark.parametrize("options", ["second=0.5", "second=0.0", "second=2.0", "discount=0.8"])
@pytest.mark.parametrize("name", LATER)
def test_other_constants_of_the_second_term_are_biased(name, options):
    flow = zoo.make(name)
    found = expected_gradient(plain(f"credit=two-term,{options}"), flow)
    assert gap(found, bound_gradient(name)) > BIASED


@pytest.mark.parametrize("options", ["second=0.5", "discount=0.8"])
@pytest.mark.parametrize("name", [n for n in LATER if small(zoo.make(n), 64)])
def test_other_constants_are_biased_with_two_samples_too(name, options):
    """And by just as much: what is sampled twice has the same expectation."""
    flow = zoo.make(name)
    one = expected_gradient(plain(f"credit=two-term,{options}"), flow)
    two = expected_gradient(plain(f"credit=two-term,two_samples=true,{options}"), flow)
    assert gap(one, two) < EXACT
    assert gap(two, bound_gradient(name)) > BIASED


@pytest.mark.parametrize("options", ["second=0.5", "second=0.0", "second=2.0", "discount=0.8"])
@pytest.mark.parametrize("name", [name for name in ALONE if name in ORDERED])
def test_at_depth_one_the_second_term_has_expectation_zero(name, options):
    found = expected_gradient(plain(f"credit=two-term,{options}"), zoo.make(name))
    assert gap(found, bound_gradient(name)) < EXACT


@pytest.mark.parametrize("name", ALONE)
def test_impatience_is_exact_at_depth_one(name):
    assert gap(expected_gradient(plain("credit=impatient"), zoo.make(name)), bound_gradient(name)) < 1e-12


@pytest.mark.parametrize("name", [name for name in SINGLE if patient(zoo.make(name))])
def test_impatience_is_biased_elsewhere(name):
    """At every depth beyond the first, in both variants, and at depth 1 if a choice sees those before it."""
    found = expected_gradient(plain("credit=impatient"), zoo.make(name))
    assert gap(found, bound_gradient(name)) > BIASED


@pytest.mark.parametrize("name", ["D4 own", "D3 depth 2 one order", "made and coupling", "chain D3 depth 3"])
def test_impatience_is_far_off(name):
    found = expected_gradient(plain("credit=impatient"), zoo.make(name))
    assert gap(found, bound_gradient(name)) > 1e-2


@pytest.mark.parametrize("name", [name for name in ORDERED if zoo.make(name).features > 1])
def test_the_appendix_as_printed_is_biased(name):
    """All rewards in each feature's term: a score counts once for its own term and once for each that follows."""
    flow = zoo.make(name)
    order = torch.tensor(flow.layers[0].conditioner.order)
    counts = torch.empty(flow.features, dtype=torch.float64)
    counts[order] = torch.arange(flow.features, 0.0, -1.0, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "p")
        log_p = trace.log_p()
        weight = log_p.detach().sum((-1, -2)).exp() * flow.base.log_prob(trace.end.state).sum(-1).detach()
        total = total + share * (weight * (log_p * counts).sum((-1, -2))).sum()
    found = expected_gradient(plain("credit=printed-rewards"), flow, parameters=networks(flow))
    torch.testing.assert_close(found, gradient(total, networks(flow)), rtol=0, atol=EXACT)
    assert gap(found, gradient(bound(flow), networks(flow))) > BIASED


@pytest.mark.parametrize("name", ["D1", "K3 D1", "D1 depth 2"])
def test_the_appendix_as_printed_is_right_for_one_feature(name):
    assert (
        gap(expected_gradient(plain("credit=printed-rewards"), zoo.make(name)), bound_gradient(name)) < EXACT
    )


# variance


def total_variance(estimator: ScoreFunction, flow: LatentFlow) -> float:
    """Of the gradient in all parameters together, on one state, by enumeration."""
    row = rows(flow)[0][0]
    draws, probability = tuples(flow, row, "p", 1, estimator.noise_shape(flow)[1])
    values = per_draw(estimator, flow, row, draws)
    each = torch.stack([gradient(value, networks(flow)) for value in values])
    mean = probability @ each
    return float((probability @ (each - mean).square()).sum())


@pytest.mark.parametrize("name", ["D3 x", "D4 own", "D3 depth 2 one order", "chain D3 depth 2"])
def test_rewards_that_cannot_change_only_add_variance(name):
    flow = zoo.make(name)
    assert total_variance(plain(), flow) < 0.9 * total_variance(plain("credit=all"), flow)


@pytest.mark.parametrize(
    "name", ["D3 depth 2 one order", "D3 depth 2 reversed", "chain summable", "D2 depth 3"]
)
def test_summing_the_last_layer_out_takes_variance_away(name):
    flow = zoo.make(name)
    assert total_variance(plain("sum_last=true"), flow) < 0.9 * total_variance(plain(), flow)


# words


@pytest.mark.parametrize("options", ["second=0.5", "discount=0.5", "two_samples=true"])
def test_options_of_the_second_term_need_two_terms(options):
    with pytest.raises(ConfigError, match="takes objective, credit"):
        score_function(options)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"credit is one of descendants, all, .*; got 'some'"):
        score_function("credit=some")
    with pytest.raises(ConfigError, match=r"baseline is one of running-mean, none, .*; got 'mean'"):
        score_function("baseline=mean")
    with pytest.raises(ConfigError, match="standardiser is one of none, one, feature; got 'two'"):
        score_function("standardise=two")
    with pytest.raises(ConfigError, match=r"decay, .*; got 1"):
        score_function("decay=1")
    with pytest.raises(ConfigError, match=r"floor, .* greater than 0; got 0"):
        score_function("standardise=one,floor=0")


def test_one_estimator_can_serve_one_flow_after_another():
    """What it prepared for one flow, which has the same size, is not used for the next."""
    estimator = plain()
    for name in ("D3 depth 2 reversed", "D3 depth 2 one order", "D3 depth 2 own"):
        assert gap(expected_gradient(estimator, zoo.make(name)), bound_gradient(name)) < EXACT
