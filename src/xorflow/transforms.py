"""Bijections of integer states, feature by feature, with a discrete parameter `u`.

The forward direction is data -> base, :math:`y = t_u^{-1}(x)` in the notation of the derivations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._repr import as_call
from xorflow._states import Alphabet, Layout, add_buffers, per_feature
from xorflow.errors import ModelError

_PAIRS_CHECKED = 2**18
"""How many pairs of a state and a choice are tried when a transform is built: all, those of bits always, or so many spread over
all."""


class Transform(nn.Module, ABC):
    """A family of bijections of {0..K_d - 1}, indexed for each feature by `u` in {0..U_d - 1}.

    A new one is two methods, `value_to_base` and its inverse `value_to_data`, on integers of any shape, each of which comes
    with the number of its feature: features may differ in their bijections. u = 0 is the identity by custom; only coupling
    layers need that, for what they leave alone.

    Args:
        categories: K_d, for each feature.
        choices: U_d, how many bijections each feature has.
        tables: tensors that the two methods read, kept as buffers of these names; they are tried when a transform is built.
    """

    sizes: Tensor
    every: Tensor

    def __init__(self, categories: Sequence[int], choices: Sequence[int], **tables: Tensor) -> None:
        super().__init__()
        self.states = Alphabet(categories)
        self.choices = Alphabet(choices)
        if self.states.features != self.choices.features:
            raise ModelError(
                f"a transform has choices for each of its features, and got {self.choices.features} numbers of choices for "
                f"{self.states.features} features"
            )
        every = torch.arange(self.states.features)
        add_buffers(self, sizes=torch.tensor(self.states.sizes), every=every, **tables)
        self.layout = Layout(self.choices)
        self.is_xor = self._tried()

    @abstractmethod
    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        """y of feature d from x and u: int64 tensors of shapes that broadcast."""

    @abstractmethod
    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        """The inverse: x from y and u."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON."""
        return {"categories": list(self.states.sizes)}

    def __repr__(self) -> str:
        settings = {
            name: value for name, value in self.config().items() if name not in ("categories", "features")
        }
        return as_call(self, settings, str(self.states))

    def to_base(self, x: Tensor, u: Tensor, features: Tensor | None = None) -> Tensor:
        """Integers y (..., D) from integers x and u (..., D), of all features or of some (b,); in the type of states."""
        return self._moved(self.value_to_base, x, u, features)

    def to_data(self, y: Tensor, u: Tensor, features: Tensor | None = None) -> Tensor:
        """The inverse: integers x from y and u."""
        return self._moved(self.value_to_data, y, u, features)

    def _moved(
        self, by: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, u: Tensor, features: Tensor | None
    ) -> Tensor:
        if self.is_xor:
            return self.states.integers(x) ^ self.choices.integers(u)
        return self.states.integers(by(x.long(), u.long(), self.every if features is None else features))

    def reached(self, x: Tensor) -> list[Tensor]:
        """The states y = to_base(x, u) that each choice leads to, by group of choices (..., n, U), int64."""
        return [
            self.value_to_base(
                values.long().unsqueeze(-1), torch.arange(group.size, device=x.device), d[:, None]
            ).expand(*values.shape, group.size)  # one that never looks at u gives one y for all
            for group, values, d in self.choices.grouped(self.layout.split(x), self.layout.features())
        ]

    def keeps(self, features: Tensor) -> bool:
        """Whether u = 0 is the identity for these `features`, booleans (D,)."""
        chosen = features.nonzero()[:, 0].to(self.every.device)
        d = chosen.repeat_interleave(self.sizes[chosen])
        x = torch.cat([torch.arange(k) for k in self.sizes[chosen].tolist()]).to(d.device)
        return torch.equal(self.value_to_base(x, torch.zeros_like(x), d), x)

    def _tried(self) -> bool:
        """Whether it flips bits by u = 1 and keeps them by u = 0; `ModelError` if it is no bijection."""
        choices, bits = torch.tensor(self.choices.sizes), self.states.binary and self.choices.binary
        pairs = self.sizes * choices
        total = int(pairs.sum())
        index = torch.arange(total if bits else min(total, _PAIRS_CHECKED))
        if total > len(index):
            index = (index.double() * (total / len(index))).long()
        d = torch.searchsorted(pairs.cumsum(0), index, right=True)
        within = index - (pairs.cumsum(0) - pairs)[d]
        u, x = within // self.sizes[d], within % self.sizes[d]
        y = self.value_to_base(x, u, d)
        inside = (y >= 0) & (y < self.sizes[d])
        if not bool(inside.all()) or bool((self.value_to_data(y, u, d) != x).any()):
            raise ModelError(
                f"value_to_data must undo value_to_base within 0..K - 1, for each choice and feature, and that of "
                f"{type(self).__name__} does not; compare to_data(to_base(x, u), u) with x for all x and u"
            )
        return bits and torch.equal(y, x ^ u)


class ModularShift(Transform):
    r""":math:`y = (x - u) \bmod K`; for K = 2 this is xor, its own inverse.

    >>> shift = ModularShift([3, 3])
    >>> shift.to_base(torch.tensor([0, 2]), torch.tensor([1, 1])).tolist()
    [2, 1]
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__(categories, categories)

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        difference = x - u  # above -K, so that no division is needed
        return torch.where(difference < 0, difference + self.sizes[d], difference)

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return (y + u) % self.sizes[d]


class Xor(ModularShift):
    """`ModularShift` with K = 2 for each of `features` bits."""

    def __init__(self, features: int) -> None:
        super().__init__(per_feature(2, features, "categories"))

    def config(self) -> dict[str, Any]:
        return {"features": self.states.features}


class ModularAffine(Transform):
    r""":math:`x = (\sigma y + \mu) \bmod K`, one joint choice u of location and scale: :math:`u = \mu + K s`.

    The scales are :math:`\sigma_s` with :math:`\gcd(\sigma_s, K) = 1` (otherwise the map is no bijection), beginning
    with 1, so that u = 0 is the identity. One joint choice keeps the expected reward linear in the choice's
    probabilities, which separate choices of location and scale would not.

    Args:
        categories: K_d for each feature.
        scales: the scales to choose from for every feature; all units modulo K_d by default.

    >>> ModularAffine([5]).choices.sizes
    (20,)
    """

    scales: Tensor
    unscales: Tensor

    def __init__(self, categories: Sequence[int], scales: Sequence[int] | None = None) -> None:
        units = [_units(int(k), scales) for k in categories]
        width = max(map(len, units), default=0)  # no feature at all is refused below
        padded = [row + [1] * (width - len(row)) for row in units]
        inverse = [
            [pow(scale, -1, int(k)) for scale in row] for k, row in zip(categories, padded, strict=True)
        ]
        self._scales_as_given = None if scales is None else [int(s) for s in scales]
        choices = [int(k) * len(row) for k, row in zip(categories, units, strict=True)]
        # (D, number of scales)
        super().__init__(categories, choices, scales=torch.tensor(padded), unscales=torch.tensor(inverse))

    def config(self) -> dict[str, Any]:
        return super().config() | {"scales": self._scales_as_given}

    def value_to_base(self, x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        k = self.sizes[d]
        return ((x - u % k) * self.unscales[d, u // k]) % k

    def value_to_data(self, y: Tensor, u: Tensor, d: Tensor) -> Tensor:
        k = self.sizes[d]
        return (y * self.scales[d, u // k] + u % k) % k


def _units(k: int, scales: Sequence[int] | None) -> list[int]:
    if scales is None:
        return [1] + [s for s in range(2, k) if math.gcd(s, k) == 1]
    bad = [s for s in scales if math.gcd(int(s), k) != 1]
    if bad:
        raise ModelError(
            f"a scale modulo {k} must have no factor in common with {k}, or the map is no bijection; "
            f"got {bad[0]}: choose among {_units(k, None)}"
        )
    return [1, *sorted({int(s) % k for s in scales} - {1 % k})]
