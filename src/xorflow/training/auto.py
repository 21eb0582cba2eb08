r"""The best exact density of a table that a budget of time allows, with nothing to choose.

In each ordering of the columns there are two kinds of conditionals, boosted trees and a MADE. Their logits are stacked, and the
orderings mixed,

.. math:: p(x) = \sum_r \pi_r \prod_d \text{softmax}\Big(\sum_m w_m\, \text{logits}_{r,m,d}(x)\Big)_{x_d},

with weights that maximise the likelihood of the validation rows. Trees are better where rows are few, networks where there are
many, and both together better than each.

Work is done in units, one kind of conditionals in one ordering. What a unit gives depends neither on the clock nor on the
number of cores; the clock only decides whether another ordering is begun. So a record of how many were made repeats the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xorflow._states import Alphabet, Layout
from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, BoostedTrees, Boosting, Conditioner, Source, Stacked
from xorflow.conditioners.boosting import available
from xorflow.data import Dataset, Split
from xorflow.data.columns import Number
from xorflow.errors import ConfigError
from xorflow.estimators import MaximumLikelihood
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.flows.choices import Choices
from xorflow.training.build import init_from_data
from xorflow.training.config import Options
from xorflow.training.registry import Trainable
from xorflow.training.trainer import Trainer

MOST_ORDERINGS = 8
"""More gain little, and scoring takes its time for each."""

_OF_TIME = 0.8
"""The share of the budget after which no ordering ends: weights are fitted, and rows evaluated, in the rest."""

_WORTH = 3e-4
"""A kind of conditionals whose loss worsens the validation likelihood by less, relatively, is left out."""

_FEW_ROWS = 500
"""With fewer rows a column dropout is tried."""

_NEARLY_CERTAIN = 1 - 1e-6
"""The base: x is about what the one layer chooses, and no value of a column has a probability of zero."""


@dataclass(frozen=True)
class Network:
    """How a MADE is made and trained: at one rate, with the average of its weights in place of a rate that falls."""

    hidden: int = 256
    dropout: float = 0.0
    input_dropout: float = 0.0
    lr: float = 0.01
    weight_decay: float = 0.1
    average: float = 0.99
    epochs: int = 100
    patience: int = 6


_PLAIN = Network()
_DROPOUT = Network(dropout=0.3, input_dropout=0.1, lr=0.002)

TREES, PLAIN, DROPOUT = "trees", "network", "network with dropout"


@dataclass
class _Unit:
    """A kind of conditionals in one ordering, with its logits for the validation rows."""

    kind: str
    order: str
    net: Conditioner
    logits: Tensor
    nll: float
    seconds: float
    more: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Plain values."""
        kept = {"kind": self.kind, "order": self.order, "validation_nll": self.nll, "seconds": self.seconds}
        return kept | self.more


@dataclass(frozen=True)
class Auto:
    """What was made, and the record of it: what was tried, chosen and why, as JSON."""

    model: Trainable
    record: dict[str, Any]


def auto_fit(
    dataset: Dataset,
    *,
    minutes: float = 2.0,
    orderings: int | None = None,
    seed: int = 0,
    ordered: Sequence[int] | None = None,
    observer: Callable[[dict[str, Any]], None] | None = None,
) -> Auto:
    """The best model of a data set that some minutes allow, everything counted but reading the data.

    Args:
        dataset: with validation rows, which choose everything.
        minutes: no ordering is begun that would not end, with all that follows, in this time.
        orderings: exactly so many instead, however long they take: with the number in a record, the very model of that.
        seed: of networks, and of which orderings there are beside the data's own.
        ordered: the columns whose values have an order; of a table, by default, its numbers and times.
        observer: is told the record of each unit.

    Raises:
        ConfigError: without validation rows, or with context.
    """
    if dataset.validation is None or dataset.context_features or dataset.train.stochastic:
        raise ConfigError(
            "the recipe auto is for tables of fixed values, without context, and chooses by validation rows; keep some back "
            "(validation), or choose a conditioner"
        )
    if dataset.stream is not None:
        raise ConfigError(
            "the recipe auto has all rows in memory, and these are read from their files: choose a conditioner, or stream=never"
        )
    if orderings is not None and not 1 <= orderings <= MOST_ORDERINGS:
        raise ConfigError(f"the recipe auto has 1 to {MOST_ORDERINGS} orderings; got {orderings}")
    if ordered is None:
        schema = dataset.schema
        ordered = [d for d, c in enumerate(schema.columns) if isinstance(c, Number)] if schema else []
    with _one_thread() as threads:
        search = _Search(dataset, seed, ordered, threads, observer)
        return search.run(60 * minutes, orderings)


@contextmanager
def _one_thread() -> Iterator[int]:
    """Within this block torch sums in one sequence, whatever the number of cores, which is handed over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


class _Search:
    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        ordered: Sequence[int],
        threads: int,
        observer: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        assert dataset.validation is not None
        self.dataset, self.seed, self.ordered, self.threads = dataset, seed, ordered, threads
        self.validation: Split = dataset.validation
        self.observer = observer
        rows, columns = dataset.train.values.shape
        self.kinds = [TREES] if available() else []
        self.kinds += [PLAIN, DROPOUT] if rows < _FEW_ROWS * columns else [PLAIN]
        self.units: list[_Unit] = []
        self.reasons: list[str] = [] if available() else ["no boosted trees: pip install 'xorflow[trees]'"]
        self.weighing = _Weighing(self.validation, dataset.categories, Boosting().most)

    def run(self, seconds: float, orderings: int | None) -> Auto:
        began = time.monotonic()
        longest, made = 0.0, 0
        ends = "so many orderings were asked for"
        while made < (orderings or MOST_ORDERINGS):
            started = time.monotonic()
            if made and orderings is None and started - began + 1.1 * longest > _OF_TIME * seconds:
                ends = "another ordering would not have ended in time"
                break
            units = self._ordering("natural" if made == 0 else f"random:{MOST_ORDERINGS * self.seed + made}")
            made += 1
            if made == 1:
                units = self._choose(units)
            self.units += units
            # of the first ordering those kinds that others have, which are made side by side
            spent = max(unit.seconds for unit in units) if made == 1 else time.monotonic() - started
            longest = max(longest, spent)
        else:
            ends = ends if orderings else "more orderings gain little"
        return self._finished(made, ends, began)

    def _ordering(self, order: str) -> list[_Unit]:
        """All kinds in one ordering: trees on other threads, while networks train."""
        with ThreadPoolExecutor(1) as pool:
            trees: Future[_Unit] | None = pool.submit(self._trees, order) if TREES in self.kinds else None
            networks = [self._network(order, kind) for kind in self.kinds if kind != TREES]
            units = ([] if trees is None else [trees.result()]) + networks
        for unit in units:
            if self.observer:
                self.observer(unit.record())
        return units

    def _trees(self, order: str) -> _Unit:
        began, data = time.monotonic(), self.dataset
        net = BoostedTrees(data.features, categories=data.categories, order=order, ordered=self.ordered)
        net.fit(data.train.values, self.validation.values, threads=self.threads)
        return self._unit(TREES, order, net, began, trees=sum(net.trees))

    def _network(self, order: str, kind: str) -> _Unit:
        began, data = time.monotonic(), self.dataset
        settings = _DROPOUT if kind == DROPOUT else _PLAIN
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = MADE(
                data.features,
                (settings.hidden,),
                order=order,
                categories=data.categories,
                direct=True,
                dropout=settings.dropout,
                input_dropout=settings.input_dropout,
            )
            flow = self._flow(net)
        init_from_data(flow, data.train)
        options = Options(
            data=data.name,
            layers=None,
            optimiser="adamw",
            lr=settings.lr,
            schedule="constant",
            weight_decay=settings.weight_decay,
            average=settings.average,
            epochs=settings.epochs,
            patience=settings.patience,
            batch_size=_batch_size(len(data.train)),
            seed=self.seed,
            device=str(data.train.device),
        )
        trainer = Trainer(flow, MaximumLikelihood(), data, options)
        trainer.train()
        flow.eval()
        return self._unit(kind, order, net, began, epochs=trainer.progress.best_epoch)

    def _unit(self, kind: str, order: str, net: Conditioner, began: float, **more: Any) -> _Unit:
        logits = _logits(net, self.validation)
        nll = self.weighing.nll([[logits]])
        return _Unit(kind, order, net, logits, nll, round(time.monotonic() - began, 3), more)

    def _flow(self, net: Conditioner) -> LatentFlow:
        base = FactorisedBase(
            self.dataset.features, _NEARLY_CERTAIN, categories=self.dataset.categories, tied=True
        )
        return LatentFlow([Layer(net)], base)

    def _choose(self, units: list[_Unit]) -> list[_Unit]:
        """Which kinds the other orderings have, by the validation likelihood of the first."""
        networks = [unit for unit in units if unit.kind != TREES]
        best = min(networks, key=lambda unit: unit.nll)
        for unit in networks:
            if unit is not best:
                self.reasons.append(
                    f"{best.kind} and not {unit.kind}: {best.nll:.4g} and {unit.nll:.4g} nats"
                )
        kept = [unit for unit in units if unit is best or unit.kind == TREES]
        together = self.weighing.fit([[unit.logits for unit in kept]]).nll
        for unit in list(kept):
            others = [other for other in kept if other is not unit]
            if not others:
                break
            without = self.weighing.fit([[other.logits for other in others]]).nll
            if without - together < _WORTH * (together + self.weighing.log_density):
                self.reasons.append(f"no {unit.kind}: {without:.5g} nats without, {together:.5g} with")
                kept = others
        self.kinds = [unit.kind for unit in kept]
        return kept

    def _finished(self, made: int, ends: str, began: float) -> Auto:
        count = len(self.kinds)
        by_ordering = [self.units[first : first + count] for first in range(0, len(self.units), count)]
        weights = self.weighing.fit([[unit.logits for unit in units] for units in by_ordering])
        flows = []
        for units in by_ordering:
            net = Stacked([unit.net for unit in units])
            with torch.no_grad():
                net.log_weights.copy_(weights.log_stack)
            flows.append(self._flow(net.to(self.validation.device)).to(self.validation.device).eval())
        model = flows[0] if made == 1 else Mixture(flows, weights.mixture).eval()
        stacked = zip(self.kinds, weights.log_stack[:, 0].exp().tolist(), strict=True)
        record = {
            "orderings": made,
            "ends": ends,
            "kinds": {kind: round(weight, 4) for kind, weight in stacked},
            "weights": {
                units[0].order: round(float(weight), 4)
                for units, weight in zip(by_ordering, weights.mixture, strict=True)
            },
            "reasons": self.reasons,
            "units": [unit.record() for unit in self.units],
            "validation_nll": weights.nll,
            "seconds": round(time.monotonic() - began, 3),
        }
        return Auto(model, record)


def _batch_size(rows: int) -> int:
    """Some hundred steps an epoch, of few rows or many.

    >>> [_batch_size(rows) for rows in (1_000, 20_000, 300_000)]
    [64, 256, 1024]
    """
    return min(1024, max(64, 2 ** round(math.log2(rows / 60))))


@torch.no_grad()
def _logits(net: Conditioner, split: Split) -> Tensor:
    net = net.to(split.device).eval()
    return torch.cat([net({Source.STATE: batch.x}).float() for batch in split.batches(4096)])


# ---- weights ----


@dataclass(frozen=True)
class _Weights:
    log_stack: Tensor  # (M, D)
    mixture: Tensor  # (R,)
    nll: float


class _Weighing:
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

    def _log_p(self, logits: Tensor) -> Tensor:
        return Choices(logits, self.layout).log_prob(self.x).double().sum(-1)

    def _mixed(self, logits: Sequence[Sequence[Tensor]], stack: Tensor, mixture: Tensor) -> Tensor:
        weights = stack.exp()[:, self.wide].float()[:, self.owners]
        each = []
        for of_ordering in logits:
            total = weights[0] * of_ordering[0]
            for weight, of_kind in zip(weights[1:], of_ordering[1:], strict=True):
                total = torch.addcmul(total, weight, of_kind)
            each.append(self._log_p(total))
        log_p = torch.logsumexp(torch.stack(each) + torch.log_softmax(mixture, 0)[:, None], 0)
        return -log_p.mean() - self.log_density

    @torch.no_grad()
    def nll(self, logits: Sequence[Sequence[Tensor]]) -> float:
        """With equal weights of orderings, and logits added up."""
        stack = torch.zeros(len(logits[0]), 2, dtype=torch.float64, device=self.x.device)
        return float(self._mixed(logits, stack, stack.new_zeros(len(logits))))

    def fit(self, logits: Sequence[Sequence[Tensor]]) -> _Weights:
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
            return _Weights(stack[:, self.wide].float(), mixture.softmax(0), nll)
