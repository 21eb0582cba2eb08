"""A deterministic flow is a bijection with an exact inverse; each way to invert a layer gives the same integers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import xorflow as xf
import zoo
from enumeration import all_states, draw_noise, padded, sequential_sample
from xorflow import LatentFlow, Layer
from xorflow.errors import ModelError
from xorflow.flows import GREEDY, Draws, Flow
from xorflow.flows.layer import by_decoding, by_passes, invert_layer


@pytest.mark.parametrize("name", zoo.every())
def test_every_state_comes_back(name):
    flow = zoo.make(name).greedy()
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    y = flow.to_base(x, context)
    assert torch.equal(torch.unique(y, dim=0), x)  # a permutation: every state is reached once
    assert torch.equal(flow.to_data(y, context), x)
    assert torch.equal(flow.to_base(flow.to_data(x, context), context), x)
    assert y.dtype == torch.int64


@pytest.mark.parametrize("name", zoo.every())
def test_the_inverse_is_that_of_one_feature_at_a_time(name):
    flow = zoo.make(name).greedy()
    y = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(y))
    assert torch.equal(flow.to_data(y, context), sequential_sample(flow, y, None, context))


@pytest.mark.parametrize("name", zoo.every())
def test_a_single_row_comes_back(name):
    flow = zoo.make(name).greedy()
    x = all_states(flow.states.sizes)[-1:]
    context = zoo.context(flow)
    assert torch.equal(flow.to_data(flow.to_base(x, context), context), x)


@pytest.mark.parametrize("name", zoo.every())
def test_greedy_takes_the_most_probable_choice_of_each_layer(name):
    """Also in layers that see their own u: the most probable one given the greedy ones before it."""
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    trace = flow.run(flow.start(x, zoo.context(flow)), draws="greedy")
    for index, choices in enumerate(trace.generator):
        likeliest = padded(choices.log_probs(), choices.alphabet, -torch.inf).argmax(-1)
        assert torch.equal(trace.u[:, index].long(), likeliest.expand(len(x), -1))


def test_the_greedy_flow_shares_the_weights():
    flow = zoo.make("D3 depth 2 reversed")
    greedy = flow.greedy()
    assert list(map(id, greedy.parameters())) == list(map(id, flow.parameters()))
    assert isinstance(greedy, xf.Flow)
    assert not isinstance(greedy, xf.LatentFlow)


def test_ten_thousand_images_come_back_through_eight_layers():
    torch.manual_seed(0)
    layers = [xf.Layer(xf.MADE(784, (64,), order=f"random:{seed}")) for seed in range(8)]
    flow = xf.Flow(layers, xf.FactorisedBase(784))
    x = xf.data.mnist().test.values
    assert x.shape == (10_000, 784)
    y = flow.to_base(x)
    assert float((y != x).double().mean()) > 0.1  # and it was no identity
    assert torch.equal(flow.to_data(y), x.long())


def test_what_never_converges_is_an_error(monkeypatch):
    """A network that sees what it must not: the inverse refuses to return something wrong."""
    monkeypatch.setattr("xorflow.flows.flow.check_normalised", lambda _: None)
    flow = xf.Flow([xf.Layer(xf.MADE(1, (), sees={"state": "up to"}))], xf.FactorisedBase(1))
    with torch.no_grad():
        flow.layers[0].conditioner.net.layers[-1].weight.fill_(2.0)
        flow.layers[0].conditioner.net.layers[-1].bias.fill_(-1.0)  # u = x: no x leads to y = 1
    with pytest.raises(ModelError, match="its logits are not finite, or its network sees what it must not"):
        flow.invert(torch.ones(1, 1, dtype=torch.uint8), "greedy", None)


def test_a_context_may_be_shared_and_of_another_float_type():
    flow = zoo.make("D3 context").greedy()
    x = all_states(flow.states.sizes)
    expected = flow.to_data(x, torch.ones(len(x), 2, dtype=torch.float64))
    for context in (torch.ones(len(x), 2), torch.ones(1, 2), torch.ones(2)):
        assert torch.equal(flow.to_data(x, context), expected)
        assert torch.equal(flow.to_base(expected, context), x)


@pytest.mark.parametrize("context", [None, torch.ones(8, 3)])
def test_a_context_of_the_wrong_width_is_refused_both_ways(context):
    flow = zoo.make("D3 context").greedy()
    for way in (flow.to_data, flow.to_base):
        with pytest.raises(xf.ModelError, match="made for 2 context features"):
            way(all_states((2,) * 3), context)


def test_rows_of_another_width_are_refused_both_ways():
    flow = zoo.make("D3 context").greedy()
    narrow, context = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    for way in (flow.to_data, flow.to_base, lambda x, context: xf.refit_base(flow, x, context)):
        with pytest.raises(xf.DataError, match="D = 3 features"):
            way(narrow, context)


@pytest.mark.parametrize("kind", [xf.MADE, xf.CausalTransformer, xf.Recurrent])
def test_a_context_with_another_number_of_rows_is_refused(kind):
    flow = xf.LatentFlow([xf.Layer(kind(3, context=2))], xf.FactorisedBase(3))
    x, context = torch.zeros(4, 3, dtype=torch.int64), torch.ones(3, 2)
    for call in (xf.evaluate.exact, xf.estimators.MaximumLikelihood(), lambda f, x, c: f(c).log_prob(x)):
        with pytest.raises(xf.DataError, match="one leading shape"):
            call(flow, x, context)


# ---- layers: every way to invert one, and which is taken is a rule ----


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
