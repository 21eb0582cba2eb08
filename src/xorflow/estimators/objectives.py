"""What score functions maximise: objectives that are sums of terms, which say what choices they depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators.base import Configured, Target
from xorflow.estimators.descendants import Drawn, Reach
from xorflow.estimators.entropy import EntropyBonus
from xorflow.flows import Choices, LatentFlow, Layer, Point, Trace
from xorflow.flows.choices import GREEDY, Draws, outcomes


@dataclass(frozen=True)
class Term:
    """A term of an objective, a number for each feature.

    Attributes:
        kind: a reward, an entropy bonus, or of a divergence what depends on the layer's own draw or what is in closed form.
        layer: whose it is; None of rewards, which come after all layers.
        depends: for each layer that is drawn, (D, D) booleans: whether entry e changes with the choice (layer, d).
    """

    kind: Literal["reward", "entropy", "sampled", "closed"]
    layer: int | None
    depends: tuple[Tensor, ...]


@dataclass(frozen=True)
class Sampled:
    """An objective of S samples of a batch.

    Attributes:
        values: its terms by feature, (S, B, D) or what broadcasts to it, with the graph of what needs no score.
        log_prob: the log-probabilities of the choices, (S, B, L', D), with graph.
        with_bonus: whether all but the rewards is a bonus, which is no part of a bound.
    """

    values: list[Tensor]
    log_prob: Tensor
    with_bonus: bool

    @property
    def bound(self) -> Tensor:
        """The value without any bonus, (S, B)."""
        return self.values[0].sum(-1) if self.with_bonus and len(self.values) > 1 else self.direct

    @cached_property
    def direct(self) -> Tensor:
        """What carries a gradient that needs no score, (S, B)."""
        return sum((value.sum(-1) for value in self.values[1:]), start=self.values[0].sum(-1))

    @cached_property
    def signal(self) -> Tensor:
        """The terms, (S, B, T, D), without gradient."""
        return torch.stack(torch.broadcast_tensors(*(value.detach() for value in self.values)), -2)


class Objective(Configured, nn.Module, ABC):
    """An expectation over choices of a sum of terms, each of which depends on some of the choices.

    The layers from `drawn` on, at most the last, are summed out: the terms are expectations over their choices.
    """

    proposal: ClassVar[Drawn]
    """What draws the choices."""

    has_divergence: ClassVar[bool] = False
    """Whether some of its terms are a divergence's."""

    with_bonus: ClassVar[bool] = False
    """Whether all terms but the rewards are a bonus, so that they are no part of a bound."""

    @abstractmethod
    def target(self, flow: LatentFlow) -> Target:
        """What it is, as a name for it."""

    def prepare(self, flow: LatentFlow, total_steps: int | None) -> None:
        """Make room for what changes in training."""
        del flow, total_steps

    @abstractmethod
    def terms(self, flow: LatentFlow, drawn: int) -> list[Term]:
        """What the objective of this flow is the sum of; rewards come first."""

    @abstractmethod
    def values(self, flow: LatentFlow, trace: Trace, last: Sequence[Choices]) -> list[Tensor]:
        """The values of all terms but the rewards, (S, B, D) or what broadcasts to it, with graph.

        Args:
            flow: the model.
            trace: the pass through the layers that are drawn.
            last: the generator's choices of a layer that is summed out and, if these draw, the posterior's.
        """

    def forward(self, flow: LatentFlow, start: Point, draws: Draws | None, drawn: int) -> Sampled:
        """Its terms at draws (S, B, L', D) of the first layers; at the most probable choices without any."""
        draws = GREEDY if draws is None else draws
        trace = flow.run(start, draws=draws, stop=drawn, proposal=self.proposal)
        choices: list[Choices] = []
        if drawn < flow.depth:
            layer = flow.layers[-1]
            choices.append(layer.generator_choices(trace.end))
            if self.proposal == "q":
                choices.append(layer.posterior_choices(trace.end, choices[0]))
            rewards = choices[-1].expectation(outcomes(layer.transform, flow.base, trace.end.state))
        else:
            rewards = flow.base.log_prob(trace.end.state)
        log_prob = rewards.new_zeros(0, flow.features)
        if drawn:
            log_prob = trace.log_p() if self.proposal == "p" else trace.log_q()
        return Sampled([rewards, *self.values(flow, trace, choices)], log_prob, self.with_bonus)

    def update(self) -> None:
        """Count a step."""


class Bound(Objective):
    r"""The special-case bound, in which choices are drawn from the generator itself.

    .. math:: L = E_{p(u|x)}\Big[\sum_d r_d\Big] \le \log p(x), \qquad r_d = \log p_d\big((x \ominus u)_d\big)

    With `entropy` w the objective is :math:`L + w\, E[\sum_l H_l]`; then it is no bound on log p.

    Args:
        entropy: the weight w of the entropy bonus.
        anneal: the fraction of training from which on w falls to zero.
        earlier: the factor of w in the layers before the last.
    """

    proposal = "p"
    with_bonus = True

    def __init__(self, entropy: float = 0.0, anneal: float = 1.0, earlier: float = 1.0) -> None:
        super().__init__()
        self.entropy, self.anneal, self.earlier = entropy, anneal, earlier
        self.bonus = EntropyBonus(entropy, anneal, earlier)

    def target(self, flow: LatentFlow) -> Target:
        return self.bonus.target(flow)

    def prepare(self, flow: LatentFlow, total_steps: int | None) -> None:
        self.bonus.prepare(flow.base.logits, total_steps)

    def terms(self, flow: LatentFlow, drawn: int) -> list[Term]:
        reach, layers = Reach(flow, "p"), range(drawn)
        rewards = Term("reward", None, tuple(map(reach.rewards, layers)))
        entropies = [
            Term("entropy", later, tuple(reach.inputs(layer, later, "p") for layer in layers))
            for later in range(flow.depth)
        ]
        return [rewards, *entropies] if self.bonus.active else [rewards]

    def values(self, flow: LatentFlow, trace: Trace, last: Sequence[Choices]) -> list[Tensor]:
        del flow
        if not self.bonus.active:
            return []
        return self.bonus.weigh([choices.entropy() for choices in (*trace.generator, *last)])

    def update(self) -> None:
        self.bonus.update()


class ELBO(Objective):
    r"""The evidence lower bound, in which choices are drawn from a posterior q, mean-field within a layer.

    .. math:: \mathrm{ELBO} = E_{q(u|x)}[\log p_Y(x \ominus u) + \log p(u|x) - \log q(u|x)] \le \log p(x)

    Its terms are the rewards and, for each layer, minus the divergence of q from p. The divergence of a layer whose generator
    does not see its own u has a closed form given the layers before, for both networks. How it enters, `divergence`:

    * `analytic`: in closed form where there is one, otherwise as in `cross-entropy`.
    * `cross-entropy`: entropies in closed form, cross-entropies :math:`\log p(u^{(l)}_d)` of the draw.
    * `sampled`: everything of the draw, :math:`\log p - \log q`; mostly with more variance.

    The divergence of a last layer that is summed out is in closed form whatever is asked for.

    Args:
        divergence: how the divergence enters.
    """

    proposal = "q"
    has_divergence = True

    def __init__(self, divergence: Literal["analytic", "cross-entropy", "sampled"] = "analytic") -> None:
        super().__init__()
        if divergence not in ("analytic", "cross-entropy", "sampled"):
            raise ConfigError(f"divergence is one of analytic, cross-entropy, sampled; got {divergence!r}")
        self.divergence = divergence

    def target(self, flow: LatentFlow) -> Target:
        del flow
        return Target("elbo")

    def _has_closed_form(self, layer: Layer) -> bool:
        return self.divergence == "analytic" and not layer.autoregressive_in_u

    def terms(self, flow: LatentFlow, drawn: int) -> list[Term]:
        reach, layers = Reach(flow, "q"), range(drawn)
        terms = [Term("reward", None, tuple(map(reach.rewards, layers)))]
        for later in range(flow.depth):
            of_q = [reach.inputs(layer, later, "q") for layer in layers]
            of_p = [reach.inputs(layer, later, "p") for layer in layers]
            drawn_here = [reach.choices(layer, later) | p for layer, p in enumerate(of_p)]
            either = tuple(p | q for p, q in zip(of_p, of_q, strict=True))
            if later == drawn or self._has_closed_form(flow.layers[later]):
                terms.append(Term("closed", later, either))
            elif self.divergence == "sampled":
                everything = tuple(u | q for u, q in zip(drawn_here, of_q, strict=True))
                terms.append(Term("sampled", later, everything))
            else:
                terms += [Term("sampled", later, tuple(drawn_here)), Term("closed", later, tuple(of_q))]
        return terms

    def values(self, flow: LatentFlow, trace: Trace, last: Sequence[Choices]) -> list[Tensor]:
        assert trace.posterior is not None
        values = []
        for layer, p, q, u in zip(flow.layers, trace.generator, trace.posterior, trace.us, strict=False):
            values += self._of_layer(layer, p, q, u)
        if last:
            p, q = last
            values.append(-q.kl(p))
        return values

    def _of_layer(self, layer: Layer, p: Choices, q: Choices, u: Tensor) -> list[Tensor]:
        """Minus the divergence of q from p in a layer, by feature, in its terms.

        The gradient of their sum is the generator's, and the part of the posterior's that needs no score.
        """
        if self._has_closed_form(layer):
            return [-q.kl(p)]
        if self.divergence == "sampled":
            return [p.log_prob(u) - q.log_prob(u).detach()]
        return [p.log_prob(u), q.entropy()]
