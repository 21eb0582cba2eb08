"""The deterministic flow is a bijection, and its inverse is exact."""

import pytest
import torch

import xorflow as xf
import zoo
from enumeration import all_states, padded, sequential_sample
from xorflow.errors import ModelError


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
    trace = flow.run(x, draws="greedy", context=zoo.context(flow))
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
