"""The deterministic flow: one bijection of the data space, exact likelihood at any depth."""

from __future__ import annotations

import torch
from torch import Tensor

from xorflow.bases import FactorisedBase
from xorflow.data import validate
from xorflow.flows.distribution import FlowDistribution
from xorflow.flows.sampling import SampleNoise, invert
from xorflow.flows.stack import GREEDY, Stack
from xorflow.flows.trace import Point


class Flow(Stack):
    r"""A deterministic flow: each layer takes the most probable u, layer by layer.

    .. math:: \log p(x) = \log p_Y(y), \qquad y = x \ominus u^{(1)}(x) \ominus \dots \ominus u^{(L)}

    A bijection of a discrete space only relabels it, so there is no Jacobian. Exact at any depth.

    >>> from xorflow import FactorisedBase, Layer, MADE
    >>> flow = Flow([Layer(MADE(4, hidden=(8,)))], FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> bool((flow.to_data(flow.to_base(x)) == x).all())
    True
    """

    is_deterministic = True

    def forward(self, context: Tensor | None = None) -> FlowDistribution:
        """The distribution of x, given `context`, as a `torch.distributions.Distribution`."""
        return FlowDistribution(self, context)

    def log_likelihood(self, x: Tensor | Point, context: Tensor | None = None) -> Tensor:
        """Exact log p(x) in nats for encoded x, or its start, (...)."""
        end = self.run(x, draws=GREEDY, context=context).end
        return self.base.log_prob(end.state).double().sum(-1)

    @torch.no_grad()
    def to_base(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers y from integers x, in one pass a layer."""
        x = validate(x, self.states.sizes, allow_empty=True)
        return self.states.decode(self.run(self.encode(x), draws=GREEDY, context=context).end.state)

    @torch.no_grad()
    def to_data(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers x from integers y: the exact inverse of `to_base`."""
        return self._inverse(validate(y, self.states.sizes, allow_empty=True), context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Tensor:
        return self.states.decode(invert(self, self.encode(y), GREEDY, context))

    @torch.no_grad()
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        """Integers x (..., D) as a function of given noise."""
        return self._inverse(self.base.sample(noise.base), context)


@torch.no_grad()
def refit_base(
    flow: Flow, x: Tensor, context: Tensor | None = None, *, batch_size: int = 4096
) -> FactorisedBase:
    """A base fitted to the residuals y of a deterministic flow on training data, with add-1/2 smoothing.

    Frequencies are the maximum-likelihood base for a fixed bijection; use training data, never the test set.

    Args:
        flow: the deterministic flow.
        x: integers (N, D), the training data.
        context: (N, C) or None.
        batch_size: rows passed at a time.
    """
    counts = torch.zeros(flow.features, flow.states.width, dtype=torch.float64, device=flow.device)
    for begin in range(0, len(x), batch_size):
        part = slice(begin, begin + batch_size)
        y = flow.to_base(x[part].to(flow.device), None if context is None else context[part].to(flow.device))
        for k in range(flow.states.width):
            counts[:, k] += (y == k).sum(0)
    smoothed = (counts + 0.5) * flow.states.valid().to(counts.device)
    probabilities = (smoothed / smoothed.sum(-1, keepdim=True)).cpu()
    base = FactorisedBase(flow.features, categories=flow.states.sizes, probabilities=probabilities)
    return base.to(flow.device, flow.dtype)
