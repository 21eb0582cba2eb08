"""The records of a study of estimators: one for each estimator, model and point, and the plan that they belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research import results
from research.estimators.names import REFERENCES
from research.files import require_folder
from research.results import Record
from xorflow import ConfigError, LatentFlow, UserError
from xorflow.training import build_estimator

COMMAND = "estimators"


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
