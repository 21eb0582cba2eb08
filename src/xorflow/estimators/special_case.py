"""Score-function estimators of the special case, in which choices are drawn from the generator itself."""

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
from xorflow.estimators.entropy import EntropyBonus
from xorflow.estimators.sampled_objective import SampledObjective
from xorflow.flows import LatentFlow
from xorflow.flows.choices import GREEDY, Draws

Rewards = Literal["descendants", "all", "two-term", "impatient", "appendix"]
_REWARDS = ("descendants", "all", "two-term", "impatient", "appendix")


@dataclass(frozen=True)
class _Pass:
    rewards: Tensor  # (..., D), with the graph of what needs no score
    bonus: list[Tensor]  # weighted entropies by layer, (..., D), with graph
    log_p: Tensor  # (..., L', D) of the layers that were drawn


class SpecialCase(Estimator):
    r"""The score function of the bound :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)] \le \log p(x)`.

    .. math:: S = \sum_{l,d} \mathrm{sg}[A_{l,d} - b_{l,d}] \log p(u^{(l)}_d \mid \cdot), \qquad A_{l,d} = \sum_{e} r_e

    with r_e the log base probability of feature e, over those e that u^(l)_d can change. Which rewards weigh a score:

    * `descendants`: exactly those; unbiased for the gradient of L for every model.
    * `all`: every one; unbiased, with the most variance.
    * `two-term`: the paper's two terms, :math:`r_d\,[\log p(u_d \mid u_{<d}) + c \log p(u_{<d})]`, where u_d are all layers'
      choices at d: the rewards of d and, times `second` and `discount` to the power of the distance, of all features after it.
      Unbiased with constant 1 where all layers share one ordering; for others it is refused.
    * `impatient`: the paper's choice, the first term alone. Unbiased at depth 1 without own u, where the second has expectation
      zero; elsewhere biased: the gradient of no stated objective.
    * `appendix`: as the paper's appendix prints it, all rewards in every feature's term; biased: it weighs scores by their
      place.

    With `two_samples` the second term comes from an independent sample; the expectation is the same.

    With `entropy` w the objective is :math:`L + w\, E[\sum_l H_l]`, its gradient unbiased under `descendants` and `all`;
    then it is no bound on log p.

    Standardisation by one number rescales the gradient; by feature it is the gradient of :math:`\sum_d E[r_d] / \sigma_d`:
    biased. A learned base gets the gradient of the rewards, unbiased.

    Cost: L passes, more in layers that see their own u, where drawing takes several; a critic doubles them, and so do two
    samples. Hesselink and Aziz (2020), section 5, appendix C.

    Args:
        rewards: which rewards weigh the score of a choice.
        baseline: `none`, `running-mean`, `sampled`, `greedy`, or a `Baseline`.
        standardise: `none`, `one` or `feature`.
        second: the constant of the second term.
        discount: by which the second term falls with distance.
        two_samples: estimate the second term from a sample of its own.
        entropy: the weight w of the entropy bonus.
        anneal: the fraction of training from which on w falls to zero.
        earlier: the factor of w in the layers before the last.
        decay: of moving estimates.
        floor: the least deviation to divide by.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = SpecialCase(baseline="greedy")(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(
        self,
        rewards: Rewards = "descendants",
        baseline: str | Baseline = "running-mean",
        standardise: Standardise = "none",
        second: float = 1.0,
        discount: float = 1.0,
        two_samples: bool = False,
        entropy: float = 0.0,
        anneal: float = 1.0,
        earlier: float = 1.0,
        decay: float = 0.9,
        floor: float = 0.1,
        sum_last: bool = False,
    ) -> None:
        super().__init__()
        if rewards not in _REWARDS:
            raise ConfigError(f"rewards is one of {', '.join(_REWARDS)}; got {rewards!r}")
        if rewards != "two-term" and (two_samples or second != 1 or discount != 1):
            raise ConfigError("second, discount and two_samples belong to rewards=two-term; set that too")
        if sum_last and two_samples:
            raise ConfigError("sum_last leaves no second term for two_samples in the last layer; choose one")
        self.rewards: Rewards = rewards
        self.sum_last = sum_last
        self.second, self.discount, self.two_samples = second, discount, two_samples
        self.signal = Signal(baseline, standardise, decay, floor)
        self.bonus = EntropyBonus(entropy, anneal, earlier)
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None

    def config(self) -> dict[str, Any]:
        config = {
            "rewards": self.rewards,
            "second": self.second,
            "discount": self.discount,
            "two_samples": self.two_samples,
            "sum_last": self.sum_last,
        }
        return config | self.signal.config() | self.bonus.config()

    def _sampled_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self._sampled_layers(flow)
        samples = 1 + self.two_samples + self.signal.baseline.draws_another
        return (samples, layers, flow.features) if layers else None

    def check(self, flow: LatentFlow) -> None:
        if self.sum_last and not flow.last_layer_summable:
            raise ModelError("sum_last sums the last layer out, which must not see its own u; leave it out")
        if self.rewards in ("two-term", "appendix") and not flow.shares_one_order:
            raise ModelError(
                f"rewards={self.rewards} groups all layers' choices at a feature, and needs layers that share one ordering; "
                "use rewards=descendants"
            )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        like = flow.base.logits
        terms = 1 + (flow.depth if self.bonus.active else 0)
        self.signal.prepare(terms, flow.features, like)
        self.bonus.prepare(like, total_steps)
        key = (like.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = self._make_sums(flow).to(like.device)

    def _make_sums(self, flow: LatentFlow) -> nn.ModuleList:
        """For each layer: the sums that turn rewards, and the layers' entropies, into what weighs its scores."""
        descendants = Descendants(flow, "p")
        sums = nn.ModuleList()
        for layer in range(self._sampled_layers(flow)):
            rows = nn.ModuleList([FeatureSum(self._reward_weights(flow, descendants, layer))])
            if self.bonus.active:
                everything = self.rewards == "all"
                for later in range(flow.depth):
                    matrix = descendants.inputs(layer, later, "p")
                    rows.append(FeatureSum(torch.ones_like(matrix) if everything else matrix))
            sums.append(rows)
        return sums

    def _reward_weights(self, flow: LatentFlow, descendants: Descendants, layer: int) -> Tensor:
        size = flow.features
        if self.rewards == "descendants":
            return descendants.rewards(layer)
        if self.rewards == "all":
            return torch.ones(size, size)
        if self.rewards == "impatient":
            return torch.eye(size)
        order = flow.layers[0].conditioner.order  # all layers', by `check`
        assert order is not None
        rank = ranks(order)
        if self.rewards == "appendix":
            return (size - rank)[:, None].expand(size, size)
        distance = (rank[None, :] - rank[:, None]).to(torch.get_default_dtype())
        later = torch.where(distance > 0, self.second * self.discount ** distance.clamp_min(0), 0.0)
        return later if self.two_samples else later + torch.eye(size)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        main = None if draws is None else draws[:1]
        sampled = self.objective_of(flow, x, context, main)
        inputs = self.signal.inputs(sampled, self.objective_of, flow, x, context, draws)
        centred, deviation, stats = self.signal(sampled.signal, inputs)
        direct = sampled.direct
        if self.signal.standardiser.kind == "one":
            direct = direct / deviation  # one number for the whole objective: its direction is kept
        if self.two_samples:
            assert draws is not None
            second = self.objective_of(flow, x, context, draws[1:2])
            rest, _, _ = self.signal(second.signal, inputs)
            rewards = (centred / deviation)[..., :1, :]  # for every layer's choice at the same feature
            score = (rewards * sampled.log_prob).sum((-1, -2))
            score = score + weighted_score(self.sums, rest / deviation, second.log_prob)
        else:
            score = weighted_score(self.sums, centred / deviation, sampled.log_prob)
        return Loss(surrogate=-(score + direct).mean(), bound=sampled.value.mean(), stats=stats)

    def objective_of(
        self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Draws | None
    ) -> SampledObjective:
        """The objective of draws (S, B, L', D), for whoever weighs the scores, by `sums`, in another way."""
        passed = self._pass(flow, x, context, draws)
        value = passed.rewards.sum(-1)
        # the rewards' own gradient is a learned base's and, where the last layer is summed out, that layer's
        direct = value + sum((part.sum(-1) for part in passed.bonus), start=torch.zeros_like(value))
        return SampledObjective(value.detach(), direct, self._signal(passed), passed.log_p)

    def _pass(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Draws | None) -> _Pass:
        stop = self._sampled_layers(flow)
        trace = flow.run(x, draws=GREEDY if draws is None else draws, context=context, stop=stop)
        choices = list(trace.generator)
        if self.sum_last:
            last, outcomes = flow.last_choices(trace.end, context)
            rewards = last.expectation(outcomes)
            choices.append(last)
        else:
            rewards = flow.base.log_prob(trace.end.state)
        bonus = self.bonus.weigh([c.entropy() for c in choices]) if self.bonus.active else []
        return _Pass(rewards, bonus, trace.log_p() if stop else rewards.new_zeros(0, flow.features))

    def _signal(self, passed: _Pass) -> Tensor:
        """Rewards and, with a bonus, weighted entropies by layer, (..., B, T, D), without gradient."""
        terms = torch.broadcast_tensors(passed.rewards.detach(), *(term.detach() for term in passed.bonus))
        return torch.stack(terms, -2)

    def update(self, stats: Mapping[str, Tensor]) -> None:
        self.signal.update(stats)
        self.bonus.update()
