"""Weights of conditionals that are made already: of kinds, the same in all orderings, and of orderings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._states import Alphabet, Layout
from xorflow.data import Split
from xorflow.flows.choices import Choices


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

    def _mixed(self, logits: Sequence[Sequence[Tensor]], stack: Tensor, mixture: Tensor) -> Tensor:
        weights = stack.exp()[:, self.wide].float()[:, self.owners]
        each = []
        for of_ordering in logits:
            total = weights[0] * of_ordering[0]
            for weight, of_kind in zip(weights[1:], of_ordering[1:], strict=True):
                total = torch.addcmul(total, weight, of_kind)
            each.append(Choices(total, self.layout).log_prob(self.x).double().sum(-1))
        log_p = torch.logsumexp(torch.stack(each) + torch.log_softmax(mixture, 0)[:, None], 0)
        return -log_p.mean() - self.log_density

    @torch.no_grad()
    def nll(self, logits: Sequence[Sequence[Tensor]]) -> float:
        """With equal weights of orderings, and logits added up."""
        stack = torch.zeros(len(logits[0]), 2, dtype=torch.float64, device=self.x.device)
        return float(self._mixed(logits, stack, stack.new_zeros(len(logits))))

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
            value = self._mixed(logits, stack, mixture)
            # a prior worth about a row for each weight: few rows say little about them
            doubt = (stack - start).square().sum() / 2 - torch.log_softmax(mixture, 0).sum()
            value = value + doubt / len(self.x)
            value.backward()
            return value

        optimiser.step(loss)
        with torch.no_grad():
            nll = float(self._mixed(logits, stack, mixture))
            return Weights(stack[:, self.wide].float(), mixture.softmax(0), nll)
