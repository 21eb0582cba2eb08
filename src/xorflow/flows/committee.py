"""Trained models as one: a committee of their networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from xorflow._math import log_mean_exp
from xorflow.bases import FactorisedBase
from xorflow.conditioners import Committee
from xorflow.errors import ModelError
from xorflow.flows.latent import LatentFlow
from xorflow.flows.layer import Layer
from xorflow.flows.mixture import Mixture


@overload
def committee_of(models: Sequence[LatentFlow]) -> LatentFlow: ...
@overload
def committee_of(models: Sequence[Mixture]) -> Mixture: ...
@overload
def committee_of(models: Sequence[LatentFlow | Mixture]) -> LatentFlow | Mixture: ...
def committee_of(models: Sequence[LatentFlow | Mixture]) -> LatentFlow | Mixture:
    """One model whose networks are committees of those of several, trained with different seeds, say.

    The networks' probabilities are averaged, and so are the base's; of mixtures, component by component, and their weights as
    well. The models' own networks are used, not copies; posteriors, which a closed form does not need, are left behind.
    `Mixture` does not need one ordering.

    Args:
        models: latent flows in closed form, of one type and on one device, with the same ordering; or mixtures of as many of
            these.

    >>> from xorflow import MADE
    >>> flows = [LatentFlow([Layer(MADE(3))], FactorisedBase(3)) for _ in range(2)]
    >>> committee_of(flows)().log_prob(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1])
    """
    mixtures = [model for model in models if isinstance(model, Mixture)]
    flows = [model for model in models if isinstance(model, LatentFlow)]
    if len(mixtures) + len(flows) < len(models):
        other = next(model for model in models if not isinstance(model, LatentFlow | Mixture))
        raise ModelError(
            f"a committee is of latent flows, or of mixtures of latent flows, and got a {type(other).__name__}; make it of the "
            "flows that were trained, and read it by its greedy()"
        )
    if not mixtures:
        return _committee(flows)
    counts = {len(model) if isinstance(model, Mixture) else 1 for model in models}
    if len(mixtures) < len(models) or len(counts) > 1:
        raise ModelError(
            "a committee of mixtures is one for each component, so that all have as many; these have "
            f"{', '.join(str(count) for count in sorted(counts))}"
        )
    if any(len(mixture.latent_components()) < len(mixture) for mixture in mixtures):
        raise ModelError(
            "a committee of mixtures is of mixtures of latent flows, and one of these has others"
        )
    each = zip(*(mixture.latent_components() for mixture in mixtures), strict=True)
    weights = log_mean_exp(torch.stack([mixture.log_weights() for mixture in mixtures]), 0).exp()
    learned = any(mixture.learned for mixture in mixtures)
    return Mixture([_committee(parts) for parts in each], weights, learned).to(weights)


def _committee(flows: Sequence[LatentFlow]) -> LatentFlow:
    for number, flow in enumerate(flows, 1):
        if not flow.has_closed_form:
            raise ModelError(
                f"a committee is of latent flows of depth 1 that do not see their own u, and flow {number} is none: between "
                "the layers of others each network has a code of its own"
            )
        if (flow.dtype, flow.device) != (flows[0].dtype, flows[0].device):
            raise ModelError(
                f"the flows of a committee have one type and device: flow 1 has {flows[0].dtype} on {flows[0].device}, and "
                f"flow {number} has {flow.dtype} on {flow.device}; bring them together with flow.to(...)"
            )
    conditioner = Committee([flow.layers[0].conditioner for flow in flows])
    first, *others = [flow.layers[0].transform for flow in flows]
    for number, transform in enumerate(others, 2):
        if not torch.equal(transform.to_base_table, first.to_base_table):
            raise ModelError(
                f"the flows of a committee choose among the same bijections, and the {type(transform).__name__} of "
                f"flow {number} has others than the {type(first).__name__} of flow 1"
            )
    base = _mean_base([flow.base for flow in flows])
    return LatentFlow([Layer(conditioner, first)], base).to(flows[0].device)


@torch.no_grad()
def _mean_base(bases: Sequence[FactorisedBase]) -> FactorisedBase:
    first = bases[0]
    base = FactorisedBase(
        first.features, categories=first.states.sizes, learned=any(base.learned for base in bases)
    ).to(first.logits)
    table = log_mean_exp(torch.stack([base.log_table() for base in bases]), 0)
    base.logits.copy_(table[:, 1] - table[:, 0] if base.states.binary else table)
    return base
