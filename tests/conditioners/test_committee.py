"""Committees: the mean of networks' probabilities, in whole passes, in walks and in captured steps."""

import json

import pytest
import torch

import zoo
from enumeration import all_states, draw_noise, sequential_sample
from xorflow import (
    MADE,
    MLP,
    CausalTransformer,
    Committee,
    Coupling,
    FactorisedBase,
    Flow,
    LatentFlow,
    Layer,
    Mixture,
    ModelError,
    Recurrent,
    Xor,
    committee_of,
    evaluate,
)
from xorflow.conditioners import Source
from xorflow.data import Split
from xorflow.flows import ways
from xorflow.training import flow_from_spec, flow_to_spec, start_from_data
from xorflow.training.storage import load_tensors, save_tensors

SMALL = {"width": 8, "heads": 2, "depth": 2, "dropout": 0.0}


def transformers(count: int, order: str = "natural", **options) -> list[CausalTransformer]:
    torch.manual_seed(0)
    nets = [CausalTransformer(20, order=order, shape=(4, 5), **(SMALL | options)) for _ in range(count)]
    with torch.no_grad():
        for net in nets:
            for parameter in net.parameters():
                parameter.normal_(std=0.4)
    return [net.double() for net in nets]


@pytest.mark.parametrize("categories", [2, 3, (2, 3, 4), (3, 1, 2)])
def test_its_probabilities_are_the_mean(categories):
    torch.manual_seed(0)
    layers = [Layer(MADE(3, (8,), order="reversed", categories=categories)) for _ in range(3)]
    flow = zoo.flow(zoo.committee(*layers)).double()
    point = flow.start(flow.encode(all_states(flow.states.sizes)))
    each = [layer.generator_nodes(point, None).log_probs().exp() for layer in layers]
    found = flow.layers[0].generator_nodes(point, None).log_probs().exp()
    torch.testing.assert_close(found, sum(each) / 3)
    assert len(flow.layers[0].conditioner) == 3
    assert flow.layers[0].conditioner.order == layers[0].conditioner.order


@pytest.mark.parametrize("categories", [2, (2, 3, 4)])
def test_on_one_base_it_is_no_worse_than_its_members_are_on_average(categories):
    torch.manual_seed(0)
    members = [zoo.sharpen(zoo.flow(zoo.made(3, categories=categories))).double() for _ in range(3)]
    for flow in members:
        flow.base = members[0].base
    together = committee_of(members)
    x = all_states(together.states.sizes)
    found = together().log_prob(x)
    mean = torch.stack([flow().log_prob(x) for flow in members]).mean(0)
    assert bool((found > mean).all())
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-12)
    # feature by feature a mixture: with one feature the same as one
    one = [zoo.flow(zoo.made(1)).double() for _ in range(2)]
    one[1].base = one[0].base
    x = torch.tensor([[0], [1]])
    torch.testing.assert_close(committee_of(one)().log_prob(x), Mixture(one).double()().log_prob(x))


@pytest.mark.parametrize("order", ["natural", "columns", "random:2"])
@pytest.mark.parametrize("quiet", [(), (0, 3, 4, 5, 19)])
@pytest.mark.parametrize("count", [2, 3])
def test_cached_and_launched_samples_are_those_of_whole_passes(order, quiet, count, monkeypatch):
    """In float64 the very integers, on the same noise."""
    flow = zoo.flow(Layer(Committee(transformers(count, order, quiet=quiet, rotary=True)))).double()
    noise = draw_noise(flow, 30)
    y = flow.base.sample(noise.base)
    with torch.no_grad():
        expected = sequential_sample(flow, y, noise.layers, None)
    for way in ("passes", "blocks"):
        with ways.only(way):
            assert torch.equal(flow.sample_with(noise), expected)
    net = flow.layers[0].conditioner
    monkeypatch.setattr("xorflow._cuda.devices.STEPPED_ON", ("cpu",))
    walk = net.incremental(30, None, 56)
    assert walk is not None
    with torch.no_grad():
        found = walk.at_once(y[:, list(net.order)].double(), noise.layers[:, 0, list(net.order)])
    assert found is not None
    assert torch.equal(found.long(), expected[:, list(net.order)])


def test_members_that_step_differently_walk_one_feature_at_a_time():
    nets = [transformers(1, quiet=(0, 3))[0], transformers(1, quiet=(7,))[0]]
    flow = zoo.flow(Layer(Committee(nets))).double()
    walk = flow.layers[0].conditioner.incremental(30, None, 56)
    assert walk is not None
    assert [(block.first, block.last) for block in walk.blocks] == [(d, d + 1) for d in range(20)]
    noise = draw_noise(flow, 30)
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, None)
    with ways.only("blocks"):
        assert torch.equal(flow.sample_with(noise), expected)


def test_members_of_which_one_cannot_walk_are_sampled_by_passes():
    class Still(MADE):
        def incremental(self, *_):
            return None

    torch.manual_seed(0)
    flow = zoo.flow(Layer(Committee([MADE(5), Still(5)]))).double()
    assert flow.layers[0].conditioner.incremental(2, None, 56) is None
    noise = draw_noise(flow, 30)
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, None)
    assert torch.equal(flow.sample_with(noise), expected)


def test_logits_in_half_precision_are_averaged_in_full():
    net = MADE(50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Committee([net, net])({Source.STATE: torch.zeros(3, 50)})
        torch.testing.assert_close(found, net({Source.STATE: torch.zeros(3, 50)}).float(), rtol=0, atol=1e-6)


def test_it_starts_where_it_is_told():
    torch.manual_seed(0)
    both = Committee([Recurrent(4, width=6), CausalTransformer(4, **SMALL)])
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    logits = torch.randn(4)
    both.start_at(logits)
    torch.testing.assert_close(both({Source.STATE: torch.zeros(1, 4)}), logits[None])


# ---- models as one ----


def mixtures(count: int) -> list[Mixture]:
    """Each of one transformer in two orderings, with its own bases and weights."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = zoo.transformer(4, "natural", shape=(2, 2)).conditioner
        flows = [zoo.flow(Layer(n), learned=True) for n in (net, net.reordered("columns"))]
        found.append(Mixture(flows, (0.3, 0.7) if seed else (0.5, 0.5)).double())
    return found


def test_a_committee_of_flows_averages_their_networks_and_bases():
    flows = [
        zoo.sharpen(zoo.flow(zoo.made(3, "reversed", categories=3), learned=True)).double() for _ in range(2)
    ]
    together = committee_of(flows)
    assert isinstance(together, LatentFlow)
    mean = (flows[0].base.log_table().exp() + flows[1].base.log_table().exp()) / 2
    torch.testing.assert_close(together.base.log_table().exp(), mean)
    assert together.base.learned
    x = all_states(together.states.sizes)
    assert float(together().log_prob(x).exp().sum()) == pytest.approx(1, abs=1e-12)
    assert together.layers[0].conditioner.members[1] is flows[1].layers[0].conditioner


def test_a_committee_of_mixtures_is_one_for_each_component():
    parts = mixtures(3)
    together = committee_of(parts)
    assert isinstance(together, Mixture)
    assert [c.layers[0].conditioner.order for c in together] == [
        c.layers[0].conditioner.order for c in parts[0]
    ]
    torch.testing.assert_close(together.log_weights().exp(), sum(m.log_weights().exp() for m in parts) / 3)
    x = all_states(together.states.sizes)
    assert float(together().log_prob(x).exp().sum()) == pytest.approx(1, abs=1e-12)
    count = sum(p.numel() for m in parts for p in m.parameters())
    bases = sum(p.numel() for m in parts[1:] for c in m for p in c.base.parameters()) + 2 * (len(parts) - 1)
    assert sum(p.numel() for p in together.parameters()) == count - bases


@pytest.mark.parametrize(
    "model", [lambda: committee_of(mixtures(2)), lambda: zoo.make("committee D3 different")]
)
def test_files_keep_it(model, tmp_path):
    before = model()
    save_tensors(tmp_path, "weights", before.state_dict())
    after = flow_from_spec(json.loads(json.dumps(flow_to_spec(before)))).double()
    after.load_state_dict(load_tensors(tmp_path, "weights"))
    x = all_states(before.states.sizes)
    torch.testing.assert_close(after().log_prob(x), before().log_prob(x))
    assert [p.shape for p in after.parameters()] == [p.shape for p in before.parameters()]


def test_files_keep_a_committee_of_posteriors():
    posterior = Committee([MLP(3, (4,), sees=("x",)), MLP(3, (5,), sees=("x",))])
    before = LatentFlow([Layer(MADE(3), posterior=posterior)], FactorisedBase(3))
    after = flow_from_spec(json.loads(json.dumps(flow_to_spec(before))))
    after.load_state_dict(before.state_dict())


def test_a_committee_of_couplings_starts_from_data_as_one_does():
    torch.manual_seed(0)
    split = Split(torch.randint(0, 3, (200, 6), dtype=torch.uint8).clamp(max=1))
    found = []
    for net in (Coupling(6, categories=3), Committee([Coupling(6, categories=3), Coupling(6, categories=3)])):
        flow = LatentFlow([Layer(net)], FactorisedBase(6, 0.998, categories=3, learned=True))
        start_from_data(flow, split)
        found.append(evaluate.exact(flow, split).nll)
    assert found[1] == pytest.approx(found[0], abs=0.3)


REFUSED = {
    "one member": ([MADE(3)], "at least two members"),
    "features": ([MADE(3), MADE(4)], "the same features: member 1 has 3, and member 2 has 4"),
    "categories": ([MADE(3), MADE(3, categories=3, choices=2)], "the same categories"),
    "choices": ([MADE(3), MADE(3, choices=4)], "the same choices"),
    "context": ([MADE(3), MADE(3, context=2)], "the same context features"),
    "inputs": ([MADE(3), MADE(3, sees={"x": "before"})], "the same inputs"),
    "ordering": ([MADE(3), MADE(3), MADE(3, order="reversed")], "that of member 3 is not that of member 1"),
    "masks": ([Coupling(4), Coupling(4, flip=True)], "have one ordering"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_networks_it_refuses(case):
    members, words = REFUSED[case]
    with pytest.raises(ModelError, match=words):
        Committee(members)


class Mirror(Xor):
    """Flips where xor does not."""

    def to_base(self, x, u):
        return super().to_base(x, 1 - u)

    def to_data(self, y, u):
        return super().to_data(y, 1 - u)


def test_transforms_that_are_the_same_bijections_are_the_same():
    committee_of([zoo.flow(zoo.made(3)), zoo.flow(Layer(MADE(3), Xor(3)))])


def test_models_it_refuses():
    deep = zoo.flow(zoo.made(3), zoo.made(3))
    shallow = zoo.flow(zoo.made(3))
    one = mixtures(1)[0]
    three = Mixture([*one, next(iter(one))])
    for models, words in (
        ([shallow, deep], "flow 2 is none"),
        ([shallow, Flow(shallow.layers, shallow.base)], "and got a Flow"),
        ([shallow, one], "these have 1, 2"),
        ([one, three], "these have 2, 3"),
        ([zoo.flow(zoo.made(2, categories=3)), zoo.flow(zoo.affine(2, 3))], "the same choices"),
        (
            [shallow, zoo.flow(Layer(MADE(3), Mirror(3)))],
            "the Mirror of flow 2 has others than the ModularShift of flow 1",
        ),
        ([shallow, zoo.flow(zoo.made(3)).double()], "torch.float32 on cpu, and flow 2 has torch.float64"),
        ([shallow, zoo.flow(zoo.made(4))], "the same features: member 1 has 3, and member 2 has 4"),
        ([Mixture([shallow, deep.greedy()])] * 2, "one of these has others"),
        ([shallow], "at least two members"),
    ):
        with pytest.raises(ModelError, match=words):
            committee_of(models)
