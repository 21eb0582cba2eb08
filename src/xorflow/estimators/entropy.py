"""The entropy of the choices as a bonus, which keeps them from becoming certain before rare contexts are learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators.base import Target
from xorflow.flows import LatentFlow


class EntropyBonus(nn.Module):
    r"""The weight w of a maximum-entropy objective, :math:`L + w\, E[\sum_l H(u^{(l)})]`, as training goes on.

    With w > 0 the objective is no bound on log p. At depth 1 its optimum is :math:`f = \sigma((2P - 1)
    \log\frac{1-\beta}{\beta} / w)` with P the probability of a one given what came before: the most probable choice is the
    right one, and nothing saturates.

    Biased for the gradient of L while w > 0, on purpose: unbiased for that of the objective above in `Bound`, and in
    `StraightThrough` at depth 1. Once w has fallen to zero it is the estimator's without a bonus.

    Cost: no passes; the entropies are those of probabilities that an estimator has computed already. Williams and Peng (1991).

    Args:
        weight: w at the beginning.
        anneal: from this fraction of training on, w falls linearly, to zero at the end; 1 keeps it.
        earlier: by how much w is multiplied in the layers before the last, whose choices disturb what comes after them.

    >>> import torch
    >>> bonus = EntropyBonus(0.7, anneal=0.5)
    >>> bonus.prepare(torch.zeros(()), total_steps=4)
    >>> weights = []
    >>> for _ in range(4):
    ...     weights.append(round(float(bonus.value(torch.zeros(()))), 3))
    ...     bonus.update()
    >>> weights
    [0.7, 0.7, 0.7, 0.35]
    >>> [round(float(term), 3) for term in EntropyBonus(0.5, earlier=0.2).weigh([torch.tensor(2.0), torch.tensor(3.0)])]
    [0.2, 1.5]
    """

    step: Tensor
    total: Tensor

    def __init__(self, weight: float = 0.0, anneal: float = 1.0, earlier: float = 1.0) -> None:
        super().__init__()
        if not weight >= 0:
            raise ConfigError(f"entropy, the weight of the bonus, is at least 0; got {weight}")
        if not 0 <= anneal <= 1:
            raise ConfigError(
                f"anneal, where the bonus begins to fall, is a fraction of training from 0 to 1; got {anneal}"
            )
        if not earlier >= 0:
            raise ConfigError(f"earlier, a factor of the bonus, is at least 0; got {earlier}")
        if weight == 0 and (anneal, earlier) != (1, 1):
            raise ConfigError(
                "anneal and earlier change the entropy bonus, whose weight entropy is 0: leave them out, or raise entropy"
            )
        self.weight, self.anneal, self.earlier = float(weight), float(anneal), float(earlier)

    @property
    def active(self) -> bool:
        return self.weight > 0

    def target(self, flow: LatentFlow) -> Target:
        """The special-case bound with this bonus."""
        return Target("bound", self.weight, self.earlier if self.active and flow.depth > 1 else 1.0)

    @property
    def _changes(self) -> bool:
        return self.active and self.anneal < 1

    def prepare(self, like: Tensor, total_steps: int | None) -> None:
        """Say how long training is; needed only where the weight changes."""
        if not self._changes:
            return
        if "step" not in self._buffers:
            self.register_buffer("step", like.new_zeros((), dtype=torch.float64))
            self.register_buffer("total", like.new_zeros((), dtype=torch.float64))
        if total_steps is not None:
            self.total.fill_(total_steps)

    def weigh(self, entropies: Sequence[Tensor]) -> list[Tensor]:
        """The entropies of the layers, from the first to the last, each times its weight now."""
        w = self.value(entropies[-1])
        return [*(w * self.earlier * entropy for entropy in entropies[:-1]), w * entropies[-1]]

    def value(self, like: Tensor) -> Tensor | float:
        """w now."""
        if not self._changes:
            return self.weight
        done = self.step / self.total.clamp_min(1)  # without a known end, the weight stays
        return (self.weight * ((1 - done) / (1 - self.anneal)).clamp(0, 1)).to(like.dtype)

    def update(self) -> None:
        if self._changes:
            self.step += self.total.clamp_max(1)
