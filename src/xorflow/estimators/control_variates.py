"""Control variates whose expectation is known, with parameters that are trained to lower the variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from xorflow._states import Layout
from xorflow.errors import ConfigError
from xorflow.estimators.base import Loss
from xorflow.estimators.baselines import mean_of_others
from xorflow.estimators.credit import feature_sums
from xorflow.estimators.descendants import Reach
from xorflow.estimators.layerwise import (
    ByLayer,
    LayerwiseEstimator,
    Step,
    end_rewards,
    logit_of,
    pushed,
    require_binary,
    require_no_own,
    require_samples,
)
from xorflow.estimators.relaxed_states import (
    Relaxed,
    RelaxedPoint,
    checked_temperature,
    frozen_choices,
    relaxed_end_rewards,
    relaxed_rewards,
)
from xorflow.flows import Choices, LatentFlow, Point
from xorflow.flows.choices import outcomes


class DoubleCV(LayerwiseEstimator):
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

    needs_draws = True

    alphas: nn.Parameter
    inner_sums: nn.ModuleList

    def __init__(self, samples: int = 4, alpha: float = 1.0, sum_last: bool = False) -> None:
        super().__init__(sum_last)
        self.samples = self.uniforms = require_samples(
            samples, "the control variates of a sample come from the others"
        )
        self.alpha = float(alpha)

    def make_for(self, flow: LatentFlow) -> None:
        super().make_for(flow)
        self.inner_sums = _inner_sums(flow, len(self.sums))
        if "alphas" not in self._parameters or len(self.alphas) != len(self.sums):
            self.alphas = nn.Parameter(flow.base.logits.new_full((len(self.sums),), self.alpha))

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        assert draws is not None
        trace = flow.run(start, draws=draws, stop=self.drawn_layers(flow))
        rewards = end_rewards(flow, trace.end)  # (K, B, D)
        value = rewards.sum(-1)
        # the gradient of a learned base and, where it is summed out, of the last layer
        surrogate = value.mean(0)
        control = flow.base.logits.new_zeros(())
        slopes = local_slopes(flow, start, trace.us)
        for index, (choices, u, slope) in enumerate(zip(trace.generator, trace.us, slopes, strict=True)):
            others, layout = mean_of_others(slope), flow.layers[index].layout
            deviation = layout.corners(u, flow.dtype) - choices.mean.detach()
            products = (layout.summed(deviation * direction) for direction in (others, slope))
            control_variate, baseline = map(self.inner_sums[index], products)
            signal, alpha = self.sums[index](rewards.detach()), self.alphas[index]
            # of each score, (K, B, D), with the graph of alpha
            weight = signal - alpha * control_variate - mean_of_others(signal - alpha * baseline)
            score = (weight.detach() * choices.log_prob(u)).sum(-1)
            linear = (others * choices.mean).sum(-1)
            surrogate = surrogate + (score + alpha.detach() * linear).mean(0)
            control = control + _mean_square(choices, layout, deviation, weight, self.alphas[index] * others)
        return Loss.of(surrogate, value, control=control)


def local_slopes(flow: LatentFlow, start: Point, us: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of the sum of rewards in each layer's choices, straight through those after it; without graph."""

    def total(*moved: Tensor) -> Tensor:
        point = RelaxedPoint.of(flow, start)
        for layer, u, values in zip(flow.layers, us, moved, strict=False):
            mean = layer.generator_choices(point.seen(), values).mean
            point = point.after(flow, Relaxed(values + (mean - mean.detach()), u))
        return relaxed_end_rewards(flow, point).sum(-1)

    hard = [layer.layout.corners(u, flow.dtype) for u, layer in zip(us, flow.layers, strict=False)]
    with torch.no_grad():
        value, pull = torch.func.vjp(total, *hard)  # pyright: ignore[reportAssignmentType]
        return pull(torch.ones_like(value))


def _inner_sums(flow: LatentFlow, layers: int) -> nn.ModuleList:
    """For each layer: sums over the choices whose descendants are all among those of each choice."""
    reach = Reach(flow, "p")
    rewards = [reach.rewards(layer).float() for layer in range(layers)]
    # (f, d): how many descendants of f are none of d's
    return feature_sums([(changed @ (1 - changed).t() == 0).t() for changed in rewards])


def _mean_square(
    choices: Choices, layout: Layout, deviation: Tensor, weight: Tensor, direction: Tensor
) -> Tensor:
    """Of the estimate of the gradient in the logits, with the graph of what weighs it."""
    mean = choices.mean.detach()
    estimate = layout.spread(weight) * deviation + pushed(mean, direction, layout)
    # logits that all samples share get the mean of the samples' estimates
    return (estimate if choices.logits.dim() == deviation.dim() else estimate.mean(0)).square().mean()


class Rebar(ByLayer):
    r"""The score function with relaxed rewards as its control variate, for :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \big[A_d(b) - C_d(\tilde z)\big](b_d - p_d)
              + \frac{\partial C(z)}{\partial \phi_d} - \frac{\partial C(\tilde z)}{\partial \phi_d}, \qquad
              C(z) = \eta\, R\big(\sigma(z / \tau)\big),

    with :math:`z = \phi + \mathrm{logit}\, v`, b = 1[z > 0], and :math:`\tilde z` another z that leads to the same b. A_d are
    the rewards that u_d can change, C_d the same rewards of the relaxed choice, times :math:`\eta`. With several layers only
    the layer whose gradient is taken is relaxed: the rewards are those of the hard choices drawn after it, the relaxed ones
    those of their means.

    Unbiased for the gradient of L whatever :math:`\eta` and :math:`\tau` are. These, one pair a layer, are the estimator's
    own parameters: the second loss, the mean square of the estimate, trains them along. Only for binary choices that are
    independent within a layer. A learned base gets the gradient of the rewards.

    Cost: L passes, and L (L - 1) of suffixes, with gradients in their inputs and, for the second loss, gradients of those.
    Tucker et al. (2017).

    Args:
        eta: the factor at the start.
        tau: the temperature at the start.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = Rebar()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> (loss.surrogate + loss.control).backward()
    """

    needs_draws = True
    uniforms = 2

    etas: nn.Parameter
    log_taus: nn.Parameter

    def __init__(self, eta: float = 1.0, tau: float = 0.5, sum_last: bool = False) -> None:
        super().__init__(sum_last)
        self.eta, self.tau = float(eta), checked_temperature(tau)

    def check(self, flow: LatentFlow) -> None:
        require_binary(self, flow)
        require_no_own(self, flow, "relaxes all choices of a layer at once")
        super().check(flow)

    def make_for(self, flow: LatentFlow) -> None:
        super().make_for(flow)
        layers, like = len(self.sums), flow.base.logits
        if "etas" not in self._parameters or len(self.etas) != layers:
            self.etas = nn.Parameter(like.new_full((layers,), self.eta))
            self.log_taus = nn.Parameter(like.new_full((layers,), self.tau).log())
            self.make_parameters(layers, like)

    def make_parameters(self, layers: int, like: Tensor) -> None:
        """Make what the control variate has beside factors and temperatures."""

    def free(self, layer: int, z: Tensor, logits: Tensor, outcomes: Tensor) -> Tensor | None:
        """What is added to the relaxed rewards, feature by feature, (..., D); None for nothing."""

    def estimate(self, step: Step, rewards: Tensor) -> tuple[Tensor, Tensor]:
        logits, u, noise = step.choices.logits.detach(), step.drawn[0], step.draws[..., step.index, :]
        again, its_slope = conditional(logits, u, noise[1])
        value, slope = self._controlled(step, torch.stack((logits + logit_of(noise[0]), again)))
        sums, score = self.sums[step.index], u - torch.sigmoid(logits)
        # with the graph of the estimator's own parameters alone
        whole = (sums(rewards) - sums(value[1])) * score + slope[0] - slope[1] * its_slope
        return (whole.detach() * step.choices.logits).sum(-1), whole.square().mean()

    def _controlled(self, step: Step, z: Tensor) -> tuple[Tensor, Tensor]:
        """The control variate by feature at z (2, B, D), and the derivative of its sum in each z."""
        flow, index, logits = step.flow, step.index, step.choices.logits.detach()
        tables = [table.detach() for table in flow.base.log_table()]
        (led_to,) = outcomes(step.layer.transform, flow.base, step.before.state)
        led_to, start = led_to.detach(), RelaxedPoint.of(flow, step.before)

        def by_feature(z: Tensor) -> Tensor:
            point = start.after(flow, Relaxed(torch.sigmoid(z * torch.exp(-self.log_taus[index]))))
            for layer in list(flow.layers)[index + 1 :]:
                mean = frozen_choices(layer, point.seen()).mean
                point = point.after(flow, Relaxed(mean))
            relaxed = self.etas[index] * relaxed_rewards(flow.base, point.state.values, tables)
            added = self.free(index, z, logits, led_to)
            return relaxed if added is None else relaxed + added

        value, pull = torch.func.vjp(by_feature, z)  # pyright: ignore[reportAssignmentType]
        return value, pull(torch.ones_like(value))[0]


def conditional(logits: Tensor, u: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    r"""A relaxed choice given the hard one, :math:`\tilde z \mid u`, and its derivative in the logits.

    The uniform behind z is drawn again where it leads to u: below 1 - p for u = 0, above for u = 1; its logit, plus the logits.
    """
    eps = torch.finfo(uniforms.dtype).eps
    w = uniforms.clamp(eps, 1 - eps)
    low, high = w.log(), torch.log1p(-w)
    up, down = logits + low, high - logits
    z = torch.where(u > 0, softplus(up, threshold=50.0) - high, low - softplus(down, threshold=50.0))
    return z, torch.sigmoid(torch.where(u > 0, up, down))


class Relax(Rebar):
    r"""`Rebar` with a free part in its control variate, for :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \big[A_d(b) - C_d(\tilde z)\big](b_d - p_d)
              + \frac{\partial C(z)}{\partial \phi_d} - \frac{\partial C(\tilde z)}{\partial \phi_d}, \qquad
              C(z) = \eta\, R\big(\sigma(z / \tau)\big) + \sum_e h(z_e)

    with h a network of one hidden layer, the same for all features of a layer, which sees z_e, the logit of the choice, and
    the rewards that either value of it would have if no layer followed. At the start h = 0.

    Unbiased for the gradient of L whatever its parameters are: :math:`\eta`, :math:`\tau` and h are trained by the second
    loss, the mean square of the estimate. Only for binary choices that are independent within a layer. A learned base gets
    the gradient of the rewards.

    Cost: the passes of `Rebar`, and h at z and :math:`\tilde z`. Grathwohl et al. (2018).

    Args:
        hidden: the width of h.
        eta: the factor at the start.
        tau: the temperature at the start.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = Relax()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> (loss.surrogate + loss.control).backward()
    """

    def __init__(self, hidden: int = 8, eta: float = 1.0, tau: float = 0.5, sum_last: bool = False) -> None:
        super().__init__(eta, tau, sum_last)
        if hidden < 1:
            raise ConfigError(
                f"the free control variate of RELAX is a network with at least one hidden unit; got hidden={hidden}: without "
                "one it has no parameters, and the estimator is rebar"
            )
        self.hidden = hidden
        self.networks = nn.ModuleList()

    def make_parameters(self, layers: int, like: Tensor) -> None:
        self.networks = nn.ModuleList(_network(self.hidden) for _ in range(layers))
        self.networks.to(like.device, like.dtype)

    def free(self, layer: int, z: Tensor, logits: Tensor, outcomes: Tensor) -> Tensor:
        seen = torch.broadcast_tensors(z, logits, *outcomes.unbind(-1))
        return self.networks[layer](torch.stack(seen, -1)).squeeze(-1)


def _network(hidden: int) -> nn.Sequential:
    last = nn.Linear(hidden, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), last)
