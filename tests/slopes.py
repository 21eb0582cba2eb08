"""What a conditioner sees, by differentiation, and what it may see."""

import torch
from torch import Tensor

from xorflow.conditioners import Conditioner, Dependence, Source


def jacobian(net: Conditioner, source: Source, seed: int = 0) -> Tensor:
    """The largest |d logits of d / d input at e|, (D, D), over a few relaxed inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for s in net.sees:
        alphabet = net.alphabet(s)
        inputs[s] = torch.rand(4, alphabet.flat, generator=generator, dtype=torch.float64)
    context = torch.rand(4, net.context_features, generator=generator, dtype=torch.float64)
    seen = inputs[source].requires_grad_()
    logits = net(inputs, context if net.context_features else None)
    # absolute values, so that opposite slopes of two categories do not cancel
    slopes = [
        torch.autograd.grad(logit.sum(), seen, retain_graph=True)[0].abs().amax(0) for logit in logits.T
    ]
    table = torch.zeros(net.features, net.features, dtype=torch.float64)
    by_numbers = zip(net.choices.logit_features.tolist(), slopes, strict=True)
    for d, slope in by_numbers:
        for e, value in zip(net.alphabet(source).logit_features.tolist(), slope, strict=True):
            table[d, e] = max(table[d, e], value)
    return table


def allowed(net: Conditioner, dependence: Dependence) -> Tensor:
    """(D, D): may the logits of d depend on the entry e."""
    if dependence is Dependence.ALL:
        return torch.ones(net.features, net.features, dtype=torch.bool)
    place = torch.empty(net.features, dtype=torch.int64)
    place[list(net.order)] = torch.arange(net.features)
    return place[None] < place[:, None] + int(dependence is Dependence.UP_TO)
