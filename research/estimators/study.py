"""The estimator laboratory: every estimator against exact gradients, at the start, in the middle and at the end of training.

For each model and point one batch is held fixed, and each estimator draws its noise again and again. What it finds is a file,
and is never measured twice.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research import results
from research.estimators.measure import Bench
from research.estimators.models import StudyBudget, Subject, own_models, run_model
from research.estimators.names import REFERENCES
from research.estimators.oracles import require_oracle
from research.estimators.statistics import LEAST_GROUPS
from research.files import require_folder
from research.results import Record
from research.rows import picked
from xorflow import ConfigError, LatentFlow, UserError
from xorflow.cli.progress import Display, Planned
from xorflow.training import Outcome, build_estimator, out_of_memory_as_error, resolve_device

COMMAND = "estimators"

# ---- records: one for each estimator, model and point, and the plan that they belong to ----


@dataclass(frozen=True)
class Piece:
    """What is measured at once, and kept in a record of its own."""

    model: str
    point: str
    estimator: str

    def __str__(self) -> str:
        return f"{self.model}.{self.point}.{self.estimator}"

    def file(self, out: Path) -> Path:
        return out / "parts" / f"{file_name(str(self))}.json"


def file_name(text: str) -> str:
    """A name without what file systems or shells dislike.

    >>> file_name("depth-1.start.score-function:credit=all,baseline=none")
    'depth-1.start.score-function.credit-all.baseline-none'
    """
    return re.sub(r"[^\w.-]", "-", text.replace(":", ".").replace(",", "."))


def refusal(text: str, flow: LatentFlow) -> UserError | None:
    """Why an estimator is not defined for a flow; None if it is."""
    try:
        build_estimator(text).admit(flow)
    except UserError as error:
        return error
    return None


def open_study(out: Path, settings: Record) -> Record:
    """The plan in a folder of results, or an empty one; refuses a folder that holds anything else, or other settings."""
    require_folder(out, COMMAND)
    path = out / "plan.json"
    if not results.exists(path):
        references = {drawn: list(texts) for drawn, texts in REFERENCES.items()}
        about = {"version": results.VERSION, "settings": dict(settings), "references": references}
        return about | {"models": {}, "refused": []}
    plan = results.read(path, COMMAND, ("settings", "models", "refused"))
    known = {key: value for key, value in settings.items() if value is not None}
    for key, value in known.items():
        held = plan["settings"].get(key)
        if held not in (None, value):
            raise ConfigError(
                f"{out} holds a study with {key} {held!r}, and this has {value!r}: remove that folder, or choose another --out"
            )
    return plan | {"settings": plan["settings"] | known}


def write_plan(out: Path, plan: Record) -> None:
    path = out / "plan.json"
    if not results.exists(path) or results.read(path, COMMAND) != plan:
        results.write(path, plan)


def read_named(path: Path, **names: Any) -> Record | None:
    """A record, which must be of these names; None if there is none."""
    if not results.exists(path):
        return None
    record = results.read(path, COMMAND, tuple(names))
    if any(record[key] != value for key, value in names.items()):
        raise results.damaged(path, "it is of another estimator or model")
    return record


# ---- the study ----

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
        models: which of them, with commas; None for all.
        estimators: their texts; None for the default ones of each model.
        points: of training, with commas; None for those of the model.
        device: where.
        seed: of batch and noise.
    """

    budget: StudyBudget
    out: Path
    work: Path
    run: Path | None = None
    models: str | None = None
    estimators: Sequence[str] | None = None
    points: str | None = None
    device: str = "auto"
    seed: int = 0


class Study:
    """All pieces of a request, with what is finished left out.

    Raises:
        UserError: before any work, if the request means nothing, a model has no exact gradient, or an estimator is not defined
            for any of the models.
    """

    def __init__(self, request: StudyRequest) -> None:
        self._request, self._budget = request, request.budget
        if self._budget.draws < _LEAST_DRAWS:
            raise ConfigError(
                f"--draws is at least {_LEAST_DRAWS}, to tell bias from noise; got {self._budget.draws}"
            )
        if self._budget.batch < 1:
            raise ConfigError(f"--batch is at least 1; got {self._budget.batch}")
        if not 0 <= request.seed < 2**31:
            raise ConfigError(f"--seed is at least 0 and below 2^31; got {request.seed}")
        self._device = resolve_device(request.device)
        if self._device.type == "mps":
            raise ConfigError("a study takes gradients in float64, which mps has not; choose --device cpu")
        self._subjects = {subject.name: subject for subject in self._chosen()}
        self._plan = open_study(request.out, self._settings())
        self._refused: dict[tuple[str, str], str] = {}
        self.pieces = self._pieces()

    @property
    def planned(self) -> list[Planned]:
        """What is still to be done: the training of models, and the pieces."""
        subjects = [self._subjects[name] for name in dict.fromkeys(piece.model for piece in self.pieces)]
        trainings = [
            Planned(subject.name, subject.run, _TRAINING_COST, subject.options.epochs)
            for subject in subjects
            if not (subject.run / "result.json").exists()
        ]
        return trainings + [Planned(str(piece), piece.file(self._request.out)) for piece in self.pieces]

    def _settings(self) -> Record:
        budget, subjects = self._budget, list(self._subjects.values())
        name = None if self._request.run is None else subjects[0].name
        return {
            "budget": budget.name,
            "description": budget.description if name is None else f"Study of the run in {name}.",
            "draws": budget.draws,
            "batch": budget.batch,
            "warm_up": budget.warm_up,
            "seed": self._request.seed,
            "device": None if all(s.pinned for s in subjects) else results.device_name(self._device),
        }

    # ---- what is asked for ----

    def _chosen(self) -> list[Subject]:
        request = self._request
        if request.run is not None:
            if request.models is not None:
                raise ConfigError("--models chooses among the models of the study; leave it out beside RUN")
            return [run_model(request.run, str(self._device))]
        subjects = own_models(self._budget, request.work / self._budget.name, str(self._device))
        names = picked(request.models, [subject.name for subject in subjects], "--models names models of")
        return [subject for subject in subjects if subject.name in names]

    def _points(self, subject: Subject) -> Sequence[str]:
        if self._request.points is None:
            return subject.points
        lacking = "" if self._request.run is None else " (a run keeps no weights in between)"
        return picked(self._request.points, subject.known, f"--points names points of training{lacking}:")

    def _pieces(self) -> list[Piece]:
        """What is still to be measured; what a model refuses is noted, and refused if no model takes it."""
        missing: list[Piece] = []
        reasons: dict[str, UserError] = {}
        taken: set[str] = set()
        for subject in self._subjects.values():
            texts = self._request.estimators or subject.estimators
            pieces = [Piece(subject.name, point, text) for point in self._points(subject) for text in texts]
            pieces = [p for p in pieces if read_named(p.file(self._request.out), **vars(p)) is None]
            refused: dict[str, UserError] = {}
            if pieces:
                flow = subject.blank()
                require_oracle(flow)
                texts_left = dict.fromkeys(piece.estimator for piece in pieces)
                refused = {text: reason for text in texts_left if (reason := refusal(text, flow))}
            self._refused |= {(subject.name, text): str(reason) for text, reason in refused.items()}
            reasons |= refused
            taken |= set(texts) - refused.keys()
            missing += [piece for piece in pieces if piece.estimator not in refused]
        for text in self._request.estimators or ():
            if text not in taken:
                raise reasons[text]
        return missing

    # ---- the work ----

    def run(self, observer: Display | None = None) -> list[Outcome]:
        """Measure everything that is not finished; nothing of it fails for itself."""
        self._note_models()
        write_plan(self._request.out, self._plan)
        for (model, point), pieces in itertools.groupby(
            self.pieces, lambda piece: (piece.model, piece.point)
        ):
            bench, about = self._bench(self._subjects[model], point)
            if observer is not None:
                observer.on_done(model)
            for piece in pieces:
                self._measure(piece, bench, about)
                if observer is not None:
                    observer.on_done(str(piece))
        return []

    def _note_models(self) -> None:
        for name, subject in self._subjects.items():
            trained = {"estimator": subject.options.estimator, "epochs": subject.options.epochs}
            self._plan["models"][name] = {"title": subject.title} | trained
        kept = [r for r in self._plan["refused"] if (r["model"], r["estimator"]) not in self._refused]
        new = [
            {"model": model, "estimator": text, "reason": reason}
            for (model, text), reason in self._refused.items()
        ]
        self._plan["refused"] = kept + new

    def _bench(self, subject: Subject, point: str) -> tuple[Bench, Record]:
        """Where estimators are measured at a point, and what is said of it in every record."""
        flow, dataset, budget = subject.at(point), subject.dataset(), self._budget
        train = dataset.train.to("cpu")
        if budget.batch > len(train):
            raise ConfigError(
                f"--batch takes at most the {len(train):,} rows of the training data; got {budget.batch}"
            )
        generator = torch.Generator().manual_seed(self._request.seed)  # on the CPU: the same on every device
        batch, *others = [train.batch(budget.batch, generator) for _ in range(1 + budget.warm_up)]
        weights = sorted(flow.state_dict().items())
        about = {
            "depth": flow.depth,
            "features": flow.features,
            "shape": list(dataset.shape) if dataset.shape is not None and len(dataset.shape) == 2 else None,
            "weights": _sha256(part for name, tensor in weights for part in (name.encode(), tensor)),
            "batch_sha256": _sha256([batch.x]),
            "device": results.device_name(flow.device),
        }
        return Bench(flow, batch, others, budget.draws, self._request.seed), about

    def _measure(self, piece: Piece, bench: Bench, about: Record) -> None:
        began = time.perf_counter()
        with out_of_memory_as_error("lower --batch"):
            figures = bench.measure(piece.estimator)
        content = {
            **vars(piece),
            **about,
            **figures,
            "seconds": round(time.perf_counter() - began, 3),
        }
        results.keep(piece.file(self._request.out), content)


def _sha256(contents: Iterable[bytes | Tensor]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(
            content if isinstance(content, bytes) else content.detach().cpu().contiguous().numpy().tobytes()
        )
    return digest.hexdigest()
