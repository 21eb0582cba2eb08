r"""A MADE evaluated block by block of its ordering, as its input becomes known.

What a block of features adds to every later unit is added once, when the block is final; inside a block only the few units
that lie between its first and its last feature are evaluated again. All blocks together cost about one pass of the network.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from xorflow._cuda import devices, kernels
from xorflow.conditioners.masked import MaskedLinear

_WIDEST_KERNEL = 8192
"""The most hidden units whose sums fit into the registers of one program."""


@dataclass(frozen=True)
class Block:
    """The features of ranks `first` to `last` - 1, and in each hidden layer the units that only they can still change.

    Attributes:
        first: the first rank.
        last: one past the last rank.
        before: for each hidden layer, how many units see only features before the block.
        inside: for each hidden layer, one past the last unit that a feature of the block's rank reads.
        after: for each hidden layer, how many units are final once the block is.
    """

    first: int
    last: int
    before: tuple[int, ...]
    inside: tuple[int, ...]
    after: tuple[int, ...]


def cut_into_blocks(features: int, degrees: Sequence[Tensor], size: int) -> list[Block]:
    """Blocks of `size` features; `degrees` are those of each hidden layer, ascending."""
    ascending = [d.tolist() for d in degrees]

    def count(most: int) -> tuple[int, ...]:
        return tuple(bisect_right(d, most) for d in ascending)

    edges = [*range(0, features, size), features]
    # a unit of degree 0 (D = 1) sees no feature, and is nobody's before the first block's
    none = (0,) * len(ascending)
    return [
        Block(i, j, count(i) if i else none, count(j - 1), count(j)) for i, j in itertools.pairwise(edges)
    ]


class IncrementalMADE:
    """One evaluation of a MADE for a batch; for each block call `logits`, then `update` with its final values.

    Args:
        net: the masked layers, in the arrangement of the ordering, with ReLUs between them.
        skip: the direct connections, or None.
        context_terms: what the context adds to the first layer (B, H) and to the output (B, O), or None.
        cut: makes the blocks, when they are first asked for: a kernel for all features needs none.
        wide: floats for each feature: at the input and at the output.
        batch: B.
    """

    def __init__(
        self,
        net: nn.Sequential,
        skip: MaskedLinear | None,
        context_terms: tuple[Tensor, Tensor, Tensor | None] | None,
        cut: Callable[[], list[Block]],
        wide: tuple[int, int],
        batch: int,
    ) -> None:
        layers = [layer for layer in net if isinstance(layer, MaskedLinear)]
        self._cut = cut
        self._blocks: list[Block] | None = None
        self._wide_in, self._wide_out = wide
        features = layers[-1].out_features // self._wide_out
        context = layers[0].in_features - features * self._wide_in
        self._weights = [layer.weight.detach() for layer in layers]
        self._weights[0] = self._weights[0][:, context:]
        self._skip = None if skip is None else skip.weight.detach()[:, context:]
        self._has_context = context_terms is not None
        self._biases = [layer.bias.detach() for layer in layers]
        # what is known so far of each unit before its activation
        self._sums = [layer.bias.detach().expand(batch, -1).clone() for layer in layers]
        if context_terms is not None:
            first, out, through_skip = context_terms
            self._sums[0] += first
            self._sums[-1] += out
            if through_skip is not None:
                self._sums[-1] += through_skip

    @property
    def blocks(self) -> list[Block]:
        """In the order of the features."""
        if self._blocks is None:
            self._blocks = self._cut()
        return self._blocks

    def _outputs(self, block: Block) -> slice:
        return slice(block.first * self._wide_out, block.last * self._wide_out)

    def _inputs(self, block: Block) -> slice:
        return slice(block.first * self._wide_in, block.last * self._wide_in)

    def logits(self, block: Block, x: Tensor) -> Tensor:
        """The outputs (B, b * wide) of a block's features, at trial values x (B, b * wide) of the block itself."""
        inputs, outputs = self._inputs(block), self._outputs(block)
        value, columns = x, inputs
        for weight, sums, low, high in zip(
            self._weights[:-1], self._sums[:-1], block.before, block.inside, strict=True
        ):
            value = relu(torch.addmm(sums[:, low:high], value, weight[low:high, columns].t()))
            columns = slice(low, high)
        out = torch.addmm(self._sums[-1][:, outputs], value, self._weights[-1][outputs, columns].t())
        return out if self._skip is None else out.addmm_(x, self._skip[outputs, inputs].t())

    def update(self, block: Block, x: Tensor) -> None:
        """The block's values are final: add what it determines to all that comes after."""
        inputs = self._inputs(block)
        later = slice(self._outputs(block).stop, None)
        value, columns = x, inputs
        for weight, sums, low, high in zip(
            self._weights[:-1], self._sums[:-1], block.before, block.after, strict=True
        ):
            sums[:, low:].addmm_(value, weight[low:, columns].t())
            value, columns = relu(sums[:, low:high]), slice(low, high)
        self._sums[-1][:, later].addmm_(value, self._weights[-1][later, columns].t())
        if self._skip is not None:
            self._sums[-1][:, later].addmm_(x, self._skip[later, inputs].t())

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x (B, D) from y and noise, in the arrangement of the ordering, by one kernel; None where there is none for it."""
        plain = self._has_context or self._skip is not None or len(self._weights) != 2
        if (
            plain
            or (self._wide_in, self._wide_out) != (1, 1)
            or not devices.usable(y)
            or y.dtype != torch.float32
        ):
            return None
        (into, out), (bias, out_bias) = self._weights, self._biases
        if len(bias) > _WIDEST_KERNEL:
            return None
        return kernels.decode_made(y, uniforms.to(y.dtype), into, bias, out, out_bias)
