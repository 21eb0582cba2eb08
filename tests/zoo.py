"""Small instances of everything. Whoever adds one line here gets every property test for it.

All members are small enough to be enumerated: each state x, and each value of all choices. They are in
float64, their weights are four times the usual (so that no probability is trivially near one half), and
their bases differ from feature to feature (with a uniform base even a wrong model sums to one).
"""

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from xorflow import (
    MADE,
    MLP,
    CausalTransformer,
    Coupling,
    FactorisedBase,
    LatentFlow,
    Layer,
    ModularAffine,
    Recurrent,
)
from xorflow.conditioners import BoostedTrees, Boosting, Conditioner, Stacked

Categories = int | Sequence[int]
CHAIN = {"previous": "up to", "own": "before"}
OWN = {"state": "before", "own": "before"}


def flow(*layers: Layer, learned: bool = False) -> LatentFlow:
    """The layers on a base with its own probabilities for each feature."""
    states = layers[0].transform.states
    scores = torch.randn(states.features, states.width, dtype=torch.float64)
    table = [row[:size].softmax(-1) for row, size in zip(scores, states.sizes, strict=True)]
    base = FactorisedBase(states.features, categories=states.sizes, probabilities=table, learned=learned)
    return LatentFlow(layers, base)


def tied(*layers: Layer, learned: bool = False) -> LatentFlow:
    """The layers on a tied base with its own probabilities for each feature."""
    states = layers[0].transform.states
    base = FactorisedBase(states.features, categories=states.sizes, tied=True, learned=learned)
    with torch.no_grad():
        base.logits.copy_(torch.linspace(-1.5, 1.0, states.features))
    return LatentFlow(layers, base)


def made(
    features: int, order: str | Sequence[int] = "natural", hidden: Sequence[int] = (8,), **options
) -> Layer:
    return Layer(MADE(features, hidden, order=order, **options))


def affine(features: int, categories: Categories, order: str = "natural", **options) -> Layer:
    sizes = (categories,) * features if isinstance(categories, int) else tuple(categories)
    transform = ModularAffine(sizes, options.pop("scales", None))
    net = MADE(features, (8,), order=order, categories=sizes, choices=transform.choices.sizes, **options)
    return Layer(net, transform)


def coupling(features: int, mask: str = "halves", flip: bool = False, **options) -> Layer:
    return Layer(Coupling(features, (8,), mask=mask, flip=flip, **options))


def transformer(features: int, order: str | Sequence[int] = "natural", depth: int = 1, **options) -> Layer:
    sizes = {"width": 8, "heads": 2, "dropout": 0.0}
    return Layer(_active(CausalTransformer(features, order=order, depth=depth, **(sizes | options))))


def recurrent(features: int, order: str | Sequence[int] = "natural", **options) -> Layer:
    return Layer(_active(Recurrent(features, order=order, width=8, **options)))


def trees(features: int, order: str | Sequence[int] = "natural", **options) -> Layer:
    return Layer(_fitted(BoostedTrees(features, order=order, **options)))


def stacked(features: int, order: str | Sequence[int] = "natural", ordered=(), **options) -> Layer:
    """Trees and networks, and at each feature other weights."""
    nets: list[Conditioner] = [MADE(features, (hidden,), order=order, **options) for hidden in (8, 6)]
    if not options.get("context"):
        nets[0] = trees(features, order, ordered=ordered, **options).conditioner
    net = Stacked(nets)
    with torch.no_grad():
        net.log_weights.uniform_(-0.4, 0.1)
    return Layer(net)


def _fitted(net: BoostedTrees) -> BoostedTrees:
    """Trees of a few rows, as many as there are rounds."""
    rows = torch.rand(40, net.features).mul(torch.tensor(net.states.sizes)).long()
    return net.fit(rows, rows, Boosting(rate=0.5, rounds=6, rows=1, l2=0.1))


def _active(net: Conditioner) -> Conditioner:
    """Weights of one size: those of a fresh network are small, and a narrow one would do almost nothing."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.15)
    return net


def inferred(layer: Layer, sees: Sequence[str] = ("x", "state"), *, relative: bool = False) -> Layer:
    """The layer with a posterior that sees everything."""
    net: Conditioner = layer.conditioner
    options = {"categories": net.states.sizes, "choices": net.choices.sizes, "context": net.context_features}
    posterior = MLP(net.features, () if relative else (8,), sees=sees, **options)
    return Layer(net, layer.transform, posterior, relative)


def chain(features: int, depth: int, order: str | Sequence[int] = "natural", **options) -> list[Layer]:
    """The paper's own deep model: the first layer sees x, each later one the choice of the one before."""
    first = made(features, order, sees={"x": "before"}, **options)
    return [first, *(made(features, order, sees=CHAIN, **options) for _ in range(depth - 1))]


MEMBERS: dict[str, Callable[[], LatentFlow]] = {
    # depth 1, xor
    "D1": lambda: flow(made(1)),
    "D2": lambda: flow(made(2)),
    "D3 reversed": lambda: flow(made(3, "reversed")),
    "D4 random": lambda: flow(made(4, "random:3", (12,))),
    "D5 explicit, two hidden layers": lambda: flow(made(5, (3, 0, 4, 1, 2), (16, 16))),
    "D3 linear": lambda: flow(made(3, "random:1", ())),
    "D4 direct": lambda: flow(made(4, "reversed", (8,), direct=True)),
    "D3 narrow": lambda: flow(made(3, "natural", (1,), direct=True)),
    "D3 learned base": lambda: flow(made(3), learned=True),
    "D3 context": lambda: flow(made(3, "reversed", (8,), context=2)),
    "D2 linear, context": lambda: flow(made(2, hidden=(), context=3)),
    "D4 own": lambda: flow(made(4, "random:5", sees=OWN)),
    "D3 x": lambda: flow(made(3, sees={"x": "before"})),
    "D3 posterior": lambda: flow(inferred(made(3))),
    # depth 1, K > 2 and mixed
    "K3 D1": lambda: flow(made(1, categories=3)),
    "K3 D3": lambda: flow(made(3, "reversed", categories=3)),
    "K4 D2": lambda: flow(made(2, categories=4, direct=True)),
    "K5 D2": lambda: flow(made(2, "reversed", categories=5)),
    "K 2, 3, 4": lambda: flow(made(3, "random:2", (12,), categories=(2, 3, 4))),
    "K 3, 1, 2 own": lambda: flow(made(3, categories=(3, 1, 2), sees=OWN)),
    "K 3, 2, 2, 4": lambda: flow(made(4, "random:1", (12, 12), categories=(3, 2, 2, 4))),
    "K 3, 2, 4 direct": lambda: flow(made(3, "random:2", (8,), categories=(3, 2, 4), direct=True)),
    "K 2, 3, 2, 4 linear": lambda: flow(made(4, (3, 1, 0, 2), (), categories=(2, 3, 2, 4)), learned=True),
    "K 3, 2, 3 own, context": lambda: flow(made(3, "reversed", categories=(3, 2, 3), sees=OWN, context=2)),
    "K 4, 2, 3 posterior": lambda: flow(inferred(made(3, "random:2", categories=(4, 2, 3), context=1))),
    "K3 context, learned base": lambda: flow(made(2, categories=3, context=1), learned=True),
    "K3 posterior": lambda: flow(inferred(made(2, categories=3))),
    # location and scale
    "affine K2": lambda: flow(affine(3, 2)),
    "affine K3": lambda: flow(affine(2, 3)),
    "affine K4": lambda: flow(affine(2, 4, "reversed")),
    "affine K5": lambda: flow(affine(2, 5)),
    "affine K5 scales 1, 4": lambda: flow(affine(2, 5, scales=(4,))),
    "affine K 2, 3, 4": lambda: flow(affine(3, (2, 3, 4))),
    "affine K 3, 2, 1, 5": lambda: flow(affine(4, (3, 2, 1, 5), "random:3", direct=True), learned=True),
    "affine K3 posterior": lambda: flow(inferred(affine(2, 3))),
    # coupling
    "coupling D2": lambda: flow(coupling(2)),
    "coupling D5 halves": lambda: flow(coupling(5), coupling(5, flip=True)),
    "coupling D4 checkerboard": lambda: flow(coupling(4, "checkerboard", shape=(2, 2))),
    "coupling D4 random": lambda: flow(coupling(4, "random:1"), coupling(4, "random:1", flip=True)),
    "coupling D3 alternate, context": lambda: flow(coupling(3, "alternate", context=2)),
    "coupling K 2, 3, 4": lambda: flow(coupling(3, categories=(2, 3, 4))),
    "coupling K3 twice": lambda: flow(coupling(2, categories=3), coupling(2, categories=3, flip=True)),
    "coupling D3 depth 2 posterior": lambda: flow(
        inferred(coupling(3, "alternate")), inferred(coupling(3, "alternate", flip=True))
    ),
    "coupling D3 relative posterior": lambda: flow(inferred(coupling(3), ("x",), relative=True), learned=True),
    "coupling K 2, 3 depth 2 posterior": lambda: flow(
        inferred(coupling(2, categories=(2, 3))),
        inferred(coupling(2, flip=True, categories=(2, 3)), ("x", "previous"), relative=True),
    ),
    "coupling K 3, 2, 4, 2 posterior": lambda: flow(
        inferred(coupling(4, "random:1", categories=(3, 2, 4, 2)), relative=True), learned=True
    ),
    # several layers on the running state
    "D1 depth 2": lambda: flow(made(1), made(1)),
    "D3 depth 2 reversed": lambda: flow(made(3), made(3, "reversed")),
    "D4 depth 2 random": lambda: flow(made(4, "random:1"), made(4, "random:2")),
    "D3 depth 2 one order": lambda: flow(made(3, (1, 2, 0)), made(3, (1, 2, 0))),
    "D2 depth 3": lambda: flow(made(2), made(2, "reversed"), made(2, hidden=())),
    "D2 depth 3 one order": lambda: flow(*(made(2, "reversed") for _ in range(3))),
    "D3 depth 3": lambda: flow(made(3, "random:1"), made(3, "reversed"), made(3, "random:2")),
    "D2 depth 8": lambda: flow(*(made(2, ("natural", "reversed")[i % 2]) for i in range(8))),
    "D3 depth 2 own": lambda: flow(made(3, sees=OWN), made(3, "reversed", sees=OWN)),
    "D3 depth 2 own first": lambda: flow(made(3, "reversed", sees=OWN), made(3)),
    "D2 depth 2 context": lambda: flow(made(2, context=2), made(2, "reversed", context=2)),
    "D3 depth 2 posterior": lambda: flow(inferred(made(3)), inferred(made(3, "reversed"), ("x", "previous"))),
    "D3 depth 2 learned base": lambda: flow(made(3), made(3, "reversed"), learned=True),
    "made and coupling": lambda: flow(made(3, "random:4"), coupling(3)),
    "K3 depth 2": lambda: flow(made(2, categories=3), made(2, "reversed", categories=3)),
    "K 2, 3 depth 3": lambda: flow(
        *(made(2, order, categories=(2, 3)) for order in ("natural", "reversed", "natural"))
    ),
    "affine K3 depth 2": lambda: flow(affine(2, 3), made(2, "reversed", categories=3)),
    # chains
    "chain D3 depth 2": lambda: flow(*chain(3, 2)),
    "chain D2 depth 3": lambda: flow(*chain(2, 3, "reversed")),
    "chain D3 depth 3": lambda: flow(*chain(3, 3, (2, 0, 1))),
    "chain K3 depth 2": lambda: flow(*chain(2, 2, categories=3)),
    "chain K 3, 2 depth 2": lambda: flow(*chain(2, 2, "reversed", categories=(3, 2))),
    "chain summable": lambda: flow(
        made(3, "reversed", sees={"x": "before", "own": "before"}),
        made(3, "reversed", sees={"previous": "up to"}),
    ),
    "chain sees all that it may": lambda: flow(
        made(2, sees=OWN),
        made(2, sees={"x": "before", "state": "before", **CHAIN}),
        made(2, sees={"x": "before", "state": "before", "previous": "up to"}),
    ),
    "chain context": lambda: flow(*chain(2, 2, "reversed", context=2)),
    "chain posterior": lambda: flow(*(inferred(layer, ("x", "previous")) for layer in chain(2, 2))),
    # attention and recurrence
    "transformer D1": lambda: flow(transformer(1)),
    "transformer D2, learned base": lambda: flow(transformer(2, "reversed"), learned=True),
    "transformer D4 image": lambda: flow(transformer(4, "random:1", 2, shape=(2, 2), reach=1)),
    "transformer K 2, 3, 2 context": lambda: flow(transformer(3, (1, 2, 0), categories=(2, 3, 2), context=2)),
    "transformer D4 rotary, skipped": lambda: flow(
        transformer(4, (2, 0, 3, 1), shape=(2, 2), reach=1, rotary=True, skipped=(0, 3))
    ),
    "transformer K 3, 2, 4": lambda: flow(transformer(3, "random:2", categories=(3, 2, 4))),
    "transformer K 2, 4, 3, 2 skipped": lambda: flow(
        transformer(4, (2, 0, 3, 1), shape=(2, 2), reach=1, categories=(2, 4, 3, 2), skipped=(0, 3))
    ),
    "transformer K3 rotary, skipped": lambda: flow(transformer(3, categories=3, rotary=True, skipped=(1,))),
    "transformer D2 depth 2": lambda: flow(transformer(2), transformer(2, "reversed")),
    "recurrent D3": lambda: flow(recurrent(3, "random:2", depth=2)),
    "recurrent D4 image": lambda: flow(recurrent(4, "columns", shape=(2, 2)), learned=True),
    "recurrent K 2, 3 context": lambda: flow(
        recurrent(2, "reversed", cell="lstm", categories=(2, 3), context=2)
    ),
    "recurrent K 4, 2, 3": lambda: flow(recurrent(3, "random:2", categories=(4, 2, 3))),
    # trees
    "trees D4": lambda: flow(trees(4, "random:1"), learned=True),
    "trees K 3, 2, 4": lambda: flow(trees(3, (2, 0, 1), categories=(3, 2, 4), ordered=(2,)), learned=True),
    "trees D3 depth 2": lambda: flow(trees(3), made(3, "reversed")),
    # logits of several networks
    "stacked D4": lambda: flow(stacked(4, "random:1"), learned=True),
    "stacked K 3, 2, 4": lambda: flow(stacked(3, (2, 0, 1), categories=(3, 2, 4), ordered=(2,))),
    "stacked D3 depth 2, context": lambda: flow(stacked(3, context=1), made(3, "reversed", context=1)),
    # one probability a feature
    "tied D3": lambda: tied(made(3, "reversed"), learned=True),
    "tied K3": lambda: tied(made(2, categories=3), learned=True),
    "tied K 2, 4, 1, 3": lambda: tied(made(4, "random:1", categories=(2, 4, 1, 3)), learned=True),
    "tied K5, fixed": lambda: tied(made(2, "reversed", categories=5)),
    "tied affine K 3, 4": lambda: tied(affine(2, (3, 4)), learned=True),
    "tied coupling K 3, 2, 3": lambda: tied(coupling(3, categories=(3, 2, 3))),
    "tied K 3, 2 depth 2": lambda: tied(
        *(made(2, o, categories=(3, 2)) for o in ("natural", "reversed")), learned=True
    ),
    # posteriors that see this or that, to depth 3
    "D3 own, posterior": lambda: flow(inferred(made(3, "reversed", sees=OWN), ("x",)), learned=True),
    "D1 depth 3 posterior": lambda: flow(*(inferred(made(1), ("state",)) for _ in range(3))),
    "D2 depth 3 posterior sees x": lambda: flow(
        *(inferred(made(2, order), ("x",)) for order in ("natural", "reversed", "natural")), learned=True
    ),
    "D2 depth 3 posterior sees x, previous": lambda: flow(
        *(inferred(made(2, order, sees=OWN), ("x", "previous")) for order in ("natural", "reversed", "natural"))
    ),
    "D2 depth 3 posterior sees state": lambda: flow(
        inferred(made(2), ("state",)), inferred(made(2, sees=OWN), ("state",)), inferred(made(2), ("state",))
    ),
    "K3 depth 2 posterior": lambda: flow(
        inferred(made(2, categories=3), ("x",)), inferred(made(2, "reversed", categories=3), ("state",))
    ),
    "D3 relative posterior": lambda: flow(inferred(made(3), ("x",), relative=True), learned=True),
    "D2 depth 3 relative posterior": lambda: flow(
        *(inferred(made(2, o), ("x", "state"), relative=True) for o in ("natural", "reversed", "natural"))
    ),
    "K3 depth 2 relative posterior": lambda: flow(
        *(inferred(made(2, o, categories=3), ("x",), relative=True) for o in ("natural", "reversed"))
    ),
    "chain depth 2 relative posterior": lambda: flow(
        inferred(made(2, sees={"x": "before"}), ("x",), relative=True),
        inferred(made(2, sees={"previous": "up to"}), ("previous",), relative=True),
    ),
    "chain depth 3 posterior sees x": lambda: flow(*(inferred(layer, ("x",)) for layer in chain(2, 3))),
    "chain depth 3 posterior sees x, previous": lambda: flow(
        *(inferred(layer, ("x", "previous")) for layer in chain(2, 3, "reversed")), learned=True
    ),
    "chain depth 3 posterior sees state": lambda: flow(
        inferred(made(2, sees={"x": "before"}), ("state",)),
        *(inferred(made(2, sees={"previous": "up to"}), ("state",)) for _ in range(2)),
    ),
}  # fmt: skip


DRAWS = {
    "recurrent K 2, 3 context": 1,
    "chain K 3, 2 depth 2": 1,
    "K 3, 1, 2 own": 1,
    "coupling K 2, 3 depth 2 posterior": 3,
    "coupling D4 random": 1,
    "D4 depth 2 random": 2,
    "D2 depth 3 one order": 9,
    "K 2, 3 depth 3": 1,
    "chain D2 depth 3": 2,
    "chain context": 17,
    "transformer D2 depth 2": 4,
    "D2 depth 3 posterior sees x": 1,
    "K3 depth 2 posterior": 5,
    "D2 depth 3 relative posterior": 1,
    "chain depth 3 posterior sees x, previous": 1,
}
"""Which draw of its weights and base a member has, if not the first, with which the bias of some estimator happens to be
smaller than tests ask for (`expectations.BIASED`), or a choice so rare that none of a statistical test's draws takes it."""


def make(name: str) -> LatentFlow:
    """A fresh member, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()) + DRAWS.get(name, 0))
        return sharpen(MEMBERS[name]()).double()


def sharpen(flow: LatentFlow) -> LatentFlow:
    """Weights and biases of all networks times four."""
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(4)
    return flow


def every(condition: Callable[[LatentFlow], bool] = lambda _: True) -> list[str]:
    """The members that satisfy a condition (which must not change them)."""
    return [name for name in MEMBERS if condition(_prototype(name))]


def names(condition: Callable[[LatentFlow], bool] = lambda _: True) -> list[str]:
    """Those of them whose generators all learn by gradients; others are fitted."""
    return every(lambda flow: learns(flow) and condition(flow))


def learns(flow: LatentFlow) -> bool:
    return all([*layer.conditioner.parameters()] for layer in flow.layers)


_prototype = cache(make)


def context(flow: LatentFlow) -> Tensor | None:
    """A fixed context (1, C) for a member that sees one."""
    count = flow.context_features
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)[None] if count else None


def rows_of_context(flow: LatentFlow, rows: int) -> Tensor | None:
    """The same context for each of some rows, (rows, C)."""
    found = context(flow)
    return None if found is None else found.expand(rows, -1)


def closed_form(flow: LatentFlow) -> bool:
    return flow.has_closed_form


def binary(flow: LatentFlow) -> bool:
    return flow.states.binary


def summable(flow: LatentFlow) -> bool:
    return flow.last_layer_summable
