"""A data set: up to three parts that agree, what must be known to build a model for them, and the batches they hand out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._math import philox_words
from xorflow.data.schema import Schema
from xorflow.errors import DataError

if TYPE_CHECKING:
    from xorflow.data.stream import Stream

TRAIN, VALIDATION, TEST, ORDER, SHUFFLE = 0, 1, 2, 3, 4
"""Streams of one seed: the three splits of a data set, the order in which rows are split, and that of rows in a stream."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that travel together: values `x` (B, D) in an integer type, `context` (B, C) float32 or None."""

    x: Tensor  # (B, D)
    context: Tensor | None = None  # (B, C)

    def split(self, size: int) -> Iterator[Batch]:
        """Some rows at a time; no rows are one empty batch."""
        for first in range(0, max(1, len(self.x)), size):
            rows = slice(first, first + size)
            yield Batch(self.x[rows], None if self.context is None else self.context[rows])


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of discrete values, or of grey values that are binarised afresh at each access.

    `values` is (N, D), uint8 where every K <= 256 and int64 otherwise. With `stochastic=True` they are
    intensities v in 0..255, and each access draws x = 1 with probability v / 255. Of a table, `log_density` is what
    the places of cells within their states add to log p of each row: likelihoods of the split are then densities.

    >>> split = Split(torch.tensor([[0, 1], [1, 1], [1, 0]], dtype=torch.uint8))
    >>> [batch.x.tolist() for batch in split.batches(2)]
    [[[0, 1], [1, 1]], [[1, 0]]]
    """

    values: Tensor  # (N, D)
    context: Tensor | None = None  # (N, C)
    stochastic: bool = False
    log_density: Tensor | None = None  # (N,) float64

    def __post_init__(self) -> None:
        v, c = self.values, self.context
        allowed = (torch.uint8,) if self.stochastic else (torch.uint8, torch.int64)
        if v.ndim != 2 or v.dtype not in allowed:
            names = " or ".join(map(str, allowed))
            raise DataError(f"a split holds (N, D) values of {names}, got {tuple(v.shape)} of {v.dtype}")
        if v.numel() == 0:
            raise DataError(f"a split needs at least one row and one feature, got shape {tuple(v.shape)}")
        if c is not None and (c.ndim != 2 or len(c) != len(v) or c.dtype != torch.float32):
            raise DataError(
                f"context must be float32 of shape ({len(v)}, C), one row for each row of data, "
                f"got {tuple(c.shape)} of {c.dtype}"
            )
        added = self.log_density
        if added is not None and (added.shape != (len(v),) or added.dtype != torch.float64):
            raise DataError(
                f"log_density must be float64 of shape ({len(v)},), got {tuple(added.shape)} of {added.dtype}"
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def features(self) -> int:
        return self.values.shape[1]

    @property
    def context_features(self) -> int:
        return 0 if self.context is None else self.context.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def mean_log_density(self) -> float:
        """What the places of cells within their states add to the mean log p, the same for all models; 0 of masses."""
        return 0.0 if self.log_density is None else float(self.log_density.mean())

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
        rows = self.values.index_select(0, indices)
        context = None if self.context is None else self.context.index_select(0, indices)
        if not self.stochastic:
            return Batch(rows, context)
        if noise is None:
            self._check_generator(generator)
            noise = torch.rand(rows.shape, generator=generator, device=self.device)
        elif noise.shape != rows.shape or noise.dtype not in (torch.float32, torch.float64):
            # Half precision has 256 to 2048 levels: far too few for probabilities in steps of 1 / 255.
            raise DataError(
                f"noise must be float32 or float64 of shape {tuple(rows.shape)}, "
                f"got {tuple(noise.shape)} of {noise.dtype}"
            )
        return Batch((noise * 255 < rows).to(torch.uint8), context)

    def probabilities(self, indices: Tensor) -> Tensor:
        """With which probability each feature of the rows at `indices` is drawn as 1, float32 (B, D)."""
        if not self.stochastic:
            raise DataError(
                "a split of fixed values draws nothing: probabilities are of grey values, which are binarised"
            )
        return self.values.index_select(0, indices).to(torch.float32) / 255

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
        return Batch(self.values, self.context).split(size)

    def frozen(self, seed: int, stream: int = TRAIN) -> Split:
        """The split binarised once by `binarise`; a split of fixed values is returned as it is."""
        if not self.stochastic:
            return self
        if devices.has_kernels(self.values.device) and 0 <= seed < 2**63:
            return Split(kernels.binarise_once(self.values, seed, stream), self.context)
        values = torch.from_numpy(binarise(self.values.cpu().numpy(), seed, stream))
        return Split(values.to(self.device), self.context)

    def to(self, device: torch.device | str) -> Split:
        context = None if self.context is None else self.context.to(device)
        values = self.values.to(device)
        there = values is self.values and context is self.context
        return self if there else replace(self, values=values, context=context)

    def subset(self, n: int) -> Split:
        """The first `n` rows."""
        self._check_count(n, "a subset")
        return self[:n]

    def __getitem__(self, rows: slice | Tensor) -> Split:
        """Rows by their numbers; consecutive ones share memory with these."""
        every = {"values": self.values, "context": self.context, "log_density": self.log_density}
        return replace(self, **{name: tensor[rows] for name, tensor in every.items() if tensor is not None})

    def _check_count(self, n: int, what: str) -> None:
        if not 1 <= n <= len(self):
            raise DataError(f"{what} takes 1 to {len(self)} rows of this split, got {n}")

    def _check_generator(self, generator: torch.Generator | None) -> None:
        if generator is not None and generator.device.type != self.device.type:
            raise DataError(
                f"the generator draws on {generator.device} but the split lives on {self.device}"
                f"; build it with torch.Generator({self.device.type!r})"
            )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train, validation and test rows over the categories 0..K_d - 1 of each feature d.

    >>> from xorflow.data import Dataset, Split
    >>> rows = torch.tensor([[0, 2], [1, 0]], dtype=torch.uint8)
    >>> Dataset("two rows", Split(rows), None, None, categories=(2, 3)).features
    2
    """

    name: str
    train: Split
    validation: Split | None
    test: Split | None
    categories: tuple[int, ...]  # K_d
    shape: tuple[int, ...] | None = None
    schema: Schema | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()
    """What a person should know of how files were read."""
    stream: Stream | None = None
    """All training rows, where memory does not hold them: `train` is then a sample of them."""

    def __post_init__(self) -> None:
        if any(k < 2 for k in self.categories):
            raise DataError(f"every feature needs at least two categories, got {min(self.categories)}")
        for name, split in self.parts.items():
            if split.features != self.features:
                raise DataError(
                    f"all splits must have D = {self.features} features, but {name} has {split.features}"
                )
            if split.context_features != self.context_features:
                raise DataError(
                    f"all splits must have the same context, but train has {self.context_features} "
                    f"context features and {name} has {split.context_features}"
                )

    @property
    def parts(self) -> dict[str, Split]:
        """The splits that exist, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def features(self) -> int:
        return len(self.categories)

    @property
    def context_features(self) -> int:
        return self.train.context_features

    @property
    def training_rows(self) -> int:
        """How many rows an epoch has."""
        return len(self.train if self.stream is None else self.stream)

    def to(self, device: torch.device | str) -> Dataset:
        return replace(self, **{name: split.to(device) for name, split in self.parts.items()})

    def describe(self) -> dict[str, Any]:
        """What a results file must say about its data; plain JSON values."""
        same = len(set(self.categories)) == 1
        drawn = (
            "stochastic, x = 1 with probability intensity / 255: drawn afresh for every training batch, "
            f"validation and test drawn once with Philox4x64, seed {self.seed}, streams 1 and 2"
        )
        return {
            "name": self.name,
            "sizes": {name: len(split) for name, split in self.parts.items()} | {"train": self.training_rows},
            "features": self.features,
            "categories": self.categories[0] if same else list(self.categories),
            "shape": None if self.shape is None else list(self.shape),
            "seed": self.seed,
            "sha256": {name: split.sha256 for name, split in self.parts.items() if name != "train"},
            "binarisation": drawn if self.train.stochastic else "none: the values are categories",
            "context": None if self.context_features == 0 else {"features": self.context_features},
            **({} if self.schema is None else {"measures": {c.name: c.measure for c in self.schema.columns}}),
        }


def binarise(intensities: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Binarise grey values v in 0..255 once: x = 1 with probability v / 255, to within 2^-32.

    Pixels in row-major order take 32-bit halves of the raw words, the low half first, so that the first rows
    do not depend on how many follow. The streams in use are train = 0, validation = 1, test = 2.

    >>> binarise(np.array([0, 64, 128, 192, 255], dtype=np.uint8), seed=0, stream=2)
    array([0, 0, 0, 1, 1], dtype=uint8)
    """
    if intensities.dtype != np.uint8:
        raise DataError(
            f"binarisation takes uint8 intensities 0..255, got {intensities.dtype}; convert first"
        )
    halves = philox_words(seed, stream, 0, intensities.size).reshape(intensities.shape)
    # The byte v repeated four times is v (2^32 - 1) / 255 exactly, so r <= limit has (limit + 1) / 2^32 for
    # its probability: v / 255 + (1 - v / 255) / 2^32. Zero is excluded by hand, and 255 admits every r.
    limits = intensities.astype(np.uint32) * np.uint32(0x01010101)
    return ((halves <= limits) & (intensities > 0)).astype(np.uint8)
