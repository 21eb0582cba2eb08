"""What the base class of conditioners derives."""

import pytest
import torch

from xorflow import MADE, MLP, CausalTransformer, Coupling, ModelError, Recurrent
from xorflow.conditioners import Conditioner, Diagonal

NETWORKS = [
    MADE(6, (4,), order="random:2", categories=(2, 3, 2, 4, 2, 2), choices=2, direct=True, context=1),
    MADE(3, (), order=(2, 0, 1), sees={"x": "before", "own": "before"}),
    MLP(3, (4, 5), sees=("x", "state"), direct=True),
    Diagonal(3, categories=(2, 3, 3), sees="x"),
    Coupling(6, (4,), mask="checkerboard", shape=(2, 3), flip=True),
    CausalTransformer(6, width=8, depth=1, heads=2, shape=(2, 3), order="columns", skipped=(1,), rotary=True),
    Recurrent(6, width=4, depth=2, cell="lstm", dropout=0.5, reach=0),
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: type(n).__name__)
def test_a_network_is_built_again_from_its_configuration(network: Conditioner) -> None:
    config = network.config()
    again = type(network)(**config)
    again.load_state_dict(network.state_dict())
    assert again.config() == config
    assert repr(again) == repr(network)
    inputs = dict.fromkeys(
        ("state", "previous", "own", "x"), torch.ones(2, network.features, dtype=torch.int64)
    )
    context = torch.ones(2, network.context_features) if network.context_features else None
    with torch.no_grad():
        assert torch.equal(again(inputs, context), network(inputs, context))


class Level(Conditioner):
    """A constant."""

    def __init__(self, features: int, start: float = 0.0, *, keep: bool = True) -> None:
        super().__init__(features, sees={})
        if keep:
            self.start, self.keep = start, keep
        self.register_buffer("level", torch.full((features,), start))  # fitted, not trained

    def forward(self, inputs, context=None):
        return self.get_buffer("level")

    def start_at(self, logits):
        self.get_buffer("level").copy_(logits)


def test_arguments_of_ones_own_are_attributes_of_their_names() -> None:
    assert Level(3, 0.5).config() == {"features": 3, "start": 0.5, "keep": True}
    assert repr(Level(3, 0.5)) == "Level(3, start=0.5)"
    with pytest.raises(ModelError, match="no plain value of 'start'; keep it as an attribute of that name"):
        Level(3, keep=False).config()
    assert repr(Level(3, keep=False)) == "Level(3)"
