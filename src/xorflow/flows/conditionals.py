r"""Along an ordering, :math:`\log p(x_d \mid \text{what is before } d)`: of a row's own values, or step by step of all
values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xorflow._states import by_inversion
from xorflow.errors import Intractable, ModelError
from xorflow.flows.choices import GREEDY, Choices
from xorflow.flows.layer import Point

if TYPE_CHECKING:
    from xorflow.flows.flow import Stack


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

    @torch.no_grad()
    def complete(self, x: Tensor, known: Tensor, uniforms: Tensor) -> Tensor:
        """Integers that agree with x (B, D) at the features `known` (D,); the others drawn given those, by uniforms (B, D)."""
        steps = self.steps(len(x), known)
        completed, given = x.clone(), known.tolist()
        while steps.done < len(steps.order):
            feature = steps.feature
            if not given[feature]:
                completed[:, feature] = by_inversion(steps.log_probs().exp(), uniforms[:, feature]).to(
                    x.dtype
                )
            steps.append(completed[:, feature])
        return completed


class FlowConditionals(Conditionals):
    """Those of a flow whose layers have one ordering and whose likelihood one greedy pass tells."""

    def __init__(self, flow: Stack, context: Tensor | None) -> None:
        orders = {layer.order for layer in flow.layers}
        couplings = any(layer.conditioner.mask is not None for layer in flow.layers)
        if len(orders) > 1 or (couplings and flow.depth > 1):
            raise Intractable(
                "p(x_d | what is before d) of a deterministic flow needs layers in one ordering, and these differ; "
                "log_prob is exact in any"
            )
        self._flow, self._context = flow, context
        (order,) = orders
        assert order is not None, "generators of normalised flows have an ordering"
        self.order = order

    def of(self, x: Tensor) -> Tensor:
        return self._flow.by_feature(
            self._flow.run(self._flow.start(x, self._context), draws=GREEDY)
        ).double()

    def steps(self, batch: int, known: Tensor | None = None) -> Steps:
        order = self.order if known is None else self._beginning_with(known)
        return _FlowSteps(self._flow, self._context, batch, order)

    def _beginning_with(self, known: Tensor) -> tuple[int, ...]:
        """An ordering that begins with what is `known` (D,), or the error says what is missing."""
        mask = self._flow.layers[0].conditioner.mask
        if mask is not None:
            # features of a mask are told by nothing, and the others by all of the mask: within each kind any order will do
            mask = mask.to(known.device)
            if bool((known & ~mask).any()) and not bool(known[mask].all()):
                raise ModelError(
                    "with a coupling layer, transformed features can be given only together with all features that it sees"
                )
            return tuple(torch.argsort(2 * (~mask).int() + (~known).int(), stable=True).tolist())
        in_order = known[torch.tensor(self.order, device=known.device)]
        count = int(in_order.sum())
        if not bool(in_order[:count].all()):
            missing = self.order[int((~in_order).nonzero()[0, 0])]
            raise ModelError(
                f"what is given must be a prefix of the flow's ordering, and feature {missing} is missing among the first "
                f"{count}; give that one too, or train a flow in an ordering that begins with the features you will give"
            )
        return self.order


class _FlowSteps(Steps):
    """By networks that can be evaluated along the ordering, if all can; otherwise by whole passes through all layers."""

    def __init__(self, flow: Stack, context: Tensor | None, batch: int, order: Sequence[int]) -> None:
        super().__init__(order)
        self._flow, self._context = flow, context
        self._x = torch.zeros(batch, flow.features, dtype=flow.states.dtype, device=flow.device)
        self._mask = flow.layers[0].conditioner.mask
        # layers that see more than the running state are passed together
        networks = [] if flow.is_chain else [layer.conditioner for layer in flow.layers]
        decoders = [decoder for net in networks if (decoder := net.incremental(batch, context, 1))]
        self._decoders = decoders if len(decoders) == flow.depth else None
        self._choices: list[Choices] | None = (
            None  # by layer, of the feature whose turn it is, once they are known
        )
        self._passed: tuple[Choices, ...] | None = (
            None  # of all features, while they are what they would be now
        )

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        return self._flow.of_all_values(self.feature, self._by_layer())

    @torch.no_grad()
    def append(self, values: Tensor) -> None:
        self._x[:, self.feature] = values
        if self._decoders is not None:
            column, feature = (
                self._x[:, self.feature, None],
                torch.tensor([self.feature], device=values.device),
            )
            # a decoder remembers what it made of a block when it was asked for its logits
            for layer, decoder, choices in zip(
                self._flow.layers, self._decoders, self._by_layer(), strict=True
            ):
                decoder.update(decoder.blocks[self.done], column)
                if decoder is not self._decoders[-1]:
                    column = layer.transform.to_base(column, choices.mode(), feature)
        # a coupling is certain of what it leaves alone, and tells what it moves by all of that: two passes will do
        mask, later = self._mask, list(self.order[self.done + 1 :])
        if mask is None or (bool(mask[self.feature]) and not bool(mask[later].any())):
            self._passed = None
        self._choices = None
        self.done += 1

    def _by_layer(self) -> list[Choices]:
        if self._choices is None:
            if self._decoders is not None:
                unknown = self._x[:, self.feature, None]
                logits = [decoder.logits(decoder.blocks[self.done], unknown) for decoder in self._decoders]
            else:
                logits = [
                    choices.logits.expand(len(self._x), -1)[:, choices.alphabet.positions([self.feature])]
                    for choices in self._pass()
                ]
            layouts = [layer.layout.of([self.feature]) for layer in self._flow.layers]
            self._choices = [Choices(*of_layer) for of_layer in zip(logits, layouts, strict=True)]
        return self._choices

    def _pass(self) -> tuple[Choices, ...]:
        if self._passed is None:
            start = Point(self._x, self._x, context=self._context)
            self._passed = self._flow.run(start, draws=GREEDY).generator
        return self._passed


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


class _MixedSteps(Steps):
    def __init__(self, components: Sequence[Steps], log_weights: Tensor) -> None:
        super().__init__(components[0].order)
        self._components = list(components)
        self._log_weights = log_weights[:, None]  # (M, B) once rows have values
        self._each: Tensor | None = None  # of the feature whose turn it is, (M, B, K), once they are known

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        weights = torch.log_softmax(self._log_weights, 0)
        return torch.logsumexp(weights.unsqueeze(-1) + self._of_components(), 0)

    @torch.no_grad()
    def append(self, values: Tensor) -> None:
        each = self._of_components()
        index = values.long().expand(len(each), -1).unsqueeze(-1)
        self._log_weights = self._log_weights + each.gather(-1, index).squeeze(-1)
        self._each = None
        for component in self._components:
            component.append(values)
        self.done += 1

    def _of_components(self) -> Tensor:
        if self._each is None:
            self._each = torch.stack([component.log_probs() for component in self._components])
        return self._each
