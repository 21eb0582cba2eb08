"""Transforms of a user's own: the model is the one that is written, for every x."""

import pytest
import torch
from torch import Tensor

from enumeration import base_table_lookup, padded
from xorflow import (
    MADE,
    Coupling,
    FactorisedBase,
    LatentFlow,
    Layer,
    ModelError,
    ModularAffine,
    ModularShift,
    Transform,
    Xor,
    evaluate,
)
from xorflow._math import enumerate_states
from xorflow._states import Layout
from xorflow.estimators.relaxed_states import Relaxed, moved
from xorflow.flows import Point, with_base

BITS, TRITS = (2, 2, 2), (3, 3)


class Permuted(Transform):
    """y is looked up by feature, choice and x."""

    maps: Tensor  # (D, U, K)
    back: Tensor

    def __init__(self, maps: list[list[list[int]]]) -> None:
        table = torch.tensor(maps)
        sizes = [len(rows[0]) for rows in maps], [len(rows) for rows in maps]
        super().__init__(*sizes, maps=table, back=table.argsort(-1))

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return self.maps[d, u, x]

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return self.back[d, u, y]


KEEP, FLIP = [0, 1], [1, 0]
TRANSFORMS = {
    "u = 0 flips": [[FLIP, KEEP]] * 3,
    "by feature": [[KEEP, FLIP], [FLIP, KEEP], [FLIP, FLIP]],
    "three choices of bits": [[KEEP, FLIP, FLIP], [FLIP, FLIP, KEEP], [KEEP, KEEP, FLIP]],
    "shifts by feature": [[[0, 1, 2], [1, 2, 0], [2, 0, 1]], [[0, 1, 2], [2, 0, 1], [2, 1, 0]]],
    "two choices by feature": [[[0, 1, 2], [2, 1, 0]], [[1, 0, 2], [2, 0, 1]]],
}
NAMES = pytest.mark.parametrize("name", TRANSFORMS)
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def made(name: str, depth: int) -> LatentFlow:
    torch.manual_seed(depth)
    transform, layers = Permuted(TRANSFORMS[name]), []
    states, choices = transform.states.sizes, transform.choices.sizes
    for index in range(depth):
        order = "natural" if index == 0 else "reversed"
        net = MADE(len(states), (8,), categories=states, choices=choices, order=order)
        layers.append(Layer(net, transform))
    probabilities = torch.rand(len(states), states[0]) + 0.05
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    base = FactorisedBase(len(states), categories=states, probabilities=probabilities, learned=True)
    flow = LatentFlow(layers, base).double()
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(6)
    return flow


def by_definition(flow: LatentFlow) -> Tensor:
    """log p(x) of every x: the sum over all u of p(u | x) p(y), with y by the integers of `to_base` alone."""
    x = enumerate_states(flow.states.sizes)
    terms = [(x, torch.zeros(len(x), dtype=torch.float64))]
    for index, layer in enumerate(flow.layers):
        after = []
        for state, log_p in terms:
            choices = layer.generator_choices(Point(state, state, None, index))
            log_probs = padded(choices.log_probs(), choices.alphabet)
            for u in enumerate_states(layer.transform.choices.sizes).unsqueeze(1).expand(-1, len(x), -1):
                chosen = log_probs.gather(-1, u.unsqueeze(-1)).squeeze(-1).sum(-1)
                after.append((layer.transform.to_base(state, u), log_p + chosen))
        terms = after
    ends = [log_p + base_table_lookup(flow, y).sum(-1) for y, log_p in terms]
    return torch.stack(ends).logsumexp(0)


@DEPTHS
@NAMES
def test_the_likelihood_is_the_sum_over_choices(name: str, depth: int) -> None:
    flow = made(name, depth)
    wanted, x = by_definition(flow).detach(), enumerate_states(flow.states.sizes)
    torch.testing.assert_close(flow().log_prob(x).detach(), wanted, rtol=0, atol=1e-12)
    assert abs(float(wanted.exp().sum()) - 1) < 1e-12


@NAMES
def test_training_maximises_that_likelihood(name: str) -> None:
    flow = made(name, 1)
    x = enumerate_states(flow.states.sizes)
    found = flow.log_marginal_total(flow.start(x))
    wanted = by_definition(flow)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    ours, reference = (
        torch.autograd.grad(value.mean(), list(flow.parameters())) for value in (found, wanted)
    )
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, maps in TRANSFORMS.items() if len(maps[0][0]) == 2])
def test_the_expectation_over_soft_targets(name: str) -> None:
    """With certain targets it is the likelihood itself; it is linear in them, feature by feature."""
    flow = made(name, 1)
    x = enumerate_states(flow.states.sizes)
    sure, start = x.double(), flow.start(x)
    torch.testing.assert_close(
        flow.expected_log_marginal(start, sure), by_definition(flow), rtol=0, atol=1e-12
    )
    both = flow.expected_log_marginal(start, sure) + flow.expected_log_marginal(start, 1 - sure)
    torch.testing.assert_close(
        2 * flow.expected_log_marginal(start, 0 * sure + 0.5), both, rtol=0, atol=1e-12
    )


@DEPTHS
@NAMES
def test_samples_follow_it(name: str, depth: int) -> None:
    flow = made(name, depth)
    states = enumerate_states(flow.states.sizes)
    p = flow().log_prob(states).detach().exp()
    drawn = flow().sample((20_000,), generator=torch.Generator().manual_seed(0))
    place = (drawn[:, None] == states).all(-1).int().argmax(-1)
    rates = torch.bincount(place, minlength=len(states)) / len(drawn)
    assert bool(((rates - p).abs() < 5 * (p * (1 - p) / len(drawn)).sqrt()).all())


@DEPTHS
@NAMES
def test_the_deterministic_flow_is_that_bijection(name: str, depth: int) -> None:
    flow = made(name, depth)
    greedy, x = flow.greedy(), enumerate_states(flow.states.sizes)
    y = x
    for index, layer in enumerate(flow.layers):
        choices = layer.generator_choices(Point(y, y, None, index))
        y = layer.transform.to_base(y, padded(choices.log_probs(), choices.alphabet, -torch.inf).argmax(-1))
    assert torch.equal(greedy.to_base(x), y)
    assert torch.equal(greedy.to_data(y), x)
    assert evaluate.greedy(flow, x).kind == "exact"


@NAMES
def test_relaxed_forms_are_exact_on_integers(name: str) -> None:
    transform = Permuted(TRANSFORMS[name])
    for u in enumerate_states(transform.choices.sizes):
        x = enumerate_states(transform.states.sizes)
        states, choices = Layout(transform.states), Layout(transform.choices)
        net = MADE(x.shape[1], (), categories=transform.states.sizes, choices=transform.choices.sizes)
        of_x, of_u = states.corners(x, torch.float64), choices.corners(u.expand_as(x), torch.float64)
        y = moved(Layer(net, transform), states, Relaxed(of_x), Relaxed(of_u))
        assert torch.equal(y.values, states.corners(transform.to_base(x, u.expand_as(x)), torch.float64))


def test_xor_by_any_name_takes_the_closed_form() -> None:
    same = Permuted([[KEEP, FLIP]] * 3)
    for transform in (Xor(3), ModularShift(BITS), ModularAffine(BITS), same):
        assert transform.is_xor
    for other in (
        ModularShift(TRITS),
        Permuted(TRANSFORMS["u = 0 flips"]),
        Permuted(TRANSFORMS["by feature"]),
    ):
        assert not other.is_xor


class Still(Transform):
    """Every choice is the identity, which needs no look at u."""

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return x

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return y


@pytest.mark.parametrize("sizes", [BITS, TRITS])
def test_choices_may_all_be_the_same_bijection(sizes: tuple[int, ...]) -> None:
    layer = Layer(MADE(len(sizes), (8,), categories=sizes, choices=2), Still(sizes, (2,) * len(sizes)))
    flow = LatentFlow([layer], FactorisedBase(len(sizes), categories=sizes, p0=0.7)).double()
    x = enumerate_states(sizes)
    torch.testing.assert_close(flow().log_prob(x), flow.base.log_prob(x).sum(-1))


def test_what_is_no_bijection_is_refused() -> None:
    with pytest.raises(ModelError, match=r"value_to_data must undo value_to_base.*Permuted"):
        Permuted([[KEEP, [1, 1]]])

    class OneWay(Xor):
        def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
            return y.expand(torch.broadcast_shapes(y.shape, u.shape, d.shape))

    with pytest.raises(ModelError, match="OneWay"):
        OneWay(2)


def test_a_coupling_needs_the_identity_where_it_leaves_features_alone() -> None:
    def layer(maps: list[list[list[int]]]) -> Layer:
        return Layer(Coupling(3, (4,), mask=[True, False, True]), Permuted(maps))

    with pytest.raises(ModelError, match=r"u = 0.*not the identity"):
        layer([[FLIP, KEEP]] * 3)
    moved = layer([[KEEP, FLIP], [FLIP, KEEP], [KEEP, KEEP]])  # only the one that it moves flips by u = 0
    flow = LatentFlow([moved], FactorisedBase(3)).double()
    torch.testing.assert_close(flow().log_prob(enumerate_states(BITS)), by_definition(flow))


def test_other_transforms_are_not_read_on_another_base() -> None:
    flow = made("u = 0 flips", 1)
    with pytest.raises(ModelError, match="does not flip by u = 1"):
        with_base(flow, FactorisedBase(3).double())
