"""Small networks of every kind, drawn by hypothesis, in float64."""

import torch
from hypothesis import strategies as st

from xorflow import MADE, MLP, CausalTransformer, Coupling, Recurrent
from xorflow.conditioners import Conditioner, Diagonal, SequenceConditioner, Source

SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (3, 2), 12: (3, 4)}
BOTH = ("transformer", "recurrent")


def sequence(kind: str, features: int, seed: int = 0, **options) -> SequenceConditioner:
    """A narrow network whose weights are all of one size, in float64."""
    torch.manual_seed(seed)
    if kind == "transformer":
        net = CausalTransformer(features, **({"width": 8, "depth": 2, "heads": 2, "dropout": 0.0} | options))
    else:
        net = Recurrent(features, **({"width": 6} | options))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.4)
    return net.double()


@st.composite
def sequences(draw, features=(1, 2, 3, 4, 5, 6), by_order=("before", "up to"), skipped=False):
    count = draw(st.sampled_from(features))
    sizes = st.lists(st.integers(1, 3), min_size=count, max_size=count)
    sources = draw(
        st.lists(st.sampled_from(["state", "previous", "own", "x"]), min_size=1, max_size=2, unique=True)
    )
    options = {
        "order": tuple(draw(st.permutations(range(count)))),
        "shape": SHAPES.get(count) if draw(st.booleans()) else None,
        "reach": draw(st.integers(0, 2)),
        "categories": draw(st.one_of(st.integers(2, 3), sizes)),
        "sees": {source: draw(st.sampled_from(by_order)) for source in sources},
        "context": draw(st.integers(0, 2)),
    }
    if skipped:
        options["skipped"] = draw(st.lists(st.integers(0, count - 1), max_size=count - 1, unique=True))
    kind = draw(st.sampled_from(BOTH))
    if kind == "recurrent":
        options |= {"cell": draw(st.sampled_from(["gru", "lstm"])), "depth": draw(st.integers(1, 2))}
    else:
        options["rotary"] = draw(st.booleans())
    return sequence(kind, count, draw(st.integers(0, 99)), **options)


@st.composite
def mades(draw, wide: bool = False, by_order: tuple[str, ...] = ("before", "up to", "all")):
    features = draw(st.integers(1, 6))
    widths = st.integers(features if wide else 1, 12)
    categories = draw(
        st.one_of(st.integers(2, 4), st.lists(st.integers(1, 4), min_size=features, max_size=features))
    )
    sources = draw(
        st.lists(st.sampled_from(["state", "previous", "own", "x"]), min_size=1, max_size=3, unique=True)
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    return MADE(
        features,
        draw(st.lists(widths, max_size=2)),
        order=tuple(draw(st.permutations(range(features)))),
        categories=categories,
        choices=draw(st.sampled_from([None, 2, 6])),
        sees={source: draw(st.sampled_from(by_order)) for source in sources},
        direct=draw(st.booleans()),
        context=draw(st.integers(0, 2)),
    ).double()


@st.composite
def unordered(draw) -> Conditioner:
    features = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(1, 4), min_size=features, max_size=features))
    options = {
        "categories": sizes,
        "choices": draw(st.sampled_from([None, 2, 6])),
        "context": draw(st.integers(0, 2)),
    }
    torch.manual_seed(draw(st.integers(0, 99)))
    hidden = draw(st.lists(st.integers(1, 6), max_size=2))
    sources = draw(st.lists(st.sampled_from(list(Source)), min_size=1, max_size=3, unique=True))
    net = draw(
        st.sampled_from(
            [
                MLP(features, hidden, sees=sources, direct=draw(st.booleans()), **options),
                Diagonal(features, sees=sources[0], **options),
                Coupling(features, hidden, mask=f"random:{draw(st.integers(0, 9))}", **options),
            ]
        )
    )
    return net.double()


def networks() -> st.SearchStrategy[Conditioner]:
    return st.one_of(mades(), sequences(skipped=True), unordered())
