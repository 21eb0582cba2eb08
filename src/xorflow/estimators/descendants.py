"""What a choice can change: the terms of an objective that its score has to be weighed with, and no others.

A choice (l, d) is u^(l)_d. It changes the choices that see it, those that see these, and so on; a reward or a term of
the objective that none of them enters is independent of it, and would only add variance to its score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from xorflow.conditioners import Conditioner, Dependence, Source, ranks
from xorflow.errors import ModelError
from xorflow.flows import LatentFlow, Layer

Drawn = Literal["p", "q"]


def relation(network: Conditioner, dependence: Dependence) -> Tensor:
    """(D, D) booleans: whether the logits of feature e (column) may depend on entry f (row) of an input."""
    size = network.features
    if dependence is Dependence.ALL:
        return torch.ones(size, size, dtype=torch.bool)
    if dependence is Dependence.COUPLED:
        assert network.mask is not None
        seen = network.mask.cpu()
        return seen[:, None] & ~seen[None, :]
    rank = ranks(network.visited)
    strict = rank[:, None] < rank[None, :]
    return strict if dependence is Dependence.BEFORE else strict | torch.eye(size, dtype=torch.bool)


def direct(network: Conditioner, source: int, layer: int) -> Tensor:
    """(D, D) booleans: whether this network, of `layer`, sees u^(source)_f when it computes the logits of feature e."""
    tells = {
        Source.STATE: source < layer,
        Source.PREVIOUS: source == layer - 1,
        Source.OWN: source == layer,
        Source.X: False,
    }
    sees = torch.zeros(network.features, network.features, dtype=torch.bool)
    for what, dependence in network.sees.items():
        if tells[what]:
            sees |= relation(network, dependence)
    return sees


def _direct_any(networks: Sequence[Conditioner], source: int, layer: int) -> Tensor:
    return torch.stack([direct(network, source, layer) for network in networks]).any(0)


def _posterior_networks(layer: Layer) -> list[Conditioner]:
    """What the logits of a posterior come from: none without one, two if it is relative to the generator."""
    if layer.posterior is None:
        return []
    return [layer.posterior, layer.conditioner] if layer.relative else [layer.posterior]


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()) > 0


def structure(flow: LatentFlow) -> tuple[object, ...]:
    """All that decides what a flow's choices can change: two flows that agree in it have the same descendants."""
    networks = [network for layer in flow.layers for network in (layer.conditioner, layer.posterior)]
    relative = tuple(layer.relative for layer in flow.layers)
    return *(None if network is None else _conditioning(network) for network in networks), relative


def _conditioning(network: Conditioner) -> tuple[object, ...]:
    mask = None if network.mask is None else tuple(network.mask.tolist())
    return network.order, tuple(network.sees.items()), mask


class Reach:
    """Which choices, rewards and terms each choice of a flow can change.

    Args:
        flow: the model.
        drawn: whose network draws the choices: the generator's (p) or the posterior's (q).
    """

    def __init__(self, flow: LatentFlow, drawn: Drawn) -> None:
        # by layer, the networks that the logits come from
        self._generators = [[layer.conditioner] for layer in flow.layers]
        self._posteriors = [_posterior_networks(layer) for layer in flow.layers]
        self._drawing = self._generators if drawn == "p" else self._posteriors
        masks = [layer.conditioner.mask for layer in flow.layers]
        # a coupling layer has no choice at the features of its mask, whoever draws
        self._moved = [
            torch.ones(flow.features, dtype=torch.bool) if mask is None else ~mask.cpu() for mask in masks
        ]
        if not all(self._drawing):
            raise ModelError("this needs a posterior in every layer; build Layer(..., posterior=MLP(...))")
        self.features, self.depth = flow.features, flow.depth
        self._reach = [self._reach_of(layer) for layer in range(flow.depth)]

    def _reach_of(self, first: int) -> dict[int, Tensor]:
        """By layer k, (D, D): whether choice (k, e) changes with choice (first, d)."""
        same = torch.eye(self.features, dtype=torch.bool)
        reach: dict[int, Tensor] = {}
        for k in range(first, self.depth):
            networks = self._drawing[k]
            here = same if k == first else torch.zeros_like(same)
            for j, reached in reach.items():
                here = here | _product(reached, _direct_any(networks, j, k)) & self._moved[k]
            # an ordering is transitive, so one product closes a layer that sees its own u
            reach[k] = here | _product(here, _direct_any(networks, k, k))
        return reach

    def rewards(self, layer: int) -> Tensor:
        """(D, D): whether the reward of feature e changes with choice (layer, d)."""
        return torch.stack(list(self._reach[layer].values())).any(0)

    def choices(self, layer: int, later: int) -> Tensor:
        """(D, D): whether choice (later, e) changes with choice (layer, d)."""
        none = torch.zeros(self.features, self.features, dtype=torch.bool)
        return self._reach[layer].get(later, none)

    def inputs(self, layer: int, later: int, of: Drawn) -> Tensor:
        """(D, D): whether what the generator (p) or posterior (q) sees for choice (later, e) changes with choice (layer, d)."""
        networks = (self._generators if of == "p" else self._posteriors)[later]
        changed = torch.zeros(self.features, self.features, dtype=torch.bool)
        for j, reached in self._reach[layer].items():
            if networks and j <= later:
                changed |= _product(reached, _direct_any(networks, j, later))
        return changed if of == "p" else changed & self._moved[later]
