"""The evidence lower bound with a posterior of its own, by score functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xorflow.conditioners import ranks
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.baselines import Baseline, Signal, Standardise
from xorflow.estimators.descendants import Descendants, FeatureSum, structure, weighted_score
from xorflow.estimators.sampled_objective import SampledObjective
from xorflow.flows import Choices, LatentFlow, Layer
from xorflow.flows.choices import GREEDY, Draws, outcomes

Divergence = Literal["analytic", "suffix", "printed", "vanilla"]
_DIVERGENCES = ("analytic", "suffix", "printed", "vanilla")


@dataclass(frozen=True)
class _Pass:
    rewards: Tensor  # (..., D), with the graph of what needs no score
    divergence: list[
        Tensor
    ]  # minus the divergence, (..., D): L terms that are sampled, then L in closed form
    log_q: Tensor  # (..., L', D) of the layers that were drawn


class FullPosterior(Estimator):
    r"""The gradient of :math:`\mathrm{ELBO} = E_{q(u|x)}[\log p_Y(x \ominus u) + \log p(u|x) - \log q(u|x)] \le \log p(x)`.

    Choices are drawn from the posterior q, mean-field within a layer. The base gets the gradient of :math:`\log p_Y`, the
    generator that of :math:`\log p(u|x)`, and the posterior, for each layer l,

    .. math:: \nabla H(q_l) + \sum_d \Big(\sum_{k \ge d} \log p(u^{(l)}_k) + \sum_{k > l} [\log p(u^{(k)}) + H(q_k)]
              + \sum_e r_e - b\Big) \nabla \log q(u^{(l)}_d),

    where only what u^(l)_d can change is summed: of its own layer the later features and only if the generator sees its own
    u, of the rewards in the last layer r_d alone. How the divergence enters, `kl`:

    * `analytic`: where the generator does not see its own u, the divergence of a layer is in closed form, for both networks;
      the rest as in `suffix`. Unbiased.
    * `suffix`: entropies in closed form, cross-entropies sampled. Unbiased.
    * `printed`: as `suffix`, but with the score of the whole layer for each feature, as the paper's appendix B prints it.
      Biased.
    * `vanilla`: everything sampled, everything weighs every score. Unbiased, mostly with more variance.

    With `local` only the divergences of layers l and l + 1 weigh the score of layer l, as in the paper: unbiased at depth 1
    and 2, biased beyond. `gamma` scales those of later layers: unbiased only at 1. `rewards=impatient` pairs r_d with the
    d-th score in every layer, as the paper does: biased in all layers but the last.

    What weighs the scores, the rewards and each layer's divergence by feature, can be divided by its deviation in past batches,
    `standardise`:

    * `one`: by one number, and with it all that needs no score. The gradient of the ELBO in base, generator and posterior is
      divided by that number: unbiased in its direction, rescaled in its length.
    * `feature`: each of these terms by its own, as the paper does. Biased for the posterior: at depth 1 with `kl=analytic` it
      gets the gradient of :math:`\sum_d E_q[r_d] / \sigma_d - \mathrm{KL}(q \| p)`, another bargain between the two; with more
      layers, a divergence in closed form counts divided for the layers before its own and undivided for its own. What needs no
      score is not divided, so the gradients of base and generator stay unbiased, unless a relative posterior shares the
      generator's logits.

    Cost: 2 L passes, one of generator and posterior in each layer; a critic doubles them. Hesselink and Aziz (2020), section 5,
    appendices A and B.

    Args:
        kl: how the divergence enters.
        rewards: `descendants` or `impatient`.
        local: the paper's two-layer divergence.
        gamma: the constant of later layers' divergences.
        baseline: `none`, `running-mean`, `sampled`, `greedy`, or a `Baseline`; for rewards and for each layer's divergence.
        standardise: `none`; `one`, which rescales the gradient; or `feature`, biased. See `Standardiser`.
        decay: of moving estimates.
        floor: the least deviation to divide by.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too, and
            at depth 1 the exact gradient.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> layer = xf.Layer(xf.MADE(4, hidden=(8,)), posterior=xf.MLP(4, hidden=(8,)))
    >>> flow = xf.LatentFlow([layer], xf.FactorisedBase(4))
    >>> loss = FullPosterior()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(
        self,
        kl: Divergence = "analytic",
        rewards: Literal["descendants", "impatient"] = "descendants",
        local: bool = False,
        gamma: float = 1.0,
        baseline: str | Baseline = "running-mean",
        standardise: Standardise = "none",
        decay: float = 0.9,
        floor: float = 0.1,
        sum_last: bool = False,
    ) -> None:
        super().__init__()
        if kl not in _DIVERGENCES:
            raise ConfigError(f"kl is one of {', '.join(_DIVERGENCES)}; got {kl!r}")
        if rewards not in ("descendants", "impatient"):
            raise ConfigError(f"rewards is one of descendants, impatient; got {rewards!r}")
        if kl == "vanilla":
            _refuse_what_vanilla_ignores(rewards, local, gamma)
        if sum_last and kl != "analytic":
            raise ConfigError(f"sum_last needs the divergence in closed form, kl=analytic; got kl={kl}")
        self.kl: Divergence = kl
        self.sum_last = sum_last
        self.rewards = rewards
        self.local, self.gamma = local, gamma
        self.signal = Signal(baseline, standardise, decay, floor)
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None

    def config(self) -> dict[str, Any]:
        config = {"kl": self.kl, "rewards": self.rewards, "local": self.local, "gamma": self.gamma}
        return config | {"sum_last": self.sum_last} | self.signal.config()

    def _sampled_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self._sampled_layers(flow)
        return (1 + self.signal.baseline.draws_another, layers, flow.features) if layers else None

    def not_capturable(self, flow: LatentFlow) -> str | None:
        del flow  # the generator is evaluated at the posterior's choices, and never drawn from
        return None

    def check(self, flow: LatentFlow) -> None:
        if not flow.has_posterior:
            raise ModelError(
                "the evidence lower bound needs a posterior in every layer; build Layer(..., posterior=MLP(...)), "
                "or train with posterior=mlp"
            )
        if self.kl == "printed" and any(layer.conditioner.order is None for layer in flow.layers):
            raise ModelError("kl=printed needs layers with an ordering; use kl=suffix")
        if self.sum_last and not flow.last_layer_summable:
            raise ModelError("sum_last sums the last layer out, which must not see its own u; leave it out")

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        like = flow.base.logits
        self.signal.prepare(1 + 2 * flow.depth, flow.features, like)
        key = (like.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = self._make_sums(flow).to(like.device)

    def _make_sums(self, flow: LatentFlow) -> nn.ModuleList:
        """For each layer: the sums that turn rewards, sampled and closed divergences into what weighs its scores."""
        descendants = Descendants(flow, "q")
        sums = nn.ModuleList()
        for layer in range(self._sampled_layers(flow)):
            matrices = [self._reward_weights(descendants, layer)]
            matrices += [
                self._sampled_weights(flow, descendants, layer, later) for later in range(flow.depth)
            ]
            matrices += [self._closed_weights(descendants, layer, later) for later in range(flow.depth)]
            sums.append(nn.ModuleList(FeatureSum(matrix) for matrix in matrices))
        return sums

    def _reward_weights(self, descendants: Descendants, layer: int) -> Tensor:
        size = descendants.features
        if self.kl == "vanilla":
            return torch.ones(size, size)
        return torch.eye(size) if self.rewards == "impatient" else descendants.rewards(layer).float()

    def _constant(self, layer: int, later: int) -> float:
        """Of the divergence of a later layer, in the score of a layer."""
        if later <= layer:
            return 1.0
        return 0.0 if self.local and later > layer + 1 else self.gamma

    def _sampled_weights(self, flow: LatentFlow, descendants: Descendants, layer: int, later: int) -> Tensor:
        size = descendants.features
        if self.kl == "vanilla":
            return torch.ones(size, size)
        order = flow.layers[layer].conditioner.order
        if self.kl == "printed" and layer == later and order is not None:
            # the d-th suffix times the whole layer's score, for each d: term k counts as often as there are d up to it
            return (ranks(order) + 1.0).expand(size, size)
        affected = descendants.choices(layer, later) | descendants.inputs(layer, later, "p")
        return self._constant(layer, later) * affected.float()

    def _closed_weights(self, descendants: Descendants, layer: int, later: int) -> Tensor:
        affected = descendants.inputs(layer, later, "q")
        if self.kl == "analytic":
            affected = affected | descendants.inputs(layer, later, "p")
        return self._constant(layer, later) * affected.float()

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        main = None if draws is None else draws[:1]
        sampled = self.objective_of(flow, x, context, main)
        inputs = self.signal.inputs(sampled, self.objective_of, flow, x, context, draws)
        centred, deviation, stats = self.signal(sampled.signal, inputs)
        score = weighted_score(self.sums, centred / deviation, sampled.log_prob)
        direct = sampled.direct
        if self.signal.standardiser.kind == "one":
            direct = direct / deviation  # one number for the whole objective: its direction is kept
        return Loss(surrogate=-(score + direct).mean(), bound=sampled.value.mean(), stats=stats)

    def objective_of(
        self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Draws | None
    ) -> SampledObjective:
        """The objective of draws (S, B, L', D), for whoever weighs the scores, by `sums`, in another way."""
        passed = self._pass(flow, x, context, draws)
        direct = sum((part.sum(-1) for part in passed.divergence), start=passed.rewards.sum(-1))
        return SampledObjective(direct.detach(), direct, _signal(passed), passed.log_q)

    def _pass(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Draws | None) -> _Pass:
        stop = self._sampled_layers(flow)
        greedy_or_drawn = GREEDY if draws is None else draws
        trace = flow.run(x, draws=greedy_or_drawn, context=context, stop=stop, proposal="q")
        assert trace.posterior is not None
        sampled, closed = [], []
        for layer, p, q, u in zip(flow.layers, trace.generator, trace.posterior, trace.us, strict=False):
            of_draw, in_closed_form = self._divergence(layer, p, q, u)
            sampled.append(of_draw)
            closed.append(in_closed_form)
        if self.sum_last:
            last = flow.layers[-1]
            p = last.generator_choices(trace.end, context)
            q = last.posterior_choices(trace.end, context, p)
            rewards = q.expectation(outcomes(last.transform, flow.base, trace.end.state))
            sampled.append(torch.zeros_like(rewards[..., :1]))
            closed.append(-q.kl(p))
        else:
            rewards = flow.base.log_prob(trace.end.state)
        log_q = trace.log_q() if stop else rewards.new_zeros(0, flow.features)
        everything = torch.broadcast_tensors(rewards, *sampled, *closed)
        return _Pass(everything[0], list(everything[1:]), log_q)

    def _divergence(self, layer: Layer, p: Choices, q: Choices, u: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the divergence of q from p in a layer, by feature: what depends on its drawn u, and what is in closed form.

        With graph: the gradient of their sum is the generator's, and the part of the posterior's that needs no score.
        """
        nothing = torch.zeros((), device=u.device, dtype=p.logits.dtype)
        if self.kl == "analytic" and not layer.autoregressive_in_u:
            return nothing, -q.kl(p)
        if self.kl == "vanilla":
            return p.log_prob(u) - q.log_prob(u).detach(), nothing
        return p.log_prob(u), q.entropy()

    def update(self, stats: Mapping[str, Tensor]) -> None:
        self.signal.update(stats)


def _refuse_what_vanilla_ignores(rewards: str, local: bool, gamma: float) -> None:
    """Options that say which terms weigh a score mean nothing where every term weighs every score."""
    given = {"rewards=impatient": rewards == "impatient", "local": local, f"gamma={gamma:g}": gamma != 1}
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise ConfigError(
            f"with kl=vanilla every term weighs every score, so that {' and '.join(ignored)} would change nothing; leave it "
            "out, or choose kl=analytic or kl=suffix"
        )


def _signal(passed: _Pass) -> Tensor:
    """Rewards, then the terms of the divergence, (..., B, 1 + 2 L, D), without gradient."""
    return torch.stack([part.detach() for part in (passed.rewards, *passed.divergence)], -2)
