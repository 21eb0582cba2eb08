"""What print and a notebook show of models: what tells them apart, and no machinery."""

from html.parser import HTMLParser

import pytest
import torch

import zoo
from xorflow import (
    MADE,
    Coupling,
    FactorisedBase,
    LatentFlow,
    Layer,
    Mixture,
    ModularAffine,
    ModularShift,
    Xor,
)
from xorflow._states import Alphabet
from xorflow.conditioners import Conditioner
from xorflow.flows import with_base

MACHINERY = ("Layout", "Reader", "Table", "Linear", "Perceptron", "Parameter", "tensor", "buffer")


def pair() -> LatentFlow:
    layers = [Layer(MADE(784)), Layer(MADE(784, (512, 512), order="random:1"))]
    return LatentFlow(layers, FactorisedBase(784, 0.998, learned=True))


def test_a_flow_in_print():
    assert repr(pair()) == (
        "LatentFlow(\n"
        "  features: 784 of 2 categories\n"
        "  weights: 2,674,992\n"
        "  layer 1 of 2: Layer(MADE(784, hidden=(1024,), order='natural'))\n"
        "  layer 2 of 2: Layer(MADE(784, hidden=(512, 512), order='random:1'))\n"
        "  base: FactorisedBase(784, p0=0.998, learned=True)\n"
        ")"
    )
    assert repr(pair().greedy()).startswith("Flow(\n  features: 784")


def test_a_table_of_several_kinds_in_print():
    sizes = [1461, *[5] * 19]
    layer = zoo.inferred(zoo.made(20, categories=sizes, context=3), ("x",))
    flow = LatentFlow([layer], FactorisedBase(20, 0.25, categories=sizes, tied=True))
    cut = "categories=(1461, 5, 5, 5, 5, 5, 5, 5, ... 20 in all)"
    assert repr(flow).splitlines()[1:] == [
        "  features: 19 of 5, 1 of 1461 categories",
        "  context: 3 features",
        f"  weights: {sum(p.numel() for p in flow.parameters()):,}",
        f"  layer 1 of 1: Layer(MADE(20, hidden=(8,), order='natural', {cut}, context=3), "
        f"posterior=MLP(20, hidden=(8,), {cut}, context=3))",
        f"  base: FactorisedBase(20, p0=0.25, {cut}, tied=True)",
        ")",
    ]


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_every_member_in_a_line_for_each_part(name):
    flow = zoo.make(name)
    shown = repr(flow)
    assert len(shown.splitlines()) == 2 + 2 + bool(flow.context_features) + flow.depth + 1
    assert not any(word in shown for word in MACHINERY)
    for layer in flow.layers:
        net = layer.conditioner
        assert type(net).__name__ in shown
        assert (
            f"mask={''.join(str(int(m)) for m in net.mask)}" in repr(net)
            if net.mask is not None
            else "order=" in repr(net)
        )
        assert type(layer.transform) is ModularShift or repr(layer.transform) in shown
    assert repr(flow.base) in shown


@pytest.mark.parametrize("name", zoo.names(lambda flow: flow.depth > 1))
def test_layers_that_differ_look_different(name):
    layers = list(zoo.make(name).layers)
    for one in layers:
        for other in layers:
            alike = one.conditioner.config() == other.conditioner.config() and type(one.conditioner) is type(
                other.conditioner
            )
            assert (repr(one.conditioner) == repr(other.conditioner)) is alike


def test_masks_and_orderings_are_told_apart():
    masks = [
        "halves",
        "alternate",
        "checkerboard",
        "random:1",
        "random:2",
        *(f"nested:{level}" for level in range(1, 6)),
    ]
    nets = [Coupling(64, (4,), mask=m, shape=(8, 8), flip=flip) for m in masks for flip in (False, True)]
    nets += [MADE(64, (4,), order=order) for order in ("natural", "random:1", tuple(reversed(range(64))))]
    assert len({repr(net) for net in nets}) == len(nets)
    assert max(len(repr(net)) for net in nets) < 130


def test_parts_alone():
    assert repr(Xor(3)) == "Xor(3 of 2 categories)"
    assert repr(ModularAffine([5, 5, 3], (4,))) == "ModularAffine(1 of 3, 2 of 5 categories, scales=(4,))"
    assert repr(Alphabet(range(1, 20))) == "Alphabet(19 of 1 to 19 categories)"
    table = torch.tensor([[0.9, 0.1], [0.25, 0.75]])
    assert repr(FactorisedBase(2, probabilities=table)) == "FactorisedBase(2, p0=0.25 to 0.9)"
    assert "'own': 'before'" in repr(zoo.made(3, sees=zoo.OWN))
    assert "choices=(6, 2)" in repr(zoo.affine(2, (3, 2)))


def test_a_conditioner_of_ones_own():
    class Constant(Conditioner):
        def __init__(self, features: int, level: float = 0.0) -> None:
            super().__init__(features, categories=2, choices=None, sees={}, order=(0, 1), context=0)
            self.level = torch.nn.Parameter(torch.full((features,), level))

        def forward(self, inputs, context=None):
            return self.level

        def start_at(self, logits):
            self.level.data.copy_(logits)

    assert repr(Constant(2)) == "Constant(2)"


def test_a_flow_on_another_base():
    flow = LatentFlow([Layer(MADE(3, (4,)))], FactorisedBase(3))
    assert "MADE(3, hidden=(4,), order='natural') on another base" in repr(
        with_base(flow, FactorisedBase(3, 0.8))
    )


def test_a_mixture_has_its_components_within():
    parts = [LatentFlow([Layer(MADE(3, (4,), order=o))], FactorisedBase(3)) for o in ("natural", "reversed")]
    lines = repr(Mixture(parts, [0.25, 0.75])).splitlines()
    assert lines[0] == "Mixture("
    assert lines[3] == "  component 1, of weight 0.25: LatentFlow("
    assert lines[6] == "    layer 1 of 1: Layer(MADE(3, hidden=(4,), order='natural'))"
    assert lines[9] == "  component 2, of weight 0.75: LatentFlow("
    assert lines[-2:] == ["  )", ")"]


def test_a_distribution_names_its_model():
    assert repr(pair()()) == f"ModelDistribution(batch_shape=(), model={pair()!r})"
    assert "batch_shape=(4, 5)" in repr(zoo.make("D3 context")(torch.zeros(4, 5, 2)))


class Tables(HTMLParser):
    """Tables and cells, and whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables = 0
        self.rows = 0
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tables += tag == "table"
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_notebook_shows_a_table():
    found = Tables(pair()._repr_html_())
    assert (found.open, found.tables, found.rows) == ([], 1, 5)
    assert found.words[0] == "LatentFlow"
    assert "Layer(MADE(784, hidden=(512, 512), order='random:1'))" in found.words
    parts = [LatentFlow([Layer(MADE(3, (4,)))], FactorisedBase(3)) for _ in range(2)]
    mixed = Tables(Mixture(parts)._repr_html_())
    assert (mixed.open, mixed.tables, mixed.rows) == ([], 3, 4 + 2 * 4)
