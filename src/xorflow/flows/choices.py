r"""The distribution of one layer's choice `u`, feature by feature, given what its network saw.

And what each choice leads to, and the last layer summed out: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`, at depth 1
log p(x_d | what is before d).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.functional import softplus as torch_softplus

from xorflow._math import Function
from xorflow._states import Layout, by_inversion
from xorflow.bases import FactorisedBase
from xorflow.errors import Intractable
from xorflow.transforms import ModularShift, Transform

GREEDY: Literal["greedy"] = "greedy"
Draws = Tensor | Literal["greedy"]
"""Uniforms in (0, 1) if floating, the choices u themselves if integers, both (..., L, D); or the most probable choice."""

_MOST_PAIRS = 2**22
"""How many pairs of a value and a choice all conditionals of a feature may have where a base is not tied."""


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact in float64 too: the default threshold of torch leaves an error of 2e-9."""
    return torch_softplus(x, threshold=50.0)


def positive(logits: Tensor) -> Tensor:
    r"""1 where a log-odds is positive and 0 elsewhere: where a formula is to be mirrored.

    :math:`\log(1 + e^{a + \phi}) - \log(1 + e^\phi)` is the difference of two numbers near :math:`\phi` if that is large, and
    float32 has no digits left for it. With u = 0 and u = 1 exchanged the log-odds is :math:`-\phi`, and nothing cancels.
    Numbers and not booleans: a sum of two products with them is exact, and on the CPU many times as fast as `torch.where`, and
    twice as fast as `torch.lerp`; a comparison takes six times as long as this.
    """
    return logits.detach().sign().clamp_min_(0)


class _LogMixture(Function):
    r""":math:`\log((1 - f) e^a + f e^b)` with :math:`f = \sigma(\phi)`, and its gradient from two sigmoids.

    Autograd on the same expression would keep and pass over several times as many tensors; this is most of a training step's
    time outside of the networks.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, low: Tensor, high: Tensor, swapped: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        at_high = _likelier_is_high(positive(logits), swapped)
        at_low = 1 - at_high
        near = torch.addcmul(at_low * low, at_high, high)  # of the likelier u
        below = logits.abs().neg_()
        raised = torch.addcmul(below, at_low.sub_(at_high), high - low)
        return near.add_(softplus(raised)).sub_(softplus(below))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, low, high, swapped = ctx.saved_tensors
        g, mirror, below = gradients[0], positive(logits), logits.abs().neg_()
        at_high = _likelier_is_high(mirror, swapped)
        raised = torch.addcmul(below, 1 - 2 * at_high, high - low)  # not kept: it has a gradient itself
        g_far = g * torch.sigmoid(raised)  # times the posterior of the u that is less likely beforehand
        g_logits = (g_far - g * torch.sigmoid(below)) * (1 - 2 * mirror)
        g_low = torch.addcmul((1 - at_high) * (g - g_far), at_high, g_far)
        shapes = logits.shape, low.shape, high.shape
        of_each = zip((g_logits, g_low, g - g_low), shapes, strict=True)
        return *(each.sum_to_size(shape) for each, shape in of_each), None


def _likelier_is_high(mirror: Tensor, swapped: Tensor | None) -> Tensor:
    """1 where the likelier u has the value `high`, and else 0; it is u = 1 where `mirror` is 1."""
    return mirror if swapped is None else (mirror - swapped).abs_()


def log_mixture(logits: Tensor, low: Tensor, high: Tensor, swapped: Tensor | None = None) -> Tensor:
    """Of a choice between two with these log-odds: log E[exp(value)], the value being `low` at u = 0 and `high` at u = 1.

    Where `swapped` is 1 and not 0, it is `high` at u = 0 and `low` at u = 1.
    """
    return _LogMixture.apply(logits, low, high, swapped)  # pyright: ignore[reportReturnType]


class Choices:
    r"""The distribution of u that packed logits stand for, (..., `flat`): a feature after the other is drawn independently.

    Bits are log-odds, for which closed forms are cheap and exact; others are logits. What has a number for each value of u
    goes in and out by group, (..., n, U); what has one for each feature as (..., D).

    Args:
        logits: packed as `Alphabet` says; half precision is taken as float32.
        layout: of the alphabet of u.
    """

    def __init__(self, logits: Tensor, layout: Layout) -> None:
        half = logits.dtype in (torch.float16, torch.bfloat16)
        self.logits = logits.float() if half else logits
        self._layout = layout
        self.alphabet = layout.alphabet

    @property
    def binary(self) -> bool:
        """Whether every choice is between two values."""
        return self.alphabet.binary

    @property
    def _groups(self) -> list[_Bits | _Categories]:
        return [
            _Bits(logits) if group.binary else _Categories(logits)
            for group, logits in zip(self.alphabet.groups, self._layout.logits(self.logits), strict=True)
        ]

    @property
    def mean(self) -> Tensor:
        """The probabilities in the layout of logits: P(u = 1) of a bit, and those of all values otherwise."""
        return self._layout.packed([group.mean() for group in self._groups])

    def log_probs(self) -> list[Tensor]:
        """log P(u = k), by group (..., n, U)."""
        return [group.log_probs() for group in self._groups]

    def log_prob(self, u: Tensor) -> Tensor:
        """log P(u) for integers u, (..., D)."""
        return self._by_feature(lambda group, part: group.log_prob(part), self._layout.split(u))

    def mode(self) -> Tensor:
        """The most probable choice (the first in a tie), integers."""
        return self.alphabet.integers(self._by_feature(lambda group: group.mode()))

    def sample(self, uniforms: Tensor) -> Tensor:
        """Integers by inverting the distribution function at `uniforms` (..., D)."""
        drawn = self._by_feature(lambda group, part: group.sample(part), self._layout.split(uniforms))
        return self.alphabet.integers(drawn)

    def entropy(self) -> Tensor:
        """(..., D), in nats."""
        return self._by_feature(lambda group: group.entropy())

    def kl(self, other: Choices) -> Tensor:
        """KL(self || other), (..., D)."""
        return self._by_feature(lambda ours, theirs: ours.kl(theirs), other._groups)

    def expectation(self, values: Sequence[Tensor]) -> Tensor:
        """E[values at u], (..., D), for values by group."""
        return self._by_feature(lambda group, part: group.expectation(part), values)

    def log_mixture(self, values: Sequence[Tensor]) -> Tensor:
        """log E[exp(values at u)], (..., D), for values by group."""
        return self._by_feature(lambda group, part: group.log_mixture(part), values)

    def log_mixture_of_shifts(self, tables: Sequence[Tensor], x: Sequence[Tensor]) -> Tensor:
        """log E[exp(table[(x - u) mod K])], (..., D), for tables (n, K) and integers x (..., n) by group; without gradient.

        A sum of products of probabilities, which takes a few passes over them; `log_mixture` of all values takes many, and is
        for what would vanish in a sum.
        """
        summed = self._by_feature(lambda group, table, x: group.log_mixture_of_shifts(table, x), tables, x)
        if bool((summed > _LEAST_IN_SUMS).all()):
            return summed
        return self.log_mixture([_shifted(table, each) for table, each in zip(tables, x, strict=True)])

    def _by_feature(self, of_group: Callable[..., Tensor], *by_group: Sequence[Any]) -> Tensor:
        """(..., D) from what a function says of each group."""
        return self._layout.joined([of_group(*each) for each in zip(self._groups, *by_group, strict=True)])


class _Bits:
    r"""Bernoulli choices with log-odds :math:`\phi` (..., n)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def mean(self) -> Tensor:
        return torch.sigmoid(self.logits)

    def log_probs(self) -> Tensor:
        return torch.stack((logsigmoid(-self.logits), logsigmoid(self.logits)), -1)

    def log_prob(self, u: Tensor) -> Tensor:
        return u.to(self.logits.dtype) * self.logits - softplus(self.logits)

    def mode(self) -> Tensor:
        return self.logits > 0

    def sample(self, uniforms: Tensor) -> Tensor:
        return uniforms > torch.sigmoid(-self.logits)

    def entropy(self) -> Tensor:
        return softplus(self.logits) - self.logits * self.mean()

    def kl(self, other: _Bits | _Categories) -> Tensor:
        sign = 1 - 2 * positive(self.logits)
        ours, theirs = sign * self.logits, sign * other.logits
        return torch.sigmoid(ours) * (ours - theirs) - softplus(ours) + softplus(theirs)

    def expectation(self, values: Tensor) -> Tensor:
        low, high = values.unbind(-1)
        return low + self.mean() * (high - low)

    def log_mixture(self, values: Tensor) -> Tensor:
        return log_mixture(self.logits, *values.unbind(-1))

    def log_mixture_of_shifts(self, table: Tensor, x: Tensor) -> Tensor:
        return self.log_mixture(_shifted(table, x))


_FEW_VALUES = 32
"""Along so short a last dimension, PyTorch's softmax on the CPU takes up to nine times as long as along the first."""


class _Categories:
    """Categorical choices with logits (..., n, U)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def mean(self) -> Tensor:
        return self._over_values(torch.softmax)

    def log_probs(self) -> Tensor:
        return self._over_values(torch.log_softmax)

    def _over_values(self, function: Callable[[Tensor, int], Tensor]) -> Tensor:
        """A function along the last dimension, (..., n, U); of few values with these first, so that rows are taken at once."""
        if self.logits.shape[-1] > _FEW_VALUES:
            return function(self.logits, -1)
        return function(self.logits.movedim(-1, 0).contiguous(), 0).movedim(0, -1)

    def log_prob(self, u: Tensor) -> Tensor:
        index = u.long().unsqueeze(-1)
        lead = torch.broadcast_shapes(index.shape[:-1], self.logits.shape[:-1])
        log_probs = self.log_probs().expand(*lead, self.logits.shape[-1])
        return log_probs.gather(-1, index.expand(*lead, 1)).squeeze(-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def sample(self, uniforms: Tensor) -> Tensor:
        return by_inversion(self.mean(), uniforms)

    def entropy(self) -> Tensor:
        return -(self.mean() * self.log_probs()).sum(-1)

    def kl(self, other: _Bits | _Categories) -> Tensor:
        return (self.mean() * (self.log_probs() - other.log_probs())).sum(-1)

    def expectation(self, values: Tensor) -> Tensor:
        return (self.mean() * values).sum(-1)

    def log_mixture(self, values: Tensor) -> Tensor:
        return torch.logsumexp(self.log_probs() + values, -1)

    def log_mixture_of_shifts(self, table: Tensor, x: Tensor) -> Tensor:
        mean, values = self.mean(), _shifted(table.exp(), x)
        # in place is quicker, and logits that do not depend on x stand for many rows
        product = mean.mul_(values) if mean.shape == values.shape else mean * values
        return product.sum(-1).log_()


_LEAST_IN_SUMS = -69.0
"""Of a logarithm of a sum of products: below, products may vanish in float32."""


def _shifted(table: Tensor, x: Tensor) -> Tensor:
    """The entries of tables (n, K) at x, x - 1, ..., modulo K, for integers x (..., n): (..., n, K)."""
    size = table.shape[-1]
    falling = table.flip(-1)
    windows = torch.cat((falling, falling), -1).unfold(-1, size, 1)  # (n, K + 1, K)
    return windows[torch.arange(len(table), device=x.device), size - 1 - x.long()]


def choose(choices: Choices, draws: Draws) -> Tensor:
    """u by the draws: the most probable value, by inversion of uniforms, or given as integers; without gradient."""
    with torch.no_grad():
        if isinstance(draws, str):
            return choices.mode()
        return choices.sample(draws) if draws.is_floating_point() else choices.alphabet.integers(draws)


# ---- the last layer ----


def outcomes(transform: Transform, base: FactorisedBase, state: Tensor) -> list[Tensor]:
    """The log base probability that each choice leads to from integer states, by group of choices (..., n, U)."""
    if transform.is_xor:
        # laid out one value of u after the other, so that each is contiguous
        return [torch.stack(_kept_and_flipped(base, state)).movedim(0, -1)]
    return base.log_probs_at(transform.reached(state), transform.choices)


def _kept_and_flipped(base: FactorisedBase, state: Tensor) -> tuple[Tensor, Tensor]:
    """The log base probabilities of bits, and of the other bits."""
    zero, one = base.log_table()[0].unbind(-1)
    bits = state.to(zero.dtype)
    return torch.lerp(zero, one, bits), torch.lerp(one, zero, bits)


def log_marginal(choices: Choices, transform: Transform, base: FactorisedBase, state: Tensor) -> Tensor:
    """The last layer summed out, feature by feature, (..., D)."""
    if transform.is_xor:  # as below, without states (..., D, 2) that autograd would pass over again and again
        zero, one = base.log_table()[0].unbind(-1)
        return log_mixture(choices.logits, zero, one, state.to(choices.logits.dtype))
    if type(transform) is ModularShift and not torch.is_grad_enabled() and state.device.type == "cpu":
        return choices.log_mixture_of_shifts(base.log_table(), transform.layout.split(state))
    return choices.log_mixture(outcomes(transform, base, state))


class _BitsTotal(Function):
    r"""`log_marginal` of bits summed over features, (...), and its gradient in the logits and in the base's log-odds (D,).

    In fewer passes than `log_mixture` takes: what a base adds is a product of the choices, which are zeros and ones, with it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, x: Tensor, base: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        at_one, below = _likelier_is_high(positive(logits), x), logits.abs().neg_()
        at_zero = 1 - at_one
        near = at_one @ logsigmoid(base) + at_zero @ logsigmoid(-base)  # of the likelier u
        raised = torch.addcmul(below, at_zero.sub_(at_one), base)
        return near + softplus(raised).sub_(softplus(below)).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, x, base = ctx.saved_tensors
        g, mirror, below = gradients[0], positive(logits), logits.abs().neg_()
        at_one = _likelier_is_high(mirror, x)
        sign = 1 - 2 * at_one
        far = torch.sigmoid(torch.addcmul(below, sign, base))
        g_logits = (far - torch.sigmoid(below)) * (1 - 2 * mirror) * g.unsqueeze(-1)
        in_base = torch.addcmul(at_one, sign, far).reshape(-1, len(base))
        return g_logits, None, g.reshape(-1) @ in_base - g.sum() * torch.sigmoid(base)


def log_marginal_of_bits(logits: Tensor, x: Tensor, base: Tensor) -> Tensor:
    """The last layer summed out, of bits, in all features, (...), from log-odds of choices and of the base."""
    return _BitsTotal.apply(logits, x.to(logits.dtype), base)  # pyright: ignore[reportReturnType]


def log_marginals(choices: Choices, transform: Transform, base: FactorisedBase, feature: int) -> Tensor:
    """The same for all values of one feature, (B, K) float64, from the choices at it, (B, flat)."""
    log_p = choices.log_probs()[0][:, 0].double()  # (B, U)
    d = torch.tensor(feature, device=log_p.device)
    u = torch.arange(log_p.shape[-1], device=log_p.device)
    values, size = base.log_probs_of(feature).double(), transform.states.sizes[feature]
    if base.tied:  # linear in K: what leads to category 0, and what leads elsewhere
        source = transform.value_to_data(torch.zeros_like(u), u, d)
        mass = log_p.new_zeros(len(log_p), size).index_add_(-1, source, log_p.exp())
        return (mass * values[0].exp() + (1 - mass).clamp_min(0) * values[-1].exp()).log()
    if size * len(u) > _MOST_PAIRS:
        raise Intractable(
            f"all conditionals of feature {feature} take {size} x {len(u)} sums for each row; use a tied base, "
            "FactorisedBase(..., tied=True), where they are linear in the number of categories"
        )
    y = transform.value_to_base(torch.arange(size, device=log_p.device)[:, None], u, d)  # (K, U)
    return torch.logsumexp(log_p.unsqueeze(1) + values[y], -1)
