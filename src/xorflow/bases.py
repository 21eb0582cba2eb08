"""The factorised distribution of `y`, where every flow ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from xorflow._states import Alphabet, per_feature
from xorflow.errors import ModelError


class FactorisedBase(nn.Module):
    r""":math:`p_Y(y) = \prod_d p_d(y_d)`, fixed or learned.

    Args:
        features: D.
        p0: the probability of category 0, the other categories share the rest evenly; 0.9 is the paper's.
        categories: K, or K_d for each feature.
        learned: whether training may change it.
        probabilities: start from these (D, K) instead of from `p0`.

    >>> base = FactorisedBase(784)
    >>> round(float(base.floor()), 3)  # no flow on this base has a smaller negative log-likelihood
    82.603
    """

    valid: Tensor

    def __init__(
        self,
        features: int,
        p0: float = 0.9,
        *,
        categories: int | Sequence[int] = 2,
        learned: bool = False,
        probabilities: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.states = Alphabet(per_feature(categories, features, "categories"))
        self.learned = learned
        table = self._uniform_rest(p0) if probabilities is None else self._checked(probabilities)
        log_table = table.double().clamp_min(1e-300).log()
        start = log_table[:, 1] - log_table[:, 0] if self.states.binary else log_table
        self.logits = nn.Parameter(start.to(torch.get_default_dtype()), requires_grad=learned)
        self.register_buffer("valid", self.states.valid(), persistent=False)

    @property
    def features(self) -> int:
        return self.states.features

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON; the probabilities themselves are weights."""
        return {"features": self.features, "categories": self.states.short(), "learned": self.learned}

    def _uniform_rest(self, p0: float) -> Tensor:
        if not 0 < p0 < 1:
            raise ModelError(f"p0 is a probability strictly between 0 and 1, and got {p0}")
        sizes = torch.tensor(self.states.sizes, dtype=torch.float64)
        rest = ((1 - p0) / (sizes - 1).clamp_min(1))[:, None].expand(-1, self.states.width).clone()
        rest[:, 0] = torch.where(sizes > 1, p0, 1.0)
        return rest * self.states.valid()

    def _checked(self, probabilities: Tensor) -> Tensor:
        expected = (self.states.features, self.states.width)
        if tuple(probabilities.shape) != expected:
            raise ModelError(
                f"base probabilities have shape (D, K) = {expected}, got {tuple(probabilities.shape)}"
            )
        table = probabilities.double() * self.states.valid()
        if not bool((table >= 0).all() & ((table.sum(-1) - 1).abs() < 1e-6).all()):
            raise ModelError(
                "base probabilities are non-negative and sum to 1 for each feature; these do not"
            )
        return table

    def log_table(self) -> Tensor:
        """log p_d(k), (D, K); 0 at the padding, which no state reaches, so that it drops out of sums."""
        if self.states.binary:
            return torch.stack((logsigmoid(-self.logits), logsigmoid(self.logits)), -1)
        logits = self.logits.masked_fill(~self.valid, -torch.inf)
        return torch.log_softmax(logits, -1).masked_fill(~self.valid, 0.0)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p_d(y_d) for encoded y, (..., D); linear in y, as exact straight-through gradients need."""
        table = self.log_table()
        if self.states.binary:
            return y * table[:, 1] + (1 - y) * table[:, 0]
        return (y * table).sum(-1)

    def sample(self, uniforms: Tensor) -> Tensor:
        """Integers y (..., D) by inverting the distribution function at `uniforms` (..., D)."""
        table = self.log_table().detach()
        cumulative = (table.exp() * self.valid).cumsum(-1)[:, :-1].to(uniforms.dtype)  # (D, K - 1)
        y = (uniforms.unsqueeze(-1) > cumulative).sum(-1)
        return y.minimum(y.new_tensor(self.states.sizes) - 1)  # rounding may leave a sum just below 1

    @torch.no_grad()
    def floor(self) -> Tensor:
        r"""The least negative log-likelihood of any flow on this base, :math:`-\max_y \log p_Y(y)`, in nats."""
        return -self.log_table().masked_fill(~self.valid, -torch.inf).amax(-1).double().sum()

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """The entropy of y, which is also that of x for every deterministic flow on this base, in nats."""
        table = self.log_table().double()
        return -(table.exp() * table * self.valid).sum()
