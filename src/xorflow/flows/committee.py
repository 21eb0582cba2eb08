"""Trained models as one: a committee of their networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xorflow._math import log_mean_exp
from xorflow.bases import FactorisedBase
from xorflow.conditioners import Committee
from xorflow.errors import ModelError
from xorflow.flows.latent import LatentFlow
from xorflow.flows.layer import Layer
from xorflow.flows.mixture import Mixture


def committee_of(models: Sequence[LatentFlow | Mixture]) -> LatentFlow | Mixture:
    """One model whose networks are committees of those of several, trained with different seeds, say.

    The networks' probabilities are averaged, and so are the base's; of mixtures, component by component, and their weights as
    well. The models' own networks are used, not copies. A mixture of the models, `Mixture(models)`, does not need one
    ordering, and gains less.

    Args:
        models: latent flows in closed form, with the same ordering; or mixtures of as many of these.

    >>> from xorflow import MADE
    >>> flows = [LatentFlow([Layer(MADE(3))], FactorisedBase(3)) for _ in range(2)]
    >>> committee_of(flows)().log_prob(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1])
    """
    mixtures = [model for model in models if isinstance(model, Mixture)]
    flows = [model for model in models if isinstance(model, LatentFlow)]
    if len(mixtures) + len(flows) < len(models):
        raise ModelError("a committee is of latent flows, or of mixtures of latent flows")
    if not mixtures:
        return _committee(flows)
    counts = {len(model) if isinstance(model, Mixture) else 1 for model in models}
    if len(mixtures) < len(models) or len(counts) > 1:
        raise ModelError(
            "a committee of mixtures is one for each component, so that all have as many; these have "
            f"{', '.join(str(count) for count in sorted(counts))}"
        )
    for mixture in mixtures:
        mixture.check_trainable()
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
        if flow.layers[0].transform.config() != flows[0].layers[0].transform.config():
            raise ModelError(
                f"the flows of a committee have the same transform, and flow {number} has another than flow 1"
            )
    conditioner = Committee([flow.layers[0].conditioner for flow in flows])
    layer = Layer(conditioner, flows[0].layers[0].transform)
    return LatentFlow([layer], _mean_base([flow.base for flow in flows])).to(flows[0].device)


@torch.no_grad()
def _mean_base(bases: Sequence[FactorisedBase]) -> FactorisedBase:
    first = bases[0]
    base = FactorisedBase(
        first.features, categories=first.states.sizes, learned=any(base.learned for base in bases)
    ).to(first.logits)
    table = log_mean_exp(torch.stack([base.log_table() for base in bases]), 0)
    base.logits.copy_(table[:, 1] - table[:, 0] if base.states.binary else table)
    return base
