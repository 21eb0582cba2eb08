"""A set, trained with the default and scored once: what a record holds."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from research.results import Record, keep
from xorflow import ConfigError, auto_fit, data, evaluate
from xorflow.data import Dataset
from xorflow.training import chow_liu, independent_nll


def find_sets(folder: Path) -> dict[str, Path]:
    """The files of sets, by name: `NAME.npz` with the arrays train, validation and test of bits."""
    files = {path.stem: path for path in sorted(folder.glob("*.npz"))}
    if not files:
        raise ConfigError(f"--data is a folder of files NAME.npz, and {folder} has none; choose another")
    return files


def run_of(out: Path, name: str, seed: int) -> Path:
    """Where the record of a run is."""
    return out / "runs" / f"{name}-{seed}.json"


def train_and_score(path: Path, seed: int, minutes: float, out: Path) -> None:
    """One run with everything counted, from reading the file to the likelihood of the test rows; its record is kept."""
    began, cpu = time.monotonic(), time.process_time()
    dataset = data.load(path, categories=2)
    if dataset.test is None or dataset.validation is None:
        raise ConfigError(f"a set has the arrays train, validation and test, and {path} lacks one")
    found = auto_fit(dataset, minutes=minutes, seed=seed)
    log_p = evaluate.exact(found.model, dataset.test)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    figures = log_p.summary()
    keep(
        run_of(out, path.stem, seed),
        {
            "set": path.stem,
            "seed": seed,
            "ll": -log_p.nll,
            "kind": log_p.kind,
            "stderr": figures["stderr"],
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "device": f"{torch.get_num_threads()} threads",
            "minutes": minutes,
            "sizes": dataset.describe()["sizes"],
            "features": dataset.features,
            **_beside(dataset),
            "auto": found.record,
        },
    )


def _beside(dataset: Dataset) -> Record:
    """Log-likelihoods of the test rows under independent columns and the best tree."""
    assert dataset.test is not None
    tree = chow_liu(dataset.train.values, dataset.categories)
    return {
        "independent": -independent_nll(dataset, dataset.test),
        "chow_liu": None if tree is None else float(tree.log_prob(dataset.test.values).mean()),
    }
