r"""What each choice leads to, and the last layer summed out: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`.

At depth 1 that is log p(x_d | what is before d). Of bits it is one function with a gradient in closed form: what
`outcomes` and `Choices.log_mixture` compute together, in half as many operations over the batch, since autograd would stack
the two outcomes of each feature, and take the stack apart again. On CUDA one launch sums it over features (`_cuda.kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from xorflow._cuda import devices, kernels
from xorflow._math import Function
from xorflow.bases import FactorisedBase
from xorflow.flows.choices import Choices, positive, softplus
from xorflow.transforms import Transform


def outcomes(transform: Transform, base: FactorisedBase, state: Tensor) -> list[Tensor]:
    """The log base probability that each choice leads to from integer states, by group of choices (..., n, U)."""
    if transform.is_xor:
        zero, one = base.log_table()[0].unbind(-1)
        bits = state.to(zero.dtype)
        # laid out one value of u after the other, so that each is contiguous
        return [torch.stack((torch.lerp(zero, one, bits), torch.lerp(one, zero, bits))).movedim(0, -1)]
    return base.log_probs_at(transform.reached(state), transform.choices)


def log_marginal(choices: Choices, transform: Transform, base: FactorisedBase, state: Tensor) -> Tensor:
    """The last layer summed out by feature, (..., D)."""
    if _is_plain(choices, transform, state):
        return marginal_by_feature(choices.logits, state.to(choices.logits.dtype), base.logits)
    return choices.log_mixture(outcomes(transform, base, state))


def log_marginal_total(choices: Choices, transform: Transform, base: FactorisedBase, state: Tensor) -> Tensor:
    """`log_marginal` summed over features, (...): one launch each way on a CUDA device."""
    logits = choices.logits
    fits = logits.dtype == base.logits.dtype == torch.float32
    if fits and devices.usable(logits) and _is_plain(choices, transform, state):
        return kernels.marginal_total(logits, state.to(logits.dtype), base.logits)
    return log_marginal(choices, transform, base, state).sum(-1)


def expected_log_marginal(
    choices: Choices, transform: Transform, base: FactorisedBase, probabilities: Tensor
) -> Tensor:
    """The expectation of `log_marginal`, summed over features, of bits x that are 1 as `probabilities` (B, D) say; (B,)."""
    probabilities = probabilities.to(choices.logits.dtype)
    if transform.is_xor:
        return expected_total(choices.logits, probabilities, base.logits)
    bits = torch.zeros(probabilities.shape, dtype=torch.uint8, device=probabilities.device)
    of_zero, of_one = (choices.log_mixture(outcomes(transform, base, bits + value)) for value in (0, 1))
    return torch.lerp(of_zero, of_one, probabilities).sum(-1)


def _is_plain(choices: Choices, transform: Transform, state: Tensor) -> bool:
    """Whether these are two choices for each of the two states, without samples."""
    return transform.is_xor and choices.logits.dim() == 2 and choices.logits.shape == state.shape


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


def expected_total(logits: Tensor, probabilities: Tensor, base_logits: Tensor) -> Tensor:
    r"""`marginal_by_feature` summed over features, expected where each :math:`x_d = 1` with its own probability; (B,).

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
