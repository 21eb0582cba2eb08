"""The distribution of one layer's choices, against torch.distributions."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, kl_divergence

from enumeration import padded
from xorflow import FactorisedBase, ModularShift
from xorflow._states import Alphabet, Layout
from xorflow.flows import Choices
from xorflow.flows.choices import log_marginal

SIZES = (3, 2, 4, 1, 2, 3)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def binary(seed: int) -> tuple[Choices, Categorical]:
    logits = random(7, 5, seed=seed) * 3
    return Choices(logits, Layout(Alphabet([2] * 5))), Categorical(
        logits=torch.stack((torch.zeros_like(logits), logits), -1)
    )


def mixed(seed: int) -> tuple[Choices, Categorical]:
    """Packed logits, and one table of them all."""
    alphabet = Alphabet(SIZES)
    packed = random(7, alphabet.flat, seed=seed) * 3
    table = torch.full((7, len(SIZES), 4), -1e9, dtype=torch.float64)
    for d, size in enumerate(SIZES):
        of_feature = packed[:, alphabet.logit_features == d]
        table[:, d, :size] = (
            torch.cat((torch.zeros_like(of_feature), of_feature), -1) if size == 2 else of_feature
        )
    return Choices(packed, Layout(alphabet)), Categorical(logits=table)


KINDS = pytest.mark.parametrize("make", [binary, mixed])


def values_of(choices: Choices, seed: int) -> list[Tensor]:
    return [random(*part.shape, seed=seed + n) for n, part in enumerate(choices.log_probs())]


def test_bits_are_bernoulli():
    logits, other = random(7, 5, seed=0) * 3, random(7, 5, seed=1) * 3
    layout = Layout(Alphabet([2] * 5))
    close(Choices(logits, layout).mean, Bernoulli(logits=logits).mean)
    close(
        Choices(logits, layout).kl(Choices(other, layout)),
        kl_divergence(Bernoulli(logits=logits), Bernoulli(logits=other)),
    )
    assert Choices(logits, layout).binary


@KINDS
def test_choices_are_categorical(make):
    (choices, reference), (other, other_reference) = make(0), make(1)
    u = reference.sample()
    close(
        padded(choices.log_probs(), choices.alphabet).exp()[reference.probs > 0],
        reference.probs[reference.probs > 0],
    )
    close(choices.log_prob(u), reference.log_prob(u))
    close(choices.log_prob(u.to(torch.uint8)), reference.log_prob(u))
    close(choices.entropy(), reference.entropy())
    close(choices.kl(other), kl_divergence(reference, other_reference))
    assert torch.equal(choices.mode().long(), reference.probs.argmax(-1))
    assert choices.mode().dtype == torch.uint8


@KINDS
def test_means_are_probabilities_in_the_layout_of_logits(make):
    choices, reference = make(0)
    for d, size in enumerate(choices.alphabet.sizes):
        of_feature = choices.mean[:, choices.alphabet.logit_features == d]
        close(of_feature, reference.probs[:, d, 1:2] if size == 2 else reference.probs[:, d, :size])


@KINDS
def test_leading_shapes_broadcast(make):
    choices, reference = make(0)
    u = reference.sample((3,))
    close(choices.log_prob(u), reference.log_prob(u))
    close(choices.log_prob(u[0, :1].unsqueeze(0)), reference.log_prob(u[0, :1].unsqueeze(0)))


@KINDS
def test_expectations_are_sums_over_choices(make):
    choices, _ = make(2)
    values = values_of(choices, 3)
    pairs = list(zip(choices.log_probs(), values, strict=True))
    ones = [(log_p.exp() * v).sum(-1, keepdim=True) for log_p, v in pairs]
    mixed_ones = [(log_p.exp() * v.exp()).sum(-1, keepdim=True).log() for log_p, v in pairs]
    close(choices.expectation(values), by_feature(choices, ones))
    close(choices.log_mixture(values), by_feature(choices, mixed_ones))


def by_feature(choices: Choices, parts: list[Tensor]) -> Tensor:
    out = torch.empty(7, choices.alphabet.features, dtype=torch.float64)
    for group, part in zip(choices.alphabet.groups, parts, strict=True):
        out[:, list(group.features)] = part.squeeze(-1)
    return out


@KINDS
def test_draws_invert_the_distribution_function(make):
    """A grid of uniforms meets each choice as often as its probability says, to one step of the grid."""
    choices, reference = make(4)
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    u = choices.sample(grid[:, None, None].expand(-1, *reference.probs.shape[:-1])).long()
    share = torch.nn.functional.one_hot(u, reference.probs.shape[-1]).double().mean(0)
    assert float((share - reference.probs).abs().max()) < 1 / 2000


@KINDS
def test_extreme_uniforms_meet_existing_choices(make):
    choices, _ = make(5)
    shape = (7, choices.alphabet.features)
    for uniform in (0.0, 1.0, 1 + 1e-6):  # the last as if rounding had left the sum just below 1
        u = choices.sample(torch.full(shape, uniform, dtype=torch.float64))
        assert bool((choices.log_prob(u) > -100).all())


def test_ties_take_the_first_choice():
    layout = Layout(Alphabet((3, 2, 3)))
    assert Choices(torch.zeros(layout.alphabet.flat), layout).mode().tolist() == [0, 0, 0]


@KINDS
def test_extreme_logits_stay_finite(make):
    choices, _ = make(6)
    choices.logits = (choices.logits * 1e4).requires_grad_()
    values = [-torch.ones_like(part) for part in choices.log_probs()]
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
    layout = Layout(Alphabet([2] * 5))

    def one(logits: Tensor, values: Tensor) -> Tensor:
        return Choices(logits, layout).log_mixture([values])

    def of(tensor: Tensor, dim: int | None, k: int) -> Tensor:
        return tensor if dim is None else tensor.select(dim, k)

    found = torch.vmap(one, in_dims)(logits, values)
    expected = torch.stack([one(of(logits, in_dims[0], k), of(values, in_dims[1], k)) for k in range(3)])
    close(found, expected)
    gradients = [torch.autograd.grad(out.sin().sum(), [logits, values]) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("lead", [(200,), (1,), (3, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_shifts_summed_out_without_gradient_are_those_with_one(
    dtype: torch.dtype, scale: float, lead: tuple[int, ...]
) -> None:
    """As probabilities, or as logs where sums would vanish; of logits for each row, for all rows, or of several draws."""
    kinds = (2, 5, 3, 5, 40)
    generator = torch.Generator().manual_seed(0)
    transform, base = ModularShift(kinds), FactorisedBase(5, categories=kinds, learned=True).to(dtype)
    with torch.no_grad():
        base.logits.copy_(scale * torch.randn(base.logits.shape, generator=generator))
    x = torch.stack([torch.randint(0, k, (200,), generator=generator) for k in kinds], -1)
    logits = scale * torch.randn(*lead, transform.choices.flat, generator=generator, dtype=dtype)
    choices = Choices(logits, transform.layout)
    expected = log_marginal(choices, transform, base, x).detach()
    with torch.no_grad():
        found = log_marginal(choices, transform, base, x)
    error = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=error, atol=error)
