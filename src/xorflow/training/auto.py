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
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, BoostedTrees, Boosting, Conditioner, Source, Stacked
from xorflow.conditioners.boosting import available
from xorflow.data import Dataset, Split
from xorflow.data.columns import Number
from xorflow.errors import ConfigError
from xorflow.estimators import MaximumLikelihood
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.auto_units import Unit, Units
from xorflow.training.auto_weights import Weighing, Weights, rows_at_once
from xorflow.training.build import init_from_data
from xorflow.training.config import Options
from xorflow.training.registry import Trainable
from xorflow.training.trainer import Trainer

MOST_ORDERINGS = 8
"""More gain little, and scoring takes its time for each."""

_ROWS_AN_ORDERING = 100
"""Few rows gain little by many orderings."""

_TREES_A_COLUMN = 2_000
"""In all orderings together: 10,000 rows of 20 columns are then scored in about a second, on two cores."""

_OF_TIME = 0.8
"""The share of the budget after which no ordering ends: weights are fitted, and rows evaluated, in the rest."""

_MOST_COLUMNS = 2_048
"""With more columns there are no trees, which take a time that grows with the square of their number."""

_WORTH = 3e-4
"""A kind of conditionals whose loss worsens the validation likelihood by less, relatively, is left out."""

_FEW_ROWS = 500
"""With fewer rows a column dropout is tried."""

_NEARLY_CERTAIN = 1 - 1e-6
"""The base: x is about what the one layer chooses, and no value of a column has a probability of zero."""


_TRAINING: dict[str, Any] = {
    "optimiser": "adamw",
    "schedule": "constant",
    "weight_decay": 0.1,
    "average": 0.99,
    "epochs": 100,
    "patience": 6,
}
"""How a MADE is trained: at one rate, with the average of its weights in place of a rate that falls."""

TREES, PLAIN, DROPOUT = "trees", "network", "network with dropout"


class AutoObserver(Protocol):
    """What watches a search; the command line draws it."""

    def on_ordering(self, number: int, seconds: float | None) -> None:
        """An ordering is begun, from 1; the search is expected to take so many seconds from now on, if that is known."""

    def on_unit(self, record: dict[str, Any]) -> None:
        """A unit is made."""


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
    observer: AutoObserver | None = None,
    units: Path | None = None,
) -> Auto:
    """The best model of a data set that some minutes allow, everything counted but reading the data.

    Args:
        dataset: with validation rows, which choose everything.
        minutes: no ordering is begun that would not end, with all that follows, in this time.
        orderings: exactly so many instead, however long they take: with the number in a record, the very model of that.
        seed: of networks, and of which orderings there are beside the data's own.
        ordered: the columns whose values have an order; of a table, by default, its numbers and times.
        observer: is told about progress.
        units: a folder where those that are done are kept, and taken from; the clock then goes on where it stood.

    Raises:
        ConfigError: of data that are `unsuitable`.
        Interrupted: after Ctrl-C or SIGTERM while a network is trained.
    """
    require_suitable(dataset)
    if not isinstance(minutes, Real) or not 0 <= minutes < math.inf:
        raise ConfigError(f"minutes is a number, at least 0; got {minutes!r}")
    if orderings is not None and orderings not in range(1, MOST_ORDERINGS + 1):
        raise ConfigError(f"the recipe auto has 1 to {MOST_ORDERINGS} orderings; got {orderings!r}")
    if ordered is None:
        schema = dataset.schema
        ordered = [d for d, c in enumerate(schema.columns) if isinstance(c, Number)] if schema else []
    with _one_thread() as threads:
        search = _Search(dataset, seed, ordered, threads, observer, Units(units))
        return search.run(60 * minutes, orderings)


def unsuitable(dataset: Dataset) -> str | None:
    """Why the recipe auto is not for these data, and what to do, in words; None if it is."""
    if dataset.validation is None:
        return "it chooses by validation rows, and there are none: keep some back (validation)"
    if dataset.context_features or dataset.train.stochastic:
        return "it takes neither context nor values that are drawn afresh"
    if dataset.stream is not None:
        return "it has all rows in memory, and these are read from their files: set stream=never"
    return None


def require_suitable(dataset: Dataset) -> None:
    """Refuse data that are `unsuitable`."""
    problem = unsuitable(dataset)
    if problem:
        raise ConfigError(
            f"the recipe auto is for tables of fixed values: {problem}; or choose recipe=none, or a conditioner"
        )


@contextmanager
def _one_thread() -> Iterator[int]:
    """Within this block torch sums in one sequence, whatever the number of cores, which is handed over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Search:
    dataset: Dataset
    seed: int
    ordered: Sequence[int]
    threads: int
    observer: AutoObserver | None
    kept: Units

    def __post_init__(self) -> None:
        dataset = self.dataset
        assert dataset.validation is not None
        self.validation: Split = dataset.validation
        self.began, self.stopping = time.monotonic(), threading.Event()
        rows, columns = dataset.train.values.shape
        lacking = without_trees(columns)
        self.kinds = [] if lacking else [TREES]
        self.kinds += [PLAIN, DROPOUT] if rows < _FEW_ROWS * columns else [PLAIN]
        self.by_ordering: list[list[Unit]] = []  # by ordering
        self.reasons: list[str] = [lacking] if lacking else []
        self.weighing = Weighing(self.validation, dataset.categories, Boosting().most)

    @property
    def elapsed(self) -> float:
        """Seconds, with those before an interruption."""
        return time.monotonic() - self.began

    def run(self, seconds: float, orderings: int | None) -> Auto:
        few = max(1, len(self.dataset.train) // _ROWS_AN_ORDERING)
        most, limit = orderings or min(MOST_ORDERINGS, few), _OF_TIME * seconds
        longest, made = 0.0, 0
        ends = "so many orderings were asked for" if orderings else "more orderings gain little"
        while made < most:
            left = most - made
            if made and orderings is None:
                left = min(left, int((limit - self.elapsed) / (1.1 * longest)))
            if left <= 0:
                ends = "another ordering would not have ended in time"
                break
            if self.observer:
                expected = left * longest if made else None if orderings else max(limit - self.elapsed, 0)
                self.observer.on_ordering(made + 1, expected)
            units = self._ordering("natural" if made == 0 else f"random:{MOST_ORDERINGS * self.seed + made}")
            made += 1
            if made == 1:
                units = self._choose(units)
            self.by_ordering.append(units)
            # kinds are made side by side
            longest = max(longest, *(unit.seconds for unit in units))
            trees = sum(unit.more.get("trees", 0) for each in self.by_ordering for unit in each)
            if orderings is None and (made + 1) / made * trees > _TREES_A_COLUMN * self.dataset.features:
                ends = "more trees would make scores slow"
                break
        return self._finished(ends)

    def _ordering(self, order: str) -> list[Unit]:
        """All kinds in one ordering: trees on other threads, while networks train."""
        with ThreadPoolExecutor(1) as pool:
            try:
                trees = [pool.submit(self._made, kind, order) for kind in self.kinds if kind == TREES]
                networks = [self._made(kind, order) for kind in self.kinds if kind != TREES]
                units = [*(one.result() for one in trees), *networks]
            except BaseException:
                self.stopping.set()  # or else the pool would wait for the trees
                raise
        for unit in units:
            if self.observer:
                self.observer.on_unit(unit.record())
        return units

    def _made(self, kind: str, order: str) -> Unit:
        """A unit, from the folder of the run if it is there."""
        unit = self.kept.find(kind, order)
        if unit is None:
            began = time.monotonic()
            flow, more = self._trees(order) if kind == TREES else self._network(order, kind)
            seconds = round(time.monotonic() - began, 3)
            unit = Unit(kind, order, flow, seconds, round(self.elapsed, 3), more)
            self.kept.keep(unit)
        elif self.elapsed < unit.elapsed:
            self.began = time.monotonic() - unit.elapsed
        unit.logits = _logits(unit.net, self.validation)
        unit.nll = self.weighing.nll([[unit.logits]])
        return unit

    def _trees(self, order: str) -> tuple[LatentFlow, dict[str, int]]:
        data = self.dataset
        net = BoostedTrees(data.features, categories=data.categories, order=order, ordered=self.ordered)
        rows = data.train.values, self.validation.values
        net.fit(*rows, threads=self.threads, stopping=self.stopping)
        return self._flow(net), {"trees": sum(net.trees)}

    def _network(self, order: str, kind: str) -> tuple[LatentFlow, dict[str, int]]:
        data = self.dataset
        dropped: dict[str, Any] = {"dropout": 0.3, "input_dropout": 0.1} if kind == DROPOUT else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = MADE(
                data.features,
                (256,),
                order=order,
                categories=data.categories,
                direct=True,
                **dropped,
            )
            flow = self._flow(net)
        init_from_data(flow, data.train)
        options = Options(
            data=data.name,
            layers=None,
            lr=0.002 if dropped else 0.01,
            batch_size=_batch_size(len(data.train)),
            seed=self.seed,
            device=str(data.train.device),
            **_TRAINING,
        )
        trainer = Trainer(flow, MaximumLikelihood(), data, options)
        trainer.train()
        return flow.eval(), {"epochs": trainer.progress.best_epoch or 0}

    def _flow(self, net: Conditioner) -> LatentFlow:
        base = FactorisedBase(
            self.dataset.features, _NEARLY_CERTAIN, categories=self.dataset.categories, tied=True
        )
        return LatentFlow([Layer(net)], base)

    def _choose(self, units: list[Unit]) -> list[Unit]:
        """Which kinds the other orderings have, by the validation likelihood of the first."""
        networks = [unit for unit in units if unit.kind != TREES]
        best = min(networks, key=lambda unit: unit.nll)
        for unit in networks:
            if unit is not best:
                self.reasons.append(
                    f"{best.kind} and not {unit.kind}: {best.nll:.4g} and {unit.nll:.4g} nats"
                )
        kept = [unit for unit in units if unit is best or unit.kind == TREES]
        together = self._weights([kept]).nll
        for unit in list(kept):
            others = [other for other in kept if other is not unit]
            if not others:
                break
            without = self._weights([others]).nll
            if without - together < _WORTH * (together + self.weighing.log_density):
                self.reasons.append(f"no {unit.kind}: {without:.5g} nats without, {together:.5g} with")
                kept = others
        self.kinds = [unit.kind for unit in kept]
        return kept

    def _weights(self, made: list[list[Unit]]) -> Weights:
        return self.weighing.fit([[unit.logits for unit in units] for units in made])

    def _finished(self, ends: str) -> Auto:
        weights = self._weights(self.by_ordering)
        flows = []
        for units in self.by_ordering:
            net = Stacked([unit.net for unit in units])
            with torch.no_grad():
                net.log_weights.copy_(weights.log_stack)
            flows.append(self._flow(net.to(self.validation.device)).to(self.validation.device).eval())
        model = flows[0] if len(flows) == 1 else Mixture(flows, weights.mixture).eval()
        stacked = zip(self.kinds, weights.log_stack[:, 0].exp().tolist(), strict=True)
        record = {
            "orderings": len(flows),
            "ends": ends,
            "kinds": {kind: round(weight, 4) for kind, weight in stacked},
            "weights": {
                units[0].order: round(float(weight), 4)
                for units, weight in zip(self.by_ordering, weights.mixture, strict=True)
            },
            "reasons": self.reasons,
            "units": [unit.record() for units in self.by_ordering for unit in units],
            "validation_nll": weights.nll,
            "seconds": round(self.elapsed, 3),
        }
        return Auto(model, record)


def without_trees(columns: int) -> str | None:
    """Why there are none, in words; None if there are some."""
    if not available():
        return "no boosted trees: pip install 'xorflow[trees]'"
    return f"no boosted trees: more than {_MOST_COLUMNS:,} columns" if columns > _MOST_COLUMNS else None


def _batch_size(rows: int) -> int:
    """Some hundred steps an epoch, of few rows or many.

    >>> [_batch_size(rows) for rows in (1_000, 20_000, 300_000)]
    [64, 256, 1024]
    """
    return min(1024, max(64, 2 ** round(math.log2(rows / 60))))


@torch.no_grad()
def _logits(net: Conditioner, split: Split) -> Tensor:
    net, rows = net.to(split.device).eval(), min(4096, rows_at_once(net.choices.flat))
    logits = torch.empty(len(split), net.choices.flat, device=split.device)
    for part, batch in zip(logits.split(rows), split.batches(rows), strict=True):
        part.copy_(net({Source.STATE: batch.x}))
    return logits
