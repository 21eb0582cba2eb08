"""What is expected of a learning signal, to be subtracted before it weighs a score; and its scale.

A learning signal has entries (..., T, D): T terms of an objective (rewards, terms of a divergence by layer), feature by
feature. A baseline is valid for the score of a choice if it does not depend on that choice given what came before:
constants, past batches, functions of x, another sample. All of these are, for every choice at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators.sampled_objective import SampledObjective
from xorflow.flows import LatentFlow
from xorflow.flows.choices import GREEDY, Draws

Standardise = Literal["none", "one", "feature"]


@dataclass(frozen=True)
class BaselineInputs:
    """What a baseline may depend on.

    Attributes:
        flow: the model.
        x: integers (B, D).
        context: (B, C) or None.
        shape: (T, D) of the signal.
        signal_of: the signal (..., B, T, D) of other choices than those drawn.
        another: draws (1, B, L, D) of an independent sample, for a baseline that asks for one.
    """

    flow: LatentFlow
    x: Tensor
    context: Tensor | None
    shape: tuple[int, int]
    signal_of: Callable[[Draws], Tensor]
    another: Tensor | None = None


class Baseline(nn.Module, ABC):
    r"""Something to expect of a signal A before it weighs a score: subtracted, it changes the variance alone.

    .. math:: E\big[(A - b)\, \nabla \log p(u^{(l)}_d \mid \cdot)\big] = E\big[A\, \nabla \log p(u^{(l)}_d \mid \cdot)\big],
              \qquad \text{as } E\big[\nabla \log p(u^{(l)}_d \mid \cdot)\big] = 0

    Unbiased for the gradient of whatever the signal is of, if b does not depend on u^(l)_d given what came before it; biased
    if it depends on this choice or on what follows from it.

    A new one is one method, `expected`. `draws_another` says whether it needs an independent sample; state is kept in buffers,
    made by `prepare` and changed by `update`, after the backward pass.

    Cost: the passes that `expected` makes, if any. Williams (1992).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> class Constant(Baseline):
    ...     def expected(self, inputs):
    ...         return torch.full(inputs.shape, -0.3)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = xf.estimators.SpecialCase(baseline=Constant())(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    draws_another = False

    def prepare(self, terms: int, features: int, like: Tensor) -> None:
        """Make room for state, once the size of the signal is known."""
        del terms, features, like

    @abstractmethod
    def expected(self, inputs: BaselineInputs) -> Tensor:
        """What to subtract, broadcastable to (S, B, T, D), without gradient."""

    def update(self, mean: Tensor) -> None:
        """Learn from the mean signal (T, D) of a batch, after it has been used."""
        del mean


class NoBaseline(Baseline):
    r"""Expects zero: the score function as it is.

    .. math:: b = 0

    Unbiased for the gradient of the objective. At depth 1 a constant b leaves, for a binary choice with
    :math:`f_d = p(u_d = 1)` and rewards r_d(u_d), a variance of :math:`f_d (1 - f_d) (b^*_d - b)^2` in its logit, with
    :math:`b^*_d = (1 - f_d)\, r_d(1) + f_d\, r_d(0)`: zero is as far off as rewards are large.

    Cost: no passes. Williams (1992).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = xf.estimators.SpecialCase(baseline=NoBaseline())(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def expected(self, inputs: BaselineInputs) -> Tensor:
        return inputs.flow.base.logits.new_zeros(inputs.shape)


class RunningMean(Baseline):
    r"""The mean signal of past batches, feature by feature, with exponentially falling weights.

    .. math:: b_n = \sum_{i<n} a^{n-1-i} \bar A_i \Big/ \sum_{i<n} a^{n-1-i}

    in batch n, with a the decay and :math:`\bar A_i` the mean signal of batch i; zero in the first batch.

    Unbiased for the gradient of the objective, as the batch at hand is left out; with it, the gradient would shrink by about
    (1 - decay) / B. The best constant is another, the :math:`b^*` of `NoBaseline`: at depth 1 even the exact mean leaves a
    variance of :math:`f_d (1 - f_d) (1 - 2 f_d)^2 \Delta_d^2` in the logit of a binary choice, with :math:`\Delta_d = r_d(1) -
    r_d(0)`.

    Cost: no passes. Mnih and Gregor (2014); Hesselink and Aziz (2020), section 5.

    Args:
        decay: of the weight of the past at each batch.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> baseline = RunningMean(decay=0.5)
    >>> estimator = xf.estimators.SpecialCase(baseline=baseline)
    >>> loss = estimator(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    >>> estimator.update(loss.stats)
    >>> torch.allclose(baseline.mean / baseline.weight, loss.stats["signal"])
    True
    """

    mean: Tensor
    weight: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = _checked_decay(decay)

    def prepare(self, terms: int, features: int, like: Tensor) -> None:
        self.register_buffer("mean", like.new_zeros(terms, features))
        self.register_buffer("weight", like.new_zeros(()))

    def expected(self, inputs: BaselineInputs) -> Tensor:
        del inputs
        return self.mean / self.weight.clamp_min(1 - self.decay)  # zero before the first batch

    def update(self, mean: Tensor) -> None:
        self.mean.lerp_(mean.to(self.mean.dtype), 1 - self.decay)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - self.decay)


class SampledCritic(Baseline):
    r"""The signal of an independent sample: the self-critic of the paper's text.

    .. math:: b = A(u'), \qquad u' \text{ drawn as } u \text{ is, and independent of it}

    Unbiased for the gradient of the objective, over both samples. At depth 1 it leaves, in the logit of a binary choice, a
    variance of :math:`V (1 - 2 f_d)^2 \Delta_d^2 + V^2 \Delta_d^2` with :math:`V = f_d (1 - f_d)`, and :math:`\Delta` as in
    `RunningMean`: what the exact mean would leave, and the critic's own noise.

    Cost: as many passes again, without gradient. Hesselink and Aziz (2020), section 5, after Rennie et al. (2017).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> estimator = xf.estimators.SpecialCase(baseline=SampledCritic())
    >>> estimator.noise_shape(flow)  # two samples of one layer of four features
    (2, 1, 4)
    >>> estimator(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    draws_another = True

    def expected(self, inputs: BaselineInputs) -> Tensor:
        if inputs.another is None:  # the only layer is summed out: nothing is drawn
            return inputs.flow.base.logits.new_zeros(inputs.shape)
        return inputs.signal_of(inputs.another)


class GreedyCritic(Baseline):
    r"""The signal of the most probable choices: the self-critic of the paper's table.

    .. math:: b = A(\hat u), \qquad \hat u^{(l)}_d = \arg\max_k p(u^{(l)}_d = k \mid \hat u \text{ before it})

    and of the posterior's most probable choices where u is drawn from q.

    Unbiased for the gradient of the objective, as :math:`\hat u` is a function of x. At depth 1 it leaves, in the logit of a
    binary choice, a variance of :math:`m (1 - m)^3 \Delta_d^2` with :math:`m = \min(f_d, 1 - f_d)`, and :math:`\Delta` as in
    `RunningMean`: none once choices are certain.

    Cost: as many passes again, without gradient. Rennie et al. (2017); Hesselink and Aziz (2020), section 6.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> greedy = flow.run(x, draws="greedy").u[None]
    >>> loss = xf.estimators.SpecialCase(baseline=GreedyCritic())(flow, x, draws=greedy)
    >>> loss.surrogate.backward()  # what was expected of these choices is what they bring: no score counts
    >>> any(bool(weight.grad.any()) for weight in flow.layers.parameters())
    False
    """

    def expected(self, inputs: BaselineInputs) -> Tensor:
        return inputs.signal_of(GREEDY)


BASELINES: dict[str, type[Baseline]] = {
    "none": NoBaseline,
    "running-mean": RunningMean,
    "sampled": SampledCritic,
    "greedy": GreedyCritic,
}
"""By the names that options use."""


def make_baseline(baseline: str | Baseline, decay: float) -> Baseline:
    """A baseline by its name; `decay` is for the one that needs it."""
    if isinstance(baseline, Baseline):
        return baseline
    if baseline not in BASELINES:
        raise ConfigError(f"baseline is one of {', '.join(BASELINES)}; got {baseline!r}")
    kind = BASELINES[baseline]
    return RunningMean(decay) if kind is RunningMean else kind()


def baseline_name(baseline: Baseline) -> str:
    """The name that `make_baseline` knows it by; a class of the user's own has its class name."""
    kind = type(baseline)
    return next((name for name, known in BASELINES.items() if known is kind), kind.__name__)


class Standardiser(nn.Module):
    r"""Centres a signal by its moving mean and divides it by its moving deviation, both of past batches.

    .. math:: A_{t,d} \mapsto (A_{t,d} - \mu_{t,d}) / \sigma, \qquad \sigma = \Big(\tfrac1D \sum_{t,e} v_{t,e}\Big)^{1/2}
              \;(\texttt{one}) \quad \text{or} \quad \sigma_{t,d} = v_{t,d}^{1/2} \;(\texttt{feature}),

    with :math:`\mu` and v the mean and the variance of what the baseline left, weighted as in `RunningMean`. What is divided
    by is at least `floor`, and 1 in the first batch.

    The mean is a baseline: unbiased. `one`: all entries, and what needs no score, by one number, so that the expectation is
    the gradient of the objective divided by it: unbiased in its direction, rescaled in its length. `feature`: each entry of
    (T, D) by its own, as the paper does; biased: the gradient of another objective, in the special case of
    :math:`\sum_d E[r_d] / \sigma_d`, which points elsewhere. With the batch at hand in the moments either would be biased
    once more.

    Cost: no passes. Mnih and Gregor (2014), with a floor of 1; Hesselink and Aziz (2020), section 5.

    Args:
        kind: `none`, `one` or `feature`.
        decay: of the weight of the past at each batch.
        floor: the least deviation to divide by.

    >>> import torch
    >>> scale = Standardiser("feature", decay=0.5, floor=0.5)
    >>> scale.prepare(terms=1, features=2, like=torch.zeros(()))
    >>> scale.update(mean=torch.tensor([[1.0, 2.0]]), square=torch.tensor([[5.0, 4.0]]))  # variances 4 and 0
    >>> scale(torch.tensor([[3.0, 3.0]]))
    (tensor([[2., 1.]]), tensor([[2.0000, 0.5000]]))
    """

    mean: Tensor
    square: Tensor
    weight: Tensor

    def __init__(self, kind: Standardise = "none", decay: float = 0.9, floor: float = 0.1) -> None:
        super().__init__()
        if kind not in ("none", "one", "feature"):
            raise ConfigError(f"standardise is one of none, one, feature; got {kind!r}")
        if not floor > 0:
            raise ConfigError(f"floor, the least deviation to divide by, is greater than 0; got {floor}")
        self.kind, self.decay, self.floor = kind, _checked_decay(decay), floor

    def prepare(self, terms: int, features: int, like: Tensor) -> None:
        if self.kind != "none":
            self.register_buffer("mean", like.new_zeros(terms, features))
            self.register_buffer("square", like.new_zeros(terms, features))
            self.register_buffer("weight", like.new_zeros(()))

    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        """The centred signal, and the (detached) number or numbers to divide it by."""
        if self.kind == "none":
            return signal, signal.new_ones(())
        weight = self.weight.clamp_min(1 - self.decay)
        mean = self.mean / weight
        variance = (self.square / weight - mean.square()).clamp_min(0)
        if self.kind == "one":
            variance = variance.sum(0).mean()
        deviation = torch.where(self.weight > 0, variance.sqrt().clamp_min(self.floor), 1.0)
        return signal - mean, deviation

    def update(self, mean: Tensor, square: Tensor) -> None:
        if self.kind != "none":
            for buffer, value in ((self.mean, mean), (self.square, square)):
                buffer.lerp_(value.to(buffer.dtype), 1 - self.decay)
            self.weight.lerp_(torch.ones_like(self.weight), 1 - self.decay)


class Signal(nn.Module):
    """A baseline and a standardiser, applied to a signal one after the other.

    Args:
        baseline: a name or a `Baseline`.
        standardise: what to divide by; see `Standardiser`.
        decay: of both.
        floor: of the standardiser.
    """

    def __init__(
        self, baseline: str | Baseline, standardise: Standardise, decay: float, floor: float
    ) -> None:
        super().__init__()
        self.baseline = make_baseline(baseline, decay)
        self.standardiser = Standardiser(standardise, decay, floor)
        self._shape: tuple[int, int] | None = None

    def prepare(self, terms: int, features: int, like: Tensor) -> None:
        if self._shape == (terms, features):
            return
        self._shape = (terms, features)
        self.baseline.prepare(terms, features, like)
        self.standardiser.prepare(terms, features, like)

    def inputs(
        self,
        sampled: SampledObjective,
        objective_of: Callable[[LatentFlow, Tensor, Tensor | None, Draws], SampledObjective],
        flow: LatentFlow,
        x: Tensor,
        context: Tensor | None,
        draws: Tensor | None,
    ) -> BaselineInputs:
        """What the baseline may depend on; the last of the draws is the independent sample, if it asks for one."""

        def signal_of(other: Draws) -> Tensor:
            with torch.no_grad():
                return objective_of(flow, x, context, other).signal

        another = draws[-1:] if draws is not None and self.baseline.draws_another else None
        shape = (sampled.signal.shape[-2], sampled.signal.shape[-1])
        return BaselineInputs(flow, x, context, shape, signal_of, another)

    def forward(self, signal: Tensor, inputs: BaselineInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The centred signal, what to divide by, and the statistics to update from; nothing carries a gradient."""
        rest = signal - self.baseline.expected(inputs)
        centred, deviation = self.standardiser(rest)
        lead = tuple(range(signal.dim() - 2))
        stats = {
            "signal": signal.mean(lead),
            "rest": rest.mean(lead),
            "rest_square": rest.square().mean(lead),
        }
        return centred, deviation, stats

    def update(self, stats: Mapping[str, Tensor]) -> None:
        self.baseline.update(stats["signal"])
        self.standardiser.update(stats["rest"], stats["rest_square"])

    def config(self) -> dict[str, object]:
        return {
            "baseline": baseline_name(self.baseline),
            "standardise": self.standardiser.kind,
            "decay": getattr(self.baseline, "decay", self.standardiser.decay),
            "floor": self.standardiser.floor,
        }


def _checked_decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise ConfigError(f"decay, the weight of the past, is at least 0 and below 1; got {decay}")
    return decay
