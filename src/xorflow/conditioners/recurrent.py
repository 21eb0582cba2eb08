"""A recurrent network as a conditioner: a state carried along the features, in any ordering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xorflow.conditioners.base import Sizes
from xorflow.conditioners.linear import Dropout
from xorflow.conditioners.orderings import Order
from xorflow.conditioners.sequence import Core, SequenceConditioner, SequenceNetwork
from xorflow.errors import ModelError

Cell = Literal["gru", "lstm"]


class Recurrent(SequenceConditioner):
    """A gated recurrent network over the features in the order in which they are visited.

    Step r begins as that of a `CausalTransformer` does; the rest of what was visited reaches it through the state. Each layer
    adds its output to what it was given.

    Cost: one pass for all logits, of D steps that wait for each other; sampling carries the state, and costs one pass.

    Args:
        features: D.
        width: of the state.
        depth: how many layers.
        cell: of what kind.
        dropout: the share of units left out after each layer in training.
        order: `"natural"`, `"reversed"`, `"random:SEED"`, `"columns"` (of an image) or a permutation.
        shape: (rows, columns) of an image, or None.
        reach: a step sees pixels at most that many rows and columns away.
        categories: K, or K_d for each feature.
        choices: U_d, the number of values of u; as many as categories by default (a shift).
        sees: the inputs, `{"state": "before"}` by default.
        context: the number of context features, which every step sees.
        skipped: features that take no step, because they hardly vary; see `SequenceConditioner`.

    >>> from xorflow.conditioners import Source
    >>> net = Recurrent(6, width=8, cell="lstm")
    >>> net({Source.STATE: torch.zeros(5, 6)}).shape
    torch.Size([5, 6])
    """

    def __init__(
        self,
        features: int,
        *,
        width: int = 512,
        depth: int = 1,
        cell: Cell = "gru",
        dropout: float = 0.0,
        order: Order = "natural",
        shape: Sequence[int] | None = None,
        reach: int = 2,
        categories: Sizes = 2,
        choices: Sizes | None = None,
        sees: Mapping[str, str] | None = None,
        context: int = 0,
        skipped: Sequence[int] = (),
    ) -> None:
        super().__init__(
            features,
            width=width,
            depth=depth,
            dropout=dropout,
            order=order,
            shape=shape,
            reach=reach,
            categories=categories,
            choices=choices,
            sees=sees,
            context=context,
            skipped=skipped,
        )
        if cell not in CELLS:
            raise ModelError(f"cell is one of {', '.join(CELLS)}, and got {cell!r}")
        self.cell = cell
        self.net = SequenceNetwork(self, RecurrentStack(width, depth, cell, dropout))


CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}

State = Any
"""What a cell carries: a tensor (1, N, width), or a pair of them."""


class RecurrentStack(Core):
    """Recurrent layers, each of which adds its output to its input.

    Args:
        width: of inputs and states.
        depth: how many layers.
        cell: of what kind.
        dropout: the share of units left out after each layer.
    """

    def __init__(self, width: int, depth: int, cell: Cell, dropout: float) -> None:
        super().__init__()
        # one module a layer: the library's own dropout between layers would draw numbers that no generator accounts for
        self.layers = nn.ModuleList(CELLS[cell](width, width, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, where: Tensor) -> Tensor:
        return self.extend(hidden, where, [None] * len(self.layers), 0)[0]

    def memory(self, batch: int, steps: int, like: Tensor) -> list[State]:
        del batch, steps, like
        return [None] * len(self.layers)

    def extend(
        self, hidden: Tensor, where: Tensor, memory: list[State], number: int | Tensor
    ) -> tuple[Tensor, list[State]]:
        del where, number
        states = []
        # under autocast the recurrent kernels of CUDA would run in float16, whose range gradients leave
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(next(self.parameters()).dtype)
            for layer, norm, state in zip(self.layers, self.norms, memory, strict=True):
                output, state = layer(norm(hidden), state)
                hidden = hidden + self.dropout(output)
                states.append(state)
        return hidden, states
