r"""Along an ordering, :math:`\log p(x_d \mid \text{what is before } d)`: of a row's own values, or step by step of all
values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from xorflow.bases import FactorisedBase
from xorflow.errors import Intractable, ModelError
from xorflow.flows.choices import GREEDY, Choices, log_marginal
from xorflow.flows.layer import Layer, LayerList, Point
from xorflow.flows.validity import is_chain

_MOST_PAIRS = 2**22
"""How many pairs of a value and a choice one step may have where a base is not tied."""


class Steps(ABC):
    """A pass along the ordering, feature by feature, for rows whose values become known one after the other.

    For each feature in turn `log_probs` gives the whole conditional, given the values that were passed to `append`.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = tuple(order)
        self.done = 0

    @property
    def feature(self) -> int:
        """Whose turn it is."""
        return self.order[self.done]

    @abstractmethod
    def log_probs(self) -> Tensor:
        """log p(x_d = k | before) of the feature whose turn it is, (B, K_d)."""

    @abstractmethod
    def append(self, values: Tensor) -> None:
        """The feature whose turn it is has these values (B,)."""


class Conditionals(ABC):
    """log p(x_d | what is before d), for one model and, if it takes one, a context of each row.

    Attributes:
        order: the features in the order in which each is told by those before it.
    """

    order: tuple[int, ...]

    @abstractmethod
    def of(self, x: Tensor) -> Tensor:
        """Of the rows' own values, (B, D) float64 by feature, with gradient; their sum over features is log p(x)."""

    @abstractmethod
    def steps(self, batch: int, known: Tensor | None = None) -> Steps:
        """All conditionals of `batch` rows, feature by feature; `known`, booleans (D,), are features that come first.

        Raises:
            ModelError: if no ordering of the model begins with these.
        """

    def order_from(self, known: Tensor | None) -> tuple[int, ...]:
        """The ordering, which must begin with what is `known` (D,), or the error says what is missing."""
        if known is None:
            return self.order
        in_order = known[torch.tensor(self.order, device=known.device)]
        count = int(in_order.sum())
        if not bool(in_order[:count].all()):
            missing = self.order[int((~in_order).nonzero()[0, 0])]
            raise ModelError(
                f"what is given must be a prefix of the flow's ordering, and feature {missing} is missing among the first "
                f"{count}; give that one too, or train a flow in an ordering that begins with the features you will give"
            )
        return self.order

    @torch.no_grad()
    def complete(self, x: Tensor, known: Tensor, uniforms: Tensor) -> Tensor:
        """Integers that agree with x (B, D) at the features `known` (D,); the others drawn given those, by uniforms (B, D)."""
        steps = self.steps(len(x), known)
        completed, given = x.clone(), known.tolist()
        while steps.done < len(steps.order):
            feature = steps.feature
            if not given[feature]:
                below = steps.log_probs().exp().cumsum(-1)[:, :-1]  # the last value is what remains
                completed[:, feature] = (uniforms[:, feature, None] > below).sum(-1).to(x.dtype)
            steps.append(completed[:, feature])
        return completed


class FlowConditionals(Conditionals):
    """Those of layers in one ordering, on a base."""

    def __init__(self, layers: LayerList, base: FactorisedBase, context: Tensor | None) -> None:
        orders = {layer.order for layer in layers}
        couplings = any(layer.conditioner.mask is not None for layer in layers)
        if len(orders) > 1 or (couplings and len(layers) > 1):
            raise Intractable(
                "p(x_d | what is before d) of a deterministic flow needs layers in one ordering, and these differ; "
                "log_prob is exact in any"
            )
        self.layers, self.base, self.context = layers, base, context
        (order,) = orders
        assert order is not None, "generators of normalised flows have an ordering"
        self.order = order

    def order_from(self, known: Tensor | None) -> tuple[int, ...]:
        mask = self.layers[0].conditioner.mask
        if mask is None or known is None:
            return super().order_from(known)
        # features of a mask are told by nothing, and the others by all of the mask: within each kind any order will do
        mask = mask.to(known.device)
        if bool((known & ~mask).any()) and not bool(known[mask].all()):
            raise ModelError(
                "with a coupling layer, transformed features can be given only together with all features that it sees"
            )
        return tuple(torch.argsort(2 * (~mask).int() + (~known).int(), stable=True).tolist())


class LatentConditionals(FlowConditionals):
    """Those of a layer whose choices are summed out."""

    def of(self, x: Tensor) -> Tensor:
        choices = self.layers[0].generator_choices(Point(x, x), self.context)
        return log_marginal(choices, self.layers[0].transform, self.base, x).double()

    def steps(self, batch: int, known: Tensor | None = None) -> Steps:
        return _LatentSteps(self, batch, self.order_from(known))


class DeterministicConditionals(FlowConditionals):
    """Those of a bijection: log p(y_d), where x_d and what is before it tell y_d."""

    def of(self, x: Tensor) -> Tensor:
        end = self.layers.run(Point(x, x), GREEDY, self.context).end
        return self.base.log_prob(end.state).double()

    def steps(self, batch: int, known: Tensor | None = None) -> Steps:
        return _DeterministicSteps(self, batch, self.order_from(known))


class MixedConditionals(Conditionals):
    r"""Those of a mixture whose components share one ordering: :math:`\sum_m w_m(x_{<d})\, p_m(x_d \mid x_{<d})`.

    The weights are the components' posterior given what is before d, :math:`w_m(x_{<d}) \propto w_m\, p_m(x_{<d})`.
    """

    def __init__(self, components: Sequence[Conditionals], log_weights: Tensor) -> None:
        orders = {component.order for component in components}
        if len(orders) > 1:
            raise Intractable(
                "p(x_d | what is before d) needs one ordering, and the components of this mixture have several; "
                "take one of them, as in mixture.components[0]()"
            )
        self._components, self._log_weights = list(components), log_weights.double()
        (self.order,) = orders

    def of(self, x: Tensor) -> Tensor:
        each = torch.stack([component.of(x) for component in self._components])  # (M, B, D)
        order = torch.tensor(self.order, device=x.device)
        up_to = each.index_select(-1, order).cumsum(-1) + self._log_weights[:, None, None]
        totals = torch.logsumexp(up_to, 0)  # log p(x up to each rank)
        ordered = torch.cat((totals[:, :1], totals.diff(dim=-1)), -1)
        return ordered.index_select(-1, order.argsort())

    def steps(self, batch: int, known: Tensor | None = None) -> Steps:
        # in one ordering, also of couplings: masks that lead to the same one are nested
        return _MixedSteps(
            [component.steps(batch, known) for component in self._components], self._log_weights
        )


class _Reader:
    """p(u_d | what is before d) of one layer, feature by feature: along its ordering if its network can, else by whole
    passes.
    """

    def __init__(self, layer: Layer, context: Tensor | None, batch: int, order: Sequence[int]) -> None:
        self.layer, self._context, self._order = layer, context, tuple(order)
        network, device = layer.conditioner, layer.layout.features(0).device
        self._decoder = network.incremental(batch, context, 1) if network.order is not None else None
        self._state = torch.zeros(batch, len(order), dtype=layer.transform.states.dtype, device=device)
        self._rank = 0
        self._whole: Tensor | None = None  # logits of all features, while they are what they would be now
        self._choices: Choices | None = None

    def choices(self) -> Choices:
        """Of the feature whose turn it is, (B, flat)."""
        if self._choices is None:
            self._choices = self._next()
        return self._choices

    def _next(self) -> Choices:
        feature = self._order[self._rank]
        if self._decoder is not None:
            block = self._decoder.blocks[self._rank]
            logits = self._decoder.logits(block, self._state[:, feature : feature + 1])
        else:
            if self._whole is None:
                self._whole = self.layer.generator_choices(
                    Point(self._state, self._state), self._context
                ).logits
            whole = self._whole.expand(len(self._state), -1)
            logits = whole[:, self.layer.transform.choices.positions([feature]).to(whole.device)]
        return Choices(logits, self.layer.layout.of([feature]))

    def append(self, values: Tensor) -> None:
        feature = self._order[self._rank]
        self._state[:, feature] = values
        if self._decoder is not None:
            self.choices()  # a decoder remembers what it made of a block when it was asked for its logits
            self._decoder.update(self._decoder.blocks[self._rank], self._state[:, feature : feature + 1])
        self._rank, self._choices = self._rank + 1, None
        mask, later = self.layer.conditioner.mask, list(self._order[self._rank :])
        # a coupling is certain of what it leaves alone, and tells what it moves by all of that: two passes will do
        if mask is None or (bool(mask[feature]) and not bool(mask[later].any())):
            self._whole = None


class _LatentSteps(Steps):
    def __init__(self, flow: FlowConditionals, batch: int, order: Sequence[int]) -> None:
        super().__init__(order)
        self._layer, self._base = flow.layers[0], flow.base
        self._reader = _Reader(self._layer, flow.context, batch, order)

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        log_p = self._reader.choices().log_probs()[0][:, 0].double()  # (B, U)
        transform, feature = self._layer.transform, torch.tensor(self.feature, device=log_p.device)
        u = torch.arange(log_p.shape[-1], device=log_p.device)
        if self._base.tied:  # linear in K: what leads to category 0, and what leads elsewhere
            first, rest = self._base.tied_log_probs(self.feature)
            source = transform.value_to_data(torch.zeros_like(u), u, feature)
            mass = log_p.new_zeros(len(log_p), transform.states.sizes[self.feature])
            mass.index_add_(-1, source, log_p.exp())
            elsewhere = (1 - mass).clamp_min(0)
            return (mass * first.exp() + elsewhere * rest.exp()).log()
        k = torch.arange(transform.states.sizes[self.feature], device=log_p.device)
        if len(k) * len(u) > _MOST_PAIRS:
            raise Intractable(
                f"all conditionals of feature {self.feature} take {len(k)} x {len(u)} sums for each row; use a tied base, "
                "FactorisedBase(..., tied=True), where they are linear in the number of categories"
            )
        y = transform.value_to_base(k[:, None], u, feature)  # (K, U)
        values = self._base.log_probs_of(self.feature).double()[y]
        return torch.logsumexp(log_p.unsqueeze(1) + values, -1)

    @torch.no_grad()
    def append(self, values: Tensor) -> None:
        self._reader.append(values)
        self.done += 1


class _DeterministicSteps(Steps):
    def __init__(self, flow: FlowConditionals, batch: int, order: Sequence[int]) -> None:
        super().__init__(order)
        self._layers, self._base, self._context = flow.layers, flow.base, flow.context
        states = flow.base.states
        self._x = torch.zeros(batch, states.features, dtype=states.dtype, device=flow.base.logits.device)
        together = is_chain([layer.conditioner for layer in self._layers])
        self._readers = None
        if not together and not any(layer.autoregressive_in_u for layer in self._layers):
            self._readers = [_Reader(layer, flow.context, batch, order) for layer in self._layers]
        self._us: list[Tensor] | None = None  # of the feature whose turn it is, once they are known

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        size = self._base.states.sizes[self.feature]
        y = torch.arange(size, device=self._x.device).expand(len(self._x), size)
        for state in self._states(y):
            y = state
        return self._base.log_probs_of(self.feature).double()[y.long()]

    @torch.no_grad()
    def append(self, values: Tensor) -> None:
        self._x[:, self.feature] = values.to(self._x.dtype)
        if self._readers is not None:
            states = [values[:, None], *self._states(values[:, None])]
            for reader, state in zip(self._readers, states, strict=False):
                reader.append(state[:, 0])
        self._us = None
        self.done += 1

    def _states(self, values: Tensor) -> list[Tensor]:
        """Where each layer takes values (B, k) of the feature whose turn it is."""
        if self._us is None:
            self._us = self._choices()
        feature, states = torch.tensor([self.feature], device=values.device), []
        for layer, u in zip(self._layers, self._us, strict=True):
            values = layer.transform.to_base(values, u, feature)
            states.append(values)
        return states

    def _choices(self) -> list[Tensor]:
        """By layer the most probable u (B, 1) of the feature whose turn it is."""
        if self._readers is not None:
            return [reader.choices().mode() for reader in self._readers]
        trace = self._layers.run(Point(self._x, self._x), GREEDY, self._context)
        return [u.expand(len(self._x), -1)[:, self.feature, None] for u in trace.us]


class _MixedSteps(Steps):
    def __init__(self, components: Sequence[Steps], log_weights: Tensor) -> None:
        super().__init__(components[0].order)
        self._components = list(components)
        self._log_weights = log_weights[:, None]  # (M, B) once rows have values
        self._each: Tensor | None = None  # of the feature whose turn it is, (M, B, K), once they are known

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        if self._each is None:
            self._each = torch.stack([component.log_probs() for component in self._components])
        weights = torch.log_softmax(self._log_weights, 0)
        return torch.logsumexp(weights.unsqueeze(-1) + self._each, 0)

    @torch.no_grad()
    def append(self, values: Tensor) -> None:
        self.log_probs()
        assert self._each is not None
        index = values.long().expand(len(self._each), -1).unsqueeze(-1)
        self._log_weights = self._log_weights + self._each.gather(-1, index).squeeze(-1)
        self._each = None
        for component in self._components:
            component.append(values)
        self.done += 1
