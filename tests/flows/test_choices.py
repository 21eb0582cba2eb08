"""The distribution of one layer's choices, against torch.distributions."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

from xorflow._states import Alphabet
from xorflow.flows import BinaryChoices, CategoricalChoices

SIZES = (2, 3, 4)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def binary(seed: int) -> tuple[BinaryChoices, Bernoulli]:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return BinaryChoices(logits), Bernoulli(logits=logits)


def mixed(seed: int) -> tuple[CategoricalChoices, Categorical]:
    valid = Alphabet(SIZES).valid()
    logits = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return CategoricalChoices(logits, valid), Categorical(logits=logits.masked_fill(~valid, -1e9))


def test_binary_nodes_are_bernoulli():
    (choices, reference), (other, other_reference) = binary(0), binary(1)
    u = reference.sample()
    close(choices.mean, reference.mean)
    close(choices.log_prob(u), reference.log_prob(u))
    close(choices.entropy(), reference.entropy())
    close(choices.kl(other), kl_divergence(reference, other_reference))
    close(choices.log_probs().exp().sum(-1), torch.ones(7, 5).double())
    assert torch.equal(choices.mode(), (reference.mean > 0.5).double())


def test_categorical_nodes_are_categorical():
    (choices, reference), (other, other_reference) = mixed(0), mixed(1)
    index = reference.sample()
    u = torch.nn.functional.one_hot(index, 4).double()
    close(choices.mean, reference.probs)
    close(choices.log_prob(u), reference.log_prob(index))
    close(choices.entropy(), reference.entropy())
    close(choices.kl(other), kl_divergence(reference, other_reference))
    assert torch.equal(choices.mode().argmax(-1), reference.probs.argmax(-1))


@pytest.mark.parametrize("make", [binary, mixed])
def test_expectations_are_sums_over_choices(make):
    choices, _ = make(2)
    p = choices.log_probs().exp()
    values = torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    close(choices.expectation(values), (p * values).sum(-1))
    close(choices.log_mixture(values), (p * values.exp()).sum(-1).log())


@pytest.mark.parametrize("make", [binary, mixed])
def test_draws_invert_the_distribution_function(make):
    """A grid of uniforms meets each choice as often as its probability says, to one step of the grid."""
    choices, _ = make(4)
    p = choices.log_probs().exp()
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    u = choices.sample(grid[:, None, None].expand(-1, *p.shape[:-1]))
    share = torch.stack((1 - u, u), -1).mean(0) if isinstance(choices, BinaryChoices) else u.mean(0)
    assert float((share - p).abs().max()) < 1 / 2000


@pytest.mark.parametrize("make", [binary, mixed])
def test_extreme_uniforms_meet_existing_choices(make):
    choices, _ = make(5)
    shape = choices.log_probs().shape[:-1]
    for uniform in (0.0, 1.0, 1 + 1e-6):  # the last as if rounding had left the sum just below 1
        u = choices.sample(torch.full(shape, uniform, dtype=torch.float64))
        assert bool((choices.log_prob(u) > -100).all())


def test_ties_take_the_first_choice():
    assert BinaryChoices(torch.zeros(3)).mode().tolist() == [0, 0, 0]
    assert CategoricalChoices(torch.zeros(1, 3), torch.ones(1, 3).bool()).mode().tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("make", [binary, mixed])
def test_extreme_logits_stay_finite(make):
    choices, _ = make(6)
    choices.logits = (choices.logits * 1e4).requires_grad_()
    values = -torch.ones_like(choices.log_probs())
    total = choices.entropy().sum() + choices.log_mixture(values).sum() + choices.expectation(values).sum()
    total.backward()
    assert bool(torch.isfinite(total))
    assert bool(torch.isfinite(choices.logits.grad).all())


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_a_mixture_under_vmap_is_one_after_the_other(in_dims):
    """Logits (S, B, D) and values (B, D, 2) of several runs: the values are broadcast, and some belong to all runs."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    values = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    logits = logits if in_dims[0] is None else torch.stack([logits + k for k in range(3)], in_dims[0])
    values = values if in_dims[1] is None else torch.stack([values * k for k in range(3)], in_dims[1])
    logits.requires_grad_()
    values.requires_grad_()

    def one(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return BinaryChoices(logits).log_mixture(values)

    def of(tensor: torch.Tensor, dim: int | None, k: int) -> torch.Tensor:
        return tensor if dim is None else tensor.select(dim, k)

    found = torch.vmap(one, in_dims)(logits, values)
    expected = torch.stack([one(of(logits, in_dims[0], k), of(values, in_dims[1], k)) for k in range(3)])
    close(found, expected)
    gradients = [torch.autograd.grad(out.sin().sum(), [logits, values]) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs)
