"""A data set: up to three splits that agree, and what must be known to build a model for them."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from xorflow.data.codec import Codec
from xorflow.data.splits import Split
from xorflow.errors import DataError


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
    codec: Codec | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if any(k < 2 for k in self.categories):
            raise DataError(f"every feature needs at least two categories, got {min(self.categories)}")
        for name, split in self.parts.items():
            if split.features != self.features:
                raise DataError(
                    f"all splits must have D = {self.features} features, but {name} has {split.features}"
                )
            width = 0 if split.context is None else split.context.shape[1]
            if width != self.context_features:
                raise DataError(
                    f"all splits must have the same context, but train has {self.context_features} "
                    f"context features and {name} has {width}"
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
        return 0 if self.train.context is None else self.train.context.shape[1]

    def to(self, device: torch.device | str) -> "Dataset":
        return replace(self, **{name: split.to(device) for name, split in self.parts.items()})

    def describe(self) -> dict[str, Any]:
        """What a results file must say about its data; plain JSON values."""
        splits = self.parts
        same = len(set(self.categories)) == 1
        return {
            "name": self.name,
            "sizes": {name: len(split) for name, split in splits.items()},
            "features": self.features,
            "categories": self.categories[0] if same else list(self.categories),
            "shape": None if self.shape is None else list(self.shape),
            "seed": self.seed,
            "sha256": {name: split.sha256 for name, split in splits.items() if name != "train"},
            "binarisation": self._binarisation(),
            "context": None if self.context_features == 0 else {"features": self.context_features},
        }

    def _binarisation(self) -> str:
        if not self.train.stochastic:
            return "none: the values are categories"
        return (
            "stochastic, x = 1 with probability intensity / 255: drawn afresh for every training batch, "
            f"validation and test drawn once with Philox4x64, seed {self.seed}, streams 1 and 2"
        )
