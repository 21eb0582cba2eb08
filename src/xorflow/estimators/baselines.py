"""What is expected of a learning signal, to be subtracted before it weighs a score; and its scale.

A learning signal has entries (..., T, D): T terms of an objective (rewards, terms of a divergence by layer), feature by
feature. A baseline is valid for the score of a choice if it does not depend on that choice given what came before:
constants, past batches, functions of x, another sample. All of these are, for every choice at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators.base import Configured
from xorflow.flows import LatentFlow, Point
from xorflow.flows.choices import GREEDY, Draws


@dataclass(frozen=True)
class BaselineInputs:
    """What a baseline may depend on.

    Attributes:
        flow: the model.
        start: where the passes begin: `start.x` are the rows (B, D), `start.context` what networks see beside them.
        signal: of the samples that are scored, (S, B, T, D); what is expected of one is to be taken from others.
        signal_of: the signal (..., B, T, D) of other choices than those drawn.
        another: draws (1, B, L, D) of an independent sample, for a baseline that asks for one.
    """

    flow: LatentFlow
    start: Point
    signal: Tensor
    signal_of: Callable[[Draws], Tensor]
    another: Tensor | None = None


class Baseline(Configured, nn.Module, ABC):
    r"""Something to expect of a signal A before it weighs a score: subtracted, it changes the variance alone.

    .. math:: E\big[(A - b)\, \nabla \log p(u^{(l)}_d \mid \cdot)\big] = E\big[A\, \nabla \log p(u^{(l)}_d \mid \cdot)\big],
              \qquad \text{as } E\big[\nabla \log p(u^{(l)}_d \mid \cdot)\big] = 0

    Unbiased for the gradient of whatever the signal is of, if b does not depend on u^(l)_d given what came before it; biased
    if it depends on this choice or on what follows from it.

    A new one is one method, `expected`. `samples` says how many are scored, `draws_another` whether it needs an independent one
    beside them; state is kept in buffers, made by `prepare` and changed by `update`, after the backward pass.

    Cost: the passes that `expected` makes, if any. Williams (1992).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> class Constant(Baseline):
    ...     def expected(self, inputs):
    ...         return torch.full(inputs.signal.shape, -0.3)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = xf.estimators.ScoreFunction(baseline=Constant())(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    samples = 1
    draws_another = False

    def __init__(self) -> None:
        super().__init__()

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
    >>> loss = xf.estimators.ScoreFunction(baseline=NoBaseline())(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def expected(self, inputs: BaselineInputs) -> Tensor:
        return inputs.signal.new_zeros(())


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
    >>> estimator = xf.estimators.ScoreFunction(baseline=baseline)
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
    >>> estimator = xf.estimators.ScoreFunction(baseline=SampledCritic())
    >>> estimator.noise_shape(flow)  # two samples of one layer of four features
    (2, 1, 4)
    >>> estimator(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    draws_another = True

    def expected(self, inputs: BaselineInputs) -> Tensor:
        if inputs.another is None:  # the only layer is summed out: nothing is drawn
            return inputs.signal.new_zeros(())
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
    >>> loss = xf.estimators.ScoreFunction(baseline=GreedyCritic())(flow, x, draws=greedy)
    >>> loss.surrogate.backward()  # what was expected of these choices is what they bring: no score counts
    >>> any(bool(weight.grad.any()) for weight in flow.layers.parameters())
    False
    """

    def expected(self, inputs: BaselineInputs) -> Tensor:
        return inputs.signal_of(GREEDY)


class LeaveOneOut(Baseline):
    r"""The mean signal of the other samples: RLOO.

    .. math:: b_k = \frac{1}{K-1} \sum_{j \ne k} A_j, \qquad
              S = \frac{1}{K} \sum_{k=1}^K \sum_{l,d} \mathrm{sg}[A_{k,l,d} - b_{k,l,d}] \log p(u^{(l)}_{k,d} \mid \cdot)

    with K independent samples. Unbiased for the gradient of the objective: each sample's baseline is independent of it.

    Cost: K L passes instead of L, the first layer's only once. Kool, van Hoof and Welling (2019).

    Args:
        samples: K, at least 2.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> estimator = xf.estimators.ScoreFunction(baseline=LeaveOneOut(samples=3))
    >>> estimator.noise_shape(flow)  # three samples of one layer of four features
    (3, 1, 4)
    >>> estimator(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, samples: int = 4) -> None:
        super().__init__()
        if samples < 2:
            raise ConfigError(
                f"leaving one sample out leaves none of {samples}: leave-one-out needs samples=2 or more; for one, use "
                "another baseline"
            )
        self.samples = samples

    def expected(self, inputs: BaselineInputs) -> Tensor:
        if len(inputs.signal) != self.samples:  # the only layer is summed out: nothing is drawn
            return inputs.signal.new_zeros(())
        return mean_of_others(inputs.signal)


def mean_of_others(values: Tensor) -> Tensor:
    """For each sample the mean of the other samples' values, along the first dimension."""
    return (values.sum(0) - values) / (len(values) - 1)


class Standardiser(Configured, nn.Module, ABC):
    r"""Centres a signal by its moving mean and divides it by its moving deviation, both of past batches.

    .. math:: A_{t,d} \mapsto (A_{t,d} - \mu_{t,d}) / \sigma_{t,d}

    with :math:`\mu` and v the mean and the variance of what the baseline left, weighted as in `RunningMean`, and
    :math:`\sigma` made of v. What is divided by is at least `floor`, and 1 in the first batch.

    The mean is a baseline: unbiased. With the batch at hand in the moments the gradient would be biased.

    Cost: no passes. Mnih and Gregor (2014), with a floor of 1; Hesselink and Aziz (2020), section 5.

    Args:
        decay: of the weight of the past at each batch.
        floor: the least deviation to divide by.

    >>> import torch
    >>> scale = FeatureScale(decay=0.5, floor=0.5)
    >>> scale.prepare(terms=1, features=2, like=torch.zeros(()))
    >>> scale.update(mean=torch.tensor([[1.0, 2.0]]), square=torch.tensor([[5.0, 4.0]]))  # variances 4 and 0
    >>> scale(torch.tensor([[3.0, 3.0]]))
    (tensor([[2., 1.]]), tensor([[2.0000, 0.5000]]))
    """

    keeps_direction = False
    """Whether all terms are divided by one number, and with them what needs no score."""

    mean: Tensor
    square: Tensor
    weight: Tensor

    def __init__(self, decay: float = 0.9, floor: float = 0.1) -> None:
        super().__init__()
        if not floor > 0:
            raise ConfigError(f"floor, the least deviation to divide by, is greater than 0; got {floor}")
        self.decay, self.floor = _checked_decay(decay), floor

    def prepare(self, terms: int, features: int, like: Tensor) -> None:
        """Make room for state, once the size of the signal is known."""
        for name, size in (("mean", (terms, features)), ("square", (terms, features)), ("weight", ())):
            self.register_buffer(name, like.new_zeros(size))

    @abstractmethod
    def shared(self, variance: Tensor) -> Tensor:
        """What of the variances (T, D) is divided by the root of."""

    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        """The centred signal, and the (detached) number or numbers to divide it by."""
        weight = self.weight.clamp_min(1 - self.decay)
        mean = self.mean / weight
        variance = self.shared((self.square / weight - mean.square()).clamp_min(0))
        deviation = torch.where(self.weight > 0, variance.sqrt().clamp_min(self.floor), 1.0)
        return signal - mean, deviation

    def update(self, mean: Tensor, square: Tensor) -> None:
        """Learn from the mean and the mean square (T, D) of a batch, after it has been used."""
        for buffer, value in ((self.mean, mean), (self.square, square)):
            buffer.lerp_(value.to(buffer.dtype), 1 - self.decay)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - self.decay)


class OneScale(Standardiser):
    r"""Divides all terms of the objective by one number.

    .. math:: \sigma = \Big(\tfrac1D \sum_{t,e} v_{t,e}\Big)^{1/2}

    with v as in `Standardiser`; what needs no score is divided by it, too. The expectation is the gradient of the objective
    divided by that number: unbiased in its direction, rescaled in its length.

    Cost: no passes. Mnih and Gregor (2014), with a floor of 1.

    Args:
        decay: of the weight of the past at each batch.
        floor: the least deviation to divide by.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(standardise=OneScale()).bias(flow).rescaled
    True
    """

    keeps_direction = True

    def shared(self, variance: Tensor) -> Tensor:
        return variance.sum(0).mean()


class FeatureScale(Standardiser):
    r"""Divides each term of the objective at each feature by a number of its own, as the paper does.

    .. math:: \sigma_{t,d} = v_{t,d}^{1/2}

    with v as in `Standardiser`. Biased: the gradient of another objective, in the special case of :math:`\sum_d E[r_d] /
    \sigma_d`, which points elsewhere. Under the `ELBO` at depth 1 with a divergence in closed form a posterior gets the
    gradient of :math:`\sum_d E_q[r_d] / \sigma_d - \mathrm{KL}(q \| p)`, another bargain between the two; with more layers, a
    divergence in closed form counts divided for the layers before its own and undivided for its own. What needs no score is
    not divided: the gradients of a learned base and of generators under the `ELBO` stay unbiased, unless a relative posterior
    shares the generator's logits.

    Cost: no passes. Hesselink and Aziz (2020), section 5.

    Args:
        decay: of the weight of the past at each batch.
        floor: the least deviation to divide by.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(standardise=FeatureScale()).bias(flow).rescaled
    False
    """

    def shared(self, variance: Tensor) -> Tensor:
        return variance


def _checked_decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise ConfigError(f"decay, the weight of the past, is at least 0 and below 1; got {decay}")
    return decay
