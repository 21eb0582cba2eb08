"""The rows of a step, and how they are cut into pieces that pass one after the other, or in several processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Minibatch:
    """Rows with all that their loss needs beside the weights."""

    x: Tensor  # integers
    context: Tensor | None
    draws: Tensor | None
    probabilities: Tensor | None  # with which x was drawn, for estimators with soft targets
    share: float = 1.0  # of the rows of a step

    def split(self, count: int, parts: int = 1) -> list[Minibatch]:
        """About equal pieces, each with its share of every one of so many equal parts."""
        if count == 1:
            return [self]
        every = torch.arange(len(self.x), device=self.x.device).tensor_split(parts)
        cut = [rows.tensor_split(min(count, len(self.x))) for rows in every]
        return [self._of(torch.cat(rows)) for rows in zip(*cut, strict=True)]

    def _of(self, rows: Tensor) -> Minibatch:
        def take(tensor: Tensor | None, dim: int = 0) -> Tensor | None:
            return None if tensor is None else tensor.index_select(dim, rows)

        rest = take(self.context), take(self.draws, 1), take(self.probabilities)
        return Minibatch(self.x.index_select(0, rows), *rest, self.share * len(rows) / len(self.x))
