"""The factorised base."""

import math

import pytest
import torch

import zoo
from enumeration import all_states
from xorflow import FactorisedBase, ModelError

MIXED = torch.tensor([[0.7, 0.3, 0, 0], [0.2, 0.5, 0.3, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def mixed(**options) -> FactorisedBase:
    return FactorisedBase(3, categories=(2, 3, 4), probabilities=MIXED, **options)


@pytest.mark.parametrize("name", zoo.names())
def test_it_sums_to_one(name):
    base = zoo.make(name).base.requires_grad_(False)
    x = base.states.encode(all_states(base.states.sizes), torch.float64)
    assert abs(float(base.log_prob(x).sum(-1).exp().sum()) - 1) < 1e-12


def test_it_starts_at_the_given_probabilities():
    torch.testing.assert_close(mixed().log_table().exp() * mixed().valid, MIXED.float(), rtol=0, atol=1e-6)
    found = FactorisedBase(2, 0.7, categories=(2, 4)).log_table().exp()
    torch.testing.assert_close(found[1], torch.tensor([0.7, 0.1, 0.1, 0.1]), rtol=0, atol=1e-6)
    assert [round(float(p), 6) for p in found[0, :2]] == [0.7, 0.3]
    assert float(FactorisedBase(1, categories=1).log_table()) == 0


def test_learned_or_fixed():
    assert mixed(learned=True).logits.requires_grad
    assert not mixed().logits.requires_grad
    base = mixed(learned=True)
    base.log_table().sum().backward()
    assert bool(torch.isfinite(base.logits.grad).all())
    assert bool((base.logits.grad[~base.valid] == 0).all())


@pytest.mark.parametrize("base", [mixed(), FactorisedBase(3, 0.9), FactorisedBase(2, 0.4, categories=5)])
def test_draws_invert_the_distribution_function(base):
    grid = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    y = base.sample(grid[:, None].expand(-1, base.features))
    for d, k in enumerate(base.states.sizes):
        share = torch.bincount(y[:, d], minlength=k) / 5000
        assert float((share - base.log_table()[d, :k].exp()).abs().max()) < 1e-3
        assert int(y[:, d].max()) < k


def test_extreme_uniforms_meet_existing_categories():
    for dtype in (torch.float32, torch.float64):
        beyond = torch.full((1, 3), 1 + 1e-6, dtype=dtype)  # as if rounding had left the sum just below 1
        highest = mixed().sample(beyond)
        assert bool((highest < torch.tensor([2, 3, 4])).all())
        assert mixed().sample(torch.zeros(1, 3, dtype=dtype)).tolist() == [[0, 0, 0]]


def test_it_is_linear_in_relaxed_states():
    for base in (mixed().double(), FactorisedBase(3).double()):
        a, b = base.states.encode(torch.tensor([[0, 0, 0], [1, 1, 1]]), torch.float64)
        middle = base.log_prob(0.3 * a + 0.7 * b)
        torch.testing.assert_close(
            middle, 0.3 * base.log_prob(a) + 0.7 * base.log_prob(b), rtol=0, atol=1e-12
        )


def test_floor_and_entropy():
    base = mixed().double()
    assert math.isclose(float(base.floor()), -math.log(0.7 * 0.5 * 0.4), abs_tol=1e-6)
    expected = -sum(float(p) * math.log(p) for p in MIXED.flatten() if p > 0)
    assert math.isclose(float(base.entropy()), expected, abs_tol=1e-6)


@pytest.mark.parametrize("p0", [0, 1, -0.1, 1.5, math.nan])
def test_a_probability_of_zero_or_one_is_refused(p0):
    with pytest.raises(ModelError, match="strictly between 0 and 1, and got"):
        FactorisedBase(3, p0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (torch.full((2, 2), 0.5), r"shape \(D, K\) = \(3, 2\), got \(2, 2\)"),
        (torch.full((3, 2), 0.4), "sum to 1"),
        (torch.tensor([[1.5, -0.5]] * 3), "non-negative"),
        (torch.full((3, 2), math.nan), "sum to 1"),
    ],
)
def test_what_is_no_distribution_is_refused(table, words):
    with pytest.raises(ModelError, match=words):
        FactorisedBase(3, probabilities=table)


def test_no_features_are_refused():
    with pytest.raises(ModelError, match="at least one feature"):
        FactorisedBase(0)
