r"""The marginal likelihood of binary features at depth 1, with its gradient in closed form.

What `Transform.outcomes` and `Choices.log_mixture` compute together, in half as many operations over the batch:
autograd would stack the two outcomes of each feature, and take the stack apart again. On CUDA one launch
does it (`_cuda.kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from xorflow._autograd import Function
from xorflow.flows.choices import positive, softplus


def marginal_by_feature(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    r""":math:`\log((1 - f_d)\, p_d(x_d) + f_d\, p_d(1 - x_d))`, (B, D).

    Args:
        logits: log-odds of u, (B, D).
        x: states in [0, 1], (B, D), without gradient.
        base_logits: log-odds of y, (D,).
    """
    zero, one = logsigmoid(-base_logits), logsigmoid(base_logits)
    values, _, _ = _Marginal.apply(logits, x, zero, one)  # pyright: ignore[reportGeneralTypeIssues]
    return values


def marginal_total(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    """`marginal_by_feature` summed over features, (B,)."""
    return marginal_by_feature(logits, x, base_logits).sum(-1)


def expected_total(logits: Tensor, probabilities: Tensor, base_logits: Tensor) -> Tensor:
    r"""The expectation of `marginal_total` over x, each :math:`x_d = 1` with its own probability, given the logits; (B,).

    Args:
        logits: log-odds of u, (B, D).
        probabilities: probabilities (B, D), without gradient.
        base_logits: log-odds of y, (D,).
    """
    zero, one = logsigmoid(-base_logits), logsigmoid(base_logits)
    mirror = positive(logits)
    below = logits * (1 - 2 * mirror)
    near_zero, near_one = torch.lerp(zero, one, mirror), torch.lerp(one, zero, mirror)
    step = near_zero - near_one
    of_zero = near_zero + softplus(below - step)
    of_one = near_one + softplus(below + step)
    return (torch.lerp(of_zero, of_one, probabilities) - softplus(below)).sum(-1)


class _Marginal(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, x: Tensor, zero: Tensor, one: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        likely = (x - positive(logits)).abs_()  # the state after the likelier u
        near, below = torch.lerp(zero, one, likely), logits.abs().neg_()
        raised = torch.lerp(one, zero, likely).sub_(near).add_(below)
        return near.add_(softplus(raised)).sub_(softplus(below)), likely, raised

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, likely, raised = output  # outputs only because what is kept must be an input or an output
        ctx.mark_non_differentiable(likely, raised)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], likely, raised)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, likely, raised = ctx.saved_tensors
        g = gradients[0]
        if g is None:
            return None, None, None, None
        g_far = g * torch.sigmoid(raised)  # times the posterior of the u that is less likely beforehand
        g_logits = (g_far - g * torch.sigmoid(-logits.abs())) * (1 - 2 * positive(logits))
        if not ctx.needs_input_grad[3]:
            return g_logits, None, None, None
        g_near = (g - g_far) - g_far
        both = g_far.sum(0)
        return g_logits, None, (g_near * (1 - likely)).sum(0) + both, (g_near * likely).sum(0) + both
