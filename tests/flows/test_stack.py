"""Layers and stacks: the pass from data to base and its record, and parts that do not fit."""

import pytest
import torch

import zoo
from enumeration import all_choices, all_states, base_table_lookup, enumerated, padded
from xorflow import MADE, MLP, FactorisedBase, LatentFlow, Layer, ModelError, ModularAffine, ModularShift
from xorflow.flows import Point


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.depth < 4))
def test_given_choices_are_recorded_as_they_are(name):
    flow = zoo.make(name)
    u = all_choices(flow)
    x = all_states(flow.states.sizes)[:1]
    trace = flow.run(flow.start(x, zoo.context(flow)), draws=u)
    assert trace.u.dtype == trace.end.state.dtype == torch.uint8
    assert torch.equal(trace.u.long(), u)
    assert trace.log_p().shape == u.shape
    assert torch.equal(trace.end.state, enumerated(name).y[:, 0])


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.depth > 1))
def test_a_pass_can_be_cut_and_continued(name):
    flow = zoo.make(name)
    noise = torch.rand(40, flow.depth, flow.features, generator=torch.Generator().manual_seed(0)).double()
    x = flow.base.sample(noise[:, 0])
    context = zoo.context(flow)
    whole = flow.run(flow.start(x, context), draws=noise)
    first = flow.run(flow.start(x, context), draws=noise[:, :1], stop=1)
    rest = flow.run(first.end, draws=noise[:, 1:])
    assert (first.end.layer, rest.end.layer) == (1, flow.depth)
    assert torch.equal(torch.cat([first.u, rest.u], -2), whole.u)
    assert torch.equal(rest.end.state, whole.end.state)
    torch.testing.assert_close(
        torch.cat([first.log_p(), rest.log_p()], -2), whole.log_p(), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.has_posterior))
def test_choices_from_the_posterior_are_scored_by_both(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    u = all_choices(flow)[:, None]
    context = zoo.context(flow)
    by_q = flow.run(flow.start(x, context), draws=u, proposal="q")
    torch.testing.assert_close(
        by_q.log_p(), flow.run(flow.start(x, context), draws=u).log_p(), rtol=0, atol=1e-12
    )
    totals = by_q.log_q().sum((-1, -2)).exp().sum(0)
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=1e-12)
    assert by_q.log_q().shape == by_q.log_p().shape


def test_leading_shapes_broadcast():
    flow = zoo.make("D3 depth 2 own first")
    x = all_states(flow.states.sizes)
    noise = torch.rand(6, 8, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trace = flow.run(x, draws=noise)
    assert trace.u.shape == trace.log_p().shape == (6, 8, 2, 3)
    for s in range(6):
        assert torch.equal(flow.run(x, draws=noise[s]).u, trace.u[s])


def test_a_first_layer_is_computed_once_for_all_samples():
    flow = zoo.make("D3 depth 2 reversed")
    trace = flow.run(all_states((2,) * 3), draws=torch.rand(50, 8, 2, 3).double())
    assert trace.generator[0].logits.shape == (8, 3)
    assert trace.generator[1].logits.shape == (50, 8, 3)


def test_choices_carry_no_gradient_and_log_terms_do():
    flow = zoo.make("K 2, 3 depth 3")
    trace = flow.run(all_states((2, 3)), draws=torch.rand(6, 3, 2).double())
    assert not any(u.requires_grad for u in trace.us)
    assert trace.log_p().requires_grad


@pytest.mark.parametrize("name", zoo.names(zoo.summable))
def test_rewards_of_the_last_layer_by_choice(name):
    flow = zoo.make(name)
    layer, x = flow.layers[-1], all_states(flow.states.sizes)
    state = x
    previous = torch.zeros(len(x), flow.features, dtype=torch.int64)
    previous = previous if flow.is_chain else None
    choices, rewards = flow.last_choices(Point(state, state, previous, flow.depth - 1, zoo.context(flow)))
    rewards, sizes = padded(rewards, choices.alphabet), torch.tensor(layer.transform.choices.sizes)
    for u in range(layer.transform.choices.width):
        real = (u < sizes).nonzero()[:, 0]
        y = layer.transform.to_base(x, torch.where(u < sizes, u, 0).expand_as(x))
        torch.testing.assert_close(
            rewards[..., u][:, real], base_table_lookup(flow, y)[:, real], rtol=0, atol=1e-14
        )


def test_a_layer_that_sees_its_own_choice_cannot_be_summed_out():
    flow = zoo.make("D4 own")
    with pytest.raises(ModelError, match="cannot be summed out"):
        flow.log_marginal(flow.start(torch.zeros(1, 4, dtype=torch.int64)))


def test_a_posterior_is_needed_to_draw_from_it():
    flow = zoo.make("D2")
    with pytest.raises(ModelError, match=r"posterior in every layer; build Layer\(\.\.\., posterior"):
        flow.run(torch.zeros(1, 2, dtype=torch.int64), draws="greedy", proposal="q")


BASE = FactorisedBase(3)
MISFITS = {
    "no layers": (lambda: LatentFlow([], BASE), "at least one layer, and got none"),
    "features": (lambda: LatentFlow([zoo.made(2)], BASE), "layer 1 has 2 features, the base 3"),
    "categories": (lambda: LatentFlow([zoo.made(3, categories=3)], BASE), "categories differ"),
    "transform's categories": (
        lambda: Layer(MADE(3, (4,)), ModularShift([3, 3, 3])),
        r"conditioner's categories must be those of its transform, \(3, 3.*are \(2.*categories=",
    ),
    "transform's choices": (
        lambda: Layer(MADE(2, (4,), categories=5), ModularAffine([5, 5])),
        r"conditioner's choices must be those of its transform, \(20.*are \(5.*choices=",
    ),
    "posterior": (
        lambda: Layer(MADE(2, (4,)), posterior=MLP(2, (4,), categories=3)),
        "posterior's categories must be those of its transform",
    ),
    "posterior sees its own u": (
        lambda: Layer(MADE(2, (4,)), posterior=MLP(2, (4,), sees=("x", "own"))),
        "mean-field",
    ),
    "context": (
        lambda: LatentFlow([zoo.made(3), zoo.made(3, context=2)], BASE),
        r"all layers see the same context.*\[0, 2\]",
    ),
    "all of x": (
        lambda: LatentFlow([Layer(MADE(3, (4,), sees={"x": "all"}))], BASE),
        "'x' 'before' d only, and declares 'all'.*not be normalised",
    ),
    "previous of another transform": (
        lambda: LatentFlow(
            [zoo.made(2, categories=3), zoo.affine(2, 3, sees={"previous": "up to"})],
            FactorisedBase(2, categories=3),
        ),
        "layer 2 sees 'previous'.*same transform",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_parts_that_do_not_fit_are_refused(what):
    build, words = MISFITS[what]
    with pytest.raises(ModelError, match=words):
        build()
