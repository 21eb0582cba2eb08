"""A flow's architecture as JSON, and back: what a run's `config.json` keeps beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, MLP, Conditioner, Coupling
from xorflow.errors import CheckpointError, ModelError
from xorflow.flows import LatentFlow, Layer
from xorflow.transforms import ModularAffine, ModularShift, Transform, Xor

PARTS: dict[str, type[nn.Module]] = {
    "made": MADE,
    "mlp": MLP,
    "coupling": Coupling,
    "shift": ModularShift,
    "xor": Xor,
    "affine": ModularAffine,
}
"""The names by which configuration files call conditioners and transforms."""


def flow_to_spec(flow: LatentFlow) -> dict[str, Any]:
    """The architecture as JSON; conditioners and transforms outside `PARTS` are named by their class."""
    return {
        "layers": [
            {
                "conditioner": _part_to_spec(layer.conditioner),
                "transform": _part_to_spec(layer.transform),
                "posterior": None if layer.posterior is None else _part_to_spec(layer.posterior),
                "relative": layer.relative,
            }
            for layer in flow.layers
        ],
        "base": flow.base.config(),
    }


def flow_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]] | None = None) -> LatentFlow:
    """Build the flow that a spec describes, with fresh weights; `parts` names classes of your own."""
    known = PARTS | dict(parts or {})
    try:
        layers = [_layer_from_spec(layer, known) for layer in spec["layers"]]
        return LatentFlow(layers, FactorisedBase(**spec["base"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the model in this configuration is not one that this version can build ({error!r}); "
            "it may be damaged, or written by another version"
        ) from error
    except ModelError as error:
        raise CheckpointError(f"the model in this configuration is illegal: {error}") from error


def _part_to_spec(part: Conditioner | Transform) -> dict[str, Any]:
    name = next((n for n, cls in PARTS.items() if cls is type(part)), type(part).__name__)
    return {"name": name} | part.config()


def _part_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]]) -> Any:
    arguments = dict(spec)
    name = arguments.pop("name")
    if name not in parts:
        raise CheckpointError(
            f"this run uses a part named {name!r}, which xorflow does not have; "
            f"open it with xorflow.load(RUN, parts={{{name!r}: YourClass}})"
        )
    return parts[name](**arguments)


def _layer_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]]) -> Layer:
    posterior = spec["posterior"]
    return Layer(
        _part_from_spec(spec["conditioner"], parts),
        _part_from_spec(spec["transform"], parts),
        None if posterior is None else _part_from_spec(posterior, parts),
        spec.get("relative", False),
    )
