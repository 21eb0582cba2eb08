"""The folder of a run: which one may be used, what is written when a run begins, and a finished run read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xorflow.data import Codec, Dataset
from xorflow.errors import CheckpointError, ConfigError, DataError
from xorflow.flows import LatentFlow
from xorflow.training.build import build_data
from xorflow.training.config import CONFIG_VERSION, Options, check_version, options_of_config
from xorflow.training.devices import resolve_device
from xorflow.training.specs import Trainable, flow_from_spec, flow_to_spec
from xorflow.training.storage import load_tensors, read_json, write_bytes, write_json

# ---- a run begins ----


def prepare_folder(out: Path, *, resumes: bool = True) -> Path:
    """A new folder for a run; one that holds anything is never written into. For `resumes` see `require_free`."""
    require_free(out, resumes=resumes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / ".writable", b"")
        (out / ".writable").unlink()
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else cause
        raise ConfigError(f"--out {out} cannot be written: {reason}; choose another folder") from None
    return out


def require_free(out: Path, *, resumes: bool = True) -> None:
    """Refuse a folder that holds anything, or a file in its place; the advice is for a command that `resumes` runs, or not."""
    if not (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        return
    kind = "is a file" if out.is_file() else "is not empty"
    hint = _how_to_go_on(out) if resumes else ""
    raise ConfigError(f"--out must be a new or an empty folder, and {out} {kind}: {hint}choose another --out")


def _how_to_go_on(out: Path) -> str:
    """The beginning of an advice, if a folder holds runs."""
    if (out / "config.json").exists():
        return "continue that run with --resume, or "
    if holds_several(out):
        return "continue its runs with the command that began them and --resume, or "
    return ""


def holds_several(folder: Path) -> bool:
    """Whether these are runs in a folder of their own each, as seeds and tables of runs leave them."""
    return any(next(folder.glob(f"{depth}/config.json"), None) for depth in ("*", "*/*"))


BEGINNING = "beginning"
"""The file of the weights that a model built in Python begins with: no options describe how it got them."""


def write_config(run: Path, options: Options, flow: Trainable, dataset: Dataset) -> None:
    """`config.json`: every option, the architecture, and what the data look like."""
    config = {
        "version": CONFIG_VERSION,
        **options.to_json(),
        "model": flow_to_spec(flow),
        "data_format": _data_format(dataset),
    }
    write_json(run / "config.json", config)


def _data_format(dataset: Dataset) -> dict[str, Any]:
    """How rows are written, and what tells these data from others."""
    return {
        "description": dataset.describe(),
        "shape": None if dataset.shape is None else list(dataset.shape),
        "codec": None if dataset.codec is None else dataset.codec.to_json(),
        "train_sha256": dataset.train.sha256,
    }


# ---- what is there ----


def data_of_run(
    run: Path, options: Options, kept: Mapping[str, Any], dataset: Dataset | None = None
) -> Dataset:
    """The data that a run began with, loaded again unless given; other data are refused."""
    if options.layers is None and options.data != "mnist" and not Path(options.data).exists():
        raise ConfigError(
            f"the run in {run} is of data named {options.data!r}, which are no file, seen from this folder; go to the folder "
            "where they are or, if fit() was given them, use xorflow.load and xorflow.evaluate in Python"
        )
    if options.data != "mnist" and dataset is None and not Path(options.data).exists():
        raise ConfigError(
            f"the run in {run} was trained on the file {options.data}, which is not there, seen from this folder; "
            "go to the folder where it was trained, or put the file back"
        )
    dataset = dataset or build_data(options)
    came = _data_format(dataset)
    if came != kept:
        changed = difference_of_data(came, kept)
        raise ConfigError(
            f"the run in {run} needs the data it was trained on, and the {changed} of {options.data} is "
            "different now; restore the file, or train a new run"
        )
    return dataset


def difference_of_data(came: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """What of their data differs between two configurations."""
    key = next((key for key in came if came[key] != kept.get(key)), "format")
    if key == "description" and isinstance(kept.get(key), dict):
        return difference_of_data(came[key], kept[key])
    return {"codec": "set of categories", "train_sha256": "training part", "sha256": "held-out part"}.get(
        key, key
    )


def read_config_file(run: Path) -> dict[str, Any]:
    """The content of a run's `config.json`."""
    if not run.is_dir():
        raise CheckpointError(
            f"RUN is the folder of a run, and there is no folder {run}; xorflow train makes one"
        )
    config = read_json(run / "config.json", "the run's configuration")
    check_version(config, run / "config.json")
    for key in ("model", "data_format"):
        if not isinstance(config.get(key), dict):
            raise CheckpointError(f"{run / 'config.json'} lacks {key!r}: it is damaged, or not of a run")
    return config


def read_result(run: Path) -> dict[str, Any]:
    """The content of a finished run's `result.json`."""
    return read_json(run / "result.json", "the result")


# ---- a finished run ----


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
        with torch.random.fork_rng(devices=[]):  # fresh weights are drawn, only to be replaced
            flow = flow_from_spec(config["model"], parts)
        codec = None if kept.get("codec") is None else Codec.from_json(kept["codec"])
        shape = None if kept.get("shape") is None else tuple(kept["shape"])
    except (CheckpointError, DataError) as error:
        raise CheckpointError(f"{run / 'config.json'}: {error}") from error
    except TypeError:
        raise CheckpointError(
            f"{run / 'config.json'} is damaged: its shape is no list; restore it or train again"
        ) from None
    install_weights(flow, run)
    return Run(run, options, flow.to(resolve_device(device)).eval(), shape, codec, kept)


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


def install_weights(flow: Trainable, run: Path, stem: str = "weights") -> None:
    """Put the weights of a folder into a flow, which takes over their type."""
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
