"""The marginal likelihood: exact at depth 1, the last layer summed out otherwise."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from xorflow._distributed import relative_shares
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss, Target
from xorflow.estimators.baselines import mean_of_others
from xorflow.flows import LatentFlow, Mixture, Point


class MaximumLikelihood(Estimator):
    r"""Maximise :math:`\log p(x)` at depth 1, and :math:`E_{u^{(<L)}}[\log M(x^{(L-1)})]` at depth L, where

    .. math:: \log M(x') = \sum_d \log \sum_{u_d} p(u^{(L)}_d = u_d \mid x')\; p_d(x'_d \ominus u_d)

    sums the last layer out. Depth 1: exact, no noise, one pass. Depth L: a bound on log p, tighter than the special-case bound;
    its gradient is estimated with S samples of the layers before the last, the others' mean as each sample's baseline,

    .. math:: \frac1S \sum_s \Big( \log M_s + \mathrm{sg}\Big[\log M_s - \frac{1}{S-1}\sum_{t \ne s} \log M_t\Big]
              \sum_{l<L} \log p(u^{(l)}_s) \Big),

    unbiased for the gradient of the bound; with S = 1 there is no baseline.

    Of a `Mixture` of flows of depth 1: its exact likelihood; or, `split_batch`, the mean of its components' log-likelihoods,
    each row by one of them, which is a bound on the mixture's if its weights are equal, and none if they are not. The
    components may share a network, which then learns several orderings.

    With `soft_targets`, for binary data that are drawn afresh from probabilities g, as images are from grey values, at depth 1,

    .. math:: \sum_d \Big( g_d \log p(x_d = 1 \mid x_{<d}) + (1 - g_d) \log p(x_d = 0 \mid x_{<d}) \Big):

    what comes before a feature says nothing about its own draw, so the expectation over draws is that of log p(x), and so is
    the gradient's, without the noise of a feature's own draw. Of mixtures this holds component by component.

    Cost: 1 pass at depth 1; 1 + S (L - 1) at depth L; of a mixture of M flows M passes, or 1 with `split_batch`. Hesselink
    and Aziz (2020), section 4, where the sum is called intractable; that it is not, at depth 1 and in the last layer, is ours.
    The baseline is that of Kool, van Hoof and Welling (2019).

    Args:
        samples: S, for depth 2 and more.
        split_batch: of M equal parts of a batch each component of a mixture learns one.
        soft_targets: use the probabilities with which data were drawn.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> loss = MaximumLikelihood()(flow, x)
    >>> bool((loss.bound - flow().log_prob(x)).abs() < 1e-5)
    True
    """

    trains_mixtures: ClassVar[bool] = True

    def __init__(self, samples: int = 4, split_batch: bool = False, soft_targets: bool = False) -> None:
        super().__init__()
        if samples < 1:
            raise ConfigError(f"an estimator needs at least one sample, and got samples={samples}")
        self.samples, self.split_batch = samples, split_batch
        self.soft_targets = self.takes_soft_targets = soft_targets

    def target(self, flow: LatentFlow) -> Target:
        return Target("log-likelihood" if flow.depth == 1 else "summed")

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        return None if flow.depth == 1 else (self.samples, flow.depth - 1, flow.features)

    def parts_of_batch(self, flow: LatentFlow) -> int:
        return len(flow.latent_components()) if self.split_batch and isinstance(flow, Mixture) else 1

    def check(self, flow: LatentFlow) -> None:
        if isinstance(flow, Mixture):
            flow.check_trainable()
        elif self.split_batch:
            raise ModelError(
                "split_batch is for the components of a mixture, and this is a single flow; leave it out"
            )
        if not flow.last_layer_summable:
            raise ModelError(
                "maximum-likelihood sums the last layer out, which must not see its own u; use a score function"
            )
        if self.soft_targets:
            self._check_soft_targets(flow)

    def _check_soft_targets(self, flow: LatentFlow) -> None:
        if flow.depth > 1 or not flow.states.binary:
            raise ModelError(
                "soft_targets is for binary features in flows of depth 1, where a feature's draw enters its own term alone; "
                "leave it out"
            )
        if isinstance(flow, Mixture) and not self.split_batch:
            raise ModelError(
                "the likelihood of a mixture has no term for each feature, so that soft_targets is for its components one by "
                "one: give split_batch too, or leave soft_targets out"
            )

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        if self.split_batch:
            return _mean_of_split_batch(flow, start, None)
        if flow.depth == 1:
            value = flow.log_marginal_total(start)
            return Loss.of(value, value)
        assert draws is not None
        trace = flow.run(start, draws=draws, stop=flow.depth - 1)
        log_m = flow.log_marginal_total(trace.end)  # (S, B)
        score = trace.log_p().sum((-1, -2))  # (S, B)
        signal = log_m.detach()
        if self.samples > 1:
            signal = signal - mean_of_others(signal)
        return Loss.of(log_m + signal * score, log_m)

    def soft_target_loss(self, flow: LatentFlow, start: Point, probabilities: Tensor) -> Loss:
        if self.split_batch:
            return _mean_of_split_batch(flow, start, probabilities)
        value = flow.expected_log_marginal(start, probabilities)
        return Loss.of(value, value)


def _mean_of_split_batch(flow: LatentFlow | Mixture, start: Point, probabilities: Tensor | None) -> Loss:
    """The mean over components, each estimated by its own part of the rows."""
    assert isinstance(flow, Mixture)
    components, x, context = flow.latent_components(), start.x, start.context
    if len(x) < len(components):
        raise ModelError(
            f"split_batch needs a row for each component, and {len(x)} rows came for {len(components)} components; choose "
            "larger batches, or pass them in fewer parts (accumulate)"
        )
    means = []
    parts = torch.arange(len(x)).tensor_split(len(components))
    shares = relative_shares([len(rows) for rows in parts])
    for component, rows, share in zip(components, parts, shares, strict=True):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        of_part = component.start(x[part], None if context is None else context[part])
        if probabilities is None:
            values = component.log_marginal_total(of_part)
        else:
            values = component.expected_log_marginal(of_part, probabilities[part])
        means.append(values.mean() * share)
    value = torch.stack(means)
    return Loss.of(value, value)
