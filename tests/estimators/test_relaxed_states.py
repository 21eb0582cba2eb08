"""Relaxed states: the multilinear form of a transform, its values and gradients, against sums over states and choices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zoo
from enumeration import all_states
from xorflow import MADE, Layer, ModelError, ModularAffine, ModularShift, Transform, Xor
from xorflow._states import Alphabet, Layout
from xorflow.estimators.relaxed_states import (
    Relaxed,
    moved,
    relaxed_rewards,
    straight_through,
)

KINDS = {
    "xor": lambda: Xor(3),
    "shift": lambda: ModularShift([3, 3]),
    "shift of mixed sizes": lambda: ModularShift([3, 2, 4, 1, 2, 3]),
    "affine": lambda: ModularAffine([4, 4]),
    "affine of mixed sizes": lambda: ModularAffine([3, 2, 5, 1, 4, 2]),
    "affine with scales": lambda: ModularAffine([5, 5], scales=(4,)),
    "by feature": lambda: ByFeature(),
}
NAMES = pytest.mark.parametrize("name", KINDS)


class ByFeature(Transform):
    """Two features of three categories and one bit, with tables of their own; the bit has three choices."""

    MAPS = torch.tensor(
        [
            [[0, 1, 2], [1, 2, 0], [2, 1, 0]],
            [[1, 0, 2], [0, 2, 1], [2, 0, 1]],
            [[1, 0, 2], [0, 1, 2], [1, 0, 2]],
        ]
    )

    def __init__(self) -> None:
        super().__init__([3, 3, 2], [3, 3, 3])

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return self.MAPS[d, u, x]

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return self.MAPS.argsort(-1)[d, u, y]


def layer_of(transform: Transform) -> Layer:
    net = MADE(
        transform.states.features, (), categories=transform.states.sizes, choices=transform.choices.sizes
    )
    return Layer(net, transform)


def simplices(alphabet: Alphabet, packed: Tensor) -> list[Tensor]:
    """By feature the point of its simplex, (..., K)."""
    parts = []
    for d, size in enumerate(alphabet.sizes):
        part = packed[..., alphabet.logit_features == d]
        parts.append(torch.cat((1 - part, part), -1) if size == 2 else part)
    return parts


def multilinear(transform: Transform, x: Tensor, u: Tensor) -> Tensor:
    """The mean of where integers go, x and u being drawn independently from their simplices."""
    p, q = simplices(transform.states, x), simplices(transform.choices, u)
    pieces = []
    for group in transform.states.groups:
        for d in group.features:
            size, choices = group.size, transform.choices.sizes[d]
            k, c = torch.arange(size), torch.arange(choices)[:, None]
            y = transform.value_to_base(k, c, torch.tensor(d))  # (U, K)
            arrives = torch.nn.functional.one_hot(y, size).double()
            piece = torch.einsum("...k,...u,ukj->...j", p[d], q[d], arrives)
            pieces.append(piece[..., 1:] if size == 2 else piece)
    return torch.cat(pieces, -1)


def soft(alphabet: Alphabet, *lead: int, seed: int = 0) -> Tensor:
    """Random points of the simplices, packed."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(alphabet)
    logits = layout.logits(torch.randn(*lead, alphabet.flat, generator=generator, dtype=torch.float64))
    parts = zip(alphabet.groups, logits, strict=True)
    return layout.packed(
        [part.sigmoid() if g.binary else part.softmax(-1) for g, part in parts]
    ).requires_grad_()


def hard(alphabet: Alphabet, *lead: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Integers, and the corners that they are, which carry a gradient."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(60, (*lead, alphabet.features), generator=generator) % torch.tensor(
        alphabet.sizes
    )
    return alphabet.integers(integers), Layout(alphabet).corners(integers, torch.float64).requires_grad_()


def assert_moved(transform: Transform, x: Relaxed, u: Relaxed, leaves: list[Tensor]) -> None:
    """The values are those of enumeration, and so are the gradients of any function of them."""
    found = moved(layer_of(transform), Layout(transform.states), x, u)
    expected = multilinear(transform, x.values, u.values)
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-14)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    slopes = [torch.autograd.grad((out * weights).sin().sum(), leaves) for out in (found.values, expected)]
    for ours, reference in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-13)
    assert found.graded == (x.graded or u.graded)


LEADS = pytest.mark.parametrize("leads", [((7,), (7,)), ((7,), (3, 7)), ((3, 7), (7,)), ((), (2,))])


@LEADS
@NAMES
def test_soft_choices_of_soft_states(name, leads):
    transform = KINDS[name]()
    x, u = soft(transform.states, *leads[0]), soft(transform.choices, *leads[1], seed=1)
    assert_moved(transform, Relaxed(x), Relaxed(u), [x, u])


@LEADS
@NAMES
def test_soft_choices_of_hard_states(name, leads):
    """The first layer of a relaxed pass: each choice's share goes where it leads."""
    transform = KINDS[name]()
    (integers, x), u = hard(transform.states, *leads[0]), soft(transform.choices, *leads[1], seed=1)
    assert_moved(transform, Relaxed(x, integers, graded=False), Relaxed(u), [u])
    assert_moved(transform, Relaxed(x, integers), Relaxed(u), [x, u])


@NAMES
def test_hard_choices_of_soft_states(name):
    transform = KINDS[name]()
    (integers, u), x = hard(transform.choices, 7), soft(transform.states, 7, seed=1)
    assert_moved(transform, Relaxed(x), Relaxed(u, integers), [x, u])


@LEADS
@NAMES
def test_hard_choices_of_hard_states_have_straight_through_gradients(name, leads):
    """Gathers forward and backward, and equal to what autograd makes of the multilinear form in the corners."""
    transform = KINDS[name]()
    (x, of_x), (u, of_u) = hard(transform.states, *leads[0]), hard(transform.choices, *leads[1], seed=1)
    assert_moved(transform, Relaxed(of_x, x), Relaxed(of_u, u), [of_x, of_u])
    found = moved(layer_of(transform), Layout(transform.states), Relaxed(of_x, x), Relaxed(of_u, u))
    assert torch.equal(found.integers, transform.to_base(x, u))
    assert torch.equal(found.values, Layout(transform.states).corners(found.integers, torch.float64))


@NAMES
def test_every_corner(name):
    transform = KINDS[name]()
    x = all_states(transform.states.sizes)
    for u in all_states(transform.choices.sizes)[::7]:
        states, choices = Layout(transform.states), Layout(transform.choices)
        of_x, of_u = states.corners(x, torch.float64), choices.corners(u.expand_as(x), torch.float64)
        expected = states.corners(transform.to_base(x, u.expand_as(x)), torch.float64)
        for some in (Relaxed(of_x), Relaxed(of_x, x), Relaxed.of(x, states, torch.float64)):
            for chosen in (Relaxed(of_u), Relaxed(of_u, u.expand_as(x))):
                assert torch.equal(moved(layer_of(transform), states, some, chosen).values, expected)


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(SIZES, st.sampled_from([ModularShift, ModularAffine]), st.integers(0, 99))
def test_any_sizes(sizes, kind, seed):
    transform = kind(sizes)
    x, u = soft(transform.states, 3, seed=seed), soft(transform.choices, 3, seed=seed + 1)
    assert_moved(transform, Relaxed(x), Relaxed(u), [x, u])
    (integers, corner), (chosen, choice) = (
        hard(transform.states, 3, seed=seed),
        hard(transform.choices, 3, seed=seed),
    )
    assert_moved(transform, Relaxed(corner, integers), Relaxed(choice, chosen), [corner, choice])
    assert_moved(transform, Relaxed(corner, integers, graded=False), Relaxed(u), [u])


@NAMES
def test_straight_through_under_vmap(name):
    transform = KINDS[name]()
    (x, of_x), (u, of_u) = hard(transform.states, 3, 7), hard(transform.choices, 3, 7, seed=1)
    layer, states = layer_of(transform), Layout(transform.states)

    def one(of_x: Tensor, of_u: Tensor, x: Tensor, u: Tensor) -> Tensor:
        return moved(layer, states, Relaxed(of_x, x), Relaxed(of_u, u)).values

    def gradients(of_x: Tensor, of_u: Tensor, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(
            lambda a, b: one(a, b, x, u).mul(torch.arange(1, 1 + states.alphabet.flat)).sum(), (0, 1)
        )(of_x, of_u)

    found = torch.vmap(one)(of_x, of_u, x, u)
    assert torch.equal(found, torch.stack([one(of_x[n], of_u[n], x[n], u[n]) for n in range(3)]))
    slopes = torch.vmap(gradients)(of_x, of_u, x, u)
    for n in range(3):
        for ours, alone in zip(slopes, gradients(of_x[n], of_u[n], x[n], u[n]), strict=True):
            torch.testing.assert_close(ours[n], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4)])
def test_straight_through_is_exactly_hard_and_passes_the_gradient_on(sizes, dtype):
    layout = Layout(Alphabet(sizes))
    values = soft(layout.alphabet, 50).detach().to(dtype).requires_grad_()
    integers, _ = hard(layout.alphabet, 50)
    relaxed = straight_through(integers, values, layout)
    assert torch.equal(relaxed.values, layout.corners(integers, dtype))
    (slope,) = torch.autograd.grad(relaxed.values.sum(), values)
    assert torch.equal(slope, torch.ones_like(values))


def test_two_soft_operands_are_refused_beyond_a_limit():
    """K x U products; hard states take any number of categories."""
    for size in (256, 257):
        transform = ModularShift([2, size])
        layer, states = layer_of(transform), Layout(transform.states)
        integers = torch.tensor([[1, size - 1]])
        x, u = Relaxed.of(integers, states, torch.float64), soft(transform.choices, 1)
        after = moved(layer, states, x, Relaxed(u))
        torch.testing.assert_close(
            after.values[:, 1:], multilinear(transform, x.values, u)[:, 1:], rtol=0, atol=1e-14
        )
        if size == 256:
            moved(layer, states, after, Relaxed(u))
            continue
        with pytest.raises(
            ModelError, match=r"for K up to 256; got 257: use st-gumbel, whose states are hard"
        ):
            moved(layer, states, after, Relaxed(u))
        chosen = Relaxed(layer.layout.corners(integers, torch.float64), integers)
        assert moved(layer, states, Relaxed(x.values, integers), chosen).integers.tolist() == [[0, 0]]


@pytest.mark.parametrize("name", zoo.names())
def test_rewards_are_linear_and_those_of_integers_in_the_corners(name):
    base = zoo.make(name).base
    y = all_states(base.states.sizes)
    with torch.no_grad():
        found = relaxed_rewards(base, base.layout.corners(y, torch.float64))
        torch.testing.assert_close(found, base.log_prob(y), rtol=0, atol=1e-14)
        one, other = soft(base.states, 4), soft(base.states, 4, seed=1)
        ends = relaxed_rewards(base, one), relaxed_rewards(base, other)
        middle = relaxed_rewards(base, 0.3 * one + 0.7 * other)
        torch.testing.assert_close(middle, 0.3 * ends[0] + 0.7 * ends[1], rtol=0, atol=1e-12)
    tables = [torch.arange(float(t.numel()), dtype=torch.float64).reshape(t.shape) for t in base.log_table()]
    instead = relaxed_rewards(base, base.layout.corners(y, torch.float64), tables)
    assert not torch.allclose(instead, found)


def test_xor_has_the_right_slopes():
    states = Layout(Alphabet([2]))
    x, u = (t.double().requires_grad_() for t in all_states((2, 2)).T.unsqueeze(-1))
    y = moved(layer_of(Xor(1)), states, Relaxed(x), Relaxed(u)).values
    dx, du = torch.autograd.grad(y.sum(), [x, u])
    assert torch.equal(y[:, 0], torch.tensor([0.0, 1.0, 1.0, 0.0]).double())
    assert torch.equal(dx, 1 - 2 * u)
    assert torch.equal(du, 1 - 2 * x)
