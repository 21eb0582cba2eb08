"""Finished runs as one: their models combined, evaluated on the same data, in a folder of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xorflow._devices import resolve_device
from xorflow._files import write_json
from xorflow.errors import ConfigError, ModelError
from xorflow.flows import LatentFlow, Mixture
from xorflow.training.checkpoint import save_tensors
from xorflow.training.config import OF_DATA, Options
from xorflow.training.folder import (
    Run,
    difference_of_data,
    new_folder,
    open_run,
    read_result,
    require_free,
    write_config,
)
from xorflow.training.registry import Trainable
from xorflow.training.results import about, report


def mixture_of(models: Sequence[Trainable]) -> Mixture:
    """All models with equal weights; the components of those that are mixtures share the weight of theirs."""
    components: list[LatentFlow] = []
    weights: list[float] = []
    for model in models:
        if isinstance(model, Mixture):
            latent = model.latent_components()
            shares = model.log_weights().exp().tolist()
            if len(latent) < len(model):
                raise ModelError("a mixture of mixtures is one of latent flows, and one of these has others")
        else:
            latent, shares = [model], [1.0]
        components += latent
        weights += [share / len(models) for share in shares]
    total = sum(weights)  # but for rounding, 1
    learned = all(model.learned for model in models if isinstance(model, Mixture))
    shares = [weight / total for weight in weights]
    return Mixture(components, shares, learned).to(components[0].device, components[0].dtype)


def combine_runs(folders: Sequence[Path], out: Path, device: str = "auto") -> dict[str, Any]:
    """Mix finished runs on the same data, with equal weights, into the folder of a new run, like any other to use.

    Args:
        folders: of at least two runs.
        out: a new folder.
        device: where to evaluate.

    Returns:
        What the new folder's `result.json` holds.
    """
    if len(folders) < 2:
        raise ConfigError(f"at least two runs are combined, and got {len(folders)}")
    require_free(out, resumes=False)  # before weights are read
    runs = [open_run(folder, device=device) for folder in folders]
    results = [read_result(folder) for folder in folders]
    _require_same_data(runs)
    model = _mixed([run.flow for run in runs])
    with new_folder(out, resumes=False):
        options, dataset = runs[0].options, runs[0].data().to(resolve_device(device))
        result = {
            **report(model, dataset, options.evaluation_samples, precision=options.precision),
            **about(model, dataset),
            "how": "mixture",
            "runs": [str(folder) for folder in folders],
            "seeds": [seed for one in results for seed in (one["seeds"] if "how" in one else [one["seed"]])],
            "seconds": round(sum(one["seconds"] for one in results), 3),
        }
        write_config(out, _options(options), model, dataset)
        save_tensors(out, "weights", model.state_dict())
        write_json(out / "result.json", result)
        return result


def _mixed(models: Sequence[Trainable]) -> Mixture:
    """One model, in the widest of their types."""
    widest = functools.reduce(torch.promote_types, (model.dtype for model in models))
    try:
        model = mixture_of([model.to(widest) for model in models]).eval()
    except ModelError as error:
        raise ConfigError(f"these runs make no mixture: {error}") from None
    if not model.has_closed_form:
        raise ConfigError(
            "runs whose likelihood is exact are combined, of depth 1 and not autoregressive in u, and one of these has only a "
            "bound"
        )
    return model


def _options(first: Options) -> Options:
    """Those of the data, and nothing about training: no single run makes this model."""
    values = first.to_json()
    return Options(layers=None).replace(
        **{name: values[name] for name in (*OF_DATA, "evaluation_samples", "precision")}
    )


def _require_same_data(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        if run.data_format != first.data_format:
            raise ConfigError(
                f"runs on the same data are combined, and those of {run.folder} are not those of {first.folder}: the "
                f"{difference_of_data(run.data_format, first.data_format)} is different; give the same data, validation, test, "
                "data_seed and label to all"
            )
