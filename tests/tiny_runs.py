"""Small data and small runs, and what it means that two runs are the same."""

from __future__ import annotations

import csv
import json
import random
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xorflow import MADE, FactorisedBase, LatentFlow, Layer
from xorflow.data import Dataset, Split
from xorflow.training import Options, Progress, Trainer, create_run, finish_run, read_result, resume_run
from xorflow.training.checkpoint import load_tensors
from xorflow.training.folder import read_metrics
from xorflow.training.registry import value_text

COLUMNS = ("colour", "size", "pet", "rooms")
DEEP = {"layers": 2, "order": "alternating", "average": 0.9, "estimator": "maximum-likelihood:samples=2"}
"""Noise in every step, an average of weights, and the state of Adam: all that a resumed run must find again."""


def rows_array(rows: int = 200, seed: int = 0) -> np.ndarray:
    """Rows of six features with K = 3, the second a copy of the first."""
    x = np.random.default_rng(seed).integers(0, 3, (rows, 6), dtype=np.uint8)
    x[:, 1] = x[:, 0]
    return x


def rows_file(path: Path, rows: int = 200, seed: int = 0) -> Path:
    np.save(path, rows_array(rows, seed))
    return path


def images_file(path: Path, rows: int = 80) -> Path:
    np.save(path, np.random.default_rng(0).integers(0, 2, (rows, 4, 5), dtype=np.uint8))
    return path


def people_file(path: Path, rows: int = 200, seed: int = 0) -> Path:
    """A table of words with 3, 2, 4 and 5 categories; cats live with whoever is red."""
    chance = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for _ in range(rows):
            colour = chance.choice(("blue", "green", "red"))
            pet = "cat" if colour == "red" else chance.choice(("cat", "dog", "fish", "ox"))
            writer.writerow((colour, chance.choice("LS"), pet, chance.randint(1, 5)))
    return path


def call(name: str, **settings: Any) -> str:
    """A name with its settings, as options have it."""
    return f"{name}:{','.join(f'{key}={value_text(value)}' for key, value in settings.items())}"


def tiny_options(data: Path | str, **changes: Any) -> Options:
    usual: dict[str, Any] = {
        "conditioner": "made:hidden=16",
        "epochs": 2,
        "batch_size": 32,
        "device": "cpu",
        "evaluation_samples": 8,
    }
    return Options(data=str(data)).replace(**(usual | changes))


def tiny_dataset(*, context: bool = False, validation: bool = True, rows: int = 200) -> Dataset:
    """Rows in memory; the context, if any, says (one-hot) what the first feature is."""
    x = torch.from_numpy(rows_array(rows))
    seen = torch.nn.functional.one_hot(x[:, 0].long(), 3).float() if context else None

    def part(first: int, last: int) -> Split:
        return Split(x[first:last], None if seen is None else seen[first:last])

    held_out = part(rows - 60, rows - 30) if validation else None
    return Dataset("in memory", part(0, rows - 60), held_out, part(rows - 30, rows), categories=(3,) * 6)


def tiny_flow(*, context: int = 0, layers: int = 1, seed: int = 0) -> LatentFlow:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [Layer(MADE(6, (16,), categories=3, context=context)) for _ in range(layers)]
        return LatentFlow(parts, FactorisedBase(6, categories=3, learned=True))


def train_run(options: Options, out: Path, observer: Any = None, **given: Any) -> dict[str, Any]:
    """The result of a new run."""
    return finish_run(create_run(options, out, observer, **given))


def continue_run(run: Path, changes: dict[str, Any], observer: Any = None) -> dict[str, Any]:
    """The result of an interrupted run, or a finished one."""
    trainer = resume_run(run, changes, observer)
    return read_result(run) if trainer is None else finish_run(trainer)


def make_steps(trainer: Trainer, captured: Any, count: int, batch: int = 0) -> None:
    """The first steps of a run, from a batch of its first epoch on; by the plain path, or captured."""
    order = trainer.row_order(0).to(trainer.device)
    if captured is None:
        for number, rows in enumerate(order.split(trainer.batch_size)[batch : batch + count]):
            trainer.make_step(rows, number)
        return
    captured.begin_epoch(order, batch)
    made = 0
    while made < count:
        made += captured.advance(count - made)


class StopAt:
    """Presses Ctrl-C when one of the given steps is done."""

    def __init__(self, steps: Collection[int]) -> None:
        self.steps = steps
        self.seen: list[int] = []
        self.records: list[dict[str, Any]] = []

    def on_start(self, total_steps: int, progress: Progress) -> None:
        self.started = (total_steps, progress.step)

    def on_step(self, step: int) -> None:
        self.seen.append(step)
        if step in self.steps:
            signal.raise_signal(signal.SIGINT)

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_tensors(run, "weights")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def assert_same_run(found: Path, expected: Path) -> None:
    """The same weights, bit for bit, and the same numbers in every file; only the time taken may differ."""
    assert (found / "weights.safetensors").read_bytes() == (expected / "weights.safetensors").read_bytes()
    rows = [list(map(_without_seconds, read_metrics(run / "metrics.jsonl"))) for run in (found, expected)]
    assert rows[0] == rows[1]
    results = [_without_seconds(read(run / "result.json")) for run in (found, expected)]
    assert results[0] == results[1]
