"""The estimator laboratory: every estimator against exact gradients, at the start, in the middle and at the end of training.

For each model and point one batch is held fixed, and each estimator draws its noise again and again. What it finds is a file,
and is never measured twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from research import results
from research.estimators.files import Piece, open_study, read_named, write_plan
from research.estimators.measure import Bench, Effort
from research.estimators.models import POINTS, StudyBudget, Subject, fingerprint, own_models, run_model
from research.estimators.oracles import require_oracle
from research.estimators.statistics import LEAST_GROUPS
from xorflow import ConfigError, UserError
from xorflow.data import Batch
from xorflow.training import Observer, build_estimator, out_of_memory_as_error, resolve_device

_LEAST_DRAWS = 2 * LEAST_GROUPS
_TRAINING_COST = 4.0
"""Of a model's training, in pieces."""


@dataclass(frozen=True)
class StudyRequest:
    """What the command line asks for.

    Attributes:
        budget: how much work it is.
        out: the folder of results.
        work: the folder of the models of our own.
        run: the run of a user, instead of these.
        models: which of them; None for all.
        estimators: their texts; None for the default ones of each model.
        points: of training; None for those of the model.
        draws: of each estimator; None for as many as the budget says.
        batch: rows; None likewise.
        device: where.
        seed: of batch and noise.
    """

    budget: StudyBudget
    out: Path
    work: Path
    run: Path | None = None
    models: Sequence[str] | None = None
    estimators: Sequence[str] | None = None
    points: Sequence[str] | None = None
    draws: int | None = None
    batch: int | None = None
    device: str = "auto"
    seed: int = 0


class StudyObserver(Protocol):
    """What watches a study: pieces of work, each with its cost, and the training of models."""

    def on_piece(self, name: str, done: float, total: float) -> None: ...
    @property
    def training(self) -> Observer | None: ...


class Study:
    """All pieces of a request, with what is finished left out.

    Raises:
        UserError: before any work, if the request means nothing, a model has no exact gradient, or an estimator is not defined
            for any of the models.
    """

    def __init__(self, request: StudyRequest) -> None:
        self._request, budget = request, request.budget
        draws = budget.draws if request.draws is None else request.draws
        self._rows = budget.batch if request.batch is None else request.batch
        if draws < _LEAST_DRAWS:
            raise ConfigError(f"--draws is at least {_LEAST_DRAWS}, to tell bias from noise; got {draws}")
        if self._rows < 1:
            raise ConfigError(f"--batch is at least 1; got {self._rows}")
        if not 0 <= request.seed < 2**31:
            raise ConfigError(f"--seed is at least 0 and below 2^31; got {request.seed}")
        self._device = resolve_device(request.device)
        if self._device.type == "mps":
            raise ConfigError("a study takes gradients in float64, which mps has not; choose --device cpu")
        self._effort = Effort(draws, budget.warm_up, request.seed)
        self._subjects = self._chosen()
        self._plan = open_study(request.out, self._settings())
        self._refused: dict[tuple[str, str], str] = {}
        self.pieces = self._pieces()

    def _settings(self) -> dict[str, Any]:
        budget, run = self._request.budget, self._request.run
        own = f"Study of the run in {self._subjects[0].name}." if run is not None else budget.words
        return {
            "budget": budget.name,
            "words": own,
            "draws": self._effort.draws,
            "batch": self._rows,
            "warm_up": self._effort.warm_up,
            "seed": self._request.seed,
            "device": None if all(s.pinned for s in self._subjects) else results.device_name(self._device),
        }

    # ---- what is asked for ----

    def _chosen(self) -> list[Subject]:
        request = self._request
        if request.run is not None:
            if request.models is not None:
                raise ConfigError("--models chooses among the models of the study; leave it out beside RUN")
            found = [run_model(request.run, str(self._device))]
        else:
            work = request.work / request.budget.name
            found = list(own_models(request.budget, work, str(self._device)))
        if request.models is not None:
            names = [subject.name for subject in found]
            unknown = [name for name in request.models if name not in names]
            if unknown or not request.models:
                raise ConfigError(
                    f"--models names models of {', '.join(names)}; got {(unknown or [''])[0]!r}"
                )
            found = [subject for subject in found if subject.name in request.models]
        return found

    def _points(self, subject: Subject) -> tuple[str, ...]:
        wanted = self._request.points
        if wanted is None:
            return subject.points
        unknown = [point for point in wanted if point not in subject.known]
        if unknown or not wanted:
            known = ", ".join(subject.known)
            why = "; a run keeps no weights in between" if unknown and unknown[0] in POINTS else ""
            raise ConfigError(
                f"--points names points of training: {known}; got {(unknown or [''])[0]!r}{why}"
            )
        return tuple(point for point in POINTS if point in wanted)

    def _pieces(self) -> list[Piece]:
        """What is still to be measured; what a model refuses is noted, and refused if no model takes it."""
        found: list[Piece] = []
        reasons: dict[str, UserError] = {}
        taken: set[str] = set()
        for subject in self._subjects:
            points, blank = self._points(subject), None
            for text in self._request.estimators or subject.estimators:
                pieces = [Piece(subject.name, point, text) for point in points]
                missing = [piece for piece in pieces if self._measured(piece) is None]
                if not missing:
                    taken.add(text)
                    continue
                if blank is None:
                    blank = subject.blank()
                    require_oracle(blank)
                try:
                    build_estimator(text).admit(blank)
                except UserError as error:
                    reasons[text] = error
                    self._refused[subject.name, text] = str(error)
                else:
                    taken.add(text)
                    found += missing
        for text in self._request.estimators or ():
            if text not in taken:
                raise reasons[text]
        return found

    def _measured(self, piece: Piece) -> dict[str, Any] | None:
        return read_named(piece.file(self._request.out), **vars(piece))

    # ---- the work ----

    def run(self, observer: StudyObserver | None = None) -> None:
        """Measure everything that is not finished."""
        request = self._request
        self._note_models()
        write_plan(request.out, self._plan)
        by_point: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.pieces:
            by_point.setdefault((piece.model, piece.point), []).append(piece)
        models = {piece.model for piece in self.pieces}
        total = len(self.pieces) + _TRAINING_COST * len(models)
        done = 0.0
        for subject in self._subjects:
            trained = False
            for point in POINTS:
                pieces = by_point.get((subject.name, point))
                if not pieces:
                    continue
                if observer is not None:
                    observer.on_piece(f"{subject.name}, {point}", done, total)
                bench, described = self._bench(subject, point, observer)
                done += 0.0 if trained else _TRAINING_COST
                trained = True
                for piece in pieces:
                    if observer is not None:
                        observer.on_piece(str(piece), done, total)
                    self._measure(piece, bench, described)
                    done += 1.0
        if observer is not None:
            observer.on_piece("", total, total)

    def _note_models(self) -> None:
        for subject in self._subjects:
            self._plan["models"][subject.name] = {"title": subject.title, "words": subject.words}
        kept = [r for r in self._plan["refused"] if (r["model"], r["estimator"]) not in self._refused]
        new = [
            {"model": model, "estimator": text, "reason": reason}
            for (model, text), reason in self._refused.items()
        ]
        self._plan["refused"] = kept + new

    def _bench(
        self, subject: Subject, point: str, observer: StudyObserver | None
    ) -> tuple[Bench, dict[str, Any]]:
        flow = subject.at(point, None if observer is None else observer.training)
        dataset = subject.dataset()
        if self._rows > len(dataset.train):
            raise ConfigError(
                f"--batch takes at most the {len(dataset.train):,} rows of the training data; got {self._rows}"
            )
        generator = torch.Generator().manual_seed(self._request.seed)  # on the CPU: the same on every device
        train = dataset.train.to("cpu")
        batch = train.batch(self._rows, generator)
        others = [train.batch(self._rows, generator) for _ in range(self._effort.warm_up)]
        shape = dataset.shape if dataset.shape is not None and len(dataset.shape) == 2 else None
        described = {
            "depth": flow.depth,
            "features": flow.features,
            "shape": None if shape is None else list(shape),
            "weights": fingerprint(flow),
            "batch_sha256": _digest(batch),
        }
        described["device"] = results.device_name(torch.device(subject.device))
        return Bench(flow.to(subject.device), batch, others, self._effort), described

    def _measure(self, piece: Piece, bench: Bench, described: dict[str, Any]) -> None:
        began = time.perf_counter()
        with out_of_memory_as_error("lower --batch"):
            found = bench.measure(piece.estimator)
        content = {
            "version": results.VERSION,
            "model": piece.model,
            "point": piece.point,
            "estimator": piece.estimator,
            **described,
            **found,
            "seconds": round(time.perf_counter() - began, 3),
            "versions": results.versions(),
        }
        results.write(piece.file(self._request.out), content)


def _digest(batch: Batch) -> str:
    return hashlib.sha256(batch.x.cpu().contiguous().numpy().tobytes()).hexdigest()
