"""Which terms of an objective weigh the score of a choice, and how much."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from xorflow._states import add_buffers
from xorflow.conditioners import ranks
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Configured
from xorflow.estimators.objectives import Term
from xorflow.flows import LatentFlow


class Credit(Configured, ABC):
    r"""Which terms :math:`T_e` of an objective weigh the score of a choice.

    .. math:: A_{l,d} = \sum_{T, e} W^T_{l,d,e}\, T_e

    A term says which choices it depends on; a new credit is one method, `weights`. Unbiased if every term counts once for each
    choice that it depends on, whatever the other weights are: what does not depend on a choice has expectation zero with its
    score. `ScoreFunction.bias` reads this from the weights themselves.

    Cost: no passes. Schulman et al. (2015).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> class Half(Credit):
    ...     def weights(self, term, layer, flow):
    ...         return 0.5 * term.depends[layer].float()
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=Half()).bias(flow).reason
    'Half does not weigh the scores of layer 1 with all that its choices change, once each'
    """

    samples = 1
    """How many independent samples it takes the scores of."""

    of_divergence: ClassVar[bool] = False
    """Whether it is about the terms of a divergence, and does nothing for an objective that has none."""

    def check(self, flow: LatentFlow) -> None:
        """Raise `ModelError`, with the reason, for a flow that it is not defined for."""
        del flow

    @abstractmethod
    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        """How much entry e of a term counts for choice (layer, d): (D, D), or (S, D, D) for each of its samples."""


class Descendants(Credit):
    r"""Exactly the terms that a choice can change.

    .. math:: W_{l,d,e} = 1[T_e \text{ depends on } u^{(l)}_d]

    Unbiased for every model.

    Cost: no passes. Schulman et al. (2015).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> layers = [xf.Layer(xf.MADE(4, hidden=(8,))) for _ in range(2)]
    >>> flow = xf.LatentFlow(layers, xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=Descendants()).bias(flow) is None
    True
    """

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        del flow
        return term.depends[layer].float()


class All(Credit):
    r"""Every term: REINFORCE as it was.

    .. math:: W_{l,d,e} = 1

    Unbiased for every model, with the most variance.

    Cost: no passes. Williams (1992).

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=All()).bias(flow) is None
    True
    """

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        del flow
        return torch.ones_like(term.depends[layer], dtype=torch.get_default_dtype())


class Impatient(Credit):
    r"""The paper's choice: of the rewards, :math:`r_d` alone weighs the score of :math:`u^{(l)}_d`.

    .. math:: W_{l,d,e} = 1[d = e] \;(\text{rewards}), \qquad \text{other terms as in `Descendants`}

    Unbiased at depth 1 without own u, and in the last layer, where a choice changes no other reward; elsewhere biased: the
    gradient of no stated objective.

    Cost: no passes. Hesselink and Aziz (2020), section 5.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> layers = [xf.Layer(xf.MADE(4, hidden=(8,))) for _ in range(2)]
    >>> flow = xf.LatentFlow(layers, xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=Impatient()).bias(flow) is None
    False
    """

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        return torch.eye(flow.features) if term.kind == "reward" else term.depends[layer].float()


class TwoTerm(Credit):
    r"""The paper's two terms, for layers that share one ordering.

    .. math:: \sum_d r_d\, \big[\log p(u_d \mid u_{<d}) + c\, \log p(u_{<d})\big]

    where u_d are all layers' choices at d: the rewards of d and, times `second` and `discount` to the power of the distance, of
    all features after it. Unbiased with constant 1, and at depth 1 without own u with any, where the second term has
    expectation zero; otherwise biased. Refused for layers of several orderings.

    With `two_samples` the second term comes from an independent sample; the expectation is the same.

    Cost: no passes; with `two_samples` those of a second sample. Hesselink and Aziz (2020), section 5, appendix C.

    Args:
        second: the constant of the second term.
        discount: by which the second term falls with distance.
        two_samples: estimate the second term from a sample of its own.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=TwoTerm(second=0.5)).bias(flow) is None
    True
    """

    def __init__(self, second: float = 1.0, discount: float = 1.0, two_samples: bool = False) -> None:
        self.second, self.discount, self.two_samples = second, discount, two_samples
        self.samples = 1 + two_samples

    def check(self, flow: LatentFlow) -> None:
        _require_one_order(self, flow)

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        first, later = torch.eye(flow.features), term.depends[layer].float()
        if term.kind == "reward":
            rank = ranks(flow.layers[0].conditioner.visited)
            distance = (rank[None, :] - rank[:, None]).to(torch.get_default_dtype())
            later = torch.where(distance > 0, self.second * self.discount ** distance.clamp_min(0), 0.0)
        else:
            first = torch.zeros_like(first)
        return torch.stack((first, later)) if self.two_samples else first + later


class PrintedRewards(Credit):
    r"""As the paper's appendix C prints it: all rewards in every feature's term, for layers that share one ordering.

    .. math:: W_{l,d,e} = D - \mathrm{rank}(d) \;(\text{rewards}), \qquad \text{other terms as in `Descendants`}

    so that a score counts once for its own term and once for each that follows. Biased, but for one feature.

    Cost: no passes. Hesselink and Aziz (2020), appendix C.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> xf.estimators.ScoreFunction(credit=PrintedRewards()).bias(flow) is None
    False
    """

    def check(self, flow: LatentFlow) -> None:
        _require_one_order(self, flow)

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        if term.kind != "reward":
            return term.depends[layer].float()
        rank = ranks(flow.layers[0].conditioner.visited)
        return (flow.features - rank)[:, None].expand(flow.features, flow.features)


class PrintedDivergence(Credit):
    r"""As the paper's appendix B prints it: the suffix of a layer's log p with the score of the whole layer, for each feature.

    .. math:: \sum_d \Big(\sum_{k \ge d} \log p(u^{(l)}_k)\Big) \log q(u^{(l)})

    so that term k counts as often as there are d up to it; other terms as in `Descendants`. Biased. Of an `ELBO` whose
    cross-entropies are sampled, and of layers with an ordering.

    Cost: no passes. Hesselink and Aziz (2020), appendix B.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> layer = xf.Layer(xf.MADE(4, hidden=(8,)), posterior=xf.MLP(4, hidden=(8,)))
    >>> flow = xf.LatentFlow([layer], xf.FactorisedBase(4))
    >>> objective = xf.estimators.ELBO(divergence="cross-entropy")
    >>> xf.estimators.ScoreFunction(objective, PrintedDivergence()).bias(flow) is None
    False
    """

    of_divergence = True

    def check(self, flow: LatentFlow) -> None:
        if any(layer.conditioner.order is None for layer in flow.layers):
            raise ModelError("PrintedDivergence needs layers with an ordering; use Descendants")

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        order = flow.layers[layer].conditioner.order
        if term.kind == "sampled" and term.layer == layer and order is not None:
            return (ranks(order) + 1.0).expand(flow.features, flow.features)
        return term.depends[layer].float()


class LocalDivergence(Credit):
    r"""Only the divergences of the next layers weigh the score of a layer, times a constant.

    .. math:: W^{\mathrm{KL}_k}_l = \gamma\, 1[k \le l + \text{reach}] \; W'_l \quad \text{for } k > l

    with W' another credit's. With a reach of 1, layers l and l + 1, and :math:`\gamma = 1` it is the paper's, unbiased at
    depth 1 and 2 and, where posteriors look no further, beyond; otherwise biased.

    Cost: no passes. Hesselink and Aziz (2020), section 5.

    Args:
        gamma: the constant of later layers' divergences.
        reach: how many later layers count; None for all.
        of: what is changed; `Descendants` by default.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> layers = [xf.Layer(xf.MADE(4, hidden=(8,)), posterior=xf.MLP(4, hidden=(8,))) for _ in range(3)]
    >>> flow = xf.LatentFlow(layers, xf.FactorisedBase(4))
    >>> local = xf.estimators.ScoreFunction(xf.estimators.ELBO(), LocalDivergence())
    >>> [local.bias_of(flow, xf.estimators.Part("posterior", layer)) is None for layer in (1, 2, 3)]
    [False, True, True]
    """

    of_divergence = True

    def __init__(self, gamma: float = 1.0, reach: int | None = 1, of: Credit | None = None) -> None:
        if reach is not None and reach < 0:
            raise ConfigError(
                f"reach, how many later layers count, is at least 0 or none for all; got {reach}"
            )
        self.gamma, self.reach, self.of = gamma, reach, of or Descendants()
        self.samples = self.of.samples

    def check(self, flow: LatentFlow) -> None:
        self.of.check(flow)

    def weights(self, term: Term, layer: int, flow: LatentFlow) -> Tensor:
        weights = self.of.weights(term, layer, flow)
        if term.layer is None or term.kind == "entropy" or term.layer <= layer:
            return weights
        near = self.reach is None or term.layer <= layer + self.reach
        return self.gamma * weights if near else torch.zeros_like(weights)


def _require_one_order(credit: Credit, flow: LatentFlow) -> None:
    if not flow.shares_one_order:
        raise ModelError(
            f"{type(credit).__name__} groups all layers' choices at a feature, and needs layers that share one ordering; use "
            "Descendants"
        )


class FeatureSum(nn.Module):
    """Weighted sums of features: out_d = sum_e weights[d, e] v_e, in the cheapest way that the weights allow.

    Args:
        weights: (D, D).
    """

    weights: Tensor
    order: Tensor
    place: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        weights = weights.to(torch.get_default_dtype())
        size = len(weights)
        order = weights.sum(1).argsort(descending=True, stable=True)
        sorted_weights = weights[order][:, order]
        if not bool(weights.any()):
            self.kind = "zero"
        elif torch.equal(weights, torch.eye(size)):
            self.kind = "identity"
        elif bool((weights == 1).all()):
            self.kind = "all"
        elif torch.equal(sorted_weights, torch.ones(size, size).triu()):
            self.kind = "suffix"
        else:
            self.kind = "matrix"
        order = order if self.kind == "suffix" else torch.empty(0)
        matrix = weights if self.kind == "matrix" else torch.empty(0)
        add_buffers(self, weights=matrix, order=order, place=order.argsort())

    def forward(self, values: Tensor) -> Tensor:
        if self.kind == "identity":
            return values
        if self.kind == "zero":
            return torch.zeros_like(values)
        if self.kind == "all":
            return values.sum(-1, keepdim=True).expand_as(values)
        if self.kind == "suffix":
            arranged = values.index_select(-1, self.order)
            later = arranged.sum(-1, keepdim=True) - arranged.cumsum(-1) + arranged
            return later.index_select(-1, self.place)
        return values @ self.weights.to(values.dtype).t()


def feature_sums(matrices: Sequence[Tensor]) -> nn.ModuleList:
    return nn.ModuleList(map(FeatureSum, matrices))


def weighted_score(sums: nn.Module, signal: Tensor, log_probs: Tensor) -> Tensor:
    """The scores (..., L, D), each weighed with its sums of the signal (..., T, D), and added up: (...)."""
    assert isinstance(sums, nn.ModuleList)
    total = torch.zeros_like(signal[..., 0, 0])
    for rows, log_prob in zip(sums, log_probs.unbind(-2), strict=True):
        assert isinstance(rows, nn.ModuleList)
        weights = [row(signal[..., index, :]) for index, row in enumerate(rows)]
        total = total + (sum(weights[1:], start=weights[0]) * log_prob).sum(-1)
    return total
