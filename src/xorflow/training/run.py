"""Runs: created, resumed and finished; `folder.open_run` reads a finished one back."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._devices import out_of_memory_as_error, resolve_device
from xorflow._distributed import process_count, rank, require_same
from xorflow._files import write_json
from xorflow.conditioners.transformer import attention_stacks
from xorflow.data import Dataset, Schema, validate
from xorflow.data import load as load_data
from xorflow.errors import CheckpointError, ConfigError, ModelError
from xorflow.estimators import Estimator, MaximumLikelihood
from xorflow.flows import LatentFlow
from xorflow.training import recipes
from xorflow.training.build import build_data, build_estimator, build_flow, init_from_data, init_from_flow
from xorflow.training.checkpoint import (
    drop_snapshots,
    has_snapshot,
    has_tensors,
    install,
    read_weights,
    save_tensors,
)
from xorflow.training.config import HARMLESS, INITS, OF_A_MODEL, OF_DATA, Options, options_of_config
from xorflow.training.folder import (
    BEGINNING,
    INCOMPLETE,
    Run,
    data_of_run,
    held,
    new_folder,
    open_run,
    read_config_file,
    read_result,
    require_free,
    require_tensorboard,
    write_config,
)
from xorflow.training.optimiser import hidden_matrices
from xorflow.training.registry import (
    CONDITIONERS,
    ESTIMATORS,
    Trainable,
    flow_to_spec,
)
from xorflow.training.results import require_complete, result_of, with_warning
from xorflow.training.spec import flow_from_spec, model_for
from xorflow.training.trainer import Observer, Trainer


def fit(
    flow: Trainable,
    data: Any,
    estimator: Estimator | str | None = None,
    *,
    out: str | Path | None = None,
    init: str = "random",
    observer: Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a flow in place; it ends with the weights that are best on validation data, if there are any.

    Args:
        flow: the model.
        data: a `Dataset`, or what `data.load` makes one of: a frame, an array, a tensor, or the path of a file.
        estimator: how the gradient is estimated, or a name as on the command line; `MaximumLikelihood()` by default.
        out: a folder for configuration, weights, metrics and results; None keeps nothing on disk.
        init: `data` sets the output biases to the data's frequencies; `random` leaves the flow as it is.
        observer: is told about progress.
        options: any of `Options` that describe training: epochs, batch_size, lr, schedule, device, ...

    Returns:
        What `result.json` holds.
    """
    estimator = build_estimator(estimator) if isinstance(estimator, str) else estimator or MaximumLikelihood()
    if init not in ("data", "random"):
        raise ConfigError(f"init of fit() is 'data', or 'random' for the flow as it is; got {init!r}")
    clash = [name for name in options if name in OF_DATA + OF_A_MODEL]
    if clash:
        raise ConfigError(f"fit() trains the flow on the data it is given: {clash[0]} means nothing here")
    dataset = data if isinstance(data, Dataset) else load_data(data)
    chosen = Options(data=dataset.name, layers=None, init=init, estimator=ESTIMATORS.text(estimator)).replace(
        **options
    )
    folder = None if out is None else Path(out)
    return finish_run(_begun(chosen, estimator, flow, dataset, folder, observer))


def save(
    flow: Trainable, folder: str | Path, schema: Schema | None = None, data: str | Path | None = None
) -> None:
    """Keep a model that was trained by a loop of one's own: a new folder that `load` and every command take.

    What needs the data, such as `xorflow evaluate`, is refused where they are not named.

    Args:
        flow: the model.
        folder: new, or empty.
        schema: of the table whose states the model is of; without it rows are integers, or those of `data`.
        data: the file that the model was trained on, split as `xf.data.load(data)` does.
    """
    out = Path(folder)
    require_free(out, resumes=False)
    if data is None:
        options, dataset = Options(data="data that are not named", layers=None), None
    else:
        options = Options(data=str(data), layers=None)
        dataset = build_data(options)
        if schema is not None and (dataset.schema is None or dataset.schema.sha256 != schema.sha256):
            raise ConfigError(
                f"the schema of a model is that of its data, and the one given is not what xf.data.load({str(data)!r}) has; "
                "leave schema out"
            )
    of_data = dataset or schema
    if of_data is not None and tuple(flow.states.sizes) != of_data.categories:
        raise ModelError(
            f"a model has the states of its data, {of_data.categories}, and this one has {tuple(flow.states.sizes)}; build it "
            "with categories=schema.categories"
        )
    with new_folder(out, resumes=False):
        save_tensors(out, "weights", flow.state_dict())
        write_config(out, options, flow, of_data)


def create_run(
    options: Options,
    out: Path,
    observer: Observer | None = None,
    *,
    model: Trainable | dict[str, Any] | None = None,
    dataset: Dataset | None = None,
) -> Trainer:
    """Make the folder of a new run, and what `finish_run` trains; whatever would stop it is found before.

    Left alone, the run is there for `resume_run`, `run_jobs` and `xorflow train --resume`.

    Args:
        options: of the run.
        out: a new folder.
        observer: is told about progress.
        model: of options without layers, the flow, with the weights that it begins with, or its architecture as `config.json`
            holds it. Layers without a weight that learns stay as they are.
        dataset: the data that the options name, if they are loaded already.
    """
    if options.is_auto:
        raise ConfigError("a run of the recipe auto is made at once: begin_auto(options, out).make()")
    resolve_device(options.device)  # before data are loaded
    estimator = build_estimator(options.estimator)
    dataset = dataset or build_data(options)
    flow = model if isinstance(model, nn.Module) else _fresh_flow(options, dataset, model)
    return _begun(options, estimator, flow, dataset, out, observer, initialised=flow is model)


def check_run(options: Options, dataset: Dataset, *, model: dict[str, Any] | None = None) -> None:
    """Raise what `create_run` would raise before it makes its folder; nothing is kept or written."""
    estimator = build_estimator(options.estimator)
    _check(options, estimator, _fresh_flow(options, dataset, model), dataset)


def resume_run(
    run: Path,
    changes: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    *,
    dataset: Dataset | None = None,
) -> Trainer | None:
    """What `finish_run` goes on with, from the last checkpoint of an interrupted run; None if the run is finished.

    Args:
        run: its folder.
        changes: options that are given again; only those that make no other run may be different.
        observer: is told about progress.
        dataset: the data that the options name, if they are loaded already.
    """
    options, config = options_of_run(run, changes or {})
    if _is_finished(run):
        if "how" in read_result(run):
            raise ConfigError(
                f"{run} combines other runs, and there is nothing to resume; see xorflow combine"
            )
        if has_snapshot(run) and not rank():
            with held(run):
                drop_snapshots(run)
        return None
    if not rank():
        with held(run):
            pass  # who else has it is said before data are loaded
    estimator = build_estimator(options.estimator)
    dataset = data_of_run(run, options, config["data_format"], dataset)
    beginning = read_weights(run, BEGINNING) if options.layers is None else {}
    flow = model_for(config["model"], beginning) if beginning else _fresh_flow(options, dataset)
    if not beginning and flow_to_spec(flow) != flow_to_spec(model_for(config["model"], flow.state_dict())):
        raise CheckpointError(
            f"the options in {run / 'config.json'} make another model than the one in that file, so its weights would mean "
            "something else; go on with the version of xorflow that began the run, or begin anew with another --out"
        )
    _check(options, estimator, flow, dataset)
    if process_count() > 1:
        require_same(_seen(options, dataset))
    if has_snapshot(run):
        pass  # the weights are those of the checkpoint
    elif options.layers is None:
        install(flow, beginning, run)
    else:
        _initialise(options, flow, dataset)
    with out_of_memory_as_error(remedy_for(options)):
        return Trainer(flow, estimator, dataset, options, run, observer)


def finish_run(trainer: Trainer) -> dict[str, Any]:
    """Train to the end, evaluate, and, if the run has a folder, write weights and `result.json`; returns the latter.

    Raises:
        EvaluationError: if the weights were trained, and are kept, but some figures could not be computed; the others are
            in `result.json`, and `complete_result` takes what is lacking.
    """
    run = trainer.run_folder
    if run is None:
        return require_complete(_trained(trainer))
    with held(run):
        if not _is_finished(run):  # by somebody else, since this trainer was made
            result = _trained(trainer)
            write_json(run / "result.json", result)
        drop_snapshots(run)
    return finished_result(run)


def train_along(trainer: Trainer) -> None:
    """What all processes of a run but the first do, which finishes it: train, and write nothing."""
    with out_of_memory_as_error(remedy_for(trainer.options)):
        trainer.train()


def _trained(trainer: Trainer) -> dict[str, Any]:
    """Train, keep the weights, and only then evaluate."""
    train_along(trainer)
    if trainer.run_folder is not None:
        save_tensors(trainer.run_folder, "weights", trainer.flow.state_dict())
    return result_of(trainer)


def finished_result(run: Path) -> dict[str, Any]:
    """The result of a finished run, whole."""
    return require_complete(read_result(run), run)


def complete_result(run: Path, figures: Mapping[str, Any]) -> None:
    """Put figures of `report` into the result of a run that lacks them; any other result is left as it is."""
    if not _is_finished(run) or INCOMPLETE not in read_result(run):
        return
    with held(run):
        result = read_result(run)
        lacking = result.pop(INCOMPLETE, {})
        result = {name: figures[name] for name in lacking if name in figures} | result
        write_json(run / "result.json", with_warning(result, options_of_run(run, {})[0]))


def _is_finished(run: Path) -> bool:
    return os.path.lexists(run / "result.json")


def _begun(
    options: Options,
    estimator: Estimator,
    flow: Trainable,
    dataset: Dataset,
    run: Path | None,
    observer: Observer | None,
    *,
    initialised: bool = False,
) -> Trainer:
    """A run with its folder, if it has one, and all that it begins with; whatever would stop it is found before."""
    _check(options, estimator, flow, dataset)
    run = None if rank() else run  # of several processes the first one writes
    if run is not None:
        require_free(run)
    if not initialised:
        _initialise(options, flow, dataset)
    if process_count() > 1:
        require_same(_seen(options, dataset))
    if run is not None:
        with new_folder(run):
            if options.layers is None:
                save_tensors(run, BEGINNING, flow.state_dict())
            write_config(run, options, flow, dataset)  # last: a folder with a configuration can be resumed
    with out_of_memory_as_error(remedy_for(options)):
        return Trainer(flow, estimator, dataset, options, run, observer)


def _seen(options: Options, dataset: Dataset) -> dict[str, str | dict[str, Tensor]]:
    """What all processes of a run must have."""
    given = {name: value for name, value in options.to_json().items() if name not in HARMLESS}
    tensors = {
        f"{name}.{key}": value
        for name, split in dataset.parts.items()
        for key, value in vars(split).items()
        if isinstance(value, Tensor)
    }
    return {
        "versions": f"xorflow {version('xorflow')}, torch {torch.__version__}",
        "options": json.dumps(given),
        "data": tensors,
        "streamed data": "" if dataset.stream is None else dataset.stream.sha256,
    }


def remedy_for(options: Options) -> str:
    """Which options lower the need of memory."""
    call = CONDITIONERS.read(options.conditioner)
    if "hidden" in call:
        return "lower batch_size, or hidden of the conditioner"
    wide = "width, depth or reach" if "reach=" in options.conditioner else "width or depth"
    return f"raise accumulate, or lower batch_size, or {wide} of the conditioner"


# ---- what a run begins with ----


def initialised_flow(options: Options, dataset: Dataset) -> Trainable:
    """The flow that the options describe, with the weights that training begins with."""
    flow = _fresh_flow(options, dataset)
    _initialise(options, flow, dataset)
    return flow


def _initialise(options: Options, flow: Trainable, dataset: Dataset) -> None:
    """Give a flow the weights that training begins with."""
    if options.init in ("data", "biases"):
        init_from_data(flow, dataset.train, posteriors=options.init == "data")
    if options.init not in INITS:
        run = Path(options.init)
        if not os.path.isdir(run):
            raise ConfigError(f"init names the folder of a finished run, and there is no folder {run}")
        before, what = open_run(run).latent, f"the run in {run}"
        if not isinstance(flow, LatentFlow):
            raise ConfigError("init=RUN is for a single flow, and this is a mixture; leave it out")
        init_from_flow(flow, before, what, keep_base="p0=" in options.base)


def _fresh_flow(options: Options, dataset: Dataset, model: dict | None = None) -> Trainable:
    with torch.random.fork_rng(devices=[]), out_of_memory_as_error(remedy_for(options)):
        torch.manual_seed(options.seed)
        return build_flow(options, dataset) if options.layers is not None else flow_from_spec(model or {})


def untrained(run: Run) -> Trainable:
    """The flow of a run as its training began."""
    if run.options.layers is not None:
        return initialised_flow(run.options, run.data()).eval()
    if not has_tensors(run.folder, BEGINNING):
        raise ConfigError(
            f"the run in {run.folder} combines others, and none of its weights was trained there; take these"
        )
    flow = copy.deepcopy(run.flow)
    install(flow, read_weights(run.folder, BEGINNING), run.folder)
    return flow


def options_of_run(run: Path, changes: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of a run, with changes that do no harm, and all of its configuration."""
    config = read_config_file(run)
    if changes.get("recipe") != config.get("recipe"):
        changes = recipes.expanded(changes)
    options = options_of_config(config, run / "config.json")
    # a run of the recipe auto has the number of its orderings, which the clock may have found
    changes = {name: value for name, value in changes.items() if (name, value) != ("orderings", None)}
    for name, value in changes.items():
        before = options.to_json()[name]
        if value != before and name not in HARMLESS:
            raise ConfigError(
                f"--resume continues a run as it was configured: {name} is {before!r} in {run} and {value!r} "
                "here; leave that option out, or start a new run with another --out"
            )
    return options.replace(**changes), config


# ---- what would stop it ----


def _check(options: Options, estimator: Estimator, flow: Trainable, dataset: Dataset) -> None:
    """What would stop a run, found before its folder is made."""
    _check_fits(flow, dataset)
    rows = min(options.batch_size, dataset.training_rows)
    if process_count() > rows:
        raise ConfigError(
            f"each process of a run takes some rows of a batch, and {process_count()} processes came for {rows}; begin fewer, "
            "or raise batch_size"
        )
    if dataset.stream is not None:
        dataset.stream.steps(rows, process_count())
    resolve_device(options.device)
    admitted = estimator.admit(flow)
    if options.posterior != "none" and estimator.proposal == "p":
        raise ConfigError(
            f"posterior has an effect only if the estimator draws from it, and {options.estimator!r} does not; leave posterior "
            "out, or choose estimator=score-function:objective=elbo"
        )
    if estimator.takes_soft_targets and not dataset.train.stochastic:
        raise ConfigError(
            "soft_targets is for images whose grey values are binarised afresh, as MNIST's are, and these data are fixed; "
            "leave soft_targets out of the estimator"
        )
    actual: dict[str, Any] = {"validation": 0 if dataset.validation is None else len(dataset.validation)}
    if options.layers is None:
        kinds = {"transformer": attention_stacks(flow), "recurrent": hidden_matrices(flow), "another": True}
        actual["conditioner"] = next(name for name, there in kinds.items() if there)
    options.require_effects(**actual)
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
