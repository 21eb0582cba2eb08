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
    x, offsets = x.cpu(), sizes.cumsum(0) - sizes
    counts = torch.zeros(int(sizes.sum()), int(sizes.sum()))
    for rows in x.split(4096):
        hot = torch.zeros(len(rows), len(counts))
        hot.scatter_(1, rows.long() + offsets, 1.0)
        counts.addmm_(hot.T, hot)
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    each = sizes[owners].double()
    pairs = each[:, None] * each
    same = owners[:, None] == owners
    pseudo = torch.where(same, torch.eye(len(owners)).double() / each, 1 / pairs)
    p = (counts.double() + pseudo) / (len(x) + 1)
    log_p = p.log()
    alone = log_p.diagonal()
    gain = torch.where(p > 0, p * (log_p - alone[:, None] - alone), 0.0)
    blocks = torch.zeros(len(owners), len(sizes), dtype=torch.float64)
    blocks[torch.arange(len(owners)), owners] = 1
    return ChowLiu(_tree(blocks.T @ gain @ blocks), log_p, offsets)


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
