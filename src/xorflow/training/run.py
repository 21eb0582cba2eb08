"""Runs: a folder with a configuration, weights, metrics and results; and the Python functions that make and read one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xorflow.data import Codec, Dataset
from xorflow.errors import CheckpointError, ConfigError
from xorflow.estimators import Estimator, Marginal
from xorflow.flows import LatentFlow
from xorflow.training.build import (
    build_data,
    build_estimator,
    build_flow,
    estimator_text,
    start_from_data,
)
from xorflow.training.checkpoint import drop_snapshots
from xorflow.training.devices import out_of_memory_as_error, resolve_device
from xorflow.training.loop import Observer, Trainer
from xorflow.training.options import CONFIG_VERSION, HARMLESS, Options, options_of_config
from xorflow.training.results import independent_nll, report
from xorflow.training.specs import flow_from_spec, flow_to_spec
from xorflow.training.storage import load_tensors, read_json, save_tensors, write_bytes, write_json

REMEDY = "lower --batch-size or --hidden"


def fit(
    flow: LatentFlow,
    data: Dataset,
    estimator: Estimator | None = None,
    *,
    out: str | Path | None = None,
    start: str = "random",
    observer: Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a flow in place; it ends with the weights that are best on validation data, if there are any.

    Args:
        flow: the model.
        data: its data.
        estimator: the objective; `Marginal()` by default.
        out: a folder for configuration, weights, metrics and results; None keeps nothing on disk.
        start: `data` to set the output biases to the data's frequencies first; `random` leaves the flow as it is.
        observer: is told about progress.
        options: any of `Options` that describe training: epochs, batch_size, lr, schedule, device, ...

    Returns:
        What `result.json` holds.
    """
    estimator = estimator or Marginal()
    chosen = Options(data=data.name, layers=None, start=start, estimator=estimator_text(estimator)).replace(**options)
    if chosen.layers is not None:
        raise ConfigError("fit() trains the flow it is given: options that describe a model have no meaning here")
    folder = None if out is None else prepare_folder(Path(out))
    if start == "data":
        start_from_data(flow, data.train)
    if folder is not None:
        write_config(folder, chosen, flow, data)
    return _train(flow, estimator, data, chosen, folder, observer)


def train_run(options: Options, out: Path, observer: Observer | None = None, *, model: dict | None = None) -> dict[str, Any]:
    """Train what the options describe into a new folder; the flow of `model`, if there is one, instead of theirs."""
    resolve_device(options.device)
    estimator = build_estimator(options.estimator)
    dataset = build_data(options)
    flow = _new_flow(options, dataset, model)
    estimator.check(flow)
    prepare_folder(out)
    write_config(out, options, flow, dataset)
    return _train(flow, estimator, dataset, options, out, observer)


def resume_run(run: Path, changes: Mapping[str, Any], observer: Observer | None = None) -> dict[str, Any]:
    """Go on with an interrupted run; a finished one returns its result."""
    config = read_config_file(run)
    options = options_of_config(config, run / "config.json")
    for name, value in changes.items():
        before = options.to_json()[name]
        if value != before and name not in HARMLESS:
            raise ConfigError(
                f"--resume continues a run as it was configured: {name} is {before!r} in {run} and {value!r} here; "
                "leave that option out, or start a new run with another --out"
            )
    options = options.replace(**changes)
    if (run / "result.json").exists():
        return read_json(run / "result.json", "the result")
    resolve_device(options.device)
    estimator = build_estimator(options.estimator)
    dataset = build_data(options)
    came, kept = dataset.describe(), config["data_format"]["description"]
    if came != kept:
        changed = next(key for key in came if came[key] != kept.get(key))
        raise ConfigError(
            f"--resume needs the data that the run began with, and their {changed} is different now: "
            f"restore {options.data}, or start a new run"
        )
    flow = _new_flow(options, dataset, config["model"])
    return _train(flow, estimator, dataset, options, run, observer)


def _new_flow(options: Options, dataset: Dataset, model: dict | None) -> LatentFlow:
    with torch.random.fork_rng(devices=[]), out_of_memory_as_error(REMEDY):
        torch.manual_seed(options.seed)
        flow = build_flow(options, dataset) if options.layers is not None else flow_from_spec(model or {})
    if options.start == "data":
        start_from_data(flow, dataset.train)
    return flow


def _train(
    flow: LatentFlow,
    estimator: Estimator,
    dataset: Dataset,
    options: Options,
    run: Path | None,
    observer: Observer | None,
) -> dict[str, Any]:
    with out_of_memory_as_error(REMEDY):
        trainer = Trainer(flow, estimator, dataset, options, run, observer)
        trainer.train()
        result = _result(trainer)
    if run is not None:
        save_tensors(run, "weights", flow.state_dict())
        write_json(run / "result.json", result)
        drop_snapshots(run)
    return result


def _result(trainer: Trainer) -> dict[str, Any]:
    flow, dataset, options = trainer.flow, trainer.dataset, trainer.options
    parts = report(flow, dataset, options.evaluation_samples, ("test", "validation"))
    reference = dataset.test or dataset.validation
    return {
        **parts,
        "independent_nll": None if reference is None else independent_nll(dataset, reference),
        "seed": options.seed,
        "epochs": options.epochs,
        "best_epoch": trainer.progress.best_epoch,
        "steps": trainer.progress.step,
        "parameters": sum(p.numel() for p in flow.parameters() if p.requires_grad),
        "weights": "average" if options.average else "last" if trainer.best is None else "best on validation",
        "seconds": round(trainer.progress.seconds, 3),
        "device": str(trainer.device),
        "data": dataset.describe(),
    }


# ---- folders ----


def prepare_folder(out: Path) -> Path:
    """A new folder for a run; one that holds anything is never written into."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        hint = "continue that run with --resume, " if (out / "config.json").exists() else ""
        raise ConfigError(f"--out must be a new or an empty folder, and {out} exists: {hint}or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / ".writable", b"")
        (out / ".writable").unlink()
    except (OSError, CheckpointError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error.__cause__)
        raise ConfigError(f"--out {out} cannot be written: {reason}; choose another folder") from None
    return out


def write_config(run: Path, options: Options, flow: LatentFlow, dataset: Dataset) -> None:
    """`config.json`: every option, the architecture, and what the data look like."""
    data_format = {
        "description": dataset.describe(),
        "shape": None if dataset.shape is None else list(dataset.shape),
        "codec": None if dataset.codec is None else dataset.codec.to_json(),
    }
    config = {"version": CONFIG_VERSION, **options.to_json(), "model": flow_to_spec(flow), "data_format": data_format}
    write_json(run / "config.json", config)


def read_config_file(run: Path) -> dict[str, Any]:
    """The content of a run's `config.json`."""
    if not run.is_dir():
        raise CheckpointError(f"RUN is the folder of a run, and there is no folder {run}; xorflow train makes one")
    config = read_json(run / "config.json", "the run's configuration")
    for key in ("model", "data_format"):
        if not isinstance(config.get(key), dict):
            raise CheckpointError(f"{run / 'config.json'} lacks {key!r}: it is damaged, or not of a run")
    return config


@dataclass(frozen=True)
class Run:
    """A run read back: the trained flow, its options, and how its data are written."""

    folder: Path
    options: Options
    flow: LatentFlow
    shape: tuple[int, ...] | None
    codec: Codec | None


def open_run(run: Path, *, device: str = "cpu", parts: Mapping[str, type[nn.Module]] | None = None) -> Run:
    """Read a finished run. No code in the folder is executed."""
    config = read_config_file(run)
    options = options_of_config(config, run / "config.json")
    if not (run / "result.json").exists() and (run / "checkpoints").exists():
        raise CheckpointError(f"the run in {run} is not finished; continue it with: xorflow train --out {run} --resume")
    flow = flow_from_spec(config["model"], parts)
    _install_weights(flow, run)
    codec, shape = config["data_format"].get("codec"), config["data_format"].get("shape")
    return Run(
        folder=run,
        options=options,
        flow=flow.to(resolve_device(device)).eval(),
        shape=None if shape is None else tuple(shape),
        codec=None if codec is None else Codec.from_json(codec),
    )


def _install_weights(flow: LatentFlow, run: Path) -> None:
    weights = load_tensors(run, "weights")
    expected = flow.state_dict()
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            came = "nothing" if name not in weights else f"shape {tuple(weights[name].shape)}"
            raise CheckpointError(
                f"the weights in {run} are not those of its configuration: {name} has {came} instead of shape "
                f"{tuple(tensor.shape)}; restore the folder, or train again"
            )
    if any(t.dtype == torch.float64 for t in weights.values()):
        flow.double()
    flow.load_state_dict({name: weights[name] for name in expected})


def load(run: str | Path, *, device: str = "cpu", parts: Mapping[str, type[nn.Module]] | None = None) -> LatentFlow:
    """The trained flow of a run folder, ready to evaluate and sample; executes no code from it.

    Args:
        run: the folder that `xorflow train` or `fit(..., out=...)` wrote.
        device: where to put it.
        parts: classes of your own that the model uses, by the names in its configuration.
    """
    return open_run(Path(run), device=device, parts=parts).flow
