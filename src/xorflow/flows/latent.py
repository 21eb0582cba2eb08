"""The latent flow: a distribution over transformations."""

from __future__ import annotations

import torch
from torch import Tensor

from xorflow._cuda import devices, kernels
from xorflow._math import ENUMERATION_LIMIT, enumerate_states
from xorflow.errors import Intractable
from xorflow.flows.choices import BinaryChoices, Choices
from xorflow.flows.distribution import FlowDistribution
from xorflow.flows.flow import Flow
from xorflow.flows.marginal import expected_total, marginal_by_feature, marginal_total
from xorflow.flows.sampling import SampleNoise, invert
from xorflow.flows.stack import Stack
from xorflow.flows.trace import Point


class LatentFlow(Stack):
    r"""A flow whose transformation is latent: :math:`u \sim p(u \mid x)`, drawn anew for every x.

    .. math:: p(x) = \sum_u p_Y(x \ominus u)\; \prod_{l,d} p(u^{(l)}_d \mid \text{what it sees})

    At depth 1 the sum over u factorises, so `log_prob` is exact in one pass; at greater depth the last layer is still
    summed out, small spaces are enumerated, and otherwise `evaluate.importance` gives a lower bound.

    Args:
        layers: from data to base.
        base: the distribution of y.

    >>> from xorflow import FactorisedBase, Layer, MADE
    >>> flow = LatentFlow([Layer(MADE(3, hidden=(8,)))], FactorisedBase(3))
    >>> flow().log_prob(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1])
    """

    is_deterministic = False

    def forward(self, context: Tensor | None = None) -> FlowDistribution:
        """The distribution of x, given `context`, as a `torch.distributions.Distribution`."""
        return FlowDistribution(self, context)

    def greedy(self) -> Flow:
        """The deterministic flow with these very weights: each layer takes its most probable u."""
        return Flow(self.layers, self.base)

    @property
    def has_closed_form(self) -> bool:
        """Whether the likelihood is one pass: depth 1, and not autoregressive in u."""
        return self.depth == 1 and self.last_layer_summable

    def log_marginal(self, point: Point, context: Tensor | None = None) -> Tensor:
        r"""The last layer summed out, feature by feature: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`, (..., D).

        At depth 1, from the start, its sum over d is log p(x).
        """
        choices = self.last_generator(point, context)
        if self._is_binary(choices, point.state):
            return marginal_by_feature(choices.logits, point.state, self.base.logits)
        return choices.log_mixture(self._outcomes(point.state))

    def log_marginal_total(self, point: Point, context: Tensor | None = None) -> Tensor:
        """`log_marginal` summed over features, (...); for training: one launch each way on a CUDA device."""
        choices = self.last_generator(point, context)
        if self._is_binary(choices, point.state):
            fits = choices.logits.dtype == point.state.dtype == self.base.logits.dtype == torch.float32
            if devices.usable(choices.logits) and fits:
                return kernels.marginal_total(choices.logits, point.state, self.base.logits)
            return marginal_total(choices.logits, point.state, self.base.logits)
        return choices.log_mixture(self._outcomes(point.state)).sum(-1)

    def _is_binary(self, choices: Choices, state: Tensor) -> bool:
        """Whether these are two choices for each of the two states, without samples and without a gradient of the states."""
        return (
            isinstance(choices, BinaryChoices)
            and self.layers[-1].transform.is_xor
            and not state.requires_grad
            and choices.logits.dim() == 2
            and choices.logits.shape == state.shape
        )

    def _outcomes(self, state: Tensor) -> Tensor:
        """The log base probability that each of the last layer's choices leads to, (..., D, U)."""
        return self.layers[-1].transform.outcomes(self.base.log_table(), state)

    def expected_log_marginal(
        self, x: Tensor, probabilities: Tensor, context: Tensor | None = None
    ) -> Tensor:
        r""":math:`\sum_d E_{x'_d}[\log p(x'_d \mid x_{<d})]` at depth 1, (B,), where :math:`x'_d` is 1 as `probabilities` say.

        If x itself was drawn with these probabilities, feature by feature, then its expectation is that of log p(x): what comes
        before a feature says nothing about its own draw.

        Args:
            x: encoded data (B, D), binary.
            probabilities: (B, D).
            context: (B, C) or None.
        """
        choices, transform = self.last_generator(self.start(x), context), self.layers[-1].transform
        probabilities = probabilities.to(choices.logits.dtype)
        if isinstance(choices, BinaryChoices) and transform.is_xor:
            return expected_total(choices.logits, probabilities, self.base.logits)
        table = self.base.log_table()
        of_zero, of_one = (
            choices.log_mixture(transform.outcomes(table, torch.full_like(x, value))) for value in (0.0, 1.0)
        )
        return torch.lerp(of_zero, of_one, probabilities).sum(-1)

    def log_likelihood(self, x: Tensor | Point, context: Tensor | None = None) -> Tensor:
        """Exact log p(x) in nats for encoded x, or its start, (B,): closed form at depth 1, enumeration in small spaces."""
        point = x if isinstance(x, Point) else self.start(x)
        if self.has_closed_form:
            return self.log_marginal(point, context).double().sum(-1)
        return self._enumerated(point.x, context)

    def _enumerated(self, x: Tensor, context: Tensor | None) -> Tensor:
        stop = self.depth - 1 if self.last_layer_summable else self.depth
        u = self._all_choices(stop)  # (T, L', D)
        rows = max(1, ENUMERATION_LIMIT // len(u))  # so that memory is bounded by the limit, not by the batch
        log_likelihoods = [
            self._sum_over(u, x[i : i + rows], None if context is None else context[i : i + rows])
            for i in range(0, max(1, len(x)), rows)
        ]
        return torch.cat(log_likelihoods)

    def _sum_over(self, u: Tensor, x: Tensor, context: Tensor | None) -> Tensor:
        stop = u.shape[-2]
        if context is not None:
            context = context.unsqueeze(0)
        trace = self.run(x.unsqueeze(0), draws=u.unsqueeze(1), context=context, stop=stop)
        log_u = trace.log_p().double().sum((-1, -2))  # (T, B)
        summed = stop < self.depth
        ends = self.log_marginal(trace.end, context) if summed else self.base.log_prob(trace.end.state)
        return torch.logsumexp(log_u + ends.double().sum(-1), 0)

    def _all_choices(self, stop: int) -> Tensor:
        """Every u of the layers before `stop`, (T, L', D)."""
        sizes = [k for layer in self.layers[:stop] for k in layer.transform.choices.sizes]
        try:
            return enumerate_states(sizes).to(self.device).unflatten(-1, (stop, self.features))
        except Intractable as error:
            raise Intractable(
                f"log p(x) of a latent flow of depth {self.depth} on {self.features} features has no closed form, and "
                f"{error}; the deterministic flow, flow.greedy(), is exact"
            ) from None

    @torch.no_grad()
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        """Integers x (..., D) as a function of given noise."""
        y = self.encode(self.base.sample(noise.base))
        return self.states.decode(invert(self, y, noise.layers, context))
