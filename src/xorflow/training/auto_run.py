"""A run of the recipe `auto`: the model of `auto_fit`, and what it reached beside simpler ones, in a folder like any other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xorflow import evaluate
from xorflow._devices import out_of_memory_as_error, resolve_device
from xorflow._files import write_json
from xorflow.data import Dataset, Split
from xorflow.data.columns.types import python_values
from xorflow.errors import ConfigError, UserError
from xorflow.flows import LatentFlow, Mixture
from xorflow.training.auto import Auto, AutoObserver, auto_fit, require_suitable
from xorflow.training.build import build_data, category_frequencies
from xorflow.training.checkpoint import save_tensors
from xorflow.training.chow_liu import chow_liu
from xorflow.training.config import OPTIONS, Options, taken_by_auto
from xorflow.training.folder import (
    INCOMPLETE,
    UNITS,
    data_of_run,
    held,
    new_folder,
    require_free,
    write_config,
)
from xorflow.training.registry import Trainable, value_text
from xorflow.training.results import about, independent_nll, require_complete, require_finite
from xorflow.training.run import options_of_run


@dataclass(frozen=True)
class AutoRun:
    """A run that is to be made, or gone on with: `make` does it.

    Attributes:
        options: of the recipe auto.
        run_folder: where it goes, a new folder, or that of a run which was interrupted.
        dataset: its data.
        observer: is told about progress.
    """

    options: Options
    run_folder: Path
    dataset: Dataset
    observer: AutoObserver | None = None

    def make(self) -> dict[str, Any]:
        """Make the model and all files of the run; what its `result.json` holds.

        Raises:
            EvaluationError: if the model is made, and is kept, but some of its likelihoods could not be computed.
        """
        run = self.run_folder
        begun = os.path.exists(run / "config.json")
        with held(run) if begun else new_folder(run):
            if not begun:
                write_config(run, self.options, None, self.dataset)
            data = self.dataset.to(resolve_device(self.options.device))
            with out_of_memory_as_error("give fewer rows, or use --device cpu"):
                searched = auto_fit(
                    data,
                    minutes=self.options.minutes,
                    orderings=self.options.orderings,
                    seed=self.options.seed,
                    observer=self.observer,
                    units=run / UNITS,
                )
            result = self._kept(searched, data)
        return require_complete(result, run)

    def _kept(self, searched: Auto, data: Dataset) -> dict[str, Any]:
        """Write the model, then what it reaches."""
        run, began = self.run_folder, time.monotonic()
        save_tensors(run, "weights", searched.model.state_dict())
        # with the number of orderings that were made, a run from this configuration makes the same model
        options = self.options.replace(orderings=searched.record["orderings"])
        write_config(run, options, searched.model, self.dataset)
        result = _unevaluated(searched, data, options)
        write_json(run / "result.json", result)
        shutil.rmtree(run / UNITS, ignore_errors=True)
        try:
            with out_of_memory_as_error("use xorflow evaluate with --device cpu"):
                result |= _figures(searched.model, data)
                del result[INCOMPLETE]
        except UserError as error:
            result[INCOMPLETE] = dict.fromkeys(result[INCOMPLETE], str(error))
        result["seconds"] = round(searched.record["seconds"] + time.monotonic() - began, 3)
        write_json(run / "result.json", result)
        return result


def begin_auto(
    options: Options,
    out: Path,
    observer: AutoObserver | None = None,
    dataset: Dataset | None = None,
) -> AutoRun:
    """A run of the recipe auto; whatever would stop it is found here, before its folder is made."""
    check_auto(options)
    require_free(out)
    dataset = dataset or build_data(options)
    require_suitable(dataset)
    return AutoRun(options, out, dataset, observer)


def resume_auto(
    run: Path,
    changes: Mapping[str, Any] | None = None,
    observer: AutoObserver | None = None,
    dataset: Dataset | None = None,
) -> AutoRun | None:
    """What is left of a run of the recipe auto that was interrupted; None if it is finished."""
    options, config = options_of_run(run, changes or {})
    if os.path.lexists(run / "result.json"):
        return None
    return AutoRun(options, run, data_of_run(run, options, config["data_format"], dataset), observer)


def check_auto(options: Options) -> None:
    """Refuse options of a model or of its training: the recipe chooses them."""
    for name in OPTIONS:
        value = getattr(options, name)
        if not taken_by_auto(name) and value != OPTIONS[name].default:
            raise ConfigError(
                f"the recipe auto chooses all of a model and of its training but minutes and orderings, and got {name}="
                f"{value_text(value)}; leave it out, or choose recipe=none"
            )


def _unevaluated(searched: Auto, dataset: Dataset, options: Options) -> dict[str, Any]:
    """What is known of a model before its likelihoods are: should the process end here, `xorflow evaluate` completes it."""
    return {
        INCOMPLETE: {name: "the process ended before" for name in dataset.parts if name != "train"},
        "independent_nll": independent_nll(dataset, _held_out(dataset)),
        "chow_liu_nll": None,
        "columns": [],
        "rows": {},
        "seed": options.seed,
        "epochs": max(unit.get("epochs", 0) for unit in searched.record["units"]),
        "seconds": searched.record["seconds"],
        **about(searched.model, dataset),
        "auto": searched.record,
    }


def _held_out(dataset: Dataset) -> Split:
    held_out = dataset.test or dataset.validation
    assert held_out is not None
    return held_out


def _figures(model: Trainable, dataset: Dataset) -> dict[str, Any]:
    """Exact likelihoods of the parts that are held out; of the first of them by column, too, and that of a Chow-Liu tree."""
    figures: dict[str, Any] = {}
    for name, split in dataset.parts.items():
        if name != "train":
            log_p = require_finite(evaluate.exact(model, split), f"the {name} part")
            figures[name] = log_p.summary() | {"floor": float(model.floor()) - split.mean_log_density}
    held_out = _held_out(dataset)
    figures["columns"] = columns(model, dataset, held_out)
    figures["rows"] = _rows(model, dataset, held_out)
    tree = chow_liu(dataset.train.values, dataset.categories)
    if tree is not None:
        figures["chow_liu_nll"] = -float(tree.log_prob(held_out.values).mean()) - held_out.mean_log_density
    return figures


@torch.no_grad()
def columns(model: Trainable, dataset: Dataset, split: Split) -> list[dict[str, Any]]:
    """For each column the mean of -log2 p of its cells, given those before it, and by its frequencies alone.

    A mixture of several orderings has no such parts; then they are of its component with the greatest weight.
    """
    flow = model
    if isinstance(model, Mixture):
        flow = model.flows[int(model.log_weights().argmax())]
    assert isinstance(flow, LatentFlow)
    conditionals = flow.conditionals()
    total = torch.zeros(dataset.features, dtype=torch.float64, device=model.device)
    for batch in split.batches(1024):
        total += conditionals.of(model.states.integers(batch.x)).sum(0)
    bits = (-total / len(split) / torch.tensor(2.0).log()).tolist()
    log2 = [p.to(split.device).log2() for p in category_frequencies(dataset.train, dataset.categories)]
    alone = [-float(of_column[split.values[:, d].long()].mean()) for d, of_column in enumerate(log2)]
    names = dataset.schema.names if dataset.schema else [str(d) for d in range(dataset.features)]
    order = {d: rank for rank, d in enumerate(conditionals.order)}
    return [
        {"column": names[d], "bits": bits[d], "independent_bits": alone[d], "rank": order[d]}
        for d in range(dataset.features)
    ]


_ROWS = 5


def _rows(model: Trainable, dataset: Dataset, split: Split) -> dict[str, list[list[str]]]:
    """A few rows of data, beside as many samples, as texts."""
    generator = torch.Generator(model.device).manual_seed(0)
    states = {"data": split.values[:_ROWS], "samples": model().sample((_ROWS,), generator=generator)}
    texts = {}
    for name, x in states.items():
        schema = dataset.schema
        columns = map(python_values, schema.decode(x.cpu()).columns) if schema else x.T.tolist()
        texts[name] = [
            ["" if cell is None else str(cell) for cell in row] for row in zip(*columns, strict=True)
        ]
    return texts
