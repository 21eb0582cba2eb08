"""What the base class of conditioners derives."""

import pytest
import torch

import zoo
from enumeration import all_states
from xorflow import (
    MADE,
    MLP,
    CausalTransformer,
    Coupling,
    FactorisedBase,
    LatentFlow,
    Layer,
    ModelError,
    Recurrent,
)
from xorflow.conditioners import Conditioner, Diagonal
from xorflow.training.registry import flow_to_spec
from xorflow.training.spec import flow_from_spec

NETWORKS = [
    MADE(6, (4,), order="random:2", categories=(2, 3, 2, 4, 2, 2), choices=2, direct=True, context=1),
    MADE(3, (), order=(2, 0, 1), sees={"x": "before", "own": "before"}),
    MLP(3, (4, 5), sees=("x", "state"), direct=True),
    Diagonal(3, categories=(2, 3, 3), sees="x"),
    Coupling(6, (4,), mask="checkerboard", shape=(2, 3), flip=True),
    CausalTransformer(6, width=8, depth=1, heads=2, shape=(2, 3), order="columns", skipped=(1,), rotary=True),
    Recurrent(6, width=4, depth=2, cell="lstm", dropout=0.5, reach=0),
    zoo.stacked(3, "reversed", categories=(3, 2, 4)).conditioner,
    zoo.trees(3, "reversed", categories=(3, 2, 4), ordered=(2,)).conditioner,
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


class Fitted(Conditioner):
    """Logits by what the feature before is, as they were fitted: there is nothing to train, and nowhere to begin."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("table", torch.arange(2.0 * features).reshape(2, features).sin())

    def forward(self, inputs, context=None):
        before = torch.nn.functional.pad(inputs["state"][..., :-1], (1, 0))
        table = self.get_buffer("table")
        return torch.where(before == 1, table[1], table[0])


class Weighed(Conditioner):
    """The logits of several conditioners of one ordering, added up."""

    def __init__(self, features: int, members: list[Conditioner]) -> None:
        super().__init__(features)
        self.members = torch.nn.ModuleList(members)

    def forward(self, inputs, context=None):
        return sum(member(inputs, context) for member in self.members)


@pytest.mark.parametrize("make", [Fitted, lambda d: Weighed(d, [Fitted(d), MADE(d, (5,))])])
def test_what_is_fitted_gives_its_logits_and_nothing_else(make) -> None:
    torch.manual_seed(0)
    flow = LatentFlow([Layer(make(4))], FactorisedBase(4)).double()
    x = all_states((2,) * 4)
    log_prob = flow().log_prob(x)
    torch.testing.assert_close(log_prob.exp().sum(), torch.ones((), dtype=torch.float64))
    steps, total = flow.conditionals().steps(len(x)), torch.zeros(len(x), dtype=torch.float64)
    for d in range(4):
        total += steps.log_probs()[torch.arange(len(x)), x[:, d]]
        steps.append(x[:, d])
    torch.testing.assert_close(total, log_prob)
    assert flow().sample((7,)).shape == (7, 4)


def test_a_conditioner_of_conditioners_is_built_again_from_its_configuration() -> None:
    torch.manual_seed(0)
    flow = LatentFlow([Layer(Weighed(4, [Fitted(4), MADE(4, (5,))]))], FactorisedBase(4))
    again = flow_from_spec(flow_to_spec(flow), {"Fitted": Fitted, "Weighed": Weighed})
    again.load_state_dict(flow.state_dict())
    x = all_states((2,) * 4)
    torch.testing.assert_close(again().log_prob(x), flow().log_prob(x))
