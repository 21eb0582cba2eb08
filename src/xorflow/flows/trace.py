"""Where a pass from data to base stands (`Point`), and the record of a pass (`Trace`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from xorflow.conditioners.base import Source
from xorflow.flows.choices import Choices

GREEDY: Literal["greedy"] = "greedy"
Draws = Tensor | Literal["greedy"]
"""Uniforms in (0, 1) if floating, the choices u themselves if integers, both (..., L, D); or the most probable choice."""

Known = Mapping[nn.Module, Choices]
"""By layer, p(u | data) of first layers, computed already for the very rows and context of a pass."""


@dataclass(frozen=True)
class Point:
    """All that the layers still to come can see.

    Attributes:
        x: the data, integers (..., D); or relaxed, see `Alphabet`, in estimators that differentiate through states.
        state: the running state x^(l).
        previous: u^(l), the choice of the layer just applied (`None` before the first).
        layer: how many layers have been applied.
    """

    x: Tensor
    state: Tensor
    previous: Tensor | None = None
    layer: int = 0

    def inputs(self, own: Tensor | None = None) -> dict[Source, Tensor]:
        """By source, what a conditioner can ask for here."""
        # the paper's u^(0) := x; posteriors of the first layer use it
        previous = self.x if self.previous is None else self.previous
        inputs = {Source.X: self.x, Source.STATE: self.state, Source.PREVIOUS: previous}
        return inputs if own is None else inputs | {Source.OWN: own}


@dataclass(frozen=True)
class Trace:
    """The record of a pass through some layers: choices, their distributions, and where it ended.

    Leading shapes broadcast: with draws (S, B, L, D) and data (B, D), what depends on draws has shape (S, B, ...), and
    what does not, such as the first layer's logits, is computed once for all S.

    Attributes:
        start: where the pass began.
        end: where it ended.
        us: the choices, integers, one tensor for each layer passed.
        generator: p's choices, one for each layer passed.
        posterior: q's choices, if u was drawn from q.
    """

    start: Point
    end: Point
    us: tuple[Tensor, ...]
    generator: tuple[Choices, ...]
    posterior: tuple[Choices, ...] | None = None

    @property
    def u(self) -> Tensor:
        """The choices as integers (..., L, D)."""
        return _stacked(self.us)

    def log_p(self) -> Tensor:
        """log p(u_d | parents) of every choice, (..., L, D), with graph."""
        return _stacked([p.log_prob(u) for p, u in zip(self.generator, self.us, strict=True)])

    def log_q(self) -> Tensor:
        """log q(u_d | inputs) of every choice, (..., L, D), with graph."""
        assert self.posterior is not None, "the choices of this trace were not drawn from the posterior"
        return _stacked([q.log_prob(u) for q, u in zip(self.posterior, self.us, strict=True)])


def _stacked(by_layer: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*by_layer), -2)


def choose(choices: Choices, draws: Draws) -> Tensor:
    """u by the draws: the most probable value, by inversion of uniforms, or given as integers; without gradient."""
    with torch.no_grad():
        if isinstance(draws, str):
            return choices.mode()
        return choices.sample(draws) if draws.is_floating_point() else choices.alphabet.integers(draws)
