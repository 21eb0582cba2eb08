"""Where a pass from data to base stands (`Point`), and the record of a pass (`Trace`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xorflow._states import Alphabet
from xorflow.conditioners.base import Source
from xorflow.flows.choices import Choices


@dataclass(frozen=True)
class Point:
    """All that the layers still to come can see, in encoded form.

    Attributes:
        x: the data.
        state: the running state x^(l).
        previous: u^(l), the choice of the layer just applied (`None` before the first).
        layer: how many layers have been applied.
        known: by layer, the generator's choices here, kept for other passes of the same layers with the same context; `None`
            keeps nothing.
    """

    x: Tensor
    state: Tensor
    previous: Tensor | None = None
    layer: int = 0
    known: dict[nn.Module, Choices] | None = field(default=None, repr=False, compare=False)

    def inputs(self, u: Tensor | None) -> dict[Source, Tensor]:
        """By source, what a conditioner can ask for here."""
        inputs = {Source.X: self.x, Source.STATE: self.state}
        if self.previous is not None:
            inputs[Source.PREVIOUS] = self.previous
        else:
            inputs[Source.PREVIOUS] = self.x  # the paper's u^(0) := x; posteriors of the first layer use it
        if u is not None:
            inputs[Source.OWN] = u
        return inputs


@dataclass(frozen=True)
class Trace:
    """The record of a pass through some layers: choices, their distributions, and where it ended.

    Leading shapes broadcast: with draws (S, B, L, D) and data (B, D), what depends on draws has shape (S, B, ...), and
    what does not, such as the first layer's logits, is computed once for all S.

    Attributes:
        start: where the pass began.
        end: where it ended.
        choices: the alphabet of u in each layer passed.
        us: the encoded choices, one for each layer passed.
        generator: p's choices, one for each layer passed.
        posterior: q's choices, if u was drawn from q.
    """

    start: Point
    end: Point
    choices: tuple[Alphabet, ...]
    us: tuple[Tensor, ...]
    generator: tuple[Choices, ...]
    posterior: tuple[Choices, ...] | None = None

    @property
    def u(self) -> Tensor:
        """The choices as integers (..., L, D): uint8 where they fit, as they nearly always do."""
        integers = torch.stack(
            self._broadcast([c.decode(u) for c, u in zip(self.choices, self.us, strict=True)]), -2
        )
        return integers.to(torch.uint8) if max(c.width for c in self.choices) <= 256 else integers

    def log_p(self) -> Tensor:
        """log p(u_d | parents) of every choice, (..., L, D), with graph."""
        return self._stack(self.generator)

    def log_q(self) -> Tensor:
        """log q(u_d | inputs) of every choice, (..., L, D), with graph."""
        assert self.posterior is not None, "the choices of this trace were not drawn from the posterior"
        return self._stack(self.posterior)

    def _stack(self, choices: tuple[Choices, ...]) -> Tensor:
        return torch.stack(
            self._broadcast([c.log_prob(u) for c, u in zip(choices, self.us, strict=True)]), -2
        )

    @staticmethod
    def _broadcast(tensors: list[Tensor]) -> list[Tensor]:
        return list(torch.broadcast_tensors(*tensors))
