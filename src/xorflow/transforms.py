"""Bijections of integer states, feature by feature, with a discrete parameter `u`.

The forward direction is data -> base, :math:`y = t_u^{-1}(x)` in the notation of the derivations. A new transform is
two methods on integers; its multilinear form on relaxed states, which carries gradients, is derived from them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import Alphabet, per_feature
from xorflow.errors import ModelError


class Transform(nn.Module, ABC):
    """A family of bijections of {0..K_d - 1}, indexed for each feature by `u` in {0..U_d - 1}.

    Features may differ in their bijections. u = 0 is the identity by custom; only coupling layers need that, for what they
    leave alone.

    Args:
        categories: K_d, for each feature.
        choices: U_d, how many bijections each feature has.
    """

    to_base_table: Tensor
    to_data_table: Tensor

    def __init__(self, categories: Sequence[int], choices: Sequence[int]) -> None:
        super().__init__()
        self.states = Alphabet(categories)
        self.choices = Alphabet(choices)
        # (D, U, K), or (1, U, K) when all features are alike
        self.register_buffer("to_base_table", self._table(self.to_base), persistent=False)
        self.register_buffer("to_data_table", self._table(self.to_data), persistent=False)
        self._check_bijections()
        self.is_xor = (
            self.states.binary and self.choices.binary and self.to_base_table.tolist() == [[[0, 1], [1, 0]]]
        )

    @abstractmethod
    def to_base(self, x: Tensor, u: Tensor) -> Tensor:
        """Integers y (..., D) from x and u (..., D), of any integer type; int64."""

    @abstractmethod
    def to_data(self, y: Tensor, u: Tensor) -> Tensor:
        """The inverse: integers x from y and u."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON."""
        return {"categories": list(self.states.sizes)}

    def _table(self, apply) -> Tensor:
        d, u_max, k_max = self.states.features, self.choices.width, self.states.width
        u = torch.arange(u_max)[:, None, None].expand(u_max, k_max, d)
        x = torch.arange(k_max)[None, :, None].expand(u_max, k_max, d)
        real = (u < torch.tensor(self.choices.sizes)) & (x < torch.tensor(self.states.sizes))
        moved = apply(torch.where(real, x, 0), torch.where(real, u, 0))
        table = torch.where(real, moved, x).permute(2, 0, 1)  # padding stays where it is
        return table[:1].clone() if bool((table == table[:1]).all()) else table.contiguous()

    def _check_bijections(self) -> None:
        there, back, k = self.to_base_table, self.to_data_table, self.states.width
        inside = bool(((there >= 0) & (there < k) & (back >= 0) & (back < k)).all())
        if inside:
            there, back = torch.broadcast_tensors(there, back)
        if not inside or bool((torch.gather(back, -1, there) != torch.arange(k)).any()):
            raise ModelError(
                f"to_data must undo to_base within 0..K - 1, for each choice and feature, and that of {type(self).__name__} "
                "does not; compare to_data(to_base(x, u), u) with x for all x and u"
            )

    def keeps(self, features: Tensor) -> bool:
        """Whether u = 0 is the identity for these `features`, booleans (D,)."""
        first = self.to_base_table[:, 0].expand(self.states.features, -1)[
            features.to(self.to_base_table.device)
        ]
        return bool((first == torch.arange(self.states.width, device=first.device)).all())

    def relaxed_to_base(self, x: Tensor, u: Tensor) -> Tensor:
        r"""The multilinear form on encoded states: :math:`y_j = \sum_u u_u\, x_{t_u(j)}`; exact on integers."""
        return self._multilinear(x, u, self.to_data_table)

    def relaxed_to_data(self, y: Tensor, u: Tensor, features: Tensor | None = None) -> Tensor:
        """The inverse direction of `relaxed_to_base` for a hard `u`, for all or for some `features`."""
        table = self.to_base_table
        return self._multilinear(y, u, table if features is None or len(table) == 1 else table[features])

    def _multilinear(self, x: Tensor, u: Tensor, source: Tensor) -> Tensor:
        if self.is_xor:  # any |x - u| or (x + u) % 2 has the wrong slope
            return x + u - 2 * x * u
        if self.states.binary:
            return self._gathered(torch.stack((1 - x, x), -1), u, source)[..., 1]
        return self._gathered(x, u, source)

    def _gathered(self, x: Tensor, u: Tensor, source: Tensor) -> Tensor:
        """The multilinear form on one-hot states (..., D, K)."""
        if self.choices.binary:
            u = torch.stack((1 - u, u), -1)
        batch = torch.broadcast_shapes(x.shape[:-2], u.shape[:-2])
        moved = torch.gather(
            x.unsqueeze(-2).expand(*batch, x.shape[-2], u.shape[-1], x.shape[-1]),
            -1,
            source.expand(*batch, x.shape[-2], *source.shape[1:]),
        )  # (..., D, U, K)
        return (moved * u.unsqueeze(-1)).sum(-2)

    def outcomes(self, table: Tensor, x: Tensor) -> Tensor:
        """For each u, the entry of `table` (D, K) at y = to_base(x, u): (..., D, U), linear in the encoded x."""
        if self.is_xor:
            zero, one = table.unbind(-1)
            # laid out one value of u after the other, so that each is contiguous
            return torch.stack((torch.lerp(zero, one, x), torch.lerp(one, zero, x))).movedim(0, -1)
        if self.states.binary:
            x = torch.stack((1 - x, x), -1)
        moved = torch.gather(
            table.unsqueeze(1).expand(-1, self.choices.width, -1),
            -1,
            self.to_base_table.expand(table.shape[0], -1, -1),
        )  # (D, U, K)
        return torch.einsum("...dk,duk->...du", x, moved)


class ModularShift(Transform):
    r""":math:`y = (x - u) \bmod K`; for K = 2 this is xor, its own inverse.

    >>> shift = ModularShift([3, 3])
    >>> shift.to_base(torch.tensor([0, 2]), torch.tensor([1, 1])).tolist()
    [2, 1]
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__(categories, categories)

    def to_base(self, x: Tensor, u: Tensor) -> Tensor:
        k = torch.tensor(self.states.sizes, device=x.device)
        return (x.long() - u.long()) % k  # int64: a small unsigned type would wrap around at 256, not at K

    def to_data(self, y: Tensor, u: Tensor) -> Tensor:
        return (y.long() + u.long()) % torch.tensor(self.states.sizes, device=y.device)


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

    def __init__(self, categories: Sequence[int], scales: Sequence[int] | None = None) -> None:
        units = [_units(int(k), scales) for k in categories]
        width = max(map(len, units), default=0)  # no feature at all is refused below
        # plain tuples, not buffers: the base class reads them while it builds its tables
        self.scales = tuple(tuple(u + [1] * (width - len(u))) for u in units)  # (D, number of scales)
        self.unscales = tuple(
            tuple(pow(s, -1, int(k)) for s in row) for k, row in zip(categories, self.scales, strict=True)
        )
        self._scales_as_given = None if scales is None else [int(s) for s in scales]
        super().__init__(categories, [int(k) * len(u) for k, u in zip(categories, units, strict=True)])

    def config(self) -> dict[str, Any]:
        return super().config() | {"scales": self._scales_as_given}

    def to_base(self, x: Tensor, u: Tensor) -> Tensor:
        x, u, k = x.long(), u.long(), torch.tensor(self.states.sizes, device=x.device)
        return ((x - u % k) * _select(self.unscales, u // k)) % k

    def to_data(self, y: Tensor, u: Tensor) -> Tensor:
        y, u, k = y.long(), u.long(), torch.tensor(self.states.sizes, device=y.device)
        return (y * _select(self.scales, u // k) + u % k) % k


def _select(table: Sequence[Sequence[int]], index: Tensor) -> Tensor:
    """table[d][index[..., d]] for a table of D rows and an index (..., D)."""
    features = torch.arange(len(table), device=index.device)
    return torch.tensor(table, device=index.device)[features, index]


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
