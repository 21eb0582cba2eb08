"""How a layer is inverted: every way gives the integers of one feature at a time, and which is taken is a rule."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import draw_noise, sequential_sample
from xorflow import LatentFlow, Layer
from xorflow.flows import GREEDY, Draws, Flow
from xorflow.flows.layer import by_decoding, by_passes, invert_layer

NAMES = zoo.every(lambda flow: not flow.is_chain)


def each_layer(flow: LatentFlow, rows: int) -> list[tuple[Layer, Tensor, Draws, Tensor | None, Tensor]]:
    """Layers with what they are given, drawn and greedy, and x of one feature at a time."""
    context, noise = zoo.rows_of_context(flow, rows), draw_noise(flow, rows, seed=3)
    y = flow.base.sample(noise.base)
    cases = []
    for index, layer in enumerate(flow.layers):
        for draws, alone in ((noise.layers[:, index], LatentFlow), (GREEDY, Flow)):
            given = None if draws is GREEDY else draws.unsqueeze(1)
            x = sequential_sample(alone([layer], flow.base), y.long(), given, context)
            cases.append((layer, y, draws, context, x))
    return cases


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_way_gives_the_integers_of_one_feature_at_a_time(name):
    for layer, y, draws, context, expected in each_layer(zoo.make(name), 100):
        decoded = by_decoding(layer, y, draws, context)
        for x in (by_passes(layer, y, draws, context), decoded, invert_layer(layer, y, draws, context)):
            if x is not None:
                assert x.dtype == y.dtype
                assert torch.equal(x, expected)
        follows = list(layer.conditioner.sees.values()) == ["before"] and not layer.autoregressive_in_u
        assert (decoded is not None) == follows


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_iteration_mends_any_guess(name):
    for layer, y, draws, context, expected in each_layer(zoo.make(name), 30):
        for guess in (torch.zeros_like(y), y.flip(0), expected.flip(0).to(y.dtype)):
            assert torch.equal(by_passes(layer, y, draws, context, guess), expected)


@pytest.mark.parametrize(
    "name", ["D3 depth 2 reversed", "K 2, 3, 4", "transformer K3 rotary, skipped", "recurrent D3"]
)
def test_what_decoding_finds_is_confirmed_by_one_pass_and_mended_if_it_is_wrong(name, monkeypatch):
    flow, passes = zoo.make(name), []
    noise, context = draw_noise(flow, 50), zoo.rows_of_context(flow, 50)
    for layer in flow.layers:
        layer.conditioner.register_forward_hook(lambda *_: passes.append(1))
    expected = flow.sample_with(noise, context)
    assert len(passes) == flow.depth
    monkeypatch.setattr("xorflow.flows.layer.by_decoding", lambda layer, y, *_: torch.zeros_like(y))
    assert torch.equal(flow.sample_with(noise, context), expected)


def test_a_decoder_takes_rows_alone():
    """Samples of several leading shapes have no row of their own noise: they are iterated."""
    flow = zoo.make("D3 reversed")
    noise = torch.rand(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(2, (4, 5, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    layer = flow.layers[0]
    assert by_decoding(layer, y, noise, None) is None
    with torch.no_grad():
        flat = by_passes(layer, y.flatten(0, 1), noise.flatten(0, 1), None)
        assert torch.equal(by_passes(layer, y, noise, None).flatten(0, 1), flat)


def test_threads_may_sample_at_once():
    flow = zoo.make("D3 depth 2 reversed")
    noise = draw_noise(flow, 50, seed=3)
    expected = flow.sample_with(noise)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: flow.sample_with(noise), range(48)))
    assert all(torch.equal(x, expected) for x in found)
