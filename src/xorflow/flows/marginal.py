r"""The marginal likelihood of binary features at depth 1, with its gradient in closed form.

What `Transform.outcomes` and `Nodes.log_mixture` compute together, in half as many operations over the batch:
autograd would stack the two outcomes of each feature, and take the stack apart again. On CUDA one launch
does it (`_cuda.kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from xorflow._autograd import Function
from xorflow.flows.nodes import softplus


def marginal_total(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    r""":math:`\sum_d \log((1 - f_d)\, p_d(x_d) + f_d\, p_d(1 - x_d))`, (B,).

    Args:
        logits: log-odds of u, (B, D).
        x: states in [0, 1], (B, D), without gradient.
        base_logits: log-odds of y, (D,).
    """
    zero, one = logsigmoid(-base_logits), logsigmoid(base_logits)
    total, _ = _MarginalTotal.apply(logits, x, zero, one)  # pyright: ignore[reportGeneralTypeIssues]
    return total


def expected_total(logits: Tensor, chances: Tensor, base_logits: Tensor) -> Tensor:
    r"""The expectation of `marginal_total` over x, each :math:`x_d = 1` with its own chance, the logits being given; (B,).

    Args:
        logits: log-odds of u, (B, D).
        chances: probabilities (B, D), without gradient.
        base_logits: log-odds of y, (D,).
    """
    zero, one = logsigmoid(-base_logits), logsigmoid(base_logits)
    of_one = one + softplus(logits + (zero - one))
    of_zero = zero + softplus(logits + (one - zero))
    return (torch.lerp(of_zero, of_one, chances) - softplus(logits)).sum(-1)


class _MarginalTotal(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, x: Tensor, zero: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        low = x * one + (1 - x) * zero
        raised = (zero + one - low) - low + logits
        return (low + softplus(raised) - softplus(logits)).sum(-1), raised

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, raised = output  # an output only because what is kept must be an input or an output
        ctx.mark_non_differentiable(raised)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], raised)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, x, raised = ctx.saved_tensors
        if gradients[0] is None:
            return None, None, None, None
        g = gradients[0].unsqueeze(-1)
        g_high = g * torch.sigmoid(raised)  # times the posterior of u = 1
        g_logits = g_high - g * torch.sigmoid(logits)
        if not ctx.needs_input_grad[3]:
            return g_logits, None, None, None
        g_low = (g - g_high) - g_high
        both = g_high.sum(0)
        return g_logits, None, (g_low * (1 - x)).sum(0) + both, (g_low * x).sum(0) + both
