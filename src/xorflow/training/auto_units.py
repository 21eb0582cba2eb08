"""Units of the recipe auto: each is kept in the folder of its run, so that a run that is interrupted goes on from them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from xorflow._files import inside, read_json, write_json
from xorflow.conditioners import Conditioner
from xorflow.errors import CheckpointError
from xorflow.flows import LatentFlow
from xorflow.training.checkpoint import install, load_tensors, save_tensors
from xorflow.training.registry import accepted_record, flow_to_spec
from xorflow.training.spec import model_for


@dataclass
class Unit:
    """A kind of conditionals in one ordering.

    Attributes:
        kind: of conditionals.
        order: of columns.
        flow: of one layer, which has them.
        seconds: that it took.
        elapsed: seconds that the run had then taken.
        more: counts of what it is made of.
        logits: for the validation rows.
        nll: of the validation rows.
    """

    kind: str
    order: str
    flow: LatentFlow
    seconds: float
    elapsed: float
    more: Mapping[str, Any]
    logits: Tensor = field(init=False)
    nll: float = field(init=False)

    @property
    def net(self) -> Conditioner:
        return self.flow.layers[0].conditioner

    def record(self) -> dict[str, Any]:
        """Plain values."""
        kept = {"kind": self.kind, "order": self.order, "validation_nll": self.nll, "seconds": self.seconds}
        return kept | dict(self.more)


@dataclass(frozen=True)
class Units:
    """Those of a run that are done, each in a folder of its own below `folder`; None keeps nothing."""

    folder: Path | None

    def keep(self, unit: Unit) -> None:
        if self.folder is None:
            return
        out = self.folder / _name(unit.kind, unit.order)
        shutil.rmtree(out, ignore_errors=True)
        save_tensors(out, "weights", unit.flow.state_dict())
        record = {"seconds": unit.seconds, "elapsed": unit.elapsed, "more": dict(unit.more)}
        write_json(out / "unit.json", record | {"model": flow_to_spec(unit.flow)})  # last: now it is whole

    def find(self, kind: str, order: str) -> Unit | None:
        """One that is done, or None.

        Raises:
            CheckpointError: if it is not what was kept.
        """
        if self.folder is None or not (self.folder / _name(kind, order) / "unit.json").exists():
            return None
        out = inside(self.folder.parent, self.folder.name)
        out = inside(out, _name(kind, order))
        record = read_json(inside(out, "unit.json"), "a unit of the run")
        try:
            unit = accepted_record(
                record, {"seconds": float, "elapsed": float, "more": Mapping[str, int], "model": dict}
            )
        except ValueError:
            raise _damaged(out) from None
        spec = unit.pop("model")
        if not 0 <= unit["seconds"] <= unit["elapsed"] < math.inf:
            raise _damaged(out)
        weights = load_tensors(out, "weights")
        flow = model_for(spec, weights)
        if not isinstance(flow, LatentFlow):
            raise _damaged(out)
        install(flow, weights, out)
        return Unit(kind, order, flow, **unit)


def _name(kind: str, order: str) -> str:
    return f"{order}-{kind}".replace(":", "-").replace(" ", "-")


def _damaged(out: Path) -> CheckpointError:
    return CheckpointError(f"{out} is no unit of a run, or damaged; remove that folder, and it is made again")
