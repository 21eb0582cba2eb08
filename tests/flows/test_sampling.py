"""Samplers: the right law, and the fast path equal to D sequential passes."""

import math

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, draw_noise, enumerated, sequential_sample
from xorflow import LatentFlow
from xorflow.flows import Flow
from xorflow.flows.layer import by_passes

NAMES = zoo.every()
SAMPLES = 200_000


def generators(flow: LatentFlow):
    return [layer.conditioner for layer in flow.layers]


def frequencies(x: Tensor, sizes) -> Tensor:
    """How often each state occurs, in the order of `all_states`."""
    place = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    index = (x * torch.tensor(place)).sum(-1)
    return torch.bincount(index, minlength=math.prod(sizes)).double() / len(x)


def assert_law(x: Tensor, p: Tensor, sizes) -> None:
    """Every frequency within five standard errors (at most sqrt(p / N)) of its probability."""
    error = (frequencies(x, sizes) - p).abs()
    assert bool((error < 5 * (p / len(x)).sqrt()).all()), float((error / (p / len(x)).sqrt()).max())


def sample(flow: LatentFlow | Flow, count: int) -> Tensor:
    context = zoo.context(flow)
    dist = flow(None if context is None else context[0])
    return dist.sample((count,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_exact_law(name):
    flow = zoo.make(name)
    assert_law(sample(flow, SAMPLES), enumerated(name).log_p.exp(), flow.states.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_deterministic_flow_have_its_exact_law(name):
    flow = zoo.make(name).greedy()
    context = zoo.context(flow)
    p = flow(None if context is None else context[0]).log_prob(all_states(flow.states.sizes)).detach().exp()
    assert_law(sample(flow, SAMPLES // 4), p, flow.states.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_sampler_equals_sequential_passes(name):
    flow = zoo.make(name)
    noise = draw_noise(flow, 500, seed=1)
    context = zoo.rows_of_context(flow, 500)
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, context)
    assert torch.equal(flow.sample_with(noise, context), expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", zoo.every(lambda flow: flow.features > 1))
def test_blocks_of_any_size_give_the_same(name, size, monkeypatch):
    flow = zoo.make(name)
    noise, context = draw_noise(flow, 100, seed=6), zoo.rows_of_context(flow, 100)
    expected = flow.sample_with(noise, context)
    monkeypatch.setattr("xorflow.flows.layer._BLOCK_SIZE", size)
    assert torch.equal(flow.sample_with(noise, context), expected)


def follows_the_order(flow: LatentFlow) -> bool:
    return not flow.is_chain and all(list(net.sees.values()) == ["before"] for net in generators(flow))


@pytest.mark.parametrize("size", [1, 2, 28])
@pytest.mark.parametrize("name", zoo.every(follows_the_order))
def test_incremental_decoding_leaves_nothing_to_the_full_pass(name, size, monkeypatch):
    """Each layer of a MADE takes the one pass that confirms: what incremental decoding gave was already right."""
    monkeypatch.setattr("xorflow.flows.layer._BLOCK_SIZE", size)
    flow = zoo.make(name)
    passes = count_passes(flow)
    flow.sample_with(draw_noise(flow, 100), zoo.rows_of_context(flow, 100))
    assert sum(passes) == flow.depth


@pytest.mark.parametrize("features", [1, 7, 33])
@pytest.mark.parametrize("categories", [2, 3])
def test_the_fast_sampler_equals_sequential_passes_on_more_features(features, categories):
    torch.manual_seed(features)
    orders = ("natural", "reversed", "random:1")
    layers = [zoo.made(features, order, (64,), categories=categories) for order in orders]
    flow = zoo.sharpen(zoo.flow(*layers)).double()
    noise = draw_noise(flow, 20)
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, None)
    assert torch.equal(flow.sample_with(noise), expected)
    greedy = flow.greedy()
    with torch.no_grad():
        expected = sequential_sample(greedy, greedy.base.sample(noise.base), None, None)
    assert torch.equal(greedy.sample_with(noise), expected)


@pytest.mark.parametrize("name", zoo.every(lambda flow: flow.shares_one_order and not flow.context_features))
def test_one_shared_ordering_can_be_drawn_layer_by_layer_or_feature_by_feature(name):
    """The two sequential samplers agree where both apply, so that each checks the other."""
    flow = zoo.make(name)
    noise = draw_noise(flow, 200, seed=2)
    y = flow.base.sample(noise.base)
    with torch.no_grad():
        expected = sequential_sample(flow, y, noise.layers, None)
        flow.is_chain = True
        assert torch.equal(sequential_sample(flow, y, noise.layers, None), expected)


@pytest.mark.parametrize("name", zoo.every(lambda flow: all(c.mask is not None for c in generators(flow))))
def test_a_coupling_layer_is_inverted_in_one_pass(name):
    flow = zoo.make(name)
    passes = count_passes(flow)
    flow.sample_with(draw_noise(flow, 50), zoo.rows_of_context(flow, 50))
    assert sum(passes) == flow.depth


def test_far_fewer_passes_than_features():
    torch.manual_seed(0)
    flow = zoo.flow(zoo.made(200, "random:1", (32,)))
    passes = count_passes(flow)
    noise = draw_noise(flow, 20)
    with torch.no_grad():
        by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], None)
    assert 1 <= sum(passes) < 100


def count_passes(flow: LatentFlow) -> list[int]:
    passes: list[int] = []
    for net in generators(flow):
        net.register_forward_hook(lambda *_: passes.append(1))
    return passes


@pytest.mark.parametrize("name", ["D3 depth 2 own", "K 2, 3, 4", "chain context"])
def test_noise_alone_decides(name):
    flow = zoo.make(name)
    first, again, other = (draw_noise(flow, 64, seed) for seed in (0, 0, 1))
    context = zoo.rows_of_context(flow, 64)
    assert torch.equal(flow.sample_with(first, context), flow.sample_with(again, context))
    assert not torch.equal(flow.sample_with(first, context), flow.sample_with(other, context))
    single = flow.sample_with(type(first)(first.base[:1], first.layers[:1]), zoo.context(flow))
    assert torch.equal(single, flow.sample_with(first, context)[:1])
