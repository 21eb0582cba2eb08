"""What a choice can change, against what it does change when it is replaced and all other noise is held."""

from functools import cache

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, probabilities
from xorflow import LatentFlow, ModelError
from xorflow.estimators.credit import FeatureSum, weighted_score
from xorflow.estimators.descendants import Reach

POSTERIORS = zoo.names(lambda flow: flow.has_posterior)
CASES = [(name, "p") for name in zoo.names()] + [(name, "q") for name in POSTERIORS]
GENERIC = [  # networks wide enough to use all that they may see, and no features that are left alone
    ("D2", "p"),
    ("D4 random", "p"),
    ("D4 own", "p"),
    ("D3 depth 2 reversed", "p"),
    ("D3 depth 2 one order", "p"),
    ("D4 depth 2 random", "p"),
    ("D2 depth 3", "p"),
    ("D2 depth 3 one order", "p"),
    ("D3 depth 3", "p"),
    ("D3 depth 2 own", "p"),
    ("D3 depth 2 own first", "p"),
    ("K3 depth 2", "p"),
    ("chain D3 depth 2", "p"),
    ("chain D2 depth 3", "p"),
    ("chain D3 depth 3", "p"),
    ("chain K3 depth 2", "p"),
    ("chain summable", "p"),
    ("chain sees all that it may", "p"),
    *((name, "q") for name in POSTERIORS if "coupling" not in name and "relative" not in name),  # which may be small
]  # fmt: skip


def differ(a: Tensor, b: Tensor) -> Tensor:
    """(D,): whether a feature of (N, D) or (N, D, U) differs for any example."""
    return ((a - b).abs() > 1e-9).reshape(*a.shape[:2], -1).any(-1).any(0)


class Observed:
    """By node (l, d), which rewards, choices and inputs changed for some state and some noise."""

    def __init__(self, flow: LatentFlow, drawn: str, draws: int) -> None:
        self.flow, self.drawn = flow, drawn
        generator = torch.Generator().manual_seed(1)
        x = all_states(flow.states.sizes)
        self.x = x[torch.randint(len(x), (draws,), generator=generator)]
        self.noise = torch.rand(draws, flow.depth, flow.features, generator=generator, dtype=torch.float64)
        self.other = torch.rand(draws, generator=generator, dtype=torch.float64)
        size = (flow.depth, flow.features)
        self.rewards = torch.zeros(*size, flow.features, dtype=torch.bool)
        self.choices = torch.zeros(*size, *size, dtype=torch.bool)
        self.inputs = {of: torch.zeros(*size, *size, dtype=torch.bool) for of in ("p", "q")}
        with torch.no_grad():
            before = self.run(self.noise)
            for layer in range(flow.depth):
                for feature in range(flow.features):
                    replaced = self.noise.clone()
                    replaced[:, layer, feature] = self.other
                    self.compare(layer, feature, before, self.run(replaced))

    def run(self, noise: Tensor):
        context = zoo.rows_of_context(self.flow, len(noise))
        trace = self.flow.run(self.flow.start(self.x, context), draws=noise, proposal=self.drawn)
        choices = {"p": trace.generator, "q": trace.posterior or ()}
        return self.flow.base.log_prob(trace.end.state), trace.u.double(), choices

    def compare(self, layer: int, feature: int, before, after) -> None:
        at = (layer, feature)
        self.rewards[at] = differ(before[0], after[0])
        for later in range(self.flow.depth):
            self.choices[(*at, later)] = differ(before[1][:, later], after[1][:, later])
            for of in ("p", "q"):
                if before[2][of]:
                    old, new = (
                        probabilities(way[2][of][later]).expand(len(self.x), -1, -1)
                        for way in (before, after)
                    )
                    self.inputs[of][(*at, later)] = differ(old, new)


@cache
def observed(name: str, drawn: str) -> Observed:
    return Observed(zoo.make(name), drawn, 20_000 if (name, drawn) in GENERIC else 300)


def pairs(name: str, drawn: str):
    """(what, claimed (D, D), observed (D, D)) for all that an descendants says."""
    flow, seen = zoo.make(name), observed(name, drawn)
    descendants = Reach(flow, drawn)
    for layer in range(flow.depth):
        yield f"rewards of layer {layer}", descendants.rewards(layer), seen.rewards[layer]
        for later in range(flow.depth):
            where = f"of layer {layer} on layer {later}"
            yield f"choices {where}", descendants.choices(layer, later), seen.choices[layer, :, later]
            for of in ("p", "q") if drawn == "q" else ("p",):
                claimed = descendants.inputs(layer, later, of)
                yield f"inputs of {of} {where}", claimed, seen.inputs[of][layer, :, later]


@pytest.mark.parametrize(("name", "drawn"), CASES)
def test_all_that_changes_is_in_the_set(name, drawn):
    for what, claimed, changed in pairs(name, drawn):
        assert not bool((changed & ~claimed).any()), what
    assert bool(observed(name, drawn).rewards.any())


@pytest.mark.parametrize(("name", "drawn"), GENERIC)
def test_nothing_else_is_in_the_set(name, drawn):
    """With these weights every choice that may change something does, for one of 20,000 states and noises."""
    for what, claimed, changed in pairs(name, drawn):
        assert torch.equal(claimed, changed), what


def test_the_descendants_of_the_named_models():
    """Own reward at depth 1 and in a last layer; all later ones in a shared ordering below it."""
    own, later = torch.eye(3, dtype=torch.bool), torch.ones(3, 3).triu().bool()
    assert torch.equal(Reach(zoo.make("D3 x"), "p").rewards(0), own)
    one = Reach(zoo.flow(zoo.made(3), zoo.made(3)), "p")
    assert torch.equal(one.rewards(0), later)
    assert torch.equal(one.rewards(1), own)
    chain = Reach(zoo.flow(*zoo.chain(3, 2)), "p")
    assert torch.equal(chain.rewards(0), later)
    assert torch.equal(chain.rewards(1), later)  # it sees its own u
    reversed_second = Reach(zoo.flow(zoo.made(3), zoo.made(3, "reversed")), "p")
    assert torch.equal(reversed_second.rewards(0), later.T)
    three = Reach(zoo.flow(zoo.made(3), zoo.made(3, "reversed"), zoo.made(3)), "p")
    assert bool(three.rewards(0)[2].all())  # back and forth: the last feature reaches all


def test_a_posterior_is_needed_to_draw_from_it():
    with pytest.raises(ModelError, match="a posterior in every layer"):
        Reach(zoo.make("D2"), "q")


KINDS = {
    "zero": torch.zeros(4, 4),
    "identity": torch.eye(4),
    "all": torch.ones(4, 4),
    "suffix": torch.ones(4, 4).triu()[[2, 0, 3, 1]][:, [2, 0, 3, 1]],
    "matrix": torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [2, 0, 0, 1]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_features_are_a_product_with_their_weights(kind):
    weights = KINDS[kind]
    sums = FeatureSum(weights)
    assert sums.kind == kind
    values = torch.randn(5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sums(values), values @ weights.double().T, rtol=0, atol=1e-14)
    assert FeatureSum(weights.bool()).kind == ("matrix" if kind == "matrix" else kind)


def test_a_scaled_suffix_is_no_suffix():
    assert FeatureSum(2 * KINDS["suffix"]).kind == "matrix"
    assert FeatureSum(0.5 * torch.eye(3)).kind == "matrix"
    assert FeatureSum(torch.ones(1, 1)).kind == "identity"


def test_scores_are_weighed_with_their_own_sums():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randint(3, (2, 3, 4, 4), generator=generator).double()  # L, T, D, D
    sums = torch.nn.ModuleList(torch.nn.ModuleList(FeatureSum(m) for m in row) for row in matrices)
    signal = torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)
    log_probs = torch.randn(6, 2, 4, dtype=torch.float64, generator=generator)
    expected = torch.einsum("ltde,bte,bld->b", matrices, signal, log_probs)
    torch.testing.assert_close(weighted_score(sums, signal, log_probs), expected, rtol=0, atol=1e-12)
