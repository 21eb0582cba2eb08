"""The result files of a study: one for each estimator, model and point, and the plan that they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xorflow.errors import ConfigError
from xorflow.experiments.files import write_compact
from xorflow.experiments.study_estimators import REFERENCES
from xorflow.training.storage import read_json

STUDY_VERSION = 1
"""Of the files below; a file of another version is refused."""

_ADVICE = "remove that folder, or choose another --out"


@dataclass(frozen=True)
class Piece:
    """What is measured at once, and kept in a file of its own."""

    model: str
    point: str
    estimator: str

    def __str__(self) -> str:
        return f"{self.model}.{self.point}.{self.estimator}"

    def file(self, out: Path) -> Path:
        return out / "parts" / f"{file_name(str(self))}.json"


def file_name(text: str) -> str:
    """A name without what file systems or shells dislike.

    >>> file_name("depth-1.start.special-case:rewards=all,baseline=none")
    'depth-1.start.special-case.rewards-all.baseline-none'
    """
    return re.sub(r"[^\w.-]", "-", text.replace(":", ".").replace(",", "."))


def open_study(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in a folder of results, or an empty one; refuses a folder that holds anything else, or other settings."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is a folder, and {out} is a file; choose another --out")
    path = out / "plan.json"
    if not path.exists():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty, and holds no results of xorflow study; choose another --out"
            )
        named = {drawn: list(texts) for drawn, texts in REFERENCES.items()}
        return {
            "version": STUDY_VERSION,
            "settings": dict(settings),
            "references": named,
            "models": {},
            "refused": [],
        }
    plan = checked(path, ("settings", "models", "refused"))
    for key, value in settings.items():
        held = plan["settings"].get(key)
        if held is not None and value is not None and held != value:
            raise ConfigError(f"{out} holds a study with {key} {held!r}, and this has {value!r}: {_ADVICE}")
    known = {key: value for key, value in settings.items() if value is not None}
    return plan | {"settings": plan["settings"] | known}


def write_plan(out: Path, plan: Mapping[str, Any]) -> None:
    write_compact(out / "plan.json", plan)


def read_piece(piece: Piece, out: Path) -> dict[str, Any] | None:
    """What was measured before; None if it was not."""
    path = piece.file(out)
    if not path.exists():
        return None
    held = checked(path, ("model", "point", "estimator", "rows"))
    if (held["model"], held["point"], held["estimator"]) != (piece.model, piece.point, piece.estimator):
        raise ConfigError(f"{path} is of another estimator or model; remove it, and it is made again")
    return held


def checked(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The content of a file of results, which has the right version and these keys."""
    content = read_json(path, "a file of the study")
    version = content.get("version")
    if version != STUDY_VERSION:
        newer = isinstance(version, int) and version > STUDY_VERSION
        reason = "a newer xorflow wrote it: install that" if newer else "xorflow study did not write it"
        raise ConfigError(
            f"{path} has version {version!r}, this xorflow reads version {STUDY_VERSION}; {reason}, or choose another --out"
        )
    missing = [key for key in keys if key not in content]
    if missing:
        raise ConfigError(f"{path} is damaged: it lacks {missing[0]!r}; remove it, and it is made again")
    return content
