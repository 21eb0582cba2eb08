r"""Flows: the deterministic one, a bijection of the data space, and the latent one, a distribution over bijections.

A latent flow, :math:`p(x) = \sum_u p_Y(x \ominus u)\, p(u \mid x)`, sums to one for every base if, from base to data, each
choice's parents can be computed before the choice is needed. Two families of models satisfy this:

* running state: layer l sees :math:`x^{(l-1)}`, strictly before d in the layer's own ordering (or the features that
  a coupling layer leaves alone), and perhaps its own u strictly before d; any ordering for each layer;
* chain: layers see the data x and earlier choices; all layers share one ordering, x and own u strictly before d, earlier
  choices up to d.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._math import ENUMERATION_LIMIT, enumerate_states
from xorflow.bases import FactorisedBase
from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.data import Batch, validate
from xorflow.errors import Intractable, ModelError
from xorflow.flows.choices import (
    GREEDY,
    Choices,
    Draws,
    log_marginal,
    log_marginal_of_bits,
    log_marginals,
    outcomes,
)
from xorflow.flows.conditionals import Conditionals, FlowConditionals
from xorflow.flows.layer import Layer, LayerList, Point, Proposal, Trace, fixed_point, invert_layer
from xorflow.flows.model import Model, SampleNoise


class Stack(Model):
    """What both kinds share: layers and a base, checked to fit together and to be normalised when built.

    Args:
        layers: from data to base.
        base: the distribution of y.
    """

    def __init__(self, layers: Sequence[Layer] | LayerList, base: FactorisedBase) -> None:
        check_fit(layers, base)
        generators = [layer.conditioner for layer in layers]
        check_normalised(generators)
        super().__init__(base.states, generators[0].context_features)
        self.layers = layers if isinstance(layers, LayerList) else LayerList(layers)
        self.base = base
        self.is_chain = is_chain(generators)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"layers": list(self.layers), "base": self.base}

    @property
    def flows(self) -> Sequence[Stack]:
        return [self]

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def has_posterior(self) -> bool:
        """Whether every layer has a posterior to draw choices from."""
        return all(layer.posterior is not None for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.logits.dtype

    @property
    def device(self) -> torch.device:
        return self.base.logits.device

    def _rows(self) -> list[tuple[str, object]]:
        layers = [(f"layer {number} of {self.depth}", layer) for number, layer in enumerate(self.layers, 1)]
        return [*super()._rows(), *layers, ("base", self.base)]

    def run(
        self,
        start: Tensor | Point,
        *,
        draws: Draws,
        stop: int | None = None,
        proposal: Proposal = "p",
    ) -> Trace:
        """Pass from data (integers), or from any point of an earlier pass, towards the base.

        Args:
            start: integers (..., D), or a `Point`, as `start` makes it of integers and a context.
            draws: (..., L', D) for the L' layers passed; see `Draws`. Choices carry no gradient; log terms do.
            stop: pass the layers before this one (default: all).
            proposal: whose distribution the choices are drawn from, the generator's p or the posterior's q.
        """
        point = start if isinstance(start, Point) else self.start(start)
        begin, us, generator, posterior = point, [], [], []
        for index, layer in enumerate(list(self.layers)[point.layer : stop]):
            u, p, q = layer.choose(point, _of_layer(draws, index), proposal)
            us.append(u)
            generator.append(p)
            posterior.append(q)
            point = point.after(layer, u)
        drawn_by_q = tuple(posterior) if proposal == "q" else None
        return Trace(begin, point, tuple(us), tuple(generator), drawn_by_q)

    @abstractmethod
    def by_feature(self, trace: Trace) -> Tensor:
        """What the whole greedy pass of some data tells of log p(x), by feature (..., D), with gradient."""

    @abstractmethod
    def of_all_values(self, feature: int, choices: Sequence[Choices]) -> Tensor:
        """log p(x_d = k | what is before d), (B, K_d) float64, from each layer's choices at the feature, (B, flat)."""

    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        return FlowConditionals(self, context)

    def draw_noise(self, count: int, generator: torch.Generator | None = None) -> SampleNoise:
        size = (count, self.depth + 1, self.features)
        uniforms = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        return SampleNoise(uniforms[:, 0], uniforms[:, 1:])

    def invert(self, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
        """Integers x from integers y with the noise held: uniforms (..., L, D), or greedy choices.

        Layers that see more than the running state are inverted together: that is triangular, hence converges, since they share
        one ordering.
        """
        if self.is_chain:
            return fixed_point(lambda x: self._step(x, y, draws, context), y).long()
        for index in reversed(range(self.depth)):
            y = invert_layer(self.layers[index], y, _of_layer(draws, index), context)
        return y.long()

    def _step(self, x: Tensor, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
        """x from y by the choices that a guess of x leads to."""
        us = self.run(self.start(x, context), draws=draws).us
        for layer, u in zip(reversed(self.layers), reversed(us), strict=True):
            y = layer.transform.to_data(y, u)
        return y

    def floor(self) -> Tensor:
        return self.base.floor()


def _of_layer(draws: Draws, index: int) -> Draws:
    return draws if isinstance(draws, str) else draws[..., index, :]


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

    def log_likelihood(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.by_feature(self.run(self.start(x, context), draws=GREEDY)).double().sum(-1)

    def by_feature(self, trace: Trace) -> Tensor:
        return self.base.log_prob(trace.end.state)

    def of_all_values(self, feature: int, choices: Sequence[Choices]) -> Tensor:
        size, d = self.categories[feature], torch.tensor([feature], device=self.device)
        y = torch.arange(size, device=self.device)
        for layer, of_layer in zip(self.layers, choices, strict=True):
            y = layer.transform.to_base(y, of_layer.mode(), d)
        return self.base.log_probs_of(feature).double()[y.long()]

    @torch.no_grad()
    def to_base(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers y from integers x, in one pass a layer."""
        x = validate(x, self.categories, allow_empty=True)
        return self.run(self.start(x, context), draws=GREEDY).end.state.long()

    @torch.no_grad()
    def to_data(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Integers x from integers y: the exact inverse of `to_base`."""
        y = self.states.integers(validate(y, self.categories, allow_empty=True))
        return self.invert(y, GREEDY, context)

    @torch.no_grad()
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        return self.invert(self.base.sample(noise.base), GREEDY, context)


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

    @property
    def last_layer_summable(self) -> bool:
        """Whether the last layer's choices are independent given its inputs, so that they can be summed out."""
        return not self.layers[-1].autoregressive_in_u

    @property
    def shares_one_order(self) -> bool:
        """Whether all layers visit the features in one and the same ordering."""
        orders = {layer.conditioner.order for layer in self.layers}
        return len(orders) == 1 and None not in orders

    def greedy(self) -> Flow:
        return Flow(self.layers, self.base)

    def last_generator(self, point: Point) -> Choices:
        """The last layer's choice at a point before it, for layers whose choices can be summed out."""
        if not self.last_layer_summable:
            raise ModelError(
                "the last layer is autoregressive in its own u: its choices cannot be summed out"
            )
        return self.layers[-1].generator_choices(point)

    def last_choices(self, point: Point) -> tuple[Choices, list[Tensor]]:
        """The last layer's choice and the log base probability that each of its values leads to, by group (..., n, U)."""
        choices = self.last_generator(point)
        return choices, outcomes(self.layers[-1].transform, self.base, point.state)

    def log_marginal(self, point: Point) -> Tensor:
        r"""The last layer summed out, feature by feature: :math:`\log \sum_{u_d} p(u_d)\, p_d(x_d \ominus u_d)`, (..., D).

        At depth 1, from the start, its sum over d is log p(x). Behind the last layer nothing is left to sum: log p_Y(y).
        """
        if point.layer == self.depth:
            return self.base.log_prob(point.state)
        return self._summed_out(self.last_generator(point), point.state)

    def _summed_out(self, choices: Choices, state: Tensor) -> Tensor:
        return log_marginal(choices, self.layers[-1].transform, self.base, state)

    def log_marginal_total(self, point: Point) -> Tensor:
        """`log_marginal` summed over features, (...); for training: one launch each way on a CUDA device."""
        choices, state = self.last_generator(point), point.state
        logits, base = choices.logits, self.base.logits
        is_plain = (
            logits.shape == state.shape and logits.dtype == base.dtype and not state.is_floating_point()
        )
        if not is_plain or not self.layers[-1].transform.is_xor:
            return self._summed_out(choices, state).sum(-1)
        if logits.dim() == 2 and base.dtype == torch.float32 and devices.has_kernels(logits.device):
            return kernels.marginal_total(logits, state.to(logits.dtype), base)
        return log_marginal_of_bits(logits, state, base)

    def expected_log_marginal(self, start: Point, probabilities: Tensor) -> Tensor:
        r""":math:`\sum_d E_{x'_d}[\log p(x'_d \mid x_{<d})]` at depth 1, (B,), where :math:`x'_d` is 1 as `probabilities` say.

        If x itself was drawn with these probabilities, feature by feature, then its expectation is that of log p(x): what comes
        before a feature says nothing about its own draw.

        Args:
            start: of binary x (B, D).
            probabilities: (B, D).
        """
        choices = self.last_generator(start)
        zeros = start.x.new_zeros(self.features)
        of_zero, of_one = self._summed_out(choices, zeros), self._summed_out(choices, zeros + 1)
        return torch.lerp(of_zero, of_one, probabilities.to(of_zero)).sum(-1)

    def log_likelihood(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.has_closed_form:
            return self.log_marginal(self.start(x, context)).double().sum(-1)
        return self._enumerated(x, context)

    def by_feature(self, trace: Trace) -> Tensor:
        return self._summed_out(trace.generator[0], trace.start.state)

    def of_all_values(self, feature: int, choices: Sequence[Choices]) -> Tensor:
        return log_marginals(choices[0], self.layers[0].transform, self.base, feature)

    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        if not self.has_closed_form:
            raise Intractable(
                "p(x_d | what is before d) of a latent flow needs depth 1 and choices that do not see their own u, whose past "
                f"values x does not determine; this one has depth {self.depth}: try flow.greedy() with one ordering"
            )
        return super().conditionals(context)

    def _enumerated(self, x: Tensor, context: Tensor | None) -> Tensor:
        stop = self.depth - self.last_layer_summable
        u = self._all_choices(stop).unsqueeze(1)  # (T, 1, L', D)
        rows = max(1, ENUMERATION_LIMIT // len(u))  # so that memory is bounded by the limit, not by the batch
        log_likelihoods = []
        for part in Batch(x, context).split(rows):
            seen = None if part.context is None else part.context.unsqueeze(0)
            trace = self.run(self.start(part.x.unsqueeze(0), seen), draws=u, stop=stop)
            log_u = trace.log_p().double().sum((-1, -2))  # (T, B)
            summed = self.log_marginal(trace.end).double().sum(-1)
            log_likelihoods.append(torch.logsumexp(log_u + summed, 0))
        return torch.cat(log_likelihoods)

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
        return self.invert(self.base.sample(noise.base), noise.layers, context)


# ---- which layers and bases fit together, and which models are normalised ----

_ALLOWED = {
    Source.STATE: (Dependence.BEFORE, Dependence.COUPLED),
    Source.X: (Dependence.BEFORE,),
    Source.PREVIOUS: (Dependence.BEFORE, Dependence.UP_TO),
    Source.OWN: (Dependence.BEFORE,),
}

_WHY = {
    Source.STATE: "the running state is being computed feature by feature when the flow generates",
    Source.X: "the data are being computed feature by feature when the flow generates",
    Source.PREVIOUS: "later features of the layer before are not yet drawn when the flow generates",
    Source.OWN: "a choice cannot depend on itself or on later choices of its layer",
}


def check_fit(layers: Sequence[Layer] | LayerList, base: FactorisedBase) -> None:
    """Raise `ModelError` unless layers and base are for the same states, context, and choices that are seen."""
    if not layers:
        raise ModelError("a flow needs at least one layer, and got none")
    before = base.states  # the first layer's "previous" is the data
    for number, layer in enumerate(layers, 1):
        if layer.transform.states != base.states:
            raise ModelError(
                f"every layer works on the features and categories of the base: layer {number} has "
                f"{layer.transform.states.features} features, the base {base.features}, or their categories differ"
            )
        for network in (layer.conditioner, layer.posterior):
            if network is not None and Source.PREVIOUS in network.sees and network.choices != before:
                raise ModelError(
                    f"layer {number} sees 'previous', which needs as many choices as the layer before has (or, in "
                    "layer 1, as the data have categories), and has others; use the same transform in both"
                )
        before = layer.transform.choices
    widths = {layer.conditioner.context_features for layer in layers}
    if len(widths) > 1:
        raise ModelError(f"all layers see the same context, and these were made for widths {sorted(widths)}")


def is_chain(generators: Sequence[Conditioner]) -> bool:
    """Whether some layer sees more than the running state, so that all layers are generated feature by feature together."""
    return any(
        Source.PREVIOUS in g.sees or (Source.X in g.sees and index > 0) for index, g in enumerate(generators)
    )


def check_normalised(generators: Sequence[Conditioner]) -> None:
    """Raise `ModelError`, naming the rule, unless the model is normalised for every base."""
    for index, generator in enumerate(generators):
        for source, dependence in generator.sees.items():
            _check_input(index, source, dependence)
        if len(generator.sees) > 1 and Dependence.COUPLED in generator.sees.values():
            raise ModelError(f"layer {index + 1}: a coupling layer sees the running state alone")
    if not is_chain(generators):
        return
    if Source.PREVIOUS in generators[0].sees:
        raise ModelError(
            "layer 1 has no layer before it: it sees 'x' or 'state', strictly before d, not 'previous'"
        )
    orders = {g.order for g in generators}
    if len(orders) > 1 or None in orders:
        raise ModelError(
            "layers that see 'previous' or, beyond the first, 'x' must all share one ordering, or the model is not "
            "normalised; give every layer the same order, or let them see 'state' alone"
        )


def _check_input(index: int, source: Source, dependence: Dependence) -> None:
    if dependence not in _ALLOWED[source]:
        allowed = " or ".join(repr(str(d)) for d in _ALLOWED[source] if d is not Dependence.COUPLED)
        raise ModelError(
            f"layer {index + 1}: a generator may see {str(source)!r} {allowed} d only, and declares "
            f"{str(dependence)!r}: {_WHY[source]}, so the likelihood would not be normalised"
        )
