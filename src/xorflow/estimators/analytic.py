"""The bounds of one layer and their gradients in closed form: nothing is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.entropy import EntropyBonus
from xorflow.flows import LatentFlow


class Analytic(Estimator):
    r"""The exact gradient, at depth 1, of the special-case bound or of the evidence lower bound.

    .. math:: L = \sum_d \sum_{u_d} p(u_d \mid x)\, \log p_d(x_d \ominus u_d), \qquad
              \mathrm{ELBO} = \sum_d \sum_{u_d} q(u_d \mid x)\, \log p_d(x_d \ominus u_d) - \mathrm{KL}(q_d \| p_d)

    Exact: unbiased without variance, for networks and base alike. It is what `SpecialCase`, `FullPosterior` and the estimators
    that draw are measured against. With more layers the choices of all but the last would have to be enumerated; there
    `sum_last=True` of the others takes the last layer's expectation in the same way.

    With `entropy` w the objective is :math:`L + w H`, which is no bound on log p for w > 0.

    Cost: 1 pass, and one of the posterior for the evidence lower bound. Hesselink and Aziz (2020), section 4; the sums are
    ours.

    Args:
        objective: `special` or `elbo`.
        entropy: the weight w of the entropy bonus, for `special`.
        anneal: the fraction of training from which on w falls to zero.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> bool(Analytic()(flow, x).bound < flow().log_prob(x))
    True
    """

    def __init__(
        self, objective: Literal["special", "elbo"] = "special", entropy: float = 0.0, anneal: float = 1.0
    ) -> None:
        super().__init__()
        if objective not in ("special", "elbo"):
            raise ConfigError(f"objective is one of special, elbo; got {objective!r}")
        if objective == "elbo" and entropy:
            raise ConfigError("the evidence lower bound contains the posterior's entropy; leave entropy out")
        self.objective = objective
        self.bonus = EntropyBonus(entropy, anneal)

    def config(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "entropy": self.bonus.weight,
            "anneal": self.bonus.anneal,
        }

    def check(self, flow: LatentFlow) -> None:
        if flow.depth != 1:
            raise ModelError(
                f"the analytic gradient sums every choice out, which needs one layer; with {flow.depth} layers the sum over "
                "the earlier ones has no closed form: use special-case:sum_last=true or maximum-likelihood"
            )
        if not flow.last_layer_summable:
            raise ModelError(
                "the analytic gradient sums every choice out, and this layer sees its own u: its choices are not independent; "
                "use leave-one-out or the special case"
            )
        if self.objective == "elbo" and not flow.has_posterior:
            raise ModelError(
                "the evidence lower bound needs a posterior; build Layer(..., posterior=MLP(...)), or train with "
                "posterior=mlp"
            )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        self.bonus.prepare(flow.base.logits, total_steps)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        del draws
        start = flow.start(x)
        p, outcomes = flow.last_choices(start, context)
        if self.objective == "elbo":
            q = flow.layers[0].posterior_choices(start, context, p)
            value = (q.expectation(outcomes) - q.kl(p)).sum(-1)
        else:
            value = p.expectation(outcomes).sum(-1)
        whole = value
        if self.bonus.active:
            whole = value + self.bonus.weigh([p.entropy().sum(-1)])[0]
        return Loss(surrogate=-whole.mean(), bound=value.detach().mean())

    def update(self, stats: Mapping[str, Tensor]) -> None:
        del stats
        self.bonus.update()
