"""The factorised distribution of `y`, where every flow ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from xorflow._repr import as_call
from xorflow._states import Alphabet, Layout, add_buffers, by_inversion, per_feature
from xorflow.errors import ModelError

_LEAST = 1e-300
"""What a probability of zero is taken for, so that its logarithm is finite."""


class FactorisedBase(nn.Module):
    r""":math:`p_Y(y) = \prod_d p_d(y_d)`, fixed or learned.

    Its parameters are packed logits; or, `tied`, one log-odds a feature, of any category but 0, which share that probability
    evenly: then the conditionals of a flow of depth 1 are linear in K, and never zero, however many categories there are.

    Args:
        features: D.
        p0: the probability of category 0, the other categories share the rest evenly; 0.9 is the paper's.
        categories: K, or K_d for each feature.
        learned: whether training may change it.
        tied: whether the categories but 0 stay equally probable.
        probabilities: start from these instead of from `p0`: K_d for each feature, (D, K) where rows may be padded.

    >>> base = FactorisedBase(784)
    >>> round(float(base.floor()), 3)  # no flow on this base has a smaller negative log-likelihood
    82.603
    """

    offsets: Tensor  # where each feature's probabilities begin among all, (D,)

    def __init__(
        self,
        features: int,
        p0: float = 0.9,
        *,
        categories: int | Sequence[int] = 2,
        learned: bool = False,
        tied: bool = False,
        probabilities: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.states = Alphabet(per_feature(categories, features, "categories"))
        self.learned, self.tied = learned, tied
        self.layout = Layout(self.states)
        if tied and probabilities is not None:
            raise ModelError("a tied base has one probability a feature, p0; leave probabilities or tied out")
        if not 0 < p0 < 1:
            raise ModelError(f"p0 is a probability strictly between 0 and 1, and got {p0}")
        if probabilities is None:
            rows = [_even_rest(p0, 2 if tied else size) for size in self.states.sizes]
        else:
            rows = self._checked(probabilities)
        visited, sizes = self.layout.visited, torch.tensor(self.states.sizes)[self.layout.visited]
        offsets = torch.empty_like(visited).scatter_(0, visited, sizes.cumsum(0) - sizes)
        add_buffers(self, offsets=offsets)
        start = self._start_at(rows).to(torch.get_default_dtype())
        self.logits = nn.Parameter(start, requires_grad=learned)

    @property
    def features(self) -> int:
        return self.states.features

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON; the probabilities themselves are weights."""
        return {
            "features": self.features,
            "categories": self.states.short(),
            "learned": self.learned,
            "tied": self.tied,
        }

    @torch.no_grad()
    def __repr__(self) -> str:
        zero = torch.stack([self.log_probs_of(d)[0] for d in range(self.features)]).exp()
        ends = dict.fromkeys(f"{float(end):.4g}" for end in (zero.min(), zero.max()))
        settings = {name: value for name, value in self.config().items() if name != "features"}
        return as_call(self, settings, f"{self.features}, p0={' to '.join(ends)}")

    def _checked(self, probabilities: Tensor | Sequence[Tensor]) -> list[Tensor]:
        shapes, sizes = [tuple(row.shape) for row in probabilities], self.states.sizes
        if len(shapes) != len(sizes) or any(
            len(s) != 1 or s[0] < k for s, k in zip(shapes, sizes, strict=True)
        ):
            raise ModelError(
                f"base probabilities are (D, K), and each of {self.features} features needs as many as it has categories; "
                f"got {shapes[:8]}"
            )
        rows = [row[:size].double().cpu() for row, size in zip(probabilities, sizes, strict=True)]
        if not all(bool((row >= 0).all()) and abs(float(row.sum()) - 1) < 1e-6 for row in rows):
            raise ModelError(
                "base probabilities are non-negative and sum to 1 for each feature; these do not"
            )
        return rows

    def _start_at(self, rows: Sequence[Tensor]) -> Tensor:
        """The parameters that give these probabilities, float64; a tied base reads those of category 0."""
        if self.tied:
            zero = torch.stack([row[0] for row in rows]).double()
            return (1 - zero).clamp_min(_LEAST).log() - zero.clamp_min(_LEAST).log()
        by_group = []
        for group in self.states.groups:
            logs = torch.stack([rows[d] for d in group.features]).clamp_min(_LEAST).log()
            by_group.append(logs[:, 1] - logs[:, 0] if group.binary else logs)
        return self.layout.packed(by_group)

    @torch.no_grad()
    def set_probabilities(self, rows: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Take these probabilities, K_d for each feature, for all features or `where` (D,) says so."""
        chosen = torch.ones(self.features, dtype=torch.bool) if where is None else where.cpu()
        if not self.tied:
            chosen = chosen[self.states.logit_features]
        self.logits[chosen] = self._start_at(rows)[chosen].to(self.logits)

    def log_table(self) -> list[Tensor]:
        """log p_d(k), by group (n, K)."""
        by_group = self.layout.split(self.logits) if self.tied else self.layout.logits(self.logits)
        return [self._log_probs(g.size, logits) for g, logits in self.states.grouped(by_group)]

    def log_probs_of(self, feature: int) -> Tensor:
        """log p_d(k) of one feature, (K_d,)."""
        size, first = self.states.sizes[feature], self.states.first_logits[feature]
        if self.tied:
            return self._log_probs(size, self.logits[feature])
        return self._log_probs(size, self.logits[first] if size == 2 else self.logits[first : first + size])

    def _log_probs(self, size: int, logits: Tensor) -> Tensor:
        """(..., K), from log-odds (...) where the base is tied or of bits, and else from logits (..., K)."""
        if size == 2:
            return torch.stack((logsigmoid(-logits), logsigmoid(logits)), -1)
        if not self.tied:
            return torch.log_softmax(logits, -1)
        if size == 1:
            return torch.zeros_like(logits).unsqueeze(-1)
        rest = logsigmoid(logits).unsqueeze(-1) - math.log(size - 1)
        return torch.cat((logsigmoid(-logits).unsqueeze(-1), rest.expand(*logits.shape, size - 1)), -1)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p_d(y_d) for integers y, (..., D)."""
        values = []
        for group, table, of_group in self.states.grouped(self.log_table(), self.layout.split(y)):
            if group.binary:
                values.append(of_bits(table, of_group))
            else:
                values.append(table[torch.arange(len(table), device=table.device), of_group.long()])
        return self.layout.joined(values)

    def log_probs_at(self, states: Sequence[Tensor], alphabet: Alphabet) -> list[Tensor]:
        """log p_d of several states of each feature, (..., n, U) by the groups of an alphabet; int64."""
        values = torch.cat([table.flatten() for table in self.log_table()])
        places = [
            of_group + self.offsets[list(group.features)][:, None]
            for group, of_group in alphabet.grouped(states)
        ]
        return [values.index_select(0, place.flatten()).view_as(place) for place in places]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Integers y (..., D) by inverting the distribution function at `uniforms` (..., D)."""
        states = []
        for table, uniform in zip(self.log_table(), self.layout.split(uniforms), strict=True):
            states.append(by_inversion(table.detach().exp(), uniform))
        return self.states.integers(self.layout.joined(states))

    @torch.no_grad()
    def floor(self) -> Tensor:
        r"""The least negative log-likelihood of any flow on this base, :math:`-\max_y \log p_Y(y)`, in nats."""
        return -torch.stack([table.amax(-1).double().sum() for table in self.log_table()]).sum()

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """The entropy of y, which is also that of x for every deterministic flow on this base, in nats."""
        tables = [table.double() for table in self.log_table()]
        return -torch.stack([(table.exp() * table).sum() for table in tables]).sum()


def _even_rest(p0: float, size: int) -> Tensor:
    """Probabilities (K,) that categories but 0 share evenly."""
    row = torch.full((size,), (1 - p0) / max(size - 1, 1), dtype=torch.float64)
    row[0] = p0 if size > 1 else 1.0
    return row


def of_bits(table: Tensor, y: Tensor) -> Tensor:
    """What a table (n, 2) has for bits y (..., n), or between its entries for relaxed ones."""
    y = y.to(table.dtype)
    return y * table[:, 1] + (1 - y) * table[:, 0]
