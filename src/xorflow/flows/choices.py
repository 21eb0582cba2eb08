"""The distribution of one layer's choice `u`, feature by feature, given what its network saw.

Two classes with one set of methods, so that nothing above them asks for K: log-odds for two choices, where closed forms
are cheap and exact, and logits otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot
from torch.nn.functional import softplus as torch_softplus

from xorflow._autograd import Function
from xorflow._math import full_precision
from xorflow._states import NEVER, Alphabet


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact in float64 too: the default threshold of torch leaves an error of 2e-9."""
    return torch_softplus(x, threshold=50.0)


def positive(logits: Tensor) -> Tensor:
    r"""1 where a log-odds is positive and 0 elsewhere: where a formula is to be mirrored.

    :math:`\log(1 + e^{a + \phi}) - \log(1 + e^\phi)` is the difference of two numbers near :math:`\phi` if that is large, and
    float32 has no digits left for it. With u = 0 and u = 1 exchanged the log-odds is :math:`-\phi`, and nothing cancels.
    Numbers and not booleans: `torch.lerp` by them is exact at both ends, and on the CPU many times as fast as `torch.where`.
    """
    return (logits > 0).to(logits.dtype)


class _LogMixture(Function):
    r""":math:`\log((1 - f) e^a + f e^b)` with :math:`f = \sigma(\phi)`, and its gradient from two sigmoids.

    Autograd on the same expression would keep and pass over several times as many tensors; this is most of a training step's
    time outside of the networks.
    """

    @staticmethod
    def forward(logits: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mirror = positive(logits)
        near, below = torch.lerp(low, high, mirror), logits.abs().neg_()  # near: of the likelier u
        raised = torch.lerp(high, low, mirror).sub_(near).add_(below)
        return near.add_(softplus(raised)).sub_(softplus(below)), raised

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, raised = output  # an output only because what is kept must be an input or an output
        ctx.mark_non_differentiable(raised)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], raised)
        ctx.shapes = tuple(t.shape for t in inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, raised = ctx.saved_tensors
        g = gradients[0]
        if g is None:
            return None, None, None
        mirror = positive(logits)
        g_far = g * torch.sigmoid(raised)  # times the posterior of the u that is less likely beforehand
        g_logits = (g_far - g * torch.sigmoid(-logits.abs())) * (1 - 2 * mirror)
        g_near = g - g_far
        g_inputs = (g_logits, torch.lerp(g_near, g_far, mirror), torch.lerp(g_far, g_near, mirror))
        return tuple(g.sum_to_size(shape) for g, shape in zip(g_inputs, ctx.shapes, strict=True))

    @staticmethod
    def vmap(info, in_dims, *inputs: Tensor):  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every operation is elementwise: the hidden dimension goes to the front of whatever has it."""
        pairs = list(zip(inputs, in_dims, strict=True))
        rank = max(t.dim() - (dim is not None) for t, dim in pairs)
        aligned = []
        for tensor, dim in pairs:
            if dim is not None:
                tensor = tensor.movedim(dim, 0)
                missing = rank + 1 - tensor.dim()
                tensor = tensor.reshape(len(tensor), *(1,) * missing, *tensor.shape[1:])
            aligned.append(tensor)
        return _LogMixture.apply(*aligned), (0, 0)


class BinaryChoices:
    r"""Bernoulli choices with log-odds :math:`\phi` (..., D)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @property
    def mean(self) -> Tensor:
        """P(u = 1), (..., D)."""
        return torch.sigmoid(self.logits)

    def log_probs(self) -> Tensor:
        """log P(u = k), (..., D, 2)."""
        return torch.stack((logsigmoid(-self.logits), logsigmoid(self.logits)), -1)

    def log_prob(self, u: Tensor) -> Tensor:
        """log P(u) for encoded u, (..., D)."""
        return u * self.logits - softplus(self.logits)

    def mode(self) -> Tensor:
        """The most probable choice (0 in a tie)."""
        return (self.logits > 0).to(self.logits.dtype)

    def sample(self, uniforms: Tensor) -> Tensor:
        """Invert the distribution function: u = 1 where the uniform exceeds P(u = 0)."""
        return (uniforms > torch.sigmoid(-self.logits)).to(self.logits.dtype)

    def entropy(self) -> Tensor:
        """(..., D), in nats."""
        return softplus(self.logits) - self.logits * self.mean

    def kl(self, other: BinaryChoices) -> Tensor:
        """KL(self || other), (..., D)."""
        sign = 1 - 2 * positive(self.logits)
        ours, theirs = sign * self.logits, sign * other.logits
        return torch.sigmoid(ours) * (ours - theirs) - softplus(ours) + softplus(theirs)

    def expectation(self, values: Tensor) -> Tensor:
        """E[values at u], (..., D), for values (..., D, 2)."""
        low, high = values.unbind(-1)
        return low + self.mean * (high - low)

    def log_mixture(self, values: Tensor) -> Tensor:
        """log E[exp(values at u)], (..., D), for values (..., D, 2)."""
        low, high = values.unbind(-1)
        mixed, _ = _LogMixture.apply(self.logits, low, high)  # pyright: ignore[reportGeneralTypeIssues]
        return mixed


class CategoricalChoices:
    """Categorical choices with logits (..., D, U), where only U_d of them exist."""

    def __init__(self, logits: Tensor, valid: Tensor) -> None:
        self.logits = logits
        self.valid = valid  # (D, U)

    @property
    def mean(self) -> Tensor:
        """The probabilities, (..., D, U): the mean of the one-hot u."""
        return torch.softmax(self.logits.masked_fill(~self.valid, -torch.inf), -1)

    def log_probs(self) -> Tensor:
        """log P(u = k), (..., D, U)."""
        masked = torch.log_softmax(self.logits.masked_fill(~self.valid, -torch.inf), -1)
        return masked.masked_fill(~self.valid, NEVER)

    def log_prob(self, u: Tensor) -> Tensor:
        """log P(u) for one-hot u, (..., D)."""
        return (u * self.log_probs()).sum(-1)

    def mode(self) -> Tensor:
        """The most probable choice, one-hot (the first in a tie)."""
        index = self.logits.masked_fill(~self.valid, -torch.inf).argmax(-1)
        return one_hot(index, self.logits.shape[-1]).to(self.logits.dtype)

    def sample(self, uniforms: Tensor) -> Tensor:
        """Invert the distribution function at `uniforms` (..., D); one-hot."""
        below = self.mean.cumsum(-1)[..., :-1]
        index = (uniforms.unsqueeze(-1) > below).sum(-1)
        last = self.valid.sum(-1) - 1  # rounding may leave the sum just below 1
        return one_hot(index.minimum(last), self.logits.shape[-1]).to(self.logits.dtype)

    def entropy(self) -> Tensor:
        """(..., D), in nats."""
        return -(self.mean * self.log_probs()).sum(-1)

    def kl(self, other: CategoricalChoices) -> Tensor:
        """KL(self || other), (..., D)."""
        return (self.mean * (self.log_probs() - other.log_probs())).sum(-1)

    def expectation(self, values: Tensor) -> Tensor:
        """E[values at u], (..., D), for values (..., D, U)."""
        return (self.mean * values).sum(-1)

    def log_mixture(self, values: Tensor) -> Tensor:
        """log E[exp(values at u)], (..., D), for values (..., D, U)."""
        return torch.logsumexp(self.log_probs() + values, -1)


Choices = BinaryChoices | CategoricalChoices


def make_choices(logits: Tensor, choices: Alphabet, valid: Tensor) -> Choices:
    """The choices that a conditioner's output stands for; half-precision logits become float32 before any log or sum."""
    logits = full_precision(logits)
    return BinaryChoices(logits) if choices.binary else CategoricalChoices(logits, valid)
