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
        shape = (4, net.features) if alphabet.binary else (4, net.features, alphabet.width)
        inputs[s] = torch.rand(shape, generator=generator, dtype=torch.float64)
    context = torch.rand(4, net.context_features, generator=generator, dtype=torch.float64)
    seen = inputs[source].requires_grad_()
    logits = net(inputs, context if net.context_features else None).reshape(4, net.features, -1)
    rows = []
    for d in range(net.features):
        # absolute values, so that opposite slopes of two categories do not cancel
        slopes = [
            torch.autograd.grad(logits[:, d, k].sum(), seen, retain_graph=True)[0].reshape(
                4, net.features, -1
            )
            for k in range(logits.shape[-1])
        ]
        rows.append(torch.stack(slopes).abs().amax((0, 1, 3)))
    return torch.stack(rows)


def allowed(net: Conditioner, dependence: Dependence) -> Tensor:
    """(D, D): may the logits of d depend on the entry e."""
    place = torch.empty(net.features, dtype=torch.int64)
    place[list(net.order)] = torch.arange(net.features)
    if dependence is Dependence.ALL:
        return torch.ones(net.features, net.features, dtype=torch.bool)
    return place[None] < place[:, None] + int(dependence is Dependence.UP_TO)
