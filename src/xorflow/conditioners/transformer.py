"""A transformer as a conditioner: causal self-attention over the features, in any ordering."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from xorflow._states import add_buffers
from xorflow.conditioners.base import Sizes
from xorflow.conditioners.linear import Dropout
from xorflow.conditioners.orderings import Order
from xorflow.conditioners.sequence import Core, SequenceConditioner, SequenceNetwork
from xorflow.errors import ModelError

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (N, H, S, width / H) of each block of the network."""

Turn = tuple[Tensor, Tensor]
"""Cosine and sine, (S, pairs), of the angles by which the pairs of a head's units are turned."""


class CausalTransformer(SequenceConditioner):
    r"""Causal self-attention over the features in the order in which they are visited.

    Step r gives the logits of the feature :math:`d_r`. It begins with embeddings of where it is, of the value visited before it
    and, in an image, of the pixels around it that were visited earlier; then each block adds attention to all steps up to r,
    and a perceptron with one hidden layer. None of them has seen :math:`x_{d_r}` or anything visited later.

    Cost: one pass for all logits, :math:`O(D\,\text{width}^2 + D^2\,\text{width})` for each block; sampling keeps keys and
    values, and takes about as many operations as one pass, feature by feature.

    Args:
        features: D.
        width: of the vectors, a multiple of `heads`.
        depth: how many blocks.
        heads: of each attention.
        dropout: the share of units, attention weights apart, left out in training.
        order: `"natural"`, `"reversed"`, `"random:SEED"`, `"columns"` (of an image) or a permutation.
        shape: (rows, columns) of an image, or None.
        reach: a step sees pixels at most that many rows and columns away.
        categories: K, or K_d for each feature.
        choices: U_d, the number of values of u; as many as categories by default (a shift).
        sees: the inputs, `{"state": "before"}` by default.
        context: the number of context features, which every step sees.
        skipped: features that take no step, because they hardly vary; see `SequenceConditioner`.
        rotary: attention depends on relative position: queries and keys are turned by angles in proportion to where steps lie.

    >>> from xorflow.conditioners import Source
    >>> net = CausalTransformer(6, width=8, depth=2, heads=2, shape=(2, 3))
    >>> net({Source.STATE: torch.zeros(5, 6)}).shape
    torch.Size([5, 6])
    """

    def __init__(
        self,
        features: int,
        *,
        width: int = 256,
        depth: int = 8,
        heads: int = 8,
        dropout: float = 0.1,
        order: Order = "natural",
        shape: Sequence[int] | None = None,
        reach: int = 2,
        categories: Sizes = 2,
        choices: Sizes | None = None,
        sees: Mapping[str, str] | None = None,
        context: int = 0,
        skipped: Sequence[int] = (),
        rotary: bool = False,
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
        if heads < 1 or width % heads:
            raise ModelError(f"width is a multiple of heads, and got width={width} with heads={heads}")
        axes = len(self.shape or (features,))
        if rotary and ((width // heads) % 2 or width // heads < 2 * axes):
            raise ModelError(
                f"rotary turns pairs of a head's units, at least one for each of {axes} coordinates, and width={width} with "
                f"heads={heads} gives a head {width // heads}; choose width / heads even, and at least {2 * axes}"
            )
        self.heads, self.rotary = heads, rotary
        turns = _frequencies(width // heads // 2, self.shape or (features,)) if rotary else None
        self.net = SequenceNetwork(self, AttentionStack(width, depth, heads, dropout, turns))


_BACKEND = "inductor"
"""What compiles."""


class AttentionStack(Core):
    """Blocks of attention and perceptrons, one after the other.

    Args:
        width: of the vectors.
        depth: how many blocks.
        heads: of each.
        dropout: the share of units left out.
        turns: (C, pairs), by how many radians for each unit of a coordinate the pairs of a head's units are turned; or None.
    """

    capturable = True
    turns: Tensor | None

    def __init__(
        self, width: int, depth: int, heads: int, dropout: float, turns: Tensor | None = None
    ) -> None:
        super().__init__()
        self._compiles = False
        add_buffers(self, turns=turns)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads, dropout) for _ in range(depth))
        for name, parameter in self.named_parameters():
            if name.endswith(("attended.weight", "narrow.weight")):
                # what enters the sum of all blocks is scaled so that the sum does not grow with their number
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
            elif name.endswith(("queries.weight", "wide.weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def compile_blocks(self) -> None:
        """Let passes with gradient run as compiled code: its kernels do several elementwise operations at a time."""
        self._compiles = True

    def forward(self, hidden: Tensor, where: Tensor) -> Tensor:
        # an evaluation has batches of other sizes, and would be compiled for each
        compiles = self._compiles and torch.is_grad_enabled()
        block_pass = _compiled_pass(_BACKEND) if compiles else AttentionBlock.__call__
        turn = self.turn(where)
        for block in self._each():
            hidden = block_pass(block, hidden, turn)
        return hidden

    def memory(self, batch: int, steps: int, like: Tensor) -> Cache:
        return [block.cache(batch, steps, like) for block in self._each()]

    def extend(
        self, hidden: Tensor, where: Tensor, memory: Cache, number: int | Tensor
    ) -> tuple[Tensor, Cache]:
        turn = self.turn(where)
        for block, cache in zip(self._each(), memory, strict=True):
            hidden = block.extend(hidden, turn, cache, number)
        return hidden, memory

    def turn(self, where: Tensor) -> Turn | None:
        """Of steps at these coordinates (S, C)."""
        if self.turns is None:
            return None
        # no product of matrices, which autocast would round
        angles = (where.unsqueeze(-1) * self.turns).sum(-2)
        return angles.cos(), angles.sin()

    def _each(self) -> list[AttentionBlock]:
        return [block for block in self.blocks if isinstance(block, AttentionBlock)]


@functools.cache  # one for all networks, and all runs of a process: it depends on shapes, not on whose weights it is given
def _compiled_pass(backend: str) -> Callable[[AttentionBlock, Tensor, Turn | None], Tensor]:
    return torch.compile(AttentionBlock.forward, dynamic=False, backend=backend)


def attention_stacks(module: nn.Module) -> list[AttentionStack]:
    """Those among the modules of a model."""
    return [part for part in module.modules() if isinstance(part, AttentionStack)]


class AttentionBlock(nn.Module):
    """x + attention(norm(x)), and to that a perceptron of its norm.

    Args:
        width: of the vectors.
        heads: into which queries, keys and values are cut.
        dropout: the share of units left out.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)  # and keys, and values
        self.attended = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, turn: Turn | None) -> Tensor:
        """(N, S, width) to the same shape."""
        queries, keys, values = self._split(hidden, turn)
        if hidden.dtype == torch.float64:
            # for proofs: most devices have no fused kernel for it, and plain products can be differentiated twice and mapped
            steps = hidden.shape[1]
            later = torch.ones(steps, steps, dtype=torch.bool, device=hidden.device).triu(1)
            mixed = attend(queries, keys, values, later)
        else:
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self._join(hidden, mixed)

    def _split(self, hidden: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (N, H, S, width / H): views, which the fused kernels read as they lie."""
        each = self.queries(self.before_attention(hidden)).split(hidden.shape[-1], -1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in each)
        if turn is not None:
            queries, keys = turned(queries, turn), turned(keys, turn)
        return queries, keys, values

    def _join(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attended(mixed.transpose(-3, -2).flatten(-2)))
        inner = self.activation(self.wide(self.before_perceptron(hidden)))
        return hidden + self.dropout(self.narrow(inner))

    def cache(self, batch: int, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of all steps."""
        shape = (batch, self.heads, steps, self.wide.in_features // self.heads)
        # zeros, so that later entries, which are read and masked, do no harm
        return like.new_zeros(shape), like.new_zeros(shape)

    def extend(
        self, hidden: Tensor, turn: Turn | None, cache: tuple[Tensor, Tensor], number: int | Tensor
    ) -> Tensor:
        """One step (N, 1, width), which attends to those in the cache and becomes part of it.

        Where its number is on the device, (1,), all of the cache is read, and later steps are masked.
        """
        queries, *new = self._split(hidden, turn)
        later = None
        if isinstance(number, int):
            for kept, part in zip(cache, new, strict=True):
                kept[:, :, number : number + 1] = part
            keys, values = (kept[:, :, : number + 1] for kept in cache)
        else:
            keys, values = (kept.index_copy_(2, number, part) for kept, part in zip(cache, new, strict=True))
            later = torch.arange(keys.shape[2], device=keys.device) > number
        return self._join(hidden, attend(queries, keys, values, later))


def turned(vectors: Tensor, turn: Turn) -> Tensor:
    """Vectors (N, H, S, width / H), each pair of whose units, one of either half, is turned by its step's angle."""
    one, other = vectors.chunk(2, -1)
    cos, sin = turn
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1).to(vectors.dtype)


def _frequencies(pairs: int, extent: tuple[int, ...]) -> Tensor:
    """(C, pairs): each pair turns with one coordinate, from a radian a step down to about one over the whole extent."""
    table = torch.zeros(len(extent), pairs)
    for axis, size in enumerate(extent):
        frequencies = table[axis, axis :: len(extent)]
        frequencies.copy_(torch.logspace(0, -math.log10(max(size, 2)), len(frequencies)))
    return table


def attend(queries: Tensor, keys: Tensor, values: Tensor, later: Tensor | None) -> Tensor:
    """Attention as plain products, but not to what is `later`, a mask that fits (queries, keys).

    Faster than the fused kernels for the single queries of incremental decoding.
    """
    scores = (queries * keys.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
    if later is not None:
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ values
