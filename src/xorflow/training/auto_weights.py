"""Weights of conditionals that are made already: of kinds, the same in all orderings, and of orderings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._states import Alphabet, Layout
from xorflow.data import Split
from xorflow.flows.choices import Choices


def rows_at_once(logits: int) -> int:
    """Of rows with so many logits."""
    return max(64, _MOST_LOGITS // logits)


_MOST_LOGITS = 2**22


@dataclass(frozen=True)
class Weights:
    log_stack: Tensor  # (M, D)
    mixture: Tensor  # (R,)
    nll: float


class Weighing:
    """Fits weights to rows: of kinds, the same in all orderings, and of orderings.

    Columns without trees, which have too many values, have weights of their own.

    Args:
        rows: whose likelihood is meant.
        categories: K_d.
        most: the most values of a column that has trees.
    """

    def __init__(self, rows: Split, categories: Sequence[int], most: int) -> None:
        self.x, self.log_density = rows.values, rows.mean_log_density
        self.layout = Layout(Alphabet(categories)).to(rows.device)
        self.wide = torch.tensor([int(size > most) for size in categories], device=rows.device)
        self.owners = self.layout.alphabet.logit_features.to(rows.device)
        self.rows = rows_at_once(self.layout.alphabet.flat)

    def _mixed(self, logits: Sequence[Sequence[Tensor]], stack: Tensor, mixture: Tensor) -> Iterator[Tensor]:
        """What rows add to the negative log-likelihood, some after the others: all of a wide table would fill memory."""
        weights = stack.exp()[:, self.wide].float()[:, self.owners]
        for first in range(0, len(self.x), self.rows):
            part, each = slice(first, first + self.rows), []
            for of_ordering in logits:
                total = weights[0] * of_ordering[0][part]
                for weight, of_kind in zip(weights[1:], of_ordering[1:], strict=True):
                    total = torch.addcmul(total, weight, of_kind[part])
                each.append(Choices(total, self.layout).log_prob(self.x[part]).double().sum(-1))
            log_p = torch.logsumexp(torch.stack(each) + torch.log_softmax(mixture, 0)[:, None], 0)
            yield -log_p.sum() / len(self.x)

    @torch.no_grad()
    def nll(self, logits: Sequence[Sequence[Tensor]]) -> float:
        """With equal weights of orderings, and logits added up."""
        stack = torch.zeros(len(logits[0]), 2, dtype=torch.float64, device=self.x.device)
        return self._nll(logits, stack, stack.new_zeros(len(logits)))

    def _nll(self, logits: Sequence[Sequence[Tensor]], stack: Tensor, mixture: Tensor) -> float:
        return sum(map(float, self._mixed(logits, stack, mixture))) - self.log_density

    def fit(self, logits: Sequence[Sequence[Tensor]]) -> Weights:
        """The best weights of `logits[ordering][kind]`, each (N, flat), from equal ones on."""
        kinds = len(logits[0])
        like = {"dtype": torch.float64, "device": self.x.device}
        stack = torch.full((kinds, 2), -math.log(kinds), **like)
        if kinds > 1:  # of trees that are frequencies alone, and networks
            stack[:, 1] = torch.tensor([-8.0, 0.0])
        start = stack.clone()
        stack.requires_grad_()
        mixture = torch.zeros(len(logits), **like).requires_grad_()
        optimiser = torch.optim.LBFGS([stack, mixture], max_iter=60, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            # a prior worth about a row for each weight: few rows say little about them
            doubt = (stack - start).square().sum() / 2 - torch.log_softmax(mixture, 0).sum()
            value = doubt / len(self.x)
            value.backward()
            for of_rows in self._mixed(logits, stack, mixture):
                of_rows.backward(
                    retain_graph=True
                )  # the weights are taken of the logarithms once for all rows
                value = value.detach() + of_rows.detach()
            return value

        optimiser.step(loss)
        with torch.no_grad():
            nll = self._nll(logits, stack, mixture)
            return Weights(stack[:, self.wide].float(), mixture.softmax(0), nll)
