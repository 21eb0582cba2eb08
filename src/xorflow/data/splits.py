"""One part of a data set on one device, and the batches that it hands out."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from xorflow._cuda import devices, kernels
from xorflow.data.binarisation import TRAIN, binarise
from xorflow.errors import DataError


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that travel together: values `x` (B, D) in an integer type, `context` (B, C) float32 or None."""

    x: Tensor  # (B, D)
    context: Tensor | None = None  # (B, C)


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of discrete values, or of grey values that are binarised afresh at each access.

    `values` is (N, D), uint8 where every K <= 256 and int64 otherwise. With `stochastic=True` they are
    intensities v in 0..255, and each access draws x = 1 with probability v / 255.

    >>> split = Split(torch.tensor([[0, 1], [1, 1], [1, 0]], dtype=torch.uint8))
    >>> [batch.x.tolist() for batch in split.batches(2)]
    [[[0, 1], [1, 1]], [[1, 0]]]
    """

    values: Tensor  # (N, D)
    context: Tensor | None = None  # (N, C)
    stochastic: bool = False

    def __post_init__(self) -> None:
        v, c = self.values, self.context
        allowed = (torch.uint8,) if self.stochastic else (torch.uint8, torch.int64)
        if v.ndim != 2 or v.dtype not in allowed:
            names = " or ".join(str(a) for a in allowed)
            raise DataError(f"a split holds (N, D) values of {names}, got {tuple(v.shape)} of {v.dtype}")
        if v.numel() == 0:
            raise DataError(f"a split needs at least one row and one feature, got shape {tuple(v.shape)}")
        if c is not None and (c.ndim != 2 or len(c) != len(v) or c.dtype != torch.float32):
            raise DataError(
                f"context must be float32 of shape ({len(v)}, C), one row for each row of data, "
                f"got {tuple(c.shape)} of {c.dtype}"
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def features(self) -> int:
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @cached_property  # a list of runs on the same data asks again and again
    def sha256(self) -> str | None:
        """SHA-256 of the values, row by row, little-endian; None where each access draws anew."""
        if self.stochastic:
            return None
        array = self.values.cpu().numpy()
        return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data).hexdigest()

    def gather(
        self, indices: Tensor, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Batch:
        """The rows at `indices` (B,). Nothing waits for the device, and with `noise` it may be captured.

        `noise` (B, D) are the uniforms in [0, 1), float32 or wider, that binarise a stochastic split; without
        them `generator` draws some. A split of fixed values ignores both.
        """
        context = None if self.context is None else self.context.index_select(0, indices)
        if not self.stochastic:
            return Batch(self.values.index_select(0, indices), context)
        shape = (len(indices), self.features)
        if noise is None:
            noise = self.draw_noise(len(indices), generator)
        elif noise.shape != shape or noise.dtype not in (torch.float32, torch.float64):
            # Half precision has 256 to 2048 levels: far too few for probabilities in steps of 1 / 255.
            raise DataError(
                f"noise must be float32 or float64 of shape {shape}, "
                f"got {tuple(noise.shape)} of {noise.dtype}"
            )
        rows = self.values.index_select(0, indices)
        return Batch((noise * 255 < rows).to(torch.uint8), context)

    def probabilities(self, indices: Tensor) -> Tensor:
        """With which probability each feature of the rows at `indices` is drawn as 1, float32 (B, D)."""
        if not self.stochastic:
            raise DataError(
                "a split of fixed values draws nothing: probabilities are of grey values, which are binarised"
            )
        return self.values.index_select(0, indices).to(torch.float32) / 255

    def draw_noise(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """The uniforms (rows, D) that `gather` binarises a stochastic split with, if it is given none."""
        self._check_generator(generator)
        return torch.rand((rows, self.features), generator=generator, device=self.device)

    def batch(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """`size` random rows, without replacement."""
        self._check_count(size, "a batch without replacement")
        self._check_generator(generator)
        order = torch.randperm(len(self), generator=generator, device=self.device)
        return self.gather(order[:size], generator=generator)

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows in order; the last batch may be short."""
        if self.stochastic:
            raise DataError(
                "a stochastic split has no fixed rows to go through; call frozen(seed) on it first"
            )
        if size < 1:
            raise DataError(f"a batch has at least one row, got size {size}")
        if self.context is None:
            return (Batch(x) for x in self.values.split(size))
        pairs = zip(self.values.split(size), self.context.split(size), strict=True)
        return (Batch(x, context) for x, context in pairs)

    def frozen(self, seed: int, stream: int = TRAIN) -> "Split":
        """The split binarised once by `binarise`; a split of fixed values is returned as it is."""
        if not self.stochastic:
            return self
        if devices.usable(self.values) and 0 <= seed < 2**63:
            return Split(kernels.binarise_once(self.values, seed, stream), self.context)
        values = torch.from_numpy(binarise(self.values.cpu().numpy(), seed, stream))
        return Split(values.to(self.device), self.context)

    def to(self, device: torch.device | str) -> "Split":
        context = None if self.context is None else self.context.to(device)
        values = self.values.to(device)
        there = values is self.values and context is self.context
        return self if there else replace(self, values=values, context=context)

    def subset(self, n: int) -> "Split":
        """The first `n` rows."""
        self._check_count(n, "a subset")
        return replace(
            self, values=self.values[:n], context=None if self.context is None else self.context[:n]
        )

    def _check_count(self, n: int, what: str) -> None:
        if not 1 <= n <= len(self):
            raise DataError(f"{what} takes 1 to {len(self)} rows of this split, got {n}")

    def _check_generator(self, generator: torch.Generator | None) -> None:
        if generator is not None and generator.device.type != self.device.type:
            raise DataError(
                f"the generator draws on {generator.device} but the split lives on {self.device}"
                f"; build it with torch.Generator({self.device.type!r})"
            )
