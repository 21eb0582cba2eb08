"""Bijections of integers, in both directions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xorflow import ModelError, ModularAffine, ModularShift, Transform, Xor

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)
KINDS = [ModularShift, ModularAffine]
INTEGERS = [torch.uint8, torch.int32, torch.int64]


def pairs(transform: Transform) -> tuple[Tensor, Tensor]:
    """Every (state, choice) of each feature, (N, D); a feature with fewer repeats its own."""
    rows = max(k * u for k, u in zip(transform.states.sizes, transform.choices.sizes, strict=True))
    n = torch.arange(rows)[:, None]
    k, u = torch.tensor(transform.states.sizes), torch.tensor(transform.choices.sizes)
    return n % k, n // k % u


@given(SIZES, st.sampled_from(KINDS), st.sampled_from(INTEGERS))
def test_every_choice_is_a_bijection_in_any_integer_type(sizes, kind, dtype):
    transform = kind(sizes)
    x, u = pairs(transform)
    y = transform.to_base(x.to(dtype), u.to(dtype))
    assert y.dtype == torch.uint8
    assert bool(((y >= 0) & (y < torch.tensor(sizes))).all())
    assert torch.equal(transform.to_data(y.to(dtype), u.to(dtype)), x)


@given(SIZES, st.sampled_from(KINDS))
def test_choice_zero_is_the_identity(sizes, kind):
    transform = kind(sizes)
    x, u = pairs(transform)
    assert torch.equal(transform.to_base(x, torch.zeros_like(u)), x)


@given(st.integers(1, 9))
def test_all_choices_differ(k):
    for transform in (ModularShift([k]), ModularAffine([k])):
        u = torch.arange(transform.choices.sizes[0])[:, None, None]
        maps = {tuple(row) for row in transform.to_base(torch.arange(k)[:, None], u)[..., 0].tolist()}
        units = sum(math.gcd(s, k) == 1 for s in range(1, max(k, 2)))
        expected = k if isinstance(transform, ModularShift) else k * units
        assert transform.choices.sizes == (expected,)
        assert k == 2 or len(maps) == expected


def test_a_shift_subtracts_towards_the_base():
    shift = ModularShift([5])
    assert int(shift.to_base(torch.tensor([1]), torch.tensor([3]))) == 3
    assert int(shift.to_data(torch.tensor([1]), torch.tensor([3]))) == 4


def test_location_and_scale():
    """x = sigma y + mu: with K = 5 the units are 1, 2, 3, 4, and u = mu + 5 s."""
    affine = ModularAffine([5])
    y = torch.arange(5)[:, None]
    for scale in range(1, 5):
        for location in range(5):
            u = torch.full_like(y, location + 5 * (scale - 1))
            assert torch.equal(affine.to_data(y, u), (scale * y + location) % 5)


def test_chosen_scales():
    assert ModularAffine([5, 5], scales=(4,)).scales.tolist() == [[1, 4], [1, 4]]
    assert ModularAffine([8], scales=(11, 3, 1)).scales.tolist() == [[1, 3]]  # modulo K, each once
    assert ModularAffine([2, 3, 4]).choices.sizes == (2, 6, 8)


@pytest.mark.parametrize(
    ("k", "scale", "units"), [(4, 2, r"\[1, 3\]"), (6, 3, r"\[1, 5\]"), (5, 0, r"\[1, 2, 3, 4\]")]
)
def test_a_scale_that_is_no_unit_is_refused(k, scale, units):
    with pytest.raises(ModelError, match=rf"modulo {k}.*no bijection; got {scale}: choose among {units}"):
        ModularAffine([k, k], scales=(1, scale))


@pytest.mark.parametrize("kind", KINDS)
def test_no_features_are_refused(kind):
    with pytest.raises(ModelError, match="at least one feature"):
        kind([])


@given(SIZES, st.sampled_from(KINDS))
def test_what_each_choice_reaches(sizes, kind):
    transform = kind(sizes)
    x, _ = pairs(transform)
    for group, reached in zip(transform.choices.groups, transform.reached(x.to(torch.uint8)), strict=True):
        assert reached.shape == (len(x), len(group.features), group.size)
        for u in range(group.size):
            y = transform.to_base(x, torch.full_like(x, u) % torch.tensor(transform.choices.sizes))
            assert torch.equal(reached[..., u], y[:, list(group.features)].long())


@given(SIZES, st.sampled_from(KINDS))
def test_some_features_alone(sizes, kind):
    """In any order, and one of them twice."""
    transform = kind(sizes)
    x, u = pairs(transform)
    features = torch.tensor([*reversed(range(len(sizes))), 0])
    some = transform.to_base(x[:, features], u[:, features], features)
    assert torch.equal(some, transform.to_base(x, u)[:, features])
    assert torch.equal(transform.to_data(some, u[:, features], features), x[:, features])


def test_leading_shapes_broadcast():
    for transform in (Xor(2), ModularAffine([2, 3])):
        x, u = torch.tensor([[1, 0], [0, 1], [1, 1]]), torch.ones(7, 1, 2, dtype=torch.int64)
        assert transform.to_base(x, u).shape == transform.to_data(x, u).shape == (7, 3, 2)


@pytest.mark.parametrize(
    ("width", "dtype"), [(256, torch.uint8), (257, torch.int16), (2**15 + 1, torch.int32)]
)
def test_states_are_of_the_smallest_type_that_holds_them(width, dtype):
    """And arithmetic that leaves its range comes back: 300 - 1 wraps around as the integers do."""
    shift = ModularShift([width, 3])
    x, u = torch.tensor([[0, 2], [width - 1, 0]]), torch.tensor([[width - 1, 2], [1, 1]])
    y = shift.to_base(x.to(dtype), u.to(dtype))
    assert y.dtype == dtype
    assert y.tolist() == [[1, 0], [width - 2, 2]]
    assert torch.equal(shift.to_data(y, u.to(dtype)).long(), x)


class Swapped(ModularShift):
    """A shift, but for one pair of a feature, which is no bijection."""

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        y = super().value_to_base(x, u, d)
        return torch.where((x == 1) & (u == 1) & (d == 1), 1, y)


def test_all_pairs_of_small_spaces_are_tried():
    with pytest.raises(ModelError, match=r"value_to_data must undo value_to_base.*Swapped"):
        Swapped([4, 4])


class Lost(ModularShift):
    """Its inverse is that of another choice."""

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return super().value_to_data(y, u + 1, d)


def test_of_wide_spaces_pairs_from_everywhere_are_tried():
    """Ten thousand categories have a hundred million pairs; building takes no such time, and a wrong inverse shows."""
    assert ModularShift([10_000] * 3).choices.sizes == (10_000,) * 3
    with pytest.raises(ModelError, match="Lost"):
        Lost([10_000] * 3)


def test_which_features_u_zero_keeps():
    class Moved(ModularShift):
        def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
            return super().value_to_base(x, u + (d == 1), d)

        def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
            return super().value_to_data(y, u + (d == 1), d)

    transform = Moved([2, 3, 4])
    assert transform.keeps(torch.tensor([True, False, True]))
    assert not transform.keeps(torch.tensor([False, True, False]))
    assert not Moved([2, 2]).is_xor
