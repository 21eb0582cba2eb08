"""Small numerical helpers: gradients of our own, what pairs of features share, enumeration, portable random numbers."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xorflow.errors import DataError, Intractable

ENUMERATION_LIMIT = 2**18
"""The most terms that an exact sum by enumeration may have."""


class Function(torch.autograd.Function):
    """torch's, with the signature of `forward` looked up once: torch does it in every call, and small networks wait for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]

    @classmethod
    def one_after_the_other(cls, info: Any, in_dims: Any, *inputs: Any) -> Tensor:
        """What `torch.vmap` asks for, (batch, ...), by one call after the other."""
        pairs = list(zip(inputs, in_dims, strict=True))
        each = [
            cls.apply(*(t.select(dim, number) if isinstance(dim, int) else t for t, dim in pairs))
            for number in range(info.batch_size)
        ]
        return torch.stack(each)  # pyright: ignore[reportArgumentType]


def pair_information(x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Of integers (N, D): log p of all pairs of values, those of one feature after the other, and features' mutual information.

    Every pair of values is counted with a pseudo-row in all. An alphabet has F values in all; (F, F) and (D, D), float64.
    """
    offsets = sizes.cumsum(0) - sizes
    counts = torch.zeros(int(sizes.sum()), int(sizes.sum()))
    for rows in x.split(4096):
        hot = torch.zeros(len(rows), len(counts))
        hot.scatter_(1, rows.long() + offsets, 1.0)
        counts.addmm_(hot.T, hot)
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    each = sizes[owners].double()
    pseudo = torch.where(
        owners[:, None] == owners, torch.eye(len(owners)).double() / each, 1 / each / each[:, None]
    )
    p = (counts.double() + pseudo) / (len(x) + 1)
    log_p = p.log()
    alone = log_p.diagonal()
    gain = torch.where(p > 0, p * (log_p - alone[:, None] - alone), 0.0)
    blocks = torch.zeros(len(owners), len(sizes), dtype=torch.float64)
    blocks[torch.arange(len(owners)), owners] = 1
    return log_p, blocks.T @ gain @ blocks


def enumerate_states(categories: Sequence[int], *, limit: int = ENUMERATION_LIMIT) -> Tensor:
    """Every state of the product space, the last feature changing quickest, as int64 (states, D).

    >>> enumerate_states([2, 3]).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    total = math.prod(categories)  # a Python integer: it may be astronomically large
    if total > limit:
        raise Intractable(
            f"enumeration is limited to {limit} terms, and this space has about 2^{math.log2(total):.0f}; "
            "use evaluate.importance() for a lower bound instead"
        )
    return torch.tensor(list(itertools.product(*(range(k) for k in categories))), dtype=torch.int64).reshape(
        total, len(categories)
    )


def philox_raw(seed: int, stream: int, count: int, *, first_block: int = 0) -> np.ndarray:
    """`count` 64-bit words of Philox4x64 with the key (seed, stream), from counter `first_block` (4 words each) on.

    Only raw output is used: its stream is fixed by the algorithm, while those of `numpy.random.Generator` and of torch
    may change from one version to the next. So these draws are the same on every device, platform and version.
    """
    if not (0 <= seed < 2**64 and 0 <= stream < 2**64):
        raise DataError(f"a seed and its stream must lie in 0..2^64 - 1, got {seed} and {stream}")
    generator = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    generator.advance(first_block)
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def philox_words(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """Words `start` to `start + count` of the endless sequence of uint32 that `seed` and `stream` name.

    Each raw word gives its low and then its high half; any part of the sequence can be had without the rest.

    >>> bool((philox_words(0, 1, 5, 3) == philox_words(0, 1, 0, 8)[5:]).all())
    True
    """
    first_block, offset = divmod(start, 8)
    raw = philox_raw(seed, stream, (offset + count + 1) // 2, first_block=first_block)
    return raw.astype("<u8", copy=False).view("<u4")[offset : offset + count]


def philox_uniforms(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """The same sequence as float32 in the open interval (0, 1): 23 bits and a half, never 0 or 1."""
    words = philox_words(seed, stream, start, count)
    return ((words >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
