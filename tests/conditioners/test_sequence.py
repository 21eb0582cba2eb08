"""Transformers and recurrent networks: what they see, and that incremental decoding equals a whole pass."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import zoo
from enumeration import all_states, draw_noise, sequential_sample
from networks import BOTH, sequence, sequences
from slopes import allowed, jacobian
from xorflow import CausalTransformer, ModelError, Recurrent
from xorflow.conditioners import Source
from xorflow.conditioners.sequence import SequenceConditioner
from xorflow.conditioners.transformer import AttentionStack, turned
from xorflow.flows.layer import by_decoding, by_passes


@given(sequences())
def test_exactly_what_is_allowed_is_seen(net):
    """Along any permutation, of images too: no slope where it must not look, and some slope where it may."""
    for source, dependence in net.sees.items():
        found, may = jacobian(net, source), allowed(net, dependence)
        sizes = torch.tensor(net.alphabet(source).sizes)
        assert bool((found[~may] == 0).all())
        free = (
            torch.tensor(net.choices.sizes) > 1
        )  # the one logit of a feature without choices may be anything
        assert bool((found[free][:, sizes > 0] > 0)[may[free]].all())


@given(sequences(skipped=True))
def test_skipped_features_see_what_they_look_at_and_others_what_they_may(net):
    """No slope where it must not look; some from each step before, and from whatever is looked at."""
    rank = {d: r for r, d in enumerate(net.order)}
    free = torch.tensor(net.choices.sizes) > 1
    for index, (source, dependence) in enumerate(net.sees.items()):
        found, may = jacobian(net, source), allowed(net, dependence)
        assert bool((found[~may] == 0).all())
        for d in free.nonzero().flatten().tolist():
            fields, seen = net.fields[index, rank[d]], net.seen[index, rank[d]]
            looked = {int(e) for e, s in zip(fields, seen, strict=True) if s}
            assert bool((found[d, sorted(looked)] > 0).all())
            if d not in net.skipped:
                active = [e for e in range(net.features) if e not in net.skipped and may[d, e]]
                assert bool((found[d, active] > 0).all())
            if d in net.skipped:
                assert bool((found[d, [e for e in range(net.features) if e not in looked]] == 0).all())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("order", ["natural", "reversed", "columns", "columns-reversed", "random:4"])
def test_larger_images_in_named_orderings(kind, order):
    net = sequence(kind, 12, order=order, shape=(3, 4), reach=2)
    assert torch.equal(jacobian(net, Source.STATE) > 0, allowed(net, net.sees[Source.STATE]))


@pytest.mark.parametrize("order", ["natural", "columns", "random:1"])
def test_steps_look_at_the_pixels_around_them_that_came_earlier(order):
    net = CausalTransformer(20, width=4, depth=1, heads=1, shape=(4, 5), order=order, reach=1)
    place = {d: rank for rank, d in enumerate(net.order)}
    for rank, d in enumerate(net.order):
        row, column = divmod(d, 5)
        around = {
            r * 5 + c
            for r in range(max(row - 1, 0), min(row + 2, 4))
            for c in range(max(column - 1, 0), min(column + 2, 5))
            if place[r * 5 + c] < rank
        }
        looked = [int(e) for e, seen in zip(net.fields[0, rank], net.seen[0, rank], strict=True) if seen]
        assert looked[: int(rank > 0)] == list(net.order[max(rank - 1, 0) : rank])
        assert sorted(looked[int(rank > 0) :]) == sorted(around)


@given(sequences(skipped=True))
@settings(max_examples=60)
def test_decoding_along_the_order_gives_the_logits_of_a_whole_pass(net):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(net.states.sizes)
    x, trial = (torch.randint(6, (5, net.features), generator=generator) % sizes for _ in range(2))
    context = torch.rand(5, net.context_features, generator=generator, dtype=torch.float64)
    context = context if net.context_features else None
    decoder = net.incremental(5, context, 56)
    if list(net.sees.values()) != ["before"] or Source.OWN in net.sees:
        assert decoder is None
        return
    if net.alphabet(next(iter(net.sees))) is not net.states:
        return
    with torch.no_grad():
        expected = net(dict.fromkeys(net.sees, x), context)
        for block in decoder.blocks:
            features = net.order[block]
            decoder.logits(block, trial[:, features])  # leaves no trace
            found = decoder.logits(block, x[:, features])
            torch.testing.assert_close(
                found, expected[:, net.choices.positions(features)], rtol=0, atol=1e-12
            )
            decoder.update(block, x[:, features])
    assert [d for block in decoder.blocks for d in range(block.start, block.stop)] == list(
        range(net.features)
    )


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("categories", [2, 3])
@pytest.mark.parametrize("skipped", [(), (0, 3, 4, 5, 19)])
def test_cached_samples_are_those_of_whole_passes(kind, categories, skipped, monkeypatch):
    """In float64 the very integers, on the same noise: of D sequential passes, and of whole passes until nothing changes."""
    more = {"rotary": bool(skipped)} if kind == "transformer" else {}
    net = sequence(kind, 20, shape=(4, 5), order="random:2", categories=categories, skipped=skipped, **more)
    flow = zoo.flow(zoo.Layer(net)).double()
    noise = draw_noise(flow, 30)
    passes: list[int] = []
    net.register_forward_hook(lambda *_: passes.append(1))
    found = flow.sample_with(noise)
    assert len(passes) == 1  # the one that confirms
    with torch.no_grad():
        assert torch.equal(found, sequential_sample(flow, flow.base.sample(noise.base), noise.layers, None))
    monkeypatch.setattr(type(net), "incremental", lambda *_: None)
    assert torch.equal(flow.sample_with(noise), found)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("skipped", [(), (0, 3, 4, 5, 19), (17, 18)])
@pytest.mark.parametrize("order", ["natural", "columns-reversed", "random:2"])
@pytest.mark.parametrize("context", [0, 2])
def test_steps_whose_number_is_on_the_device_give_the_same(order, skipped, rotary, context, monkeypatch):
    """What a CUDA device replays as a graph, here operation by operation: the very integers, without a pass that mends them."""
    net = sequence(
        "transformer", 20, shape=(4, 5), order=order, skipped=skipped, rotary=rotary, context=context
    )
    flow = zoo.flow(zoo.Layer(net)).double()
    noise = draw_noise(flow, 30)
    seen = torch.rand(30, 2, dtype=torch.float64) if context else None
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, seen)
        decoder = net.incremental(30, seen, 56)
        assert decoder is not None
        y, uniforms = (t[:, list(net.order)] for t in (flow.base.sample(noise.base), noise.layers[:, 0]))
        assert decoder.decode(y, uniforms) is None
        monkeypatch.setattr("xorflow._devices.STEPPED_ON", ("cpu",))
        found = decoder.decode(y, uniforms)
    assert found is not None
    assert found.dtype == y.dtype
    assert torch.equal(found.long(), expected[:, list(net.order)])
    passes: list[int] = []
    net.register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(flow.sample_with(noise, seen), expected)
    assert len(passes) == 1


@pytest.mark.parametrize(("kind", "categories"), [("recurrent", 2), ("transformer", 3)])
def test_what_has_no_such_step_is_decoded_as_ever(kind, categories, monkeypatch):
    monkeypatch.setattr("xorflow._devices.STEPPED_ON", ("cpu",))
    net = sequence(kind, 6, categories=categories)
    flow = zoo.flow(zoo.Layer(net)).double()
    noise = draw_noise(flow, 4)
    decoder = net.incremental(4, None, 56)
    y = flow.base.sample(noise.base)
    assert decoder.decode(y, noise.layers[:, 0]) is None
    decoded = by_decoding(flow.layers[0], y, noise.layers[:, 0], None)
    assert torch.equal(decoded, by_passes(flow.layers[0], y, noise.layers[:, 0], None))


@pytest.mark.parametrize("kind", BOTH)
def test_a_pass_without_gradient_may_come_in_parts(kind, monkeypatch):
    net = sequence(kind, 4, context=2)
    x, context = torch.randint(2, (7, 4)), torch.rand(7, 2).double()
    whole = net({Source.STATE: x}, context)
    monkeypatch.setattr("xorflow.conditioners.sequence._STEPS_ON_CPU", 8)
    with torch.no_grad():
        torch.testing.assert_close(net({Source.STATE: x}, context), whole.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", BOTH)
def test_inputs_of_different_leading_shapes_broadcast(kind):
    net = sequence(kind, 3, sees={"x": "before", "state": "before"}, context=2)
    inputs = {Source.X: torch.randint(2, (5, 3)), Source.STATE: torch.randint(2, (7, 5, 3))}
    context = torch.rand(5, 2).double()
    found = net(inputs, context)
    assert found.shape == (7, 5, 3)
    one = net({Source.X: inputs[Source.X][2], Source.STATE: inputs[Source.STATE][4, 2]}, context[2])
    torch.testing.assert_close(found[4, 2], one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", BOTH)
def test_skipped_features_of_any_integers_are_kept_as_plain_ones(kind):
    net = sequence(kind, 6, skipped=np.array([4, 1]))
    assert json.loads(json.dumps(net.config()))["skipped"] == [1, 4]


@pytest.mark.parametrize("kind", BOTH)
def test_a_context_reaches_all_but_skipped_features(kind):
    net = sequence(kind, 6, context=2, skipped=[0, 4])
    x = torch.zeros(1, 6, dtype=torch.int64)
    one, other = (net({Source.STATE: x}, torch.full((1, 2), c).double())[0] for c in (0.0, 1.0))
    assert (one != other).tolist() == [False, True, True, True, False, True]


# ---- one network in several orderings ----


@pytest.mark.parametrize("kind", BOTH)
def test_reordered_shares_the_weights(kind):
    net = sequence(kind, 6, shape=(2, 3), context=1, skipped=(1, 5))
    other = net.reordered("columns-reversed")
    assert other.order == (5, 2, 4, 1, 3, 0)
    assert other.net is net.net
    others = {name for name, p in other.named_parameters() if all(p is not q for q in net.parameters())}
    assert others == {"ordering"}
    assert bool((jacobian(other, Source.STATE)[~allowed(other, other.sees[Source.STATE])] == 0).all())
    alone = type(net)(**other.config()).double()
    alone.load_state_dict(other.state_dict())
    x, context = torch.randint(2, (4, 6)), torch.rand(4, 1).double()
    assert torch.equal(alone({Source.STATE: x}, context), other({Source.STATE: x}, context))
    twins = copy.deepcopy(torch.nn.ModuleList([net, other]))
    assert twins[0].net is twins[1].net


# ---- dropout ----


@pytest.mark.parametrize("kind", BOTH)
def test_dropout_is_for_gradients_alone(kind):
    """A likelihood or a sample is the whole network's, in training mode too."""
    net = sequence(kind, 6, dropout=0.5)
    flow = zoo.flow(zoo.Layer(net)).double().train()
    x = all_states((2,) * 6)
    torch.manual_seed(0)
    drawn = [flow.log_marginal_total(flow.start(x)).detach() for _ in range(2)]
    assert not torch.allclose(*drawn)
    state = torch.get_rng_state()
    with torch.no_grad():
        exact, noise = flow().log_prob(x), draw_noise(flow, 20)
    sample = flow.sample_with(noise)
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(float(exact.exp().sum()) - 1) < 1e-10
    flow.eval()
    with torch.no_grad():
        assert torch.equal(flow().log_prob(x), exact)
    assert torch.equal(flow.sample_with(noise), sample)
    for whole in (flow.log_marginal_total(flow.start(x)), flow().log_prob(x)):
        torch.testing.assert_close(whole.detach(), exact, rtol=0, atol=1e-12)


# ---- the rest ----


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("categories", [2, 3, (2, 3, 4)])
def test_they_start_where_they_are_told(kind, categories):
    net = sequence(kind, 3, order="random:1", categories=categories)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    logits = torch.randn(net.choices.flat).double()
    net.start_at(logits)
    found = net({Source.STATE: torch.zeros(2, 3, dtype=torch.int64)})
    torch.testing.assert_close(found, logits.expand(found.shape), rtol=0, atol=0)


@pytest.mark.parametrize("rotary", [False, True])
def test_fused_attention_is_the_plain_one(rotary):
    torch.manual_seed(0)
    net = CausalTransformer(30, width=16, depth=2, heads=4, dropout=0.0, rotary=rotary)
    x = torch.randint(2, (3, 30))
    fused = net({Source.STATE: x})
    torch.testing.assert_close(fused.double(), net.double()({Source.STATE: x}), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rotary", [False, True])
def test_turned_queries_and_keys_see_differences_of_places(rotary):
    """Moved by a row and a column, the products of queries and keys stay what they are; those that are not turned, too."""
    stack = CausalTransformer(12, width=8, depth=1, heads=2, shape=(3, 4), rotary=rotary).double().net.core
    assert isinstance(stack, AttentionStack)
    where = torch.tensor([[0.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    moved = where + torch.tensor([1.0, 1.0], dtype=torch.float64)
    vectors = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)
    products = []
    for places in (where, moved):
        turn = stack.turn(places)
        assert (turn is None) == (not rotary)
        queries, keys = vectors if turn is None else (turned(part, turn) for part in vectors)
        products.append(queries @ keys.mT)
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-12)
    if rotary:
        far = where * torch.tensor([1.0, 2.0], dtype=torch.float64)
        turn = stack.turn(far)
        assert turn is not None
        assert not torch.allclose(turned(vectors[0], turn) @ turned(vectors[1], turn).mT, products[0])


@pytest.mark.parametrize("rotary", [False, True])
def test_bfloat16_is_near(rotary):
    """Products are rounded, logits are not: they come in float32, and close."""
    net = sequence("transformer", 30, rotary=rotary).float()
    x = torch.randint(2, (3, 30))
    with torch.autocast("cpu", torch.bfloat16):
        found = net({Source.STATE: x})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, net({Source.STATE: x}), rtol=0, atol=0.2)


def refused(kind: str) -> list[tuple[dict, str]]:
    shared: list[tuple[dict, str]] = [
        ({"width": 0}, "width is at least 1, and got 0"),
        ({"depth": 0}, "depth is at least 1, and got 0"),
        ({"reach": -1}, "reach is at least 0, and got -1"),
        ({"dropout": 1.0}, "below 1, and got 1.0"),
        ({"shape": (2, 2)}, r"shape of 6 features, and got shape=\(2, 2\)"),
        ({"order": "columns"}, "'columns' needs the two-dimensional shape of 6 features, and got shape=None"),
        ({"order": "sideways"}, "'natural', 'reversed'.*'sideways'"),
        ({"order": 5}, "or a permutation, and got 5"),
        ({"shape": 6}, "shape of 6 features, and got shape=6"),
        ({"sees": {"state": "all"}}, "'before' or 'up to' a feature; use MLP or Coupling"),
        ({"features": 0}, "at least one feature"),
        ({"context": -1}, "at least 0, and got -1"),
        ({"skipped": [1, 1]}, r"from 0 to 5, once each; got \[1, 1\]"),
        ({"skipped": [6]}, r"from 0 to 5, once each; got \[6\]"),
        ({"skipped": 3}, "a list of whole numbers, those of features; got 3"),
        ({"skipped": ["1"]}, "a list of whole numbers, those of features"),
        ({"skipped": range(6)}, "all 6 features, and at least one must take a step"),
    ]
    own: dict[str, list[tuple[dict, str]]] = {
        "transformer": [
            ({"width": 6, "heads": 4}, "multiple of heads, and got width=6 with heads=4"),
            ({"width": 6, "rotary": True}, "width=6 with heads=2 gives a head 3; choose width / heads even"),
            (
                {"width": 4, "shape": (2, 3), "rotary": True},
                "each of 2 coordinates.* gives a head 2; choose width / heads even, and at least 4",
            ),
        ],
        "recurrent": [({"cell": "rnn"}, "cell is one of gru, lstm, and got 'rnn'")],
    }
    return [*shared, *own[kind]]


@pytest.mark.parametrize(("kind", "options", "words"), [(k, *case) for k in BOTH for case in refused(k)])
def test_what_they_refuse(kind, options, words):
    usual = {"features": 6, "width": 8} | ({"heads": 2} if kind == "transformer" else {})
    with pytest.raises(ModelError, match=words):
        (CausalTransformer if kind == "transformer" else Recurrent)(**(usual | options))


@pytest.mark.parametrize("kind", BOTH)
def test_a_context_of_the_wrong_width_is_refused(kind):
    net = sequence(kind, 2, context=2)
    for given_context in (None, torch.zeros(1, 3)):
        with pytest.raises(ModelError, match="made for 2 context features"):
            net({Source.STATE: torch.zeros(1, 2, dtype=torch.int64)}, given_context)


def slopes(net: SequenceConditioner, x: Tensor) -> Tensor:
    return torch.autograd.grad(net({Source.STATE: x}).sum(), x)[0]


def test_relaxed_states_carry_gradients():
    """As straight-through gradients need: the slope at a relaxed input is that of differences."""
    net = sequence("transformer", 4, categories=3)
    x = torch.rand(2, 4 * 3, dtype=torch.float64, requires_grad=True)
    step = torch.zeros_like(x)
    step[1, 2] = 1e-6
    with torch.no_grad():
        difference = (net({Source.STATE: x + step}).sum() - net({Source.STATE: x - step}).sum()) / 2e-6
    assert float(slopes(net, x)[1, 2]) == pytest.approx(float(difference), rel=1e-5)
