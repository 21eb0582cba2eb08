r"""The best tree of columns: what a model should be better than.

.. math:: p(x) = \prod_d p(x_d \mid x_{\mathrm{parent}(d)})

Of all trees, the one with the greatest sum of mutual informations along its edges has the greatest likelihood (Chow and Liu,
1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._math import pair_information

_MOST = 2**13
"""Values of all columns together; with more the table of all pairs would not fit into memory."""


@dataclass(frozen=True)
class ChowLiu:
    """A tree of columns with its probabilities.

    Attributes:
        parents: of each column; column 0 is the root, and its own.
        log_p: log p(x_d = a, x_e = b) for all pairs of values, in the order of columns, (F, F).
        offsets: where the values of each column begin, (D,).
    """

    parents: Tensor
    log_p: Tensor
    offsets: Tensor

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of rows (N, D), (N,) float64."""
        places = x.cpu().long() + self.offsets
        above = places[:, self.parents]
        alone = self.log_p.diagonal()
        # that of the root given itself is zero
        return (self.log_p[places, above] - alone[above]).sum(-1) + alone[places[:, 0]]


def chow_liu(x: Tensor, categories: Sequence[int]) -> ChowLiu | None:
    """The tree of rows (N, D), every pair of values counted with a pseudo-row in all; None if there are too many values."""
    sizes = torch.tensor(tuple(categories))
    if int(sizes.sum()) > _MOST:
        return None
    log_p, information = pair_information(x.cpu(), sizes)
    return ChowLiu(_tree(information), log_p, sizes.cumsum(0) - sizes)


def _tree(information: Tensor) -> Tensor:
    """The parents in the tree with the greatest sum, from column 0 on."""
    parents, best = torch.zeros(len(information), dtype=torch.int64), information[0].clone()
    left = torch.ones(len(information), dtype=torch.bool)
    left[0] = False
    while bool(left.any()):
        following = int(torch.where(left, best, -torch.inf).argmax())
        left[following] = False
        closer = left & (information[following] > best)
        parents[closer], best[closer] = following, information[following][closer]
    return parents
