"""Negative controls: models that break a rule are caught, and would indeed not sum to one."""

import pytest
import torch

import zoo
from enumeration import joint
from xorflow import MADE, FactorisedBase, Flow, LatentFlow, Layer, ModelError
from xorflow.conditioners import Conditioner, MaskedLinear, Source


@pytest.fixture
def unchecked(monkeypatch):
    """Build models that the library refuses."""
    monkeypatch.setattr("xorflow.flows.flow.check_normalised", lambda _: None)


def off_by(flow: LatentFlow) -> float:
    with torch.no_grad():
        return abs(joint(flow).total - 1)


def built(*layers: Layer, seed: int = 0) -> LatentFlow:
    torch.manual_seed(seed)
    for layer in layers:  # fresh weights after the seed, so that a test's layers do not depend on its order
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
            if isinstance(module, MaskedLinear):
                module.apply_mask()
    return zoo.sharpen(zoo.flow(*layers)).double()


def sees(order: str = "natural", features: int = 3, **inputs: str) -> Layer:
    return zoo.made(features, order, (12,), sees=inputs)


@pytest.mark.parametrize("seed", range(3))
def test_a_leaky_network_does_not_sum_to_one(seed):
    flow = built(zoo.made(3, "random:1", (12,)), seed=seed)
    assert off_by(flow) < 1e-10
    with torch.no_grad():
        for module in flow.modules():
            if isinstance(module, MaskedLinear):
                module.weight.copy_(torch.randn_like(module.weight))
    assert off_by(flow) > 1e-3


BROKEN = {
    "all of x": lambda: [sees(x="all")],
    "all of the state": lambda: [sees(state="all")],
    "x up to d": lambda: [sees(x="up to")],
    "own u up to d": lambda: [sees(state="before", own="up to")],
    "all of own u": lambda: [sees(state="before", own="all")],
    "second layer, state up to d": lambda: [sees(state="before"), sees("reversed", state="up to")],
    "chain, all of the previous u": lambda: [sees(x="before"), sees(previous="all", own="before")],
    "chain of two orderings": lambda: [sees(x="before"), sees("reversed", previous="before", own="before")],
    "chain up to d, two orderings": lambda: [sees(x="before"), sees("reversed", previous="up to")],
    "x in a second layer of another ordering": lambda: [sees(state="before"), sees("reversed", x="before")],
    "previous u before any": lambda: [sees(previous="up to")],
}
THRESHOLD = {"chain, all of the previous u": 1e-4}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_refused(rule):
    with pytest.raises(ModelError):
        built(*BROKEN[rule]())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_does_not_sum_to_one(rule):
    # some weights happen to break it little, so take the worst of a few draws of them
    assert max(off_by(built(*BROKEN[rule](), seed=seed)) for seed in range(10)) > THRESHOLD.get(rule, 1e-3)


def test_the_paper_chain_is_normalised_with_its_legal_sets():
    for previous in ("before", "up to"):
        for own in ({}, {"own": "before"}):
            layers = [sees(x="before", **own), *(sees(previous=previous, **own) for _ in range(2))]
            assert off_by(built(*layers)) < 1e-10


class Cycle(Conditioner):
    """The choice of feature d sees exactly x at d - 1, and at the last feature for d = 0."""

    def __init__(self, at_zero: torch.Tensor, at_one: torch.Tensor) -> None:
        features = len(at_zero)
        super().__init__(features, categories=2, choices=None, sees={"state": "all"}, order=None, context=0)
        self.at_zero, self.at_one = at_zero, at_one

    def forward(self, inputs, context=None):
        before = inputs[Source.STATE].roll(1, -1)
        return torch.where(before > 0, self.at_one, self.at_zero)

    def start_at(self, logits):
        raise NotImplementedError


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("features", [1, 2, 3, 4])
def test_a_cycle_breaks_it_by_a_known_amount(features):
    torch.manual_seed(features)
    at_zero, at_one = torch.randn(2, features, dtype=torch.float64) * 2
    beta = torch.rand(features, dtype=torch.float64)
    base = FactorisedBase(features).double()
    with torch.no_grad():
        base.logits.copy_(torch.logit(beta))
    flow = LatentFlow([Layer(Cycle(at_zero, at_one))], base)
    expected = 1 + float(((1 - 2 * beta) * (at_one.sigmoid() - at_zero.sigmoid())).prod())
    assert abs(joint(flow).total - expected) < 1e-12


def test_a_cycle_is_refused():
    with pytest.raises(ModelError, match="'state' 'before' d only, and declares 'all'"):
        LatentFlow([Layer(Cycle(torch.zeros(2), torch.ones(2)))], FactorisedBase(2))


def test_a_deterministic_flow_is_checked_too():
    with pytest.raises(ModelError, match="normalised"):
        Flow([Layer(MADE(2, (4,), sees={"state": "up to"}))], FactorisedBase(2))
