r"""What each choice leads to, and the last layer summed out: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`.

At depth 1 that is log p(x_d | what is before d). Of bits it is one function with a gradient of its own (`marginal`); on CUDA
one launch sums it over features (`_cuda.kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xorflow._cuda import devices, kernels
from xorflow.bases import FactorisedBase
from xorflow.flows.choices import Choices
from xorflow.flows.marginal import expected_total, marginal_by_feature
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
