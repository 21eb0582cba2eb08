"""Runs: what makes them, goes on with them, and reads them back."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xorflow.conditioners.transformer import attention_stacks
from xorflow.data import Codec, Dataset, validate
from xorflow.errors import CheckpointError, ConfigError, DataError, ModelError
from xorflow.estimators import Estimator, MaximumLikelihood
from xorflow.flows import LatentFlow
from xorflow.training import recipes
from xorflow.training.build import build_data, build_estimator, build_flow
from xorflow.training.checkpoint import drop_snapshots
from xorflow.training.config import (
    HARMLESS,
    INITS,
    OF_A_MODEL,
    OF_DATA,
    Options,
    options_of_config,
)
from xorflow.training.devices import check_precision, out_of_memory_as_error, resolve_device
from xorflow.training.folder import (
    data_of_run,
    prepare_folder,
    read_config_file,
    read_result,
    write_config,
)
from xorflow.training.init import init_from_data, init_from_flow
from xorflow.training.loop import Observer, Trainer
from xorflow.training.metrics import require_tensorboard
from xorflow.training.muon import hidden_matrices
from xorflow.training.registry import BASES, CONDITIONERS, ESTIMATORS
from xorflow.training.results import independent_nll, report
from xorflow.training.specs import flow_from_spec, flow_to_spec
from xorflow.training.step import Trainable
from xorflow.training.storage import TEMPORARY, load_tensors, save_tensors, write_json


def remedy_for(options: Options) -> str:
    """Which options lower the need of memory."""
    call = CONDITIONERS.read(options.conditioner)
    if "hidden" in call.defaults:
        return "lower batch_size, or hidden of the conditioner"
    wide = "width, depth or reach" if call.settings.get("reach") else "width or depth"
    return f"raise accumulate, or lower batch_size, or {wide} of the conditioner"


_SEEDED = threading.Lock()
"""Held while weights are drawn: the generator that modules draw from is the process's, and runs may be threads."""


def fit(
    flow: Trainable,
    data: Dataset,
    estimator: Estimator | None = None,
    *,
    out: str | Path | None = None,
    init: str = "random",
    observer: Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a flow in place; it ends with the weights that are best on validation data, if there are any.

    Args:
        flow: the model.
        data: its data.
        estimator: the objective; `MaximumLikelihood()` by default.
        out: a folder for configuration, weights, metrics and results; None keeps nothing on disk.
        init: `data` sets the output biases to the data's frequencies; `random` leaves the flow as it is.
        observer: is told about progress.
        options: any of `Options` that describe training: epochs, batch_size, lr, schedule, device, ...

    Returns:
        What `result.json` holds.
    """
    estimator = estimator or MaximumLikelihood()
    if init not in ("data", "random"):
        raise ConfigError(f"init of fit() is 'data', or 'random' for the flow as it is; got {init!r}")
    clash = [name for name in options if name in OF_DATA + OF_A_MODEL]
    if clash:
        raise ConfigError(f"fit() trains the flow on the data it is given: {clash[0]} means nothing here")
    chosen = Options(data=data.name, layers=None, init=init, estimator=ESTIMATORS.text(estimator)).replace(
        **options
    )
    _check(chosen, estimator, flow, data)
    folder = None if out is None else prepare_folder(Path(out))
    if init == "data":
        init_from_data(flow, data.train)
    if folder is not None:
        _write_beginning(folder, chosen, flow, data)
    return complete_run(_trainer(flow, estimator, data, chosen, folder, observer))


def prepare_run(flow: Trainable, options: Options, dataset: Dataset, out: Path) -> None:
    """Make the folder of a run whose model was built in Python, with the weights that it begins with, untrained.

    `resume_run`, `run_jobs` and `xorflow train --resume` then train it as any other. Layers without a weight that learns stay
    as they are.

    Args:
        flow: the model.
        options: of the run; those that describe a model have their defaults, and `layers` is None.
        dataset: the data that the options name.
        out: a new folder.
    """
    _check(options, build_estimator(options.estimator), flow, dataset)
    prepare_folder(out)
    _write_beginning(out, options, flow, dataset)


_BEGINNING = "beginning"
"""The file of the weights that a model built in Python begins with: no options describe how it got them."""


def _write_beginning(run: Path, options: Options, flow: Trainable, dataset: Dataset) -> None:
    save_tensors(run, _BEGINNING, flow.state_dict())
    write_config(run, options, flow, dataset)  # last: a folder with a configuration can be resumed


def train_run(
    options: Options,
    out: Path,
    observer: Observer | None = None,
    *,
    model: dict | None = None,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Train what the options describe into a new folder; `model` is the flow of options without layers.

    `dataset` is the data that the options name, if they are loaded already.
    """
    return complete_run(begin_run(options, out, observer, model=model, dataset=dataset))


def begin_run(
    options: Options,
    out: Path,
    observer: Observer | None = None,
    *,
    model: dict | None = None,
    dataset: Dataset | None = None,
) -> Trainer:
    """Make the folder of a new run, and what trains it; see `train_run`."""
    resolve_device(options.device)
    estimator = build_estimator(options.estimator)
    dataset = dataset or build_data(options)
    flow = _fresh_flow(options, dataset, model)
    _check(options, estimator, flow, dataset)
    _initialise(options, flow, dataset)
    prepare_folder(out)
    (write_config if options.layers is not None else _write_beginning)(out, options, flow, dataset)
    return _trainer(flow, estimator, dataset, options, out, observer)


def check_run(options: Options, dataset: Dataset, *, model: dict | None = None) -> None:
    """Raise what `train_run` would raise before it makes its folder; nothing is kept or written."""
    estimator = build_estimator(options.estimator)
    _check(options, estimator, _fresh_flow(options, dataset, model), dataset)


def _check(options: Options, estimator: Estimator, flow: Trainable, dataset: Dataset) -> None:
    """What would stop a run, found before its folder is made."""
    _check_fits(flow, dataset)
    check_precision(options.precision, resolve_device(options.device))
    admitted = estimator.admit(flow)
    if options.compile and not attention_stacks(flow):
        raise ConfigError(
            "compile is of the blocks of transformers, and this model has none; leave it out, or set compile=false beside a "
            "recipe that has it"
        )
    if options.optimiser == "muon" and not hidden_matrices(flow):
        raise ConfigError(
            "optimiser=muon is for matrices within transformers and recurrent networks, and this model has none; choose adamw"
        )
    if options.accumulate > 1:
        estimator.prepare(admitted)
        if any(True for _ in estimator.parameters()):
            raise ConfigError(
                f"estimator {options.estimator!r} learns from the gradient of the whole batch, which accumulate never has at "
                "once; leave accumulate out"
            )
    if options.tensorboard:
        require_tensorboard()


def _check_fits(flow: Trainable, dataset: Dataset) -> None:
    """Rows outside a flow's space would train it to something that is no likelihood of them."""
    if flow.features != dataset.features:
        raise ModelError(
            f"a flow has the features of its data: this one has D = {flow.features}, and {dataset.name} has "
            f"{dataset.features}; build it with features={dataset.features}"
        )
    for feature, (has, needs) in enumerate(zip(flow.states.sizes, dataset.categories, strict=True)):
        if has < needs:
            raise ModelError(
                f"a flow has at least the categories of its data: this one has K = {has} at feature {feature} (from 0), and "
                f"{dataset.name} has {needs}; build its layers and its base with categories=data.categories"
            )
    if flow.context_features not in (0, dataset.context_features):
        raise ModelError(
            f"this flow takes {flow.context_features} context features, and {dataset.name} has {dataset.context_features}; "
            f"build its conditioners with context={dataset.context_features}"
        )
    sizes = torch.tensor(dataset.categories)
    for split in dataset.parts.values():
        if not split.stochastic and bool((split.values.amax(0).cpu() >= sizes).any()):
            validate(split.values, dataset.categories)  # raises, and names the row


def resume_run(
    run: Path,
    changes: Mapping[str, Any],
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Go on with an interrupted run; a finished one returns its result."""
    if (run / "result.json").exists():
        _options_of_run(run, changes)
        result = read_result(run)
        if "how" in result:
            raise ConfigError(
                f"{run} combines other runs, and there is nothing to resume; see xorflow combine"
            )
        drop_snapshots(run)
        return result
    return complete_run(reopen_run(run, changes, observer))


def reopen_run(
    run: Path,
    changes: Mapping[str, Any],
    observer: Observer | None = None,
    *,
    dataset: Dataset | None = None,
) -> Trainer:
    """What goes on with an interrupted run; `dataset` is the data that its options name, if they are loaded already."""
    options, config = _options_of_run(run, changes)
    for left in run.glob(f".*{TEMPORARY}"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    estimator = build_estimator(options.estimator)
    dataset = data_of_run(run, options, config["data_format"], dataset)
    saved = (run / "checkpoints" / "latest.json").exists()
    flow = _fresh_flow(options, dataset, config["model"])
    if options.layers is not None and _written(flow) != _written_anew(config["model"]):
        raise CheckpointError(
            f"the options in {run / 'config.json'} make another model than the one in that file, so its weights would mean "
            "something else; go on with the version of xorflow that began the run, or begin anew with another --out"
        )
    _check(options, estimator, flow, dataset)
    if saved:
        pass  # the weights are those of the checkpoint
    elif options.layers is None:
        _install_weights(flow, run, _BEGINNING)
    else:
        _initialise(options, flow, dataset)
    return _trainer(flow, estimator, dataset, options, run, observer)


def _written(flow: Trainable) -> dict[str, Any]:
    """The model as a file has it."""
    return json.loads(json.dumps(flow_to_spec(flow)))


def _written_anew(model: dict[str, Any]) -> dict[str, Any]:
    """The model of a file as we would write it: that of an earlier version lacks settings that came later."""
    with torch.random.fork_rng(devices=[]):
        return _written(flow_from_spec(model))


def _options_of_run(run: Path, changes: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of a run, with changes that do no harm, and all of its configuration."""
    config = read_config_file(run)
    if changes.get("recipe") != config.get("recipe"):
        changes = recipes.expanded(changes)
    options = options_of_config(config, run / "config.json")
    for name, value in changes.items():
        before = options.to_json()[name]
        if value != before and name not in HARMLESS:
            raise ConfigError(
                f"--resume continues a run as it was configured: {name} is {before!r} in {run} and {value!r} "
                "here; leave that option out, or start a new run with another --out"
            )
    return options.replace(**changes), config


def initialised_flow(options: Options, dataset: Dataset, model: dict | None = None) -> Trainable:
    """A flow with the weights that training begins with."""
    flow = _fresh_flow(options, dataset, model)
    _initialise(options, flow, dataset)
    return flow


def _initialise(options: Options, flow: Trainable, dataset: Dataset) -> None:
    """Give a flow the weights that training begins with."""
    if options.init in ("data", "biases"):
        init_from_data(flow, dataset.train, posteriors=options.init == "data")
    if options.init not in INITS:
        run = Path(options.init)
        if not run.is_dir():
            raise ConfigError(f"init names the folder of a finished run, and there is no folder {run}")
        before, what = open_run(run).latent, f"the run in {run}"
        if not isinstance(flow, LatentFlow):
            raise ConfigError("init=RUN is for a single flow, and this is a mixture; leave it out")
        init_from_flow(flow, before, what, keep_base="p0" in BASES.read(options.base).settings)


def _fresh_flow(options: Options, dataset: Dataset, model: dict | None) -> Trainable:
    with _SEEDED, torch.random.fork_rng(devices=[]), out_of_memory_as_error(remedy_for(options)):
        torch.manual_seed(options.seed)
        return build_flow(options, dataset) if options.layers is not None else flow_from_spec(model or {})


def _trainer(
    flow: Trainable,
    estimator: Estimator,
    dataset: Dataset,
    options: Options,
    run: Path | None,
    observer: Observer | None,
) -> Trainer:
    with out_of_memory_as_error(remedy_for(options)):
        return Trainer(flow, estimator, dataset, options, run, observer)


def complete_run(trainer: Trainer) -> dict[str, Any]:
    """Train to the end, evaluate, and, if the run has a folder, write weights and `result.json`; returns the latter."""
    with out_of_memory_as_error(remedy_for(trainer.options)):
        trainer.train()
        result = _result(trainer)
    run = trainer.run_folder
    if run is not None:
        save_tensors(run, "weights", trainer.flow.state_dict())
        write_json(run / "result.json", result)
        drop_snapshots(run)
    return result


def _result(trainer: Trainer) -> dict[str, Any]:
    flow, dataset, options = trainer.flow, trainer.dataset, trainer.options
    likelihoods = report(flow, dataset, options.evaluation_samples, ("test", "validation"), options.precision)
    reference = dataset.test or dataset.validation
    independent = None if reference is None else independent_nll(dataset, reference)
    worse = worse_than_independent(
        likelihoods.get("test" if dataset.test else "validation"), independent, options
    )
    return {
        **likelihoods,
        "independent_nll": independent,
        **({} if worse is None else {"warning": worse}),
        "seed": options.seed,
        "epochs": options.epochs,
        "best_epoch": trainer.progress.best_epoch,
        "steps": trainer.progress.step,
        "parameters": sum(p.numel() for p in flow.parameters() if p.requires_grad),
        "weights": "average" if options.average else "last" if trainer.best is None else "best on validation",
        "seconds": round(trainer.progress.seconds, 3),
        "device": str(trainer.device),
        "data": dataset.describe(),
    } | ({} if trainer.not_captured is None else {"not_captured": trainer.not_captured})


def worse_than_independent(
    figures: Mapping[str, Any] | None, independent: float | None, options: Options
) -> str | None:
    """What to say, and to try, if a model is no better than one that ignores how features depend on each other."""
    if figures is None or independent is None or figures["nll"] <= independent:
        return None
    exact = figures["kind"] == "exact"
    ways = ["train longer (epochs)"]
    ways += [] if options.base.startswith("learned") else ["let the base learn (base=learned)"]
    ways += [] if options.init == "data" else ["begin at independent columns (init=data)"]
    ways += [] if exact else ["evaluate with more samples (evaluation_samples), for a bound may be loose"]
    ways += (
        []
        if options.estimator.startswith("maximum-likelihood")
        else ["train by estimator=maximum-likelihood"]
    )
    return (
        f"this model {'has' if exact else 'has at most'} {figures['nll']:.2f} nats, and independent columns have "
        f"{independent:.2f}: it has learned nothing of how columns depend on each other. Try to {', to '.join(ways)}"
    )


# ---- folders ----


@dataclass(frozen=True)
class Run:
    """A run read back: the trained flow, its options, and how its data are written."""

    folder: Path
    options: Options
    flow: Trainable
    shape: tuple[int, ...] | None
    codec: Codec | None
    data_format: Mapping[str, Any]

    @property
    def latent(self) -> LatentFlow:
        """The flow of a run that is no mixture."""
        if not isinstance(self.flow, LatentFlow):
            raise ConfigError(f"this takes the run of a single flow, and that in {self.folder} is a mixture")
        return self.flow

    def data(self) -> Dataset:
        """The data that it was trained on."""
        return data_of_run(self.folder, self.options, self.data_format)


def open_run(run: Path, *, device: str = "cpu", parts: Mapping[str, type[nn.Module]] | None = None) -> Run:
    """Read a finished run. No code in the folder is executed."""
    config = read_config_file(run)
    options = options_of_config(config, run / "config.json")
    if not (run / "result.json").exists() and (run / "checkpoints").exists():
        raise CheckpointError(
            f"the run in {run} is not finished; continue it with: xorflow train --out {run} --resume"
        )
    kept = config["data_format"]
    try:
        with _SEEDED, torch.random.fork_rng(devices=[]):  # fresh weights are drawn, only to be replaced
            flow = flow_from_spec(config["model"], parts)
        codec = None if kept.get("codec") is None else Codec.from_json(kept["codec"])
        shape = None if kept.get("shape") is None else tuple(kept["shape"])
    except (CheckpointError, DataError) as error:
        raise CheckpointError(f"{run / 'config.json'}: {error}") from error
    except TypeError:
        raise CheckpointError(
            f"{run / 'config.json'} is damaged: its shape is no list; restore it or train again"
        ) from None
    _install_weights(flow, run)
    return Run(run, options, flow.to(resolve_device(device)).eval(), shape, codec, kept)


def untrained(run: Run) -> Trainable:
    """The flow of a run as its training began."""
    if run.options.layers is not None:
        return initialised_flow(run.options, run.data()).eval()
    if not list(run.folder.glob(f"{_BEGINNING}.*")):
        raise ConfigError(
            f"the run in {run.folder} combines others, and none of its weights was trained there; take these"
        )
    flow = copy.deepcopy(run.flow)
    _install_weights(flow, run.folder, _BEGINNING)
    return flow


def _install_weights(flow: Trainable, run: Path, stem: str = "weights") -> None:
    weights = load_tensors(run, stem)
    expected = flow.state_dict()
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            came = "nothing" if name not in weights else f"shape {tuple(weights[name].shape)}"
            raise CheckpointError(
                f"the weights in {run} are not those of its configuration: {name} has {came} instead of "
                f"shape {tuple(tensor.shape)}; restore the folder, or train again"
            )
    if any(t.dtype == torch.float64 for t in weights.values()):
        flow.double()
    flow.load_state_dict({name: weights[name] for name in expected})


def load(
    run: str | Path, *, device: str = "cpu", parts: Mapping[str, type[nn.Module]] | None = None
) -> Trainable:
    """The trained flow of a run folder, ready to evaluate and sample; executes no code from it.

    Args:
        run: the folder that `xorflow train` or `fit(..., out=...)` wrote.
        device: where to put it.
        parts: classes of your own that the model uses, by the names in its configuration.
    """
    return open_run(Path(run), device=device, parts=parts).flow
