"""How integer states are written as floats for the networks.

Two features' worth of convention, used everywhere below the public edge:

* all K_d = 2: a state is a float tensor (..., D) with entries in {0, 1}; relaxed, in [0, 1];
* otherwise: one-hot, (..., D, K) with K = max K_d; relaxed, a point of the simplex.

Shape legend of the whole package: S samples, B batch, L layers, D features, K categories, U values of u.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from xorflow.errors import ModelError

NEVER = -1e4
"""A log-probability whose exponential is exactly zero in every float type, and which, unlike -inf, gives 0
and not nan when it is multiplied by a zero."""


class Alphabet:
    """The sizes K_1..K_D of a product space, and the two-way road between its integers and floats."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(int(k) for k in sizes)
        if not self.sizes:
            raise ModelError("a model needs at least one feature, and got none")
        if min(self.sizes) < 1:
            raise ModelError(f"every feature needs at least one category, and got {min(self.sizes)}")
        self.features = len(self.sizes)
        self.width = max(self.sizes)
        self.binary = set(self.sizes) == {2}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alphabet) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def short(self) -> int | list[int]:
        """The sizes as JSON: one number if all are alike."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else list(self.sizes)

    @property
    def flat(self) -> int:
        """How many floats a network sees for one state."""
        return self.features if self.binary else self.features * self.width

    def valid(self) -> Tensor:
        """Which of the (D, K) padded categories exist."""
        return torch.arange(self.width) < torch.tensor(self.sizes)[:, None]  # (D, K)

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers (..., D) to floats (..., D) or (..., D, K)."""
        if self.binary:
            return x.to(dtype)
        return one_hot(x.long(), self.width).to(dtype)

    def decode(self, state: Tensor) -> Tensor:
        """Floats back to int64 (..., D)."""
        return state.long() if self.binary else state.argmax(-1)

    def batch_shape(self, state: Tensor) -> torch.Size:
        """The leading shape of an encoded state."""
        return state.shape[:-1] if self.binary else state.shape[:-2]

    def expand(self, state: Tensor, batch: Sequence[int]) -> Tensor:
        """Broadcast an encoded state to the leading shape `batch`."""
        return state.expand(*batch, *state.shape[len(self.batch_shape(state)) :])

    def flatten(self, state: Tensor) -> Tensor:
        """(..., D[, K]) to what a linear layer takes, (..., flat)."""
        return state if self.binary else state.flatten(-2)


def per_feature(sizes: int | Sequence[int], features: int, name: str) -> tuple[int, ...]:
    """One number for all features, or one for each: always as a tuple of D numbers."""
    if features < 1:
        raise ModelError(f"a model needs at least one feature, and got features={features}")
    values = (sizes,) * features if isinstance(sizes, int) else tuple(int(k) for k in sizes)
    if len(values) != features:
        raise ModelError(
            f"{name} is one number or one for each of the {features} features, and has {len(values)} numbers"
        )
    if min(values) < 1:
        raise ModelError(f"{name} must be at least 1, and contains {min(values)}")
    return values
