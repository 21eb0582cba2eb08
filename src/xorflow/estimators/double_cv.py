"""Leave-one-out score functions with a second, linear control variate, whose expectation is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import Layout
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.descendants import Descendants, FeatureSum, structure
from xorflow.estimators.layerwise import (
    descendant_sums,
    end_rewards,
    pushed,
    require_summable,
)
from xorflow.estimators.relaxed_states import Relaxed, RelaxedPoint, corners, relaxed_end_rewards
from xorflow.estimators.sampled_objective import mean_of_others
from xorflow.flows import Choices, LatentFlow


class DoubleCV(Estimator):
    r"""Double control variates: `LeaveOneOut` on rewards less their linear part, which is put back in closed form.

    .. math:: S = \frac1K \sum_k \sum_{l,d} \mathrm{sg}\Big[A_k - \alpha\, \bar g_{-k} \cdot (u_k - p_k)
              - \frac{1}{K-1} \sum_{j \ne k} \big(A_j - \alpha\, g_j \cdot (u_j - p_j)\big)\Big]_{l,d}
              \log p(u^{(l)}_{k,d} \mid \cdot) + \alpha\, \mathrm{sg}[\bar g_{-k}] \cdot p_k

    with K independent samples, A the rewards that a choice can change, p the probabilities of the choices u, g_j the gradient
    of sample j's rewards in its relaxed choices (behind them, hard choices with the gradient of their means), and :math:`\bar
    g_{-k}` its mean over the other samples. The first linear term depends on u_k, and its product with the score has the
    expectation that the last term carries; the second is a baseline, from other samples. For a choice d the products are
    summed over the choices of its layer whose descendants are among its own.

    Unbiased for the gradient of the special-case bound :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]` whatever :math:`\alpha`
    is, for any number of categories and for layers that see their own u. :math:`\alpha`, one a layer, is the estimator's own
    parameter: the second loss, the mean square of the estimate, trains it along. Where rewards are linear in the choices, as
    at depth 1 without own u, and :math:`\alpha = 1`, nothing is left to vary. A learned base gets the gradient of the rewards.

    Cost: 2 K L passes, half of them for g; the first layer's only twice. Titsias and Shi (2022).

    Args:
        samples: K, at least 2.
        alpha: the factor of the linear control variate at the start.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = DoubleCV(samples=2)(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> (loss.surrogate + loss.control).backward()
    """

    alpha: nn.Parameter

    def __init__(self, samples: int = 4, alpha: float = 1.0, sum_last: bool = False) -> None:
        super().__init__()
        if samples < 2:
            raise ConfigError(
                f"the control variates of a sample come from the others: samples is at least 2; got {samples}"
            )
        self.samples, self.sum_last, self._start = samples, sum_last, float(alpha)
        self.sums, self.inner_sums = nn.ModuleList(), nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None
        self._parameters_for: int | None = None

    def config(self) -> dict[str, Any]:
        return {"samples": self.samples, "alpha": self._start, "sum_last": self.sum_last}

    def _drawn_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return self.samples, self._drawn_layers(flow), flow.features

    def check(self, flow: LatentFlow) -> None:
        if self.sum_last:
            require_summable(flow)
            if flow.depth == 1:
                raise ModelError(
                    "one layer that is summed out leaves nothing to draw, and the control variate without parameters; use "
                    "analytic, which is the same gradient"
                )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        layers, like = self._drawn_layers(flow), flow.base.logits
        if self._parameters_for != layers:
            self._parameters_for = layers
            self.alpha = nn.Parameter(like.new_full((layers,), self._start))
        key = (like.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = descendant_sums(flow, layers)
            self.inner_sums = _inner_sums(flow, layers)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None
        trace = flow.run(x, draws=draws, context=context, stop=self._drawn_layers(flow))
        rewards = end_rewards(flow, trace.end, context)  # (K, B, D)
        value = rewards.sum(-1)
        surrogate = value.mean(
            0
        )  # the gradient of a learned base and, where it is summed out, of the last layer
        control = flow.base.logits.new_zeros(())
        slopes = local_slopes(flow, x, context, trace.us)
        for index, (choices, u, slope) in enumerate(zip(trace.generator, trace.us, slopes, strict=True)):
            others, layout = mean_of_others(slope), flow.layers[index].layout
            deviation = corners(u, layout, flow.dtype) - choices.mean.detach()
            products = [layout.summed(deviation * others), layout.summed(deviation * slope)]
            weight = self._weight(index, rewards.detach(), products)
            alpha = self.alpha[index]
            score = (weight.detach() * choices.log_prob(u)).sum(-1)
            linear = (others * choices.mean).sum(-1)
            surrogate = surrogate + (score + alpha.detach() * linear).mean(0)
            control = control + _mean_square(choices, layout, deviation, weight, alpha * others)
        return Loss(surrogate=-surrogate.mean(), bound=value.detach().mean(), control=control)

    def _weight(self, index: int, rewards: Tensor, products: Sequence[Tensor]) -> Tensor:
        """What the score of each sample's choices is weighed with, (K, B, D), with the graph of alpha."""
        signal = self.sums[index](rewards)
        control_variate, baseline = (self.inner_sums[index](product) for product in products)
        alpha = self.alpha[index]
        return signal - alpha * control_variate - mean_of_others(signal - alpha * baseline)


def local_slopes(
    flow: LatentFlow, x: Tensor, context: Tensor | None, us: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of the sum of rewards in each layer's choices, straight through those after it; without graph."""

    def total(*moved: Tensor) -> Tensor:
        point = RelaxedPoint.of(flow, flow.start(x))
        for layer, u, values in zip(flow.layers, us, moved, strict=False):
            mean = layer.generator_choices(point.seen(), context, values).mean
            point = point.after(flow, Relaxed(values + (mean - mean.detach()), u))
        return relaxed_end_rewards(flow, point, context).sum(-1)

    hard = [corners(u, layer.layout, flow.dtype) for u, layer in zip(us, flow.layers, strict=False)]
    with torch.no_grad():
        value, pull = torch.func.vjp(total, *hard)  # pyright: ignore[reportAssignmentType]
        return pull(torch.ones_like(value))


def _inner_sums(flow: LatentFlow, layers: int) -> nn.ModuleList:
    """For each layer: sums over the choices whose descendants are all among those of each choice."""
    descendants = Descendants(flow, "p")
    sums = nn.ModuleList()
    for layer in range(layers):
        rewards = descendants.rewards(layer).float()
        outside = rewards @ (1 - rewards).t()  # (f, d): how many descendants of f are none of d's
        sums.append(FeatureSum((outside == 0).t()))
    return sums.to(flow.device)


def _mean_square(
    choices: Choices, layout: Layout, deviation: Tensor, weight: Tensor, direction: Tensor
) -> Tensor:
    """Of the estimate of the gradient in the logits, with the graph of what weighs it."""
    mean = choices.mean.detach()
    estimate = layout.spread(weight) * deviation + pushed(mean, direction, layout)
    # logits that all samples share get the mean of the samples' estimates
    return (estimate if choices.logits.dim() == deviation.dim() else estimate.mean(0)).square().mean()
