"""Bijections: both directions on integers, and the multilinear form that carries gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from enumeration import all_states
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
    assert y.dtype == torch.int64
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
        maps = {tuple(row) for row in transform.to_base_table[0, : transform.choices.sizes[0], :k].tolist()}
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
    assert ModularAffine([5, 5], scales=(4,)).scales == ((1, 4), (1, 4))
    assert ModularAffine([8], scales=(11, 3, 1)).scales == ((1, 3),)  # modulo K, each once
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
def test_the_multilinear_form_is_exact_on_integers(sizes, kind):
    transform = kind(sizes)
    x, u = pairs(transform)
    coded, choice = transform.states.encode(x, torch.float64), transform.choices.encode(u, torch.float64)
    y = transform.relaxed_to_base(coded, choice)
    assert torch.equal(y, transform.states.encode(transform.to_base(x, u), torch.float64))
    assert torch.equal(transform.relaxed_to_data(y, choice), coded)


@given(SIZES, st.sampled_from(KINDS), st.integers(0, 99))
def test_the_multilinear_form_is_the_mean_over_random_choices(sizes, kind, seed):
    """Linear in x and in u: on relaxed values it is the average of what the integers do."""
    transform = kind(sizes)
    generator = torch.Generator().manual_seed(seed)
    p, q = (_simplex(a, generator) for a in (transform.states, transform.choices))  # (D, K), (D, U)
    found = transform.relaxed_to_base(_relaxed(transform.states, p), _relaxed(transform.choices, q))
    expected = torch.zeros_like(p)
    for d in range(len(sizes)):
        for k in range(transform.states.sizes[d]):
            for u in range(transform.choices.sizes[d]):
                place = transform.to_base_table[0 if len(transform.to_base_table) == 1 else d, u, k]
                expected[d, place] += p[d, k] * q[d, u]
    torch.testing.assert_close(found, _relaxed(transform.states, expected), rtol=0, atol=1e-12)


def _simplex(alphabet, generator: torch.Generator) -> Tensor:
    scores = torch.randn(alphabet.features, alphabet.width, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~alphabet.valid(), -torch.inf).softmax(-1)


def _relaxed(alphabet, p: Tensor) -> Tensor:
    return p[:, 1] if alphabet.binary else p


def test_xor_has_the_right_slopes():
    x, u = (t.double().requires_grad_() for t in all_states((2, 2)).T.unsqueeze(-1))
    y = Xor(1).relaxed_to_base(x, u)
    dx, du = torch.autograd.grad(y.sum(), [x, u])
    assert torch.equal(y[:, 0], torch.tensor([0.0, 1.0, 1.0, 0.0]).double())
    assert torch.equal(dx, 1 - 2 * u)
    assert torch.equal(du, 1 - 2 * x)


@given(SIZES, st.sampled_from(KINDS))
def test_outcomes_look_each_choice_up(sizes, kind):
    transform = kind(sizes)
    table = torch.randn(len(sizes), transform.states.width, dtype=torch.float64) * transform.states.valid()
    x, _ = pairs(transform)
    found = transform.outcomes(table, transform.states.encode(x, torch.float64))
    for u in range(transform.choices.width):
        for d, choices in enumerate(transform.choices.sizes):
            if u < choices:
                y = transform.to_base(x, torch.full_like(x, u) % torch.tensor(transform.choices.sizes))[:, d]
                torch.testing.assert_close(found[:, d, u], table[d, y], rtol=0, atol=1e-14)


def test_leading_shapes_broadcast():
    for transform in (Xor(2), ModularAffine([2, 3])):
        x = transform.states.encode(torch.tensor([[1, 0], [0, 1], [1, 1]]), torch.float64)
        u = transform.choices.encode(torch.ones(7, 1, 2, dtype=torch.int64), torch.float64)
        assert transform.states.batch_shape(transform.relaxed_to_base(x, u)) == (7, 3)
