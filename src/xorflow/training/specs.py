"""A flow's architecture as JSON, and back: what a run's `config.json` keeps beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from xorflow.bases import FactorisedBase
from xorflow.conditioners import Conditioner, SequenceConditioner
from xorflow.errors import CheckpointError, ModelError
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.registry import PARTS
from xorflow.training.spec_checks import REORDERED, check_spec
from xorflow.transforms import Transform

Trainable = LatentFlow | Mixture
"""What a run trains."""


def flow_to_spec(flow: LatentFlow | Mixture) -> dict[str, Any]:
    """The architecture as JSON; conditioners and transforms outside `PARTS` are named by their class."""
    shared: _Shared = []
    if isinstance(flow, Mixture):
        components = [_flow_to_spec(part, shared) for part in flow if isinstance(part, LatentFlow)]
        if len(components) < len(flow):
            raise ModelError("a mixture is kept as the latent flows it is made of, and this one has others")
        return {"components": components, "learned": flow.learned}
    return _flow_to_spec(flow, shared)


_Shared = list[SequenceConditioner]
"""The conditioners described so far whose network others may share."""


def _flow_to_spec(flow: LatentFlow, shared: _Shared) -> dict[str, Any]:
    return {
        "layers": [_layer_to_spec(layer, shared) for layer in flow.layers],
        "base": flow.base.config(),
    }


def _layer_to_spec(layer: Layer, shared: _Shared) -> dict[str, Any]:
    """A layer none of whose weights learns is kept as such."""
    weights = list(layer.parameters())
    is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    return {
        "conditioner": _conditioner_to_spec(layer.conditioner, shared),
        "transform": _part_to_spec(layer.transform),
        "posterior": None if layer.posterior is None else _part_to_spec(layer.posterior),
        "relative": layer.relative,
        **({"frozen": True} if is_frozen else {}),
    }


def flow_from_spec(
    spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]] | None = None
) -> LatentFlow | Mixture:
    """Build the flow, or the mixture of flows, that a spec describes, with fresh weights; `parts` names your own classes."""
    known = PARTS | dict(parts or {})
    check_spec(spec, known)
    shared: _Shared = []
    try:
        if "components" in spec:
            components = [_flow_from_spec(part, known, shared) for part in spec["components"]]
            return Mixture(components, learned=spec["learned"])
        return _flow_from_spec(spec, known, shared)
    except ModelError as error:
        raise CheckpointError(f"the model in this configuration is illegal: {error}") from error


def sizes_in(spec: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers a spec has in all, and the largest whole number in it, before anything of it is checked or built."""
    layers, largest = 0, 0
    waiting: list[Any] = [spec]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            layers += len(value["layers"]) if isinstance(value.get("layers"), list) else 0
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int):
            largest = max(largest, abs(value))
    return layers, largest


def _flow_from_spec(
    spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]], shared: _Shared
) -> LatentFlow:
    layers = [_layer_from_spec(layer, parts, shared) for layer in spec["layers"]]
    return LatentFlow(layers, FactorisedBase(**spec["base"]))


def _conditioner_to_spec(conditioner: Conditioner, shared: _Shared) -> dict[str, Any]:
    """One that shares its network with an earlier one is named by that one's number and its own ordering."""
    if not isinstance(conditioner, SequenceConditioner):
        return _part_to_spec(conditioner)
    same = [index for index, other in enumerate(shared) if other.net is conditioner.net]
    shared.append(conditioner)
    spec = _part_to_spec(conditioner)
    return {"name": REORDERED, "of": same[0], "order": spec["order"]} if same else spec


def _conditioner_from_spec(
    spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]], shared: _Shared
) -> Conditioner:
    again = spec["name"] == REORDERED
    conditioner = shared[spec["of"]].reordered(spec["order"]) if again else _part_from_spec(spec, parts)
    if isinstance(conditioner, SequenceConditioner):
        shared.append(conditioner)
    return conditioner


def _part_to_spec(part: Conditioner | Transform) -> dict[str, Any]:
    name = next((n for n, cls in PARTS.items() if cls is type(part)), type(part).__name__)
    return {"name": name} | part.config()


def _part_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]]) -> Any:
    return parts[spec["name"]](**{key: value for key, value in spec.items() if key != "name"})


def _layer_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]], shared: _Shared) -> Layer:
    posterior = spec["posterior"]
    layer = Layer(
        _conditioner_from_spec(spec["conditioner"], parts, shared),
        _part_from_spec(spec["transform"], parts),
        None if posterior is None else _part_from_spec(posterior, parts),
        spec.get("relative", False),
    )
    return layer.requires_grad_(not spec.get("frozen", False))
