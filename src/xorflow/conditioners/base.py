"""What every conditioner declares: which inputs it sees, how far, and in which ordering."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._repr import as_call
from xorflow._states import Alphabet, per_feature
from xorflow.conditioners.orderings import Order, resolve_order
from xorflow.errors import DataError, ModelError

Sizes = int | Sequence[int]
"""One number for all features, or one for each."""


class Source(StrEnum):
    """Where a network's input comes from, in a pass from data to base."""

    STATE = "state"  # the running state x^(l-1): what the layer is about to transform
    PREVIOUS = "previous"  # u^(l-1), the choice of the layer before
    OWN = "own"  # u^(l) itself
    X = "x"  # the data


BySource = Mapping[Source, Tensor]
"""What a network is given."""


class Dependence(StrEnum):
    """Which entries of an input the logits of feature d may depend on."""

    BEFORE = "before"  # those visited before d
    UP_TO = "up to"  # those visited before d, and d itself
    ALL = "all"  # every one (posteriors only)
    COUPLED = "coupled"  # those of a mask; d is transformed only where it is outside of the mask


class Incremental(ABC):
    """A conditioner evaluated block by block of its ordering, for a batch.

    For each block `logits` is called at trial values, one or more times, and then `update` at the final ones. The last
    trial's values are final too, but perhaps for the block's last feature, on which none of the block's logits depend.
    """

    def __init__(self, net: Conditioner, size: int = 1) -> None:
        self.order, features = net.visited, net.features
        # ranks that are taken together
        self.blocks = [slice(first, min(first + size, features)) for first in range(0, features, size)]

    @abstractmethod
    def logits(self, block: slice, x: Tensor) -> Tensor:
        """The packed logits of the space of a block's features, at values x (B, b) of the block itself."""

    @abstractmethod
    def update(self, block: slice, x: Tensor) -> None:
        """The block has these values."""

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """All blocks at once, for xor, in the arrangement of the ordering; None where there is no kernel for it."""
        del y, uniforms
        return None


class Conditioner(nn.Module, ABC):
    """What a layer's choice u depends on: from its declared inputs to the logits of u.

    A subclass calls this constructor, keeps its further arguments as attributes of their names (or gives `config`), and gives
    `forward`; if it is trained by gradients, `start_at`. It gives `decoder` if it can be evaluated along its ordering, which
    spares sampling, and conditionals step by step, a whole pass for each feature. How it learns is its own matter: one that is
    fitted keeps buffers instead of parameters.

    Args:
        features: D.
        categories: K_d of the states.
        choices: U_d, the number of values of u; K_d by default (a shift).
        sees: which sources it reads, and how far in its ordering; `{"state": "before"}` by default.
        order: the ordering, see `resolve_order`; `None` for a network without one.
        shape: (rows, columns) of an image, for orderings that need them.
        context: the number of context features C (0: none).

    `forward(inputs, context)` takes integers (..., D) by source, leading shapes broadcast, embeds them itself, and returns
    the packed logits of u, (..., `choices.flat`): a log-odds for a feature of two choices, U_d logits otherwise, see
    `Alphabet`. Estimators that differentiate through states give relaxed ones, floats in that very layout, in the place of
    integers.
    """

    def __init__(
        self,
        features: int,
        *,
        categories: Sizes = 2,
        choices: Sizes | None = None,
        sees: Mapping[str, str] | None = None,
        order: Order | None = "natural",
        shape: Sequence[int] | None = None,
        context: int = 0,
    ) -> None:
        super().__init__()
        self.features = features
        self.states = Alphabet(per_feature(categories, features, "categories"))
        self.choices = self.states if choices is None else Alphabet(per_feature(choices, features, "choices"))
        self.sees = _parse_sees({"state": "before"} if sees is None else sees)
        self.order = None if order is None else resolve_order(order, features, shape)
        self._named_order = order if isinstance(order, str) else self.order
        self.mask: Tensor | None = None
        if context < 0:
            raise ModelError(f"context is the number of context features, at least 0, and got {context}")
        self.context_features = context

    @property
    def visited(self) -> tuple[int, ...]:
        """The ordering of a network that has one."""
        assert self.order is not None, "this network has no ordering"
        return self.order

    @abstractmethod
    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor: ...

    def start_at(self, logits: Tensor) -> None:
        """Set the output biases, so that a network of small weights begins near these packed logits (flat,).

        One that is fitted does not begin anywhere.
        """

    def declared(self) -> dict[str, Any]:
        """What it is of and sees, as a constructor takes it."""
        return {
            "categories": self.states.short(),
            "choices": self.choices.short(),
            "context": self.context_features,
            "order": self.order,
            "sees": {str(source): str(dependence) for source, dependence in self.sees.items()},
        }

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, from which a checkpoint builds it again: as JSON, or conditioners themselves.

        Those of this class are known; others are attributes of their names.
        """
        known = self.declared() | {
            "order": self._named_order,
            "mask": None if self.mask is None else self.mask.tolist(),
        }
        names = inspect.signature(type(self)).parameters
        settings = {name: _as_json(known.get(name, getattr(self, name, _UNKNOWN))) for name in names}
        for name, value in settings.items():
            if value is _UNKNOWN:
                raise ModelError(
                    f"a checkpoint builds {type(self).__name__} from its arguments, and has no plain value of {name!r}; keep "
                    "it as an attribute of that name, or give the class a config()"
                )
        return settings

    def __repr__(self) -> str:
        try:
            settings = self.config()
        except ModelError:  # of one's own, and not made for checkpoints
            settings = {}
        hidden = {"features"} | ({"choices"} if self.choices == self.states else set())
        if self.sees == {Source.STATE: Dependence.BEFORE}:
            hidden.add("sees")
        shown = {name: value for name, value in settings.items() if name not in hidden}
        return as_call(self, shown, str(self.features), ("hidden", "width", "depth", "order"))

    def incremental(self, batch: int, context: Tensor | None, block_size: int) -> Incremental | None:
        """An evaluation that follows the ordering, for sampling; None where there is none, and whole passes are made."""
        if list(self.sees.values()) != [Dependence.BEFORE] or Source.OWN in self.sees:
            return None  # logits that see more than one state strictly before d
        self._check_context(context)
        context = None if context is None else context.expand(batch, context.shape[-1])
        return self.decoder(batch, context, block_size)

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> Incremental | None:
        """That evaluation, of a network that sees one state before d; blocks of at most so many features."""
        del batch, context, block_size
        return None

    def alphabet(self, source: Source) -> Alphabet:
        """Which values a source has."""
        return self.choices if source in (Source.PREVIOUS, Source.OWN) else self.states

    def states_of(self, inputs: BySource, context: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """What it sees by source, and the context, with one leading shape."""
        self._check_context(context)
        given = [inputs[source] for source in self.sees] + ([] if context is None else [context])
        lead = common_lead(*(tensor.shape[:-1] for tensor in given))
        given = [tensor.expand(*lead, tensor.shape[-1]) for tensor in given]
        return given[: len(self.sees)], None if context is None else given[-1]

    def _check_context(self, context: Tensor | None) -> None:
        came = 0 if context is None else context.shape[-1]
        if came != self.context_features:
            raise ModelError(
                f"this conditioner was made for {self.context_features} context features, and got {came}; "
                "pass context=... of that width, or build the conditioner with context=..."
            )


_UNKNOWN = object()


def _as_json(value: object) -> Any:
    """A plain value, as JSON would give it back, or a conditioner; `_UNKNOWN` of anything else."""
    if isinstance(value, tuple | list | nn.ModuleList):
        entries = [_as_json(entry) for entry in value]
        return _UNKNOWN if _UNKNOWN in entries else entries
    return (
        value
        if value is None or isinstance(value, bool | int | float | str | dict | Conditioner)
        else _UNKNOWN
    )


def common_lead(*shapes: torch.Size) -> torch.Size:
    """The leading shape that rows and their context broadcast to."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        came = " and ".join(str(tuple(shape)) for shape in shapes)
        raise DataError(
            f"rows and context have one leading shape, or shapes that broadcast, and these have {came}; give one row of "
            "context for each row of x, or one for all"
        ) from None


def _parse_sees(sees: Mapping[str, str]) -> dict[Source, Dependence]:
    try:
        return {Source(s): Dependence(d) for s, d in sees.items()}
    except ValueError as error:
        raise ModelError(
            f"sees= maps {', '.join(map(repr, map(str, Source)))} to {', '.join(map(repr, map(str, Dependence)))}, "
            f"and got {dict(sees)!r}"
        ) from error
