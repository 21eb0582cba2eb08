"""Importance weights: bounds of several samples, and prefixes from a proposal."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from xorflow._states import Layout
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss, Target
from xorflow.estimators.baselines import mean_of_others
from xorflow.estimators.descendants import Drawn
from xorflow.estimators.layerwise import LayerwiseEstimator, require_samples
from xorflow.flows import Choices, LatentFlow, Layer, Point
from xorflow.flows.choices import choose, outcomes
from xorflow.flows.layer import fixed_point


class VIMCO(LayerwiseEstimator):
    r"""The importance-weighted bound :math:`L_K = E\big[\log \tfrac1K \sum_k w_k\big] \le \log p(x)`, by VIMCO.

    .. math:: S = \sum_k \mathrm{sg}[\hat L - \hat L_{-k}] \log q(u_k \mid x) + \mathrm{sg}[\tilde w_k] \log w_k, \qquad
              w_k = p_Y(x \ominus u_k)\, \frac{p(u_k \mid x)}{q(u_k \mid x)},

    with :math:`\hat L = \log \tfrac1K \sum_k w_k`, :math:`\tilde w` the normalised weights, and :math:`\hat L_{-k}` the same
    with w_k replaced by the geometric mean of the others, which is independent of u_k. With `proposal=p` choices are drawn
    from the generator, q := p, and :math:`w_k = p_Y(x \ominus u_k)`.

    With `sum_last` the last layer is summed out: :math:`w_k = M(x_k^{(L-1)})\, p/q` with the choices of the layers before it
    only, M as in `MaximumLikelihood`. The bound is then tighter for every K, and at depth 1 it is log p(x) itself.

    Unbiased for the gradient of the bound :math:`L_K`, for generator, posterior and a learned base; the bound grows with K.
    What is reported as bound is :math:`\hat L`.

    Cost: K L passes, the first layer's only once; with `proposal=q` twice that. Burda, Grosse and Salakhutdinov (2016); Mnih
    and Rezende (2016).

    Args:
        samples: K, at least 2.
        proposal: `p`, the generator, or `q`, the posterior.
        sum_last: sum the last layer out.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = VIMCO(samples=3)(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(self, samples: int = 4, proposal: Drawn = "p", sum_last: bool = False) -> None:
        super().__init__(sum_last)
        if proposal not in ("p", "q"):
            raise ConfigError(f"proposal is p, the generator, or q, the posterior; got {proposal!r}")
        self.samples = self.uniforms = require_samples(
            samples, "a bound of several samples compares each with the others"
        )
        self.proposal = proposal

    def target(self, flow: LatentFlow) -> Target:
        if self.noise_shape(flow) is None:
            return Target("log-likelihood")
        return Target("importance", samples=self.samples, sum_last=self.sum_last, proposal=self.proposal)

    def make_for(self, flow: LatentFlow) -> None:
        del flow  # the bound is no sum: all of it weighs every score

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        if draws is None:  # depth 1, summed out: nothing is left to draw
            value = flow.log_marginal_total(start)
            return Loss.of(value, value)
        log_w, score = self.weigh(flow, start, draws)
        with torch.no_grad():
            bound, signal = vimco(log_w)
            share = torch.softmax(log_w, 0)
        return Loss.of((signal * score + share * log_w).sum(0), bound)

    def weigh(self, flow: LatentFlow, start: Point, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The log-weights of samples and the log-probabilities that they were drawn with, both (K, B), with graph."""
        trace = flow.run(start, draws=draws, stop=self.drawn_layers(flow), proposal=self.proposal)
        log_w = (
            flow.log_marginal_total(trace.end)
            if self.sum_last
            else flow.base.log_prob(trace.end.state).sum(-1)
        )
        log_p = trace.log_p().sum((-1, -2))
        if self.proposal == "p":
            return log_w, log_p
        log_q = trace.log_q().sum((-1, -2))
        return log_w + log_p - log_q, log_q


def vimco(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """The bound (...) of log-weights (K, ...), and for each sample what it adds to a bound without it, (K, ...)."""
    samples = len(log_w)
    bound = torch.logsumexp(log_w, 0)
    itself = torch.eye(samples, dtype=torch.bool, device=log_w.device)
    itself = itself.reshape(samples, samples, *(1,) * (log_w.dim() - 1))
    replaced = torch.where(itself, mean_of_others(log_w).unsqueeze(1), log_w)  # (K, K, ...)
    return bound - math.log(samples), bound - torch.logsumexp(replaced, 1)


class ProposalPrefix(Estimator):
    r"""The gradient of :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`, prefixes drawn from :math:`\rho` instead of p.

    .. math:: S = \sum_d \mathrm{sg}[\omega_d\, r_d(u_d)]\, \big(\log p(u_d \mid v_{<d}) + \log p(v_{<d})\big), \qquad
              \omega_d = \frac{p(v_{<d})}{\rho(v_{<d})},

    with v drawn from :math:`\rho` and each u_d from p given the prefix of v. Here :math:`\rho` mixes the generator's
    conditionals with uniform ones, and carries no gradient. At depth L, u_d is a choice of the last layer, and its prefix has
    all choices of the layers before as well.

    Unbiased for the gradient of L with every mixture; with `mix=0`, :math:`\rho = p` and all weights are 1, and at depth 1 the
    two terms are those of `TwoTerm`. The weights are products of up to L D ratios, so with `mix > 0` their variance grows
    with these.

    Cost: L passes if no layer sees its own u; otherwise, for a layer that does, as many as drawing v takes, and one more.
    Hesselink and Aziz (2020), appendix C.

    Args:
        mix: the share of the uniform distribution in :math:`\rho`, from 0 to 1.
        sum_last: take the expectation over each u_d given its prefix instead of drawing it: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> sees = {"state": "before", "own": "before"}
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,), sees=sees))], xf.FactorisedBase(4))
    >>> ProposalPrefix(mix=0.1)(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, mix: float = 0.0, sum_last: bool = False) -> None:
        super().__init__()
        if not 0 <= mix <= 1:
            raise ConfigError(
                f"mix, the share of the uniform distribution, is a number from 0 to 1; got {mix}"
            )
        self.mix, self.sum_last = mix, sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return 2 - self.sum_last, flow.depth, flow.features  # of the second, only the last layer's is used

    def check(self, flow: LatentFlow) -> None:
        if flow.layers[-1].conditioner.order is None:
            raise ModelError(
                "prefixes from a proposal need a last layer with an ordering; use score-function for other flows"
            )

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        assert draws is not None
        point, last = start, flow.layers[-1]
        log_p = log_weight = flow.base.logits.new_zeros(())  # of the layers before the last, (B, 1) or less
        for index, layer in enumerate(flow.layers[:-1]):
            v, log_v, ratio, _ = self._prefix(layer, point, draws[0, ..., index, :])
            log_p, log_weight = log_p + log_v.sum(-1, keepdim=True), log_weight + ratio.sum(-1, keepdim=True)
            point = point.after(layer, v)
        v, log_v, ratio, choices = self._prefix(last, point, draws[0, ..., -1, :])
        order = _on_device(last.conditioner.visited, draws.device)
        log_p = log_p + _before(log_v, order)
        omega = (log_weight + _before(ratio, order)).exp()
        if self.sum_last:
            rewards = choices.expectation(outcomes(last.transform, flow.base, point.state))
        else:
            u = choose(choices, draws[1, ..., -1, :])
            rewards = flow.base.log_prob(last.transform.to_base(point.state, u))
            log_p = log_p + choices.log_prob(u)
        score = (omega * rewards.detach() * log_p).sum(-1)
        direct = (omega * rewards).sum(-1)  # the gradient of a learned base, and of what is summed out
        return Loss.of(score + direct, direct)

    def _prefix(self, layer: Layer, point: Point, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Choices]:
        """v ~ rho, log p of it, log p - log rho without gradient, all (..., D), and the generator's choices given v."""
        choices = None if layer.autoregressive_in_u else layer.generator_choices(point)

        def drawn(v: Tensor) -> Tensor:
            return choose(self.rho(choices or layer.generator_choices(point, v), layer.layout), draws)

        with torch.no_grad():
            v = torch.zeros(draws.shape, dtype=layer.transform.choices.dtype, device=draws.device)
            v = drawn(v) if choices or not draws.is_floating_point() else fixed_point(drawn, v)
        choices = choices or layer.generator_choices(point, v)
        log_v = choices.log_prob(v)
        return v, log_v, log_v.detach() - self.log_rho(choices, v, layer.layout), choices

    def log_rho(self, choices: Choices, v: Tensor, layout: Layout) -> Tensor:
        """log rho(v_d | v_<d), (..., D), without gradient."""
        return self.rho(choices, layout).log_prob(v)

    @torch.no_grad()
    def rho(self, choices: Choices, layout: Layout) -> Choices:
        """The generator's conditionals mixed with uniform ones, without gradient."""
        if not self.mix:
            return Choices(choices.logits.detach(), layout)
        mixed = [
            torch.log((1 - self.mix) * log_probs.exp() + self.mix / log_probs.shape[-1])
            for log_probs in choices.log_probs()
        ]
        logits = [
            log_probs[..., 1] - log_probs[..., 0] if group.binary else log_probs
            for group, log_probs in layout.alphabet.grouped(mixed)
        ]
        return Choices(layout.packed(logits), layout)


def _before(values: Tensor, order: Tensor) -> Tensor:
    """The sum over the features strictly before each one in the ordering."""
    arranged = values.index_select(-1, order)
    total = arranged.cumsum(-1) - arranged
    return total.index_select(-1, order.argsort())


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: a captured step can't copy from the host."""
    return torch.tensor(numbers, device=device)
