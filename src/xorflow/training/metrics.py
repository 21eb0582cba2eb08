"""A run's metrics as JSON lines, and as TensorBoard events if asked for."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from xorflow._files import write_bytes
from xorflow.errors import CheckpointError, ConfigError


class MetricsLog:
    """`metrics.jsonl`, one record an epoch; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, *, tensorboard: bool) -> None:
        self._path = None if folder is None else folder / "metrics.jsonl"
        self._stream: IO[str] | None = None
        self._events = _event_writer(folder) if tensorboard and folder is not None else None

    def begin(self, epochs: int) -> None:
        """Open for writing; records after `epochs` are of a time that the resumed run will live again."""
        if self._path is None:
            return
        old = read_metrics(self._path) if self._path.exists() else []
        kept = [record for record in old if record["epoch"] <= epochs]
        write_bytes(self._path, "".join(json.dumps(r) + "\n" for r in kept).encode())
        self._stream = self._path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        if self._stream is not None:
            try:
                self._stream.write(json.dumps(record, allow_nan=False) + "\n")
                self._stream.flush()
            except OSError as error:
                raise CheckpointError(
                    f"could not write {self._path}: {error.strerror}; make room, and continue with --resume"
                ) from error
        if self._events is not None:
            for name in record.keys() - {"epoch", "step"}:
                self._events.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        if self._stream is not None:
            with suppress(OSError):  # of a full disk: that a record was lost was said when it was written
                self._stream.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, up to a line that is none, as the last one that a killed run left half written."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not (isinstance(record, dict) and isinstance(record.get("epoch"), int)):
            break
        records.append(record)
    return records


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard needs the package tensorboard, which is not installed: "
            "pip install 'xorflow[tensorboard]'"
        )


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
