"""One optimisation step: the module that is captured or wrapped, and its learning rate."""

from __future__ import annotations

import math

from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow, Mixture
from xorflow.training.config import Options

Trainable = LatentFlow | Mixture
"""What a run trains."""


class Step(nn.Module):
    """Flow and estimator as one module, from an encoded batch and its noise to the tensors of a `Loss`."""

    def __init__(self, flow: LatentFlow, estimator: Estimator) -> None:
        super().__init__()
        self.flow = flow
        self.estimator = estimator

    def forward(
        self,
        x: Tensor,
        context: Tensor | None,
        draws: Tensor | None,
        probabilities: Tensor | None = None,
        share: float = 1.0,
    ) -> dict[str, Tensor]:
        """Means over rows, times `share`, that of these rows among those of the step."""
        if probabilities is None:
            loss = self.estimator.loss(self.flow, x, context, draws)
        else:
            loss = self.estimator.soft_target_loss(self.flow, x, context, probabilities)
        total = loss.surrogate
        if loss.control is not None:
            self._require_parameters()
            total = total + loss.control
        found = {"loss": total, "bound": loss.bound, **{f"stats.{k}": v for k, v in loss.stats.items()}}
        return found if share == 1 else {name: value * share for name, value in found.items()}

    def _require_parameters(self) -> None:
        if next(self.estimator.parameters(), None) is None:
            raise ConfigError(
                f"the second loss of {type(self.estimator).__name__} trains a control variate that has no parameters; make "
                "them in prepare(), or return a Loss without control"
            )


def learning_rate(options: Options, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`."""
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    if options.schedule == "constant":
        return options.lr
    done = (step - options.warmup) / max(1, total - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
