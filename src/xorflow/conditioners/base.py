"""What every conditioner declares: which inputs it sees, how far, and in which ordering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xorflow._states import Alphabet, per_feature
from xorflow.errors import DataError, ModelError


class Source(StrEnum):
    """Where a network's input comes from, in a pass from data to base."""

    STATE = "state"  # the running state x^(l-1): what the layer is about to transform
    PREVIOUS = "previous"  # u^(l-1), the choice of the layer before
    OWN = "own"  # u^(l) itself
    X = "x"  # the data


class Dependence(StrEnum):
    """Which entries of an input the logits of feature d may depend on."""

    BEFORE = "before"  # those visited before d
    UP_TO = "up to"  # those visited before d, and d itself
    ALL = "all"  # every one (posteriors only)
    COUPLED = "coupled"  # those of a mask; d is transformed only where it is outside of the mask


class Incremental(Protocol):
    """A conditioner evaluated block by block of its ordering; see `IncrementalMADE` and `IncrementalSequence`.

    For each block `logits` is called at trial values, one or more times, and then `update` at the final ones. The last
    trial's values are final too, but perhaps for the block's last feature, on which none of the block's logits depend.
    """

    @property
    def blocks(self) -> Sequence[Any]: ...
    def logits(self, block: Any, x: Tensor) -> Tensor: ...
    def update(self, block: Any, x: Tensor) -> None: ...
    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """All blocks at once, for xor, in the arrangement of the ordering; None where there is no kernel for it."""
        ...


class Conditioner(nn.Module, ABC):
    """A network from its declared inputs to the logits of `u`.

    Args:
        features: D.
        categories: K_d of the states.
        choices: U_d, the number of values of u (K_d for a shift).
        sees: which sources it reads, and how far in its ordering.
        order: the ordering; `None` for a network without one.
        context: the number of context features C (0: none).

    `forward(inputs, context)` takes encoded inputs by source, leading shapes broadcast, and returns the log-odds of
    u = 1, (..., D), if all U_d = 2, and otherwise logits (..., D, U), padded with a value that is never chosen.
    """

    def __init__(
        self,
        features: int,
        *,
        categories: int | Sequence[int],
        choices: int | Sequence[int] | None,
        sees: Mapping[str, str],
        order: tuple[int, ...] | None,
        context: int,
    ) -> None:
        super().__init__()
        self.features = features
        self.states = Alphabet(per_feature(categories, features, "categories"))
        self.choices = self.states if choices is None else Alphabet(per_feature(choices, features, "choices"))
        self.sees = _parse_sees(sees)
        self.order = order
        self.mask: Tensor | None = None
        if context < 0:
            raise ModelError(f"context is the number of context features, at least 0, and got {context}")
        self.context_features = context

    @abstractmethod
    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def start_at(self, logits: Tensor) -> None:
        """Set the output biases, so that a network of small weights begins near these logits (D,) or (D, U)."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON, from which a checkpoint builds the conditioner again."""
        return {
            "features": self.features,
            "categories": self.states.short(),
            "choices": self.choices.short(),
            "context": self.context_features,
        }

    def incremental(self, batch: int, context: Tensor | None, block_size: int) -> Incremental | None:
        """An evaluation that follows the ordering, for sampling; None where there is none, and whole passes are made."""
        del batch, context, block_size
        return None

    def alphabet(self, source: Source) -> Alphabet:
        """Which values a source has."""
        return self.choices if source in (Source.PREVIOUS, Source.OWN) else self.states

    def flatten(self, inputs: Mapping[Source, Tensor], context: Tensor | None) -> Tensor:
        """All declared inputs side by side, (..., width); leading shapes are broadcast to a common one."""
        self._check_context(context)
        tensors = [self.alphabet(s).flatten(inputs[s]) for s in self.sees]
        if context is not None:
            tensors.append(context.to(tensors[0].dtype))
        if len(tensors) == 1:
            return tensors[0]
        batch = common_lead(*(t.shape[:-1] for t in tensors))
        return torch.cat([t.expand(*batch, t.shape[-1]) for t in tensors], -1)

    def _check_context(self, context: Tensor | None) -> None:
        came = 0 if context is None else context.shape[-1]
        if came != self.context_features:
            raise ModelError(
                f"this conditioner was made for {self.context_features} context features, and got {came}; "
                "pass context=... of that width, or build the conditioner with context=..."
            )

    def shape_logits(self, flat: Tensor, features: int | None = None) -> Tensor:
        """The network's flat output as log-odds (..., D) or logits (..., D, U), for all or for `features` features."""
        return (
            flat
            if self.choices.binary
            else flat.unflatten(-1, (features or self.features, self.choices.width))
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


def linear_map(net: Conditioner, source: Source, slope: Tensor) -> Tensor:
    """A linear map of all that a network sees, (inputs, outputs), that reads one source alone."""
    sources = list(net.sees)
    widths = [net.alphabet(other).flat for other in sources]
    whole = slope.new_zeros(sum(widths) + net.context_features, slope.shape[1])
    first = sum(widths[: sources.index(source)])
    whole[first : first + len(slope)] = slope
    return whole


def _parse_sees(sees: Mapping[str, str]) -> dict[Source, Dependence]:
    try:
        return {Source(s): Dependence(d) for s, d in sees.items()}
    except ValueError as error:
        raise ModelError(
            f"sees= maps {', '.join(map(repr, map(str, Source)))} to {', '.join(map(repr, map(str, Dependence)))}, "
            f"and got {dict(sees)!r}"
        ) from error
