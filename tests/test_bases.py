"""The factorised base."""

import math

import pytest
import torch

import zoo
from enumeration import all_states, padded
from xorflow import FactorisedBase, ModelError

MIXED = torch.tensor([[0.7, 0.3, 0, 0], [0.2, 0.5, 0.3, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def mixed(**options) -> FactorisedBase:
    return FactorisedBase(3, categories=(2, 3, 4), probabilities=MIXED, **options)


@pytest.mark.parametrize("name", zoo.names())
def test_it_sums_to_one(name):
    base = zoo.make(name).base.requires_grad_(False)
    x = all_states(base.states.sizes)
    assert abs(float(base.log_prob(x).sum(-1).exp().sum()) - 1) < 1e-12


def test_it_starts_at_the_given_probabilities():
    for d, row in enumerate(MIXED.float()):
        torch.testing.assert_close(mixed().log_probs_of(d).exp(), row[: d + 2], rtol=0, atol=1e-6)
    base = FactorisedBase(2, 0.7, categories=(4, 2))
    torch.testing.assert_close(
        base.log_probs_of(0).exp(), torch.tensor([0.7, 0.1, 0.1, 0.1]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(base.log_probs_of(1).exp(), torch.tensor([0.7, 0.3]), rtol=0, atol=1e-6)
    assert FactorisedBase(1, categories=1).log_probs_of(0).tolist() == [0]


def test_learned_or_fixed():
    assert mixed(learned=True).logits.requires_grad
    assert not mixed().logits.requires_grad
    base = mixed(learned=True)
    sum(table.sum() for table in base.log_table()).backward()
    assert bool(torch.isfinite(base.logits.grad).all())


@pytest.mark.parametrize(
    "base",
    [
        mixed(),
        FactorisedBase(3, 0.9),
        FactorisedBase(2, 0.4, categories=5),
        FactorisedBase(3, 0.4, categories=(3, 1, 2), tied=True),
    ],
)
def test_draws_invert_the_distribution_function(base):
    grid = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    y = base.sample(grid[:, None].expand(-1, base.features))
    for d, k in enumerate(base.states.sizes):
        share = torch.bincount(y[:, d].int(), minlength=k) / 5000
        assert float((share - base.log_probs_of(d).exp()).abs().max()) < 1e-3
        assert int(y[:, d].max()) < k


def test_extreme_uniforms_meet_existing_categories():
    for dtype in (torch.float32, torch.float64):
        beyond = torch.full((1, 3), 1 + 1e-6, dtype=dtype)  # as if rounding had left the sum just below 1
        highest = mixed().sample(beyond)
        assert bool((highest < torch.tensor([2, 3, 4])).all())
        assert mixed().sample(torch.zeros(1, 3, dtype=dtype)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", zoo.names())
def test_all_forms_of_a_probability_are_the_same(name):
    base = zoo.make(name).base.requires_grad_(False)
    y, table = all_states(base.states.sizes), padded(base.log_table(), base.states)
    for d, size in enumerate(base.states.sizes):
        torch.testing.assert_close(base.log_probs_of(d), table[d, :size], rtol=0, atol=0)
        torch.testing.assert_close(base.log_prob(y)[:, d], table[d, y[:, d]], rtol=0, atol=1e-15)
    states = [torch.arange(group.size).expand(len(group.features), -1) for group in base.states.groups]
    for found, expected in zip(base.log_probs_at(states, base.states), base.log_table(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def tied(*categories: int, p0: float = 0.3, learned: bool = False) -> FactorisedBase:
    return FactorisedBase(len(categories), p0, categories=categories, tied=True, learned=learned).double()


def test_a_tied_base_has_one_number_a_feature_and_shares_the_rest_evenly():
    base = tied(4, 2, 1, 301)
    assert base.logits.shape == (4,)
    expected = [[0.3, *[0.7 / 3] * 3], [0.3, 0.7], [1.0], [0.3, *[0.7 / 300] * 300]]
    for d, row in enumerate(expected):
        torch.testing.assert_close(base.log_probs_of(d).exp(), torch.tensor(row).double(), rtol=0, atol=1e-7)


def test_a_tied_base_is_the_untied_one_of_the_same_probabilities():
    base = tied(3, 2, 4)
    rows = [base.log_probs_of(d).exp() for d in range(3)]
    free = FactorisedBase(3, categories=(3, 2, 4), probabilities=rows).double()
    y = all_states((3, 2, 4))
    torch.testing.assert_close(base.log_prob(y), free.log_prob(y), rtol=0, atol=1e-6)
    uniforms = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(base.sample(uniforms), free.sample(uniforms))
    assert float(base.floor()) == pytest.approx(float(free.floor()), abs=1e-6)
    assert float(base.entropy()) == pytest.approx(float(free.entropy()), abs=1e-6)


def test_a_learned_tied_base_has_the_gradient_of_differences():
    base, y = tied(3, 2, 4, 1, learned=True), all_states((3, 2, 4, 1))
    assert torch.autograd.gradcheck(lambda logits: log_prob_at(base, logits, y), base.logits)


def log_prob_at(base: FactorisedBase, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(_LogProb(base), {"base.logits": logits}, (y,))


class _LogProb(torch.nn.Module):
    def __init__(self, base: FactorisedBase) -> None:
        super().__init__()
        self.base = base

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.base.log_prob(y)


@pytest.mark.parametrize("is_tied", [False, True])
def test_probabilities_can_be_set_for_some_features(is_tied):
    base = FactorisedBase(3, 0.9, categories=(3, 2, 4), tied=is_tied).double()
    rows = [torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.2, 0.8]), torch.full((4,), 0.25)]
    base.set_probabilities([row.double() for row in rows], torch.tensor([True, True, False]))
    for d, row in enumerate([rows[0], rows[1], torch.tensor([0.9, *[0.1 / 3] * 3])]):
        torch.testing.assert_close(base.log_probs_of(d).exp(), row.double(), rtol=0, atol=1e-6)
    base.set_probabilities(rows)
    torch.testing.assert_close(base.log_probs_of(2).exp(), rows[2].double(), rtol=0, atol=1e-6)


def test_what_a_configuration_says_builds_it_again():
    for base in (tied(3, 2, learned=True), mixed(), FactorisedBase(3)):
        again = FactorisedBase(**base.config()).to(base.logits.dtype)
        again.load_state_dict(base.state_dict())
        for d in range(base.features):
            assert torch.equal(again.log_probs_of(d), base.log_probs_of(d))
        assert (again.learned, again.tied, again.states) == (base.learned, base.tied, base.states)


def test_a_tied_base_has_no_other_probabilities():
    with pytest.raises(ModelError, match="one probability a feature, p0"):
        FactorisedBase(2, tied=True, probabilities=torch.full((2, 2), 0.5))


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
        (torch.full((2, 2), 0.5), r"\(D, K\), and each of 3 features needs as many.* got \[\(2,\), \(2,\)\]"),
        (torch.full((3, 1), 1.0), "each of 3 features needs as many as it has categories"),
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
