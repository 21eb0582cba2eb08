"""Flows: the deterministic one, a bijection of the data space, and the latent one, a distribution over bijections."""

from __future__ import annotations

import torch
from torch import Tensor

from xorflow._math import ENUMERATION_LIMIT, enumerate_states
from xorflow.bases import FactorisedBase
from xorflow.data import validate
from xorflow.errors import Intractable
from xorflow.flows import likelihood
from xorflow.flows.conditionals import Conditionals, DeterministicConditionals, LatentConditionals
from xorflow.flows.sampling import SampleNoise, invert
from xorflow.flows.stack import Stack
from xorflow.flows.trace import GREEDY, Known, Point


class Flow(Stack):
    r"""A deterministic flow: each layer takes the most probable u, layer by layer.

    .. math:: \log p(x) = \log p_Y(y), \qquad y = x \ominus u^{(1)}(x) \ominus \dots \ominus u^{(L)}

    A bijection of a discrete space only relabels it, so there is no Jacobian. Exact at any depth. Its choices are hard, so
    that its likelihood has a gradient for the base alone: train a `LatentFlow`, and take its `greedy()`.

    >>> from xorflow import FactorisedBase, Layer, MADE
    >>> flow = Flow([Layer(MADE(4, hidden=(8,)))], FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> bool((flow.to_data(flow.to_base(x)) == x).all())
    True
    """

    @property
    def has_closed_form(self) -> bool:
        return True

    def greedy(self) -> Flow:
        return self

    def log_likelihood(
        self, x: Tensor, context: Tensor | None = None, *, known: Known | None = None
    ) -> Tensor:
        end = self.run(x, draws=GREEDY, context=context, known=known).end
        return self.base.log_prob(end.state).double().sum(-1)

    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        return DeterministicConditionals(list(self.layers), self.base, context)

    @torch.no_grad()
    def to_base(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers y from integers x, in one pass a layer."""
        x = validate(x, self.categories, allow_empty=True)
        return self.run(x, draws=GREEDY, context=context).end.state.long()

    @torch.no_grad()
    def to_data(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers x from integers y: the exact inverse of `to_base`."""
        y = self.states.integers(validate(y, self.categories, allow_empty=True))
        return invert(self, y, GREEDY, context).long()

    @torch.no_grad()
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        return invert(self, self.base.sample(noise.base), GREEDY, context).long()


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

    @property
    def has_closed_form(self) -> bool:
        """Whether the likelihood is one pass: depth 1, and not autoregressive in u."""
        return self.depth == 1 and self.last_layer_summable

    def greedy(self) -> Flow:
        return Flow(self.layers, self.base)

    def log_marginal(self, point: Point, context: Tensor | None = None, known: Known | None = None) -> Tensor:
        r"""The last layer summed out, feature by feature: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`, (..., D).

        At depth 1, from the start, its sum over d is log p(x).
        """
        choices = self.last_generator(point, context, known)
        return likelihood.log_marginal(choices, self.layers[-1].transform, self.base, point.state)

    def log_marginal_total(self, point: Point, context: Tensor | None = None) -> Tensor:
        """`log_marginal` summed over features, (...); for training: one launch each way on a CUDA device."""
        choices = self.last_generator(point, context)
        return likelihood.log_marginal_total(choices, self.layers[-1].transform, self.base, point.state)

    def expected_log_marginal(
        self, x: Tensor, probabilities: Tensor, context: Tensor | None = None
    ) -> Tensor:
        r""":math:`\sum_d E_{x'_d}[\log p(x'_d \mid x_{<d})]` at depth 1, (B,), where :math:`x'_d` is 1 as `probabilities` say.

        If x itself was drawn with these probabilities, feature by feature, then its expectation is that of log p(x): what comes
        before a feature says nothing about its own draw.

        Args:
            x: integers (B, D), binary.
            probabilities: (B, D).
            context: (B, C) or None.
        """
        choices = self.last_generator(self.start(x), context)
        return likelihood.expected_log_marginal(choices, self.layers[-1].transform, self.base, probabilities)

    def log_likelihood(
        self, x: Tensor, context: Tensor | None = None, *, known: Known | None = None
    ) -> Tensor:
        if self.has_closed_form:
            return self.log_marginal(self.start(x), context, known).double().sum(-1)
        return self._enumerated(x, context)

    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        if not self.has_closed_form:
            raise Intractable(
                "p(x_d | what is before d) of a latent flow needs depth 1 and choices that do not see their own u, whose past "
                f"values x does not determine; this one has depth {self.depth}: try flow.greedy() with one ordering"
            )
        return LatentConditionals(self.layers[0], self.base, context)

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
        return invert(self, self.base.sample(noise.base), noise.layers, context).long()


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
    counts = [torch.zeros(k, dtype=torch.int64, device=flow.device) for k in flow.categories]
    for begin in range(0, len(x), batch_size):
        part = slice(begin, begin + batch_size)
        y = flow.to_base(x[part].to(flow.device), None if context is None else context[part].to(flow.device))
        for count, column in zip(counts, y.unbind(-1), strict=True):
            count += torch.bincount(column, minlength=len(count))
    smoothed = [count.double() + 0.5 for count in counts]
    probabilities = [count / count.sum() for count in smoothed]
    base = FactorisedBase(flow.features, categories=flow.categories, probabilities=probabilities)
    return base.to(flow.device, flow.dtype)
