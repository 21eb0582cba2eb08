r"""A start in which the layers before the last write what the last one, trained already, gains most from.

On a fixed base a feature that never varies costs :math:`-\log(1 - \beta)`, however certain it is, and one flip among N such
features costs :math:`\log\frac{1-\beta}{\beta}` more, whichever it is: 2.2 nats on the base 0.9 / 0.1. Yet it can say
:math:`\log N` nats, 5.5 for 250 blank pixels around a digit. So a layer that sees the data may flip a blank feature, a slot, by
what it sees, and the last layer, which meets the slots first in its ordering, knows more of the data before it comes to them.

What should the flip say? A flipped slot k shifts the last layer's logits by a word :math:`w_k`, through direct connections, and
changes the log-likelihood of a row, on the base that the flow is read on, by :math:`s(u)`, prices included. The layer that
writes flips slot k with chance :math:`\sigma(a_k(x))`, independently of the others, so that for any rows u of a set U

.. math:: \log \sum_u p(u)\, e^{s(u)} \;\ge\; \log \sum_{u \in U} e^{a \cdot u + s(u)} - \sum_k \log\big(1 + e^{a_k}\big).

With U all rows of at most two flips among the slots that would be worth most, likely to be written or not, this is what the
writer and the words are trained by: no choice is drawn, and what should be written is known at once.

From noise near the identity nothing of the kind is found: flips cost something at once, and are worth something only once the
last layer has learned to read them. The words are therefore fitted first, to a writer that always picks the best one; then the
writer is taught what that would pick.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from xorflow.conditioners import MADE
from xorflow.conditioners.base import Conditioner, Source
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow

_STILL = 0.002
"""A feature that differs from its usual value in fewer rows than this hardly varies."""
_FLIPS = 2
"""At most, of a row, in all layers that write; at least one in each."""
_PASSES = 20
"""Over the data, of each layer that writes."""
_OF_WORDS, _OF_TEACHING = 0.2, 0.2
"""The parts of them in which the words alone are fitted, and then the writer alone, to the best of them."""
_BATCH, _RATE, _RATE_OF_WORDS = 256, 2e-3, 2e-2
_LEAST_STEPS = 200
_QUIET, _SILENT = -7.0, -20.0
"""The logits at which flips of slots, and of all other features, begin."""
_LOUD = 2.0
"""How much of a row's own residual its word begins with."""
_CHOSEN = 3
"""Slots that are considered for each flip of a row."""
_LEAK = 0.05
"""The part of a plain likelihood in what a word is worth: a feature that the base holds certain has no gradient otherwise."""


def few_flips(logits: Tensor, chosen: Tensor, subsets: Tensor, gains: Tensor) -> Tensor:
    """log of the sum of p(u) exp(gain) over some rows u (B,).

    Args:
        logits: (B, N) of the flips.
        chosen: (B, C) the slots that may be flipped.
        subsets: (M, C) which of them each of the rows flips, as zeros and ones.
        gains: (B, M) what each is worth.
    """
    return (logits.gather(-1, chosen) @ subsets.T + gains).logsumexp(-1) - softplus(logits).sum(-1)


def subsets_of(count: int, most: int) -> Tensor:
    """All ways (M, count) to take at most so many of some, as zeros and ones; none comes first.

    >>> subsets_of(2, 1).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    ways = [way for size in range(most + 1) for way in itertools.combinations(range(count), size)]
    return torch.tensor([[float(place in way) for place in range(count)] for way in ways])


def start_from_code(
    flow: LatentFlow, train: Split, device: torch.device, *, p0: float, seed: int = 0
) -> None:
    """Fit the layers before the last to write a code, and the last one to read it. The flow comes back where it was.

    Args:
        flow: binary, of at least two layers, all with an ordering; the last one trained, a MADE with direct connections.
        train: the data.
        device: where to compute.
        p0: the probability of 0 on the base that the flow is to be read on, by which flips are priced.
        seed: of the rows and the choices drawn.
    """
    _check(flow)
    home = flow.device
    flow.to(device)
    rows = _Rows(train, device, torch.Generator(device).manual_seed(seed))
    slots = choose_slots(rows, flow)
    reader = flow.layers[-1].conditioner
    assert isinstance(reader, MADE)
    every = torch.cat(slots)
    reader.connect_directly(every, torch.zeros(len(every), flow.features, device=device))
    steps = max(_LEAST_STEPS, _PASSES * len(rows) // _BATCH)
    flips = max(1, _FLIPS // (flow.depth - 1))
    for index, own in enumerate(slots):
        words = _Fit(flow, index, own, flips, p0, rows).run(steps)
        reader.connect_directly(own, words)
    flow.to(home)


def _check(flow: LatentFlow) -> None:
    reader = flow.layers[-1].conditioner
    ordered = all(layer.conditioner.order is not None for layer in flow.layers)
    plain = all(set(layer.conditioner.sees) == {Source.STATE} for layer in flow.layers)
    direct = isinstance(reader, MADE) and reader.skip is not None and not reader.context_features
    if flow.depth < 2 or not flow.states.binary or not (ordered and plain and direct):
        raise ConfigError(
            "code_p0 is for flows of two layers or more on binary data without context, all in orderings, each seeing the "
            "state, the last a MADE with direct connections: give --layers 2 --direct, or leave --code-p0 out"
        )


def choose_slots(rows: _Rows, flow: LatentFlow) -> list[Tensor]:
    """For each layer that writes, features that hardly vary, of the first half of the last layer's ordering.

    A layer's slots come before those of the next one in its ordering, if all that write have one: the next sees them.
    """
    ones = rows.draw(20_000).mean(0)
    varies = torch.minimum(ones, 1 - ones)
    first = _order(flow.layers[-1].conditioner, ones.device)[: flow.features // 2]
    count = max(int((varies[first] < _STILL).sum()), len(first) // 2)
    chosen = torch.zeros(flow.features, dtype=torch.bool, device=ones.device)
    chosen[first[varies[first].argsort(stable=True)[:count]]] = True
    writing = _order(flow.layers[0].conditioner, ones.device)
    return list(writing[chosen[writing]].tensor_split(flow.depth - 1))


def _order(conditioner: Conditioner, device: torch.device) -> Tensor:
    return torch.tensor(conditioner.order, device=device)


class _Fit:
    """Of the layer `index` of a flow to its slots, and of their words."""

    def __init__(
        self, flow: LatentFlow, index: int, slots: Tensor, flips: int, p0: float, rows: _Rows
    ) -> None:
        self.flow, self.index, self.slots, self.rows = flow, index, slots, rows
        self.writer, self.reader = flow.layers[index].conditioner, flow.layers[-1].conditioner
        self.flips = flips
        self.subsets = subsets_of(min(flips * _CHOSEN, len(slots)), flips).to(slots.device)
        left = torch.ones(flow.features, dtype=torch.bool, device=slots.device)
        left[slots] = False
        self.others = left.nonzero().flatten()  # which must not be flipped
        self.low = 1 - p0
        self.price = math.log(p0 / (1 - p0))
        rank = _order(self.reader, slots.device).argsort()
        # (N, D): what the last layer's ordering lets a word say
        self.reach = (rank[None, :] > rank[slots, None]).float()
        self.words = torch.zeros(len(slots), flow.features, device=slots.device, requires_grad=True)

    def run(self, steps: int) -> Tensor:
        """The words (N, D); the layer is fitted in place."""
        self._begin()
        writer = list(self.writer.parameters())
        of_words, of_teaching = int(_OF_WORDS * steps), int(_OF_TEACHING * steps)
        for x, logits in self._batches({_RATE_OF_WORDS: [self.words]}, of_words):
            self._minimise(-self._best_words(x, logits))
        for x, logits in self._batches({_RATE: writer}, of_teaching):
            self._minimise(self._taught(x, logits))
        both = {_RATE: writer, _RATE_OF_WORDS / 4: [self.words]}
        for x, logits in self._batches(both, steps - of_words - of_teaching):
            self._minimise(-self._bound(x, logits))
        return (self.words * self.reach).detach()

    @torch.no_grad()
    def _begin(self) -> None:
        """Quiet flips, and words that are what the last layer did not expect of some rows."""
        quiet = torch.full((self.flow.features,), _SILENT, device=self.slots.device)
        quiet[self.slots] = _QUIET
        self.writer.start_at(quiet)
        x = self._states(self.rows.draw(len(self.slots)))
        one = torch.sigmoid(self._reads(x))
        found = _LOUD * (x - one) * self._reachable(one)
        self.words[: len(found)] = found

    def _batches(
        self, rates: Mapping[float, Sequence[Tensor]], steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self._optimiser = torch.optim.Adam([{"params": params, "lr": rate} for rate, params in rates.items()])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimiser, max(1, steps))
        for _ in range(steps):
            with torch.no_grad():
                x = self._states(self.rows.draw(_BATCH))
                logits = self._reads(x)
            yield x, logits
            schedule.step()

    def _minimise(self, losses: Tensor) -> None:
        self._optimiser.zero_grad()
        losses.mean().backward()
        self._optimiser.step()

    def _states(self, x: Tensor) -> Tensor:
        """Rows as the layers before this one leave them."""
        if self.index == 0:
            return x
        noise = self.rows.noise((len(x), self.index, self.flow.features))
        return self.flow.run(x, draws=noise, stop=self.index).end.state

    def _reads(self, x: Tensor) -> Tensor:
        """The log-odds of every feature by the last layer, its own slots left out."""
        beta = torch.sigmoid(self.flow.base.logits)
        flip = torch.sigmoid(self.reader({Source.STATE: x}))
        return torch.logit(beta + (1 - 2 * beta) * flip, eps=1e-6)

    def _best_words(self, x: Tensor, logits: Tensor) -> Tensor:
        """What the best words gain (B,), one after the other."""
        words, taken = self.words * self.reach, x[:, self.slots]
        total, logits = self._already(x, logits, words, taken)
        for _ in range(self.flips):
            gain, flip = self._best(x, logits, words, taken)
            total = total + gain
            logits = logits + flip @ words.detach()
        return total

    def _taught(self, x: Tensor, logits: Tensor) -> Tensor:
        """What the writer misses (B,) of the best flips, as far as they are worth their price."""
        with torch.no_grad():
            words, taken = self.words * self.reach, x[:, self.slots]
            _, logits = self._already(x, logits, words, taken)
            target = torch.zeros_like(x)
            for _ in range(self.flips):
                gain, flip = self._best(x, logits, words, taken)
                flip = flip * (gain > 0)[:, None]
                target[:, self.slots] += flip.abs()
                logits = logits + flip @ words
        written = self.writer({Source.STATE: x})
        return binary_cross_entropy_with_logits(written, target.clamp(max=1), reduction="none").sum(-1)

    def _bound(self, x: Tensor, logits: Tensor) -> Tensor:
        """What the flips gain (B,), by the part of them that are few and promising."""
        words, taken = self.words * self.reach, x[:, self.slots]
        written = self.writer({Source.STATE: x})
        total, logits = self._already(x, logits, words, taken)
        chosen = self._promising(x, logits, words, taken)
        sign = 1 - 2 * taken.gather(-1, chosen)
        shifts = self.subsets @ (sign[..., None] * words[chosen])  # (B, M, D)
        after = self._worth(x[:, None], logits[:, None] + shifts)
        gains = after - self._worth(x, logits)[:, None] - self.price * (sign @ self.subsets.T)
        bound = few_flips(written[:, self.slots], chosen, self.subsets, gains)
        return total + bound - softplus(written[:, self.others]).sum(-1)

    def _already(self, x: Tensor, logits: Tensor, words: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """What slots that the data themselves take are worth, and the logits with them."""
        shifted = logits + taken @ words
        return self._worth(x, shifted) - self._worth(x, logits), shifted

    def _worth(self, x: Tensor, logits: Tensor) -> Tensor:
        """The log-likelihood of rows on the base that is read on; certain features keep a little of their gradient."""
        signed = logits * (2 * x - 1)
        within = torch.sigmoid(signed).clamp(self.low, 1 - self.low).log()
        return (within + _LEAK * logsigmoid(signed)).sum(-1)

    def _reachable(self, one: Tensor) -> Tensor:
        """Where the base leaves room: elsewhere a feature is certain, and nothing can be gained."""
        return ((one > self.low) & (one < 1 - self.low)).to(one.dtype)

    @torch.no_grad()
    def _guess(self, x: Tensor, logits: Tensor, words: Tensor, taken: Tensor) -> Tensor:
        """To second order, what the flip of each slot is worth (B, N)."""
        one = torch.sigmoid(logits)
        residual, variance = (x - one) * self._reachable(one), one * (1 - one)
        return (1 - 2 * taken) * (residual @ words.T - self.price) - 0.5 * variance @ words.square().T

    @torch.no_grad()
    def _promising(self, x: Tensor, logits: Tensor, words: Tensor, taken: Tensor) -> Tensor:
        """Slots (B, C) that are worth most, and those that are once the best of them is flipped, and so on."""
        found: list[Tensor] = []
        free = torch.ones_like(taken)
        while sum(part.shape[-1] for part in found) < self.subsets.shape[-1]:
            guess = self._guess(x, logits, words, taken).masked_fill(free == 0, -math.inf)
            left = self.subsets.shape[-1] - sum(part.shape[-1] for part in found)
            found.append(guess.topk(min(_CHOSEN, left), -1).indices)
            free = free.scatter(-1, found[-1], 0)
            best = found[-1][:, :1]
            logits = logits + (1 - 2 * taken.gather(-1, best)) * words[best[:, 0]]
        return torch.cat(found, -1)

    def _best(self, x: Tensor, logits: Tensor, words: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """What the best flip is worth (B,), and that flip (B, N): 1 where a slot is taken, -1 where one is given up."""
        chosen = self._guess(x, logits, words, taken).topk(min(_CHOSEN, len(words)), -1).indices
        sign = 1 - 2 * taken.gather(-1, chosen)
        after = self._worth(x[:, None], logits[:, None] + sign[..., None] * words[chosen])
        gains = after - self._worth(x, logits)[:, None] - sign * self.price
        gain, place = gains.max(-1, keepdim=True)
        flip = torch.zeros_like(taken).scatter(-1, chosen.gather(-1, place), sign.gather(-1, place))
        return gain[:, 0], flip


class _Rows:
    """Training rows on a device in any order, grey values binarised afresh, and noise, all from one generator."""

    def __init__(self, train: Split, device: torch.device, generator: torch.Generator) -> None:
        self._split, self._generator = train.to(device), generator

    def __len__(self) -> int:
        return len(self._split)

    def draw(self, count: int) -> Tensor:
        """So many rows (count, D), or all of them if there are fewer, with replacement."""
        count = min(count, len(self))
        index = torch.randint(len(self), (count,), generator=self._generator, device=self._split.device)
        return self._split.gather(index, generator=self._generator).x.float()

    def noise(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._split.device)
