"""What networks on sequences share: the receptive field of each step, and incremental decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xorflow._cuda import decoding
from xorflow._cuda.decoding import Capturable
from xorflow._states import Alphabet, Layout, add_buffers
from xorflow.conditioners.base import BySource, Conditioner, Dependence, Incremental
from xorflow.conditioners.linear import Dropout, bag
from xorflow.conditioners.orderings import Order, image_shape
from xorflow.conditioners.receptive_field import checked_skipped, coordinates, receptive_fields
from xorflow.errors import ModelError

_SMALL = 0.02
"""The standard deviation of fresh weights; normalisation makes their scale matter little."""

_STEPS_ON_CPU, _STEPS_ELSEWHERE = 2**15, 2**19
"""Rows times features that pass at a time where no gradient is wanted: what bounds the memory of an evaluation."""


def fresh(*shape: int) -> nn.Parameter:
    """Small weights."""
    return nn.Parameter(torch.randn(*shape) * _SMALL)


class Core(nn.Module, ABC):
    """From a sequence of vectors to a sequence of vectors, each seeing itself and those before it."""

    capturable = False
    """Whether steps can be captured as a CUDA graph."""

    @abstractmethod
    def forward(self, hidden: Tensor, where: Tensor) -> Tensor:
        """Steps (N, S, width), which lie at the coordinates (S, C), to the same shape."""

    @abstractmethod
    def memory(self, batch: int, steps: int, like: Tensor) -> Any:
        """What incremental decoding of that many steps keeps of earlier ones (a KV cache, or a state), before its first."""

    @abstractmethod
    def extend(self, hidden: Tensor, where: Tensor, memory: Any, number: int | Tensor) -> tuple[Tensor, Any]:
        """A step (N, 1, width) after those in memory: what it becomes, and the memory with it.

        The same number again replaces that step. Where steps can be captured the number may be on the device, (1,), and the
        memory is changed in place.
        """


class SequenceNetwork(nn.Module):
    """All weights that do not depend on an ordering, which several conditioners may therefore share.

    The vector that a step begins with is a linear function of the values in its receptive field: numbers enter a product, and
    categories are looked up. A value that is not there yet, or lies outside of the image, is told from a zero: each place of
    the field that is seen adds a vector of its own. So do the feature of the step and the one before it; in an image, by row
    and by column.

    Args:
        net: the conditioner that they are of.
        core: what makes of these vectors what the head takes.
    """

    def __init__(self, net: SequenceConditioner, core: Core) -> None:
        super().__init__()
        sources, _, places = net.fields.shape
        inputs = places * sum(_floats(net.alphabet(source)) for source in net.sees)
        features, outputs, axes = net.features, _floats(net.choices), net.shape or (net.features,)
        self.values, self.seen = fresh(inputs, net.width), fresh(sources * places, net.width)
        self.visited = nn.ParameterList(fresh(size, net.width) for size in axes)  # by the step's own feature
        self.came_from = nn.ParameterList(fresh(size, net.width) for size in axes)  # by the one before it
        self.context = fresh(net.context_features, net.width) if net.context_features else None
        self.dropout = Dropout(net.dropout)
        self.core = core
        self.norm = nn.LayerNorm(net.width)
        self.head = nn.Linear(net.width, outputs, bias=False)
        nn.init.normal_(self.head.weight, std=_SMALL)
        self.bias = nn.Parameter(torch.zeros(features, outputs))
        # the outputs of skipped features
        self.aside = nn.Parameter(torch.zeros(inputs, outputs)) if net.skipped else None

    def places(self, visits: Tensor, seen: Tensor) -> Tensor:
        """The part of a step's vector that does not depend on values: (D, width), in the ordering."""
        visited, came_from = (
            tables[0] if len(tables) == 1 else (tables[0][:, None] + tables[1]).flatten(0, 1)
            for tables in (self.visited, self.came_from)
        )
        here, before = visited.index_select(0, visits), came_from.index_select(0, visits[:-1])
        return here + torch.cat([torch.zeros_like(here[:1]), before]) + seen @ self.seen

    def hidden(self, embedded: Tensor, where: Tensor) -> Tensor:
        """Steps as they begin to what the head takes, both (N, S, width)."""
        return self.core(self.dropout(embedded), where)

    def outputs(self, hidden: Tensor, first: int | None = None) -> Tensor:
        """What the head makes of steps, without bias: all outputs, or the first ones."""
        # a handful of sums over the width: in full precision they cost nothing, and logits reach the likelihood unrounded
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(self.norm(hidden.to(self.head.weight.dtype)), self.head.weight[:first])


class SequenceConditioner(Conditioner):
    """A network over the features as a sequence, in its ordering: step r gives the logits of the r-th feature visited.

    The receptive field of step r is the feature visited before it and, in an image, the pixels around its own that were visited
    earlier, whatever the ordering. What else it may see reaches it through the core.

    Skipped features, those that hardly ever vary, take no step: their logits are one linear function, the same for all, of
    their receptive field, and a bias of their own. Neither the core nor the context reaches them, and they reach others only
    through their receptive fields. The core then has so much less to do. Where features are skipped, every receptive field
    also has the last one before it that is not.

    Args:
        features: D.
        width: of the vectors that the core works on.
        order: `"natural"`, `"reversed"`, `"random:SEED"`, `"columns"` (of an image) or a permutation.
        shape: (rows, columns) of an image, or None.
        reach: a step sees pixels at most that many rows and columns away.
        categories: K, or K_d for each feature.
        choices: U_d, the number of values of u; as many as categories by default (a shift).
        sees: the inputs, each `before` or `up to`.
        context: the number of context features, which every step sees.
        skipped: the features that take no step.
    """

    net: SequenceNetwork
    visits: Tensor
    places: Tensor
    fields: Tensor
    seen: Tensor
    where: Tensor
    active: Tensor
    silent: Tensor

    def __init__(
        self,
        features: int,
        *,
        width: int,
        depth: int,
        dropout: float,
        shape: Sequence[int] | None,
        reach: int,
        skipped: Sequence[int],
        **declared: Any,
    ) -> None:
        image = None if shape is None else image_shape(shape, features, "a network on images")
        super().__init__(features, shape=image, **declared)
        if set(self.sees.values()) - {Dependence.BEFORE, Dependence.UP_TO}:
            raise ModelError(
                f"{type(self).__name__} sees its inputs along an ordering, 'before' or 'up to' a feature; use MLP or "
                "Coupling for others"
            )
        for name, number, least in (("width", width, 1), ("depth", depth, 1), ("reach", reach, 0)):
            if number < least:
                raise ModelError(f"{name} is at least {least}, and got {number}")
        self.width, self.depth, self.dropout, self.reach = width, depth, dropout, reach
        self.shape, self.skipped = image, checked_skipped(skipped, features)
        self._lay_out()
        self.ordering = fresh(width)

    def _lay_out(self) -> None:
        """Which ranks of the ordering are steps, what these see and where they lie, and where each feature's outputs are among
        theirs.
        """
        fields, seen = receptive_fields(
            self.visited, self.shape, self.reach, list(self.sees.values()), self.skipped
        )
        visits, dtype = torch.tensor(self.visited), torch.get_default_dtype()
        skipped = torch.isin(visits, torch.tensor(self.skipped, dtype=torch.int64))  # by rank
        active, silent = (~skipped).nonzero().flatten(), skipped.nonzero().flatten()
        add_buffers(
            self,
            visits=visits,  # (D,)
            fields=fields,  # (sources, D, R)
            seen=seen.to(dtype),
            active=active,
            silent=silent,
            places=visits[torch.cat([active, silent])].argsort(),
            where=coordinates(visits, self.shape)[active].to(dtype),
        )
        self.steps_before = [0, *(~skipped).cumsum(0).tolist()]  # by rank
        self.layout = Layout(self.choices)

    def reordered(self, order: Order) -> Self:
        """The same network in another ordering: all weights are shared but a vector that tells the orderings apart."""
        settings: dict[str, Any] = self.config() | {"order": order}
        twin = type(self)(**settings)
        twin.net = self.net
        return twin.to(self.ordering.device, self.ordering.dtype)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        for group in self.choices.groups:
            start = logits[group.logits].reshape(-1, group.each).to(self.net.bias)
            self.net.bias[list(group.features), : group.each] = start

    # ---- a whole pass ----

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        states, context = self.states_of(inputs, context)
        lead, dtype = states[0].shape[:-1], self.net.bias.dtype
        rows = [
            _values(self.alphabet(source), state.reshape(-1, state.shape[-1]), dtype)
            for source, state in zip(self.sees, states, strict=True)
        ]
        fixed = self.fixed_part(None if context is None else context.reshape(-1, context.shape[-1]))
        size = total = max(len(rows[0]), 1)
        if not torch.is_grad_enabled():
            steps = _STEPS_ON_CPU if rows[0].device.type == "cpu" else _STEPS_ELSEWHERE
            size = max(1, steps // self.steps_before[-1])
        chunks = [slice(start, start + size) for start in range(0, total, size)]
        logits = [
            self._pass([r[chunk] for r in rows], fixed[chunk] if fixed.dim() > 2 else fixed)
            for chunk in chunks
        ]
        return (logits[0] if len(logits) == 1 else torch.cat(logits)).reshape(*lead, self.choices.flat)

    def _pass(self, rows: list[Tensor], fixed: Tensor) -> Tensor:
        """The packed logits of rows, see `_values`."""
        net, groups, outputs = self.net, self.choices.groups, None
        hidden = net.hidden(
            self.embedded(rows, fixed, self.active if self.skipped else slice(None)), self.where
        )
        if net.aside is not None:
            outputs = torch.cat([net.outputs(hidden), self.aside(rows, self.silent)], 1)
        elif len(groups) == 1:
            outputs = net.outputs(hidden)
        logits = []
        for group, features in self.choices.grouped(self.layout.features()):
            places = self.places[features]
            if outputs is None:  # each group through as much of the head as it has
                of_group = net.outputs(hidden.index_select(1, places), group.each)
            else:
                of_group = outputs.index_select(1, places)[..., : group.each]
            logits.append((of_group + net.bias[features, : group.each]).flatten(1))
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def fixed_part(self, context: Tensor | None) -> Tensor:
        """What steps begin with whatever the values are: (D, width), or (N, D, width) with a context."""
        fixed = self.net.places(self.visits, self.seen.movedim(0, 1).flatten(1)) + self.ordering
        if context is None or self.net.context is None:
            return fixed
        return fixed + (context.to(fixed.dtype) @ self.net.context).unsqueeze(-2)

    def embedded(self, rows: list[Tensor], fixed: Tensor, steps: Tensor | slice) -> Tensor:
        """What some ranks begin with, (N, b, width): `fixed`, and what the values in their receptive fields add."""
        return self._through_fields(rows, steps, self.net.values) + fixed[..., steps, :]

    def aside(self, rows: list[Tensor], steps: Tensor | slice) -> Tensor:
        """The outputs (N, b, O) of the skipped features of some ranks, without their bias."""
        assert self.net.aside is not None
        with torch.autocast(rows[0].device.type, enabled=False):
            return self._through_fields(rows, steps, self.net.aside)

    def _through_fields(self, rows: list[Tensor], steps: Tensor | slice, weights: Tensor) -> Tensor:
        """A linear map (inputs, outputs) of the values in the receptive fields of some ranks, (N, b, outputs)."""
        size = self.fields.shape[-1]
        tables = weights.split([size * _floats(self.alphabet(source)) for source in self.sees])
        sums = []
        for number, (values, table) in enumerate(zip(rows, tables, strict=True)):
            fields, seen = self.fields[number, steps], self.seen[number, steps]
            gathered = values.index_select(1, fields.flatten()).unflatten(1, fields.shape)  # (N, b, R, ...)
            if values.is_floating_point():
                sums.append((gathered * seen.unsqueeze(-1)).flatten(2) @ table)
            else:  # what is not seen adds nothing
                place = torch.arange(size, device=values.device) * (len(table) // size)
                places = torch.where(seen > 0, gathered + place, len(table))
                sums.append(bag(places, torch.cat([table, torch.zeros_like(table[:1])])))
        return sum(sums[1:], start=sums[0])

    # ---- incremental decoding ----

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalSequence:
        # a block of several features would be evaluated until it converges: more operations than fewer blocks save
        del block_size
        return IncrementalSequence(self, batch, context)


class IncrementalSequence(Incremental):
    """One evaluation of a `SequenceConditioner` along its ordering, which keeps what the core made of earlier steps.

    Each feature is a block of its own, whose logits do not depend on its value: each step is taken once.

    Args:
        net: the conditioner.
        batch: B.
        context: (B, C) or None.
    """

    def __init__(self, net: SequenceConditioner, batch: int, context: Tensor | None) -> None:
        super().__init__(net)
        self._net = net
        (source,) = net.sees
        like, self._alphabet = net.net.bias, net.alphabet(source)
        nothing = torch.zeros(batch, net.features, dtype=self._alphabet.dtype, device=like.device)
        self._values = _values(self._alphabet, nothing, like.dtype)
        self._fixed = net.fixed_part(context)
        self._memory = net.net.core.memory(batch, net.steps_before[-1], like)
        self._ahead = self._memory

    def logits(self, block: slice, x: Tensor) -> Tensor:
        """The packed logits of a block's feature, (B, U)."""
        del x
        net, number = self._net, self._net.steps_before[block.start]
        if number == net.steps_before[block.stop]:  # of a skipped feature
            out = net.aside([self._values], block)
        else:
            hidden, where = net.embedded([self._values], self._fixed, block), net.where[number : number + 1]
            hidden, self._ahead = net.net.core.extend(hidden, where, self._memory, number)
            out = net.net.outputs(hidden)
        logits = (out + net.net.bias[net.visits[block]]).flatten(1)
        return logits[:, : net.choices.of(self.order[block]).flat]

    def update(self, block: slice, x: Tensor) -> None:
        """The feature has these values (B, 1)."""
        self._values.index_copy_(1, self._net.visits[block], _values(self._alphabet, x, self._values.dtype))
        self._memory = self._ahead

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x (B, D) from y and noise, in the arrangement of the ordering, by steps captured as a CUDA graph; or None."""
        net = self._net
        if not net.choices.binary or not net.net.core.capturable:
            return None
        return decoding.decode(Capturable(net, self._values, self._fixed, self._memory), y, uniforms)


def _floats(alphabet: Alphabet) -> int:
    """How many rows of an embedding a feature has, the widest one's."""
    return 1 if alphabet.binary else alphabet.width


def _values(alphabet: Alphabet, state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state (N, D) as embeddings take it: bits, and what is relaxed, as numbers (N, D, floats), else int64 (N, D)."""
    if alphabet.binary:
        return state.to(dtype).unsqueeze(-1)
    if not state.is_floating_point():
        return state.long()
    spread = state.new_zeros(len(state), alphabet.features, alphabet.width)
    for group, values in alphabet.grouped(Layout(alphabet).logits(state)):
        both = torch.stack((1 - values, values), -1) if group.binary else values
        spread[:, list(group.features), : group.size] = both
    return spread
