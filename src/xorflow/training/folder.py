"""The folder of a run: who may write there, its configuration, metrics and result, and a finished run read back."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import nn

from xorflow._devices import resolve_device
from xorflow._files import (
    MOST_JSON,
    Lock,
    inside,
    is_left_over,
    read_bytes,
    read_json,
    remove_half_written,
    write_bytes,
    write_json,
)
from xorflow.data import Dataset, Schema
from xorflow.data.tables import means_several
from xorflow.errors import CheckpointError, ConfigError, DataError
from xorflow.flows import LatentFlow
from xorflow.training.build import build_data
from xorflow.training.checkpoint import has_tensors, install, read_weights
from xorflow.training.config import CONFIG_VERSION, Options, options_of_config, read_config_json
from xorflow.training.registry import Trainable, accepted_record, flow_to_spec
from xorflow.training.spec import model_for

UNITS = "units"
"""The folder, within that of a run of the recipe auto, of what is done while it is unfinished."""

# ---- who writes ----


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Within this block nobody else writes into the folder of a run, or of several; what killed ones left half written goes."""
    try:
        lock = Lock(run)
    except OSError as error:
        raise _unwritable(run, error) from None
    try:
        _require_own_folders(run)
        remove_half_written(run)
        yield
    finally:
        lock.release()


def _require_own_folders(run: Path) -> None:
    """Refuse links to folders elsewhere, where files would be made and removed."""
    for name in ("checkpoints", UNITS, "tensorboard"):
        folder = inside(run, name)
        for path in folder.glob("*"):
            inside(folder, path.name)


@contextmanager
def new_folder(out: Path, *, resumes: bool = True) -> Iterator[None]:
    """Within this block a new folder is held; one that holds anything is left alone. For `resumes` see `require_free`."""
    require_free(out, resumes=resumes)
    with held(out):
        require_free(out, resumes=resumes)  # somebody may have been quicker
        yield


def require_free(out: Path, *, resumes: bool = True) -> None:
    """Refuse a folder that holds anything, or a file in its place; the advice is for a command that `resumes` runs, or not."""
    try:
        out.name.encode()
        kept = [name for name in os.listdir(out) if not is_left_over(name)]
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        if not os.path.lexists(out):
            raise _unwritable(out, error) from None
        kind = "is a file"
    except (OSError, ValueError) as error:  # ValueError: of a name that no file has, or no text
        raise _unwritable(out, error) from None
    else:
        kind = "is not empty" if kept else ""
    if kind:
        hint = _how_to_go_on(out) if resumes else ""
        raise ConfigError(
            f"--out must be a new or an empty folder, and {out} {kind}: {hint}choose another --out"
        )


def _unwritable(out: Path, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else "its name is no text"
    return ConfigError(f"--out {out} cannot be written: {reason}; choose another folder")


# ---- a run begins ----


def _how_to_go_on(out: Path) -> str:
    """The beginning of an advice, if a folder holds runs."""
    if os.path.exists(out / "config.json"):
        return "continue that run with --resume, or "
    if holds_several(out):
        return "continue its runs with the command that began them and --resume, or "
    return ""


def holds_several(folder: Path) -> bool:
    """Whether these are runs in a folder of their own each, as seeds and tables of runs leave them."""
    below = ("*/config.json", "*/*/config.json")
    return os.path.isdir(folder) and any(next(folder.glob(names), None) for names in below)


BEGINNING = "beginning"
"""The file of the weights that a model built in Python begins with: no options describe how it got them."""


SCHEMA = "schema.json"
"""The file of the columns of a table."""


def write_config(run: Path, options: Options, flow: Trainable | None, data: Dataset | Schema | None) -> None:
    """`config.json`: all options, the architecture once it is known, what the data look like; and a table's `schema.json`.

    Of data that are not known there may be a schema.
    """
    schema = data.schema if isinstance(data, Dataset) else data
    if schema is not None:
        write_json(run / SCHEMA, schema.to_json())
    known = isinstance(data, Dataset)
    config = {
        "version": CONFIG_VERSION,
        **options.to_json(),
        "model": {} if flow is None else flow_to_spec(flow),
        "data_format": _data_format(data) if known else {"shape": None, "schema": schema and schema.sha256},
    }
    write_json(run / "config.json", config)


def _data_format(dataset: Dataset) -> dict[str, Any]:
    """How rows are written, and what tells these data from others."""
    return {
        "description": dataset.describe(),
        "shape": None if dataset.shape is None else list(dataset.shape),
        "schema": None if dataset.schema is None else dataset.schema.sha256,
        "train_sha256": (dataset.stream or dataset.train).sha256,
        **({} if dataset.stream is None else {"streamed": True}),
    }


# ---- what is there ----


def data_of_run(
    run: Path, options: Options, kept: Mapping[str, Any], dataset: Dataset | None = None
) -> Dataset:
    """The data that a run began with, loaded again unless given; other data are refused."""
    there = options.data == "mnist" or os.path.exists(options.data) or means_several(options.data)
    if dataset is None and not there:
        raise ConfigError(
            f"the run in {run} is of data named {options.data!r}, which are no file, seen from this folder; go to the folder "
            "where they are or, if fit() was given them, use xorflow.load and xorflow.evaluate in Python"
        )
    if options.stream == "auto" and options.data != "mnist":  # memory may be larger now, or smaller
        options = options.replace(stream="always" if kept.get("streamed") else "never")
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
    return {
        "schema": "set of columns or values",
        "train_sha256": "training part",
        "sha256": "held-out part",
    }.get(key, key)


def read_config_file(run: Path) -> dict[str, Any]:
    """The content of a run's `config.json`."""
    if not os.path.isdir(run):
        raise CheckpointError(
            f"RUN is the folder of a run, and there is no folder {run}; xorflow train makes one"
        )
    path = inside(run, "config.json")
    config = read_config_json(path, "the run's configuration")
    for key in ("model", "data_format"):
        if not isinstance(config.get(key), dict):
            raise CheckpointError(f"{path} lacks {key!r}: it is damaged, or not of a run")
    return config


HELD_OUT = ("test", "validation")
"""The parts of the data whose likelihoods a result has."""

INCOMPLETE = "incomplete"
"""Under which key a result has the parts whose figures could not be computed, with the reasons."""

_FIGURES: dict[str, Any] = {
    "nll": float, "kind": Literal["exact", "lower bound"], "stderr": float | None, "bits_per_dim": float, "rows": int,
    "floor": float,
}  # fmt: skip
_DETERMINISTIC: dict[str, Any] = {"greedy_nll": float, "refit_nll": float, "refit_stderr": float | None}
_RESULT: dict[str, Any] = {"device": str, "parameters": int, "seconds": float, "data": dict}
_DATA: dict[str, Any] = {"name": str, "shape": Sequence[int] | None}
_OF_ONE: dict[str, Any] = {"seed": int, "epochs": int, "independent_nll": float | None}
_OF_SEVERAL: dict[str, Any] = {"how": str, "runs": list, "seeds": list}
_OF_SOME: dict[str, Any] = {INCOMPLETE: Mapping[str, str], "warning": str}
"""What others than people read in a `result.json`: of a part of the data, of every run, of one trained here, of a mixture."""


def _records(result: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a result holds, with the kinds of its values; each is asked for once those before it are there."""
    combined = "how" in result
    yield result, _RESULT | (_OF_SEVERAL if combined else _OF_ONE)
    yield result["data"], _DATA
    for figures in (result[part] for part in HELD_OUT if part in result):
        yield figures, _FIGURES
        if "auto" not in result:
            yield figures, _DETERMINISTIC
        if figures["kind"] != "exact":
            yield figures, {"samples": int}
        if not combined:
            yield result, {"independent_nll": float}
    yield result, {key: kind for key, kind in _OF_SOME.items() if key in result}


def read_result(run: Path) -> dict[str, Any]:
    """The content of a finished run's `result.json`, as far as it is read by programs as it should be."""
    path = inside(run, "result.json")
    result = read_json(path, "the result")
    try:
        for record, kinds in _records(result):
            accepted_record(record, kinds)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; restore it, or train again") from None
    return result


def reported_part(result: Mapping[str, Any]) -> str | None:
    """The held-out part that a result is about: test data if there are any, otherwise validation data."""
    return next((part for part in HELD_OUT if part in result), None)


# ---- metrics ----


class MetricsLog:
    """`metrics.jsonl`, one record an epoch, and TensorBoard events if asked for; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, *, tensorboard: bool) -> None:
        self._path = None if folder is None else inside(folder, "metrics.jsonl")
        self._events = None if folder is None or not tensorboard else folder / "tensorboard" / EVENTS

    def begin(self, epochs: int) -> None:
        """Drop records after so many epochs: they are of a time that the resumed run will live again."""
        if self._path is None:
            return
        try:
            old = read_metrics(self._path)
        except FileNotFoundError:
            old = []
        except OSError as error:
            raise CheckpointError(
                f"metrics cannot be read: {self._path}: {error.strerror}; remove what is there"
            ) from None
        kept = [record for record in old if record["epoch"] <= epochs]
        write_bytes(self._path, b"".join(map(_line, kept)))
        if self._events is not None:
            write_bytes(self._events, b"".join(map(_event, [None, *kept])))

    def write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            _append(self._path, _line(record))
        if self._events is not None:
            _append(self._events, _event(record))


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as stream:
            stream.write(content)
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror}; make room, and continue with --resume"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, up to a line that is none, as the last one that a killed run left half written."""
    records = []
    for line in read_bytes(path, MOST_JSON).decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not (isinstance(record, dict) and all(map(_is_number, record.values())) and "epoch" in record):
            break
        if not all(isinstance(record.get(key, 0), int) for key in ("epoch", "step")):
            break
        records.append(record)
    return records


def _is_number(value: Any) -> bool:
    """Whether it is one that a metric could have: finite, and small enough to be computed with."""
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 2**53


EVENTS = "events.out.tfevents.of-the-run"
"""The file of TensorBoard events. It is written here because TensorBoard's own writer names the host, and the time."""


def _event(record: Mapping[str, Any] | None) -> bytes:
    """A record as TensorBoard reads it, at the time since training began; None is the beginning of a file."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    event: Any = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
    if record is None:
        event.file_version = "brain.Event:2"
    else:
        event.step, event.wall_time = record.get("step", 0), record.get("seconds", 0.0)
        for name in sorted(record.keys() - {"epoch", "step"}):
            event.summary.value.add(tag=name, simple_value=record[name])
    content = io.BytesIO()
    RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard needs the package tensorboard, which is not installed: "
            "pip install 'xorflow[tensorboard]'"
        )


# ---- a finished run ----


@dataclass(frozen=True)
class Run:
    """A run read back: the trained flow, its options, and how its data are written."""

    folder: Path
    options: Options
    flow: Trainable
    shape: tuple[int, ...] | None
    schema: Schema | None
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


def open_run(run: Path, *, device: str = "cpu", classes: Mapping[str, type[nn.Module]] | None = None) -> Run:
    """Read a finished run. No code in the folder is executed, and its model is no larger than its weights."""
    config = read_config_file(run)
    path = run / "config.json"
    options = options_of_config(config, path)
    unfinished = os.path.exists(run / "checkpoints") or os.path.exists(run / UNITS)
    if unfinished and not has_tensors(run, "weights"):
        raise CheckpointError(
            f"the run in {run} is not finished; continue it with: xorflow train --out {run} --resume"
        )
    target = resolve_device(device)
    weights = read_weights(run)
    kept = config["data_format"]
    try:
        flow = model_for(config["model"], weights, classes)
        schema = None if kept.get("schema") is None else _read_schema(run, kept["schema"])
    except (CheckpointError, DataError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    install(flow, weights, run)
    return Run(run, options, flow.to(target).eval(), _checked_shape(kept, flow, schema, path), schema, kept)


def _read_schema(run: Path, digest: Any) -> Schema:
    schema = Schema.from_json(read_json(inside(run, SCHEMA), "the schema"))
    if schema.sha256 != digest:
        raise CheckpointError(f"{run / SCHEMA} is not the one that the run was trained with; restore it")
    return schema


def _checked_shape(
    kept: Mapping[str, Any], flow: Trainable, schema: Schema | None, path: Path
) -> tuple[int, ...] | None:
    """The shape of a row, if it is one that the model's features have; the schema must have its columns and categories."""
    sizes = flow.states.sizes
    if schema is not None and (
        len(schema.columns) != len(sizes)
        or any(k > size for k, size in zip(schema.categories, sizes, strict=True))
    ):
        raise CheckpointError(
            f"{path} is damaged: the schema beside it has other columns or categories than its model; restore it"
        )
    shape = kept.get("shape")
    if shape is None:
        return None
    good = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not good or math.prod(shape) != flow.features:
        raise CheckpointError(
            f"{path} is damaged: its shape is {shape!r}, and its model has {flow.features} features; restore it or train again"
        )
    return tuple(shape)


def load(
    run: str | Path, *, device: str = "cpu", classes: Mapping[str, type[nn.Module]] | None = None
) -> Trainable:
    """The trained flow of a run folder, ready to evaluate and sample; executes no code from it.

    Args:
        run: the folder that `xorflow train` or `fit(..., out=...)` wrote.
        device: where to put it.
        classes: classes of your own that the model uses, by the names in its configuration.
    """
    return open_run(Path(run), device=device, classes=classes).flow
