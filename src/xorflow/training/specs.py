"""A flow's architecture as JSON, and back: what a run's `config.json` keeps beside the weights.

A file is untrusted: its arguments are checked against the annotations of the constructors that they are given to, and what it
makes is no larger than its weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xorflow.bases import FactorisedBase
from xorflow.conditioners import Conditioner, SequenceConditioner
from xorflow.errors import CheckpointError, ModelError
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.registry import PARTS, accepted_value
from xorflow.transforms import Transform

Trainable = LatentFlow | Mixture
"""What a run trains."""

_Shared = list[SequenceConditioner]
"""The conditioners of a model so far whose network others may share."""

_REORDERED = "reordered"
"""The name of a conditioner that shares the network of an earlier one of the same model, in another ordering."""


# ---- to JSON ----


def flow_to_spec(flow: Trainable) -> dict[str, Any]:
    """The architecture as JSON; conditioners and transforms outside `PARTS` are named by their class."""
    shared: _Shared = []
    if not isinstance(flow, Mixture):
        return _flow_to_spec(flow, shared)
    components = [_flow_to_spec(component, shared) for component in flow.latent_components()]
    if len(components) < len(flow):
        raise ModelError("a mixture is kept as the latent flows it is made of, and this one has others")
    return {"components": components, "learned": flow.learned}


def _flow_to_spec(flow: LatentFlow, shared: _Shared) -> dict[str, Any]:
    return {"layers": [_layer_to_spec(layer, shared) for layer in flow.layers], "base": flow.base.config()}


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


def _conditioner_to_spec(conditioner: Conditioner, shared: _Shared) -> dict[str, Any]:
    """One that shares its network with an earlier one is named by that one's number and its own ordering."""
    spec = _part_to_spec(conditioner)
    if isinstance(conditioner, SequenceConditioner):
        same = next((n for n, other in enumerate(shared) if other.net is conditioner.net), None)
        shared.append(conditioner)
        spec = spec if same is None else {"name": _REORDERED, "of": same, "order": spec["order"]}
    return spec


def _part_to_spec(part: Conditioner | Transform) -> dict[str, Any]:
    name = next((n for n, cls in PARTS.items() if cls is type(part)), type(part).__name__)
    return {"name": name} | part.config()


# ---- from JSON ----


def flow_from_spec(spec: Mapping[str, Any], parts: Mapping[str, type[nn.Module]] | None = None) -> Trainable:
    """Build the flow, or the mixture of flows, that a spec describes, with fresh weights; `parts` names your own classes."""
    reader = _Reader(PARTS | dict(parts or {}))
    try:
        given = _object(spec, "a model")
        if "components" not in given:
            return reader.flow(given)
        components = [reader.flow(component) for component in _items(given.pop("components"), "components")]
        return _made(Mixture, given, components=components)
    except ModelError as error:
        raise CheckpointError(f"the model in this configuration is illegal: {error}") from error


class _Reader:
    """Reads one model, of these conditioners and transforms."""

    def __init__(self, parts: Mapping[str, type[nn.Module]]) -> None:
        self._parts = parts
        self._shared: _Shared = []

    def flow(self, spec: object) -> LatentFlow:
        given = _object(spec, "a flow")
        layers = [self._layer(layer) for layer in _items(given.pop("layers", None), "layers")]
        base = _made(FactorisedBase, _object(given.pop("base", None), "a base"))
        return _made(LatentFlow, given, layers=layers, base=base)

    def _layer(self, spec: object) -> Layer:
        given = _object(spec, "a layer")
        frozen = given.pop("frozen", False)
        _require(type(frozen) is bool, "frozen", frozen)
        conditioner = self._conditioner(given.pop("conditioner", None))
        transform = self._part(given.pop("transform", None), Transform)
        posterior = given.pop("posterior", None)
        posterior = None if posterior is None else self._part(posterior, Conditioner)
        layer = _made(Layer, given, conditioner=conditioner, transform=transform, posterior=posterior)
        return layer.requires_grad_(not frozen)

    def _conditioner(self, spec: object) -> Conditioner:
        given = _object(spec, "a conditioner")
        if given.get("name") == _REORDERED:
            number: Any = given.pop("of", None)
            _require(type(number) is int and 0 <= number < len(self._shared), "of", number)
            del given["name"]
            conditioner = _made(self._shared[number].reordered, given)
        else:
            conditioner = self._part(given, Conditioner)
        if isinstance(conditioner, SequenceConditioner):
            self._shared.append(conditioner)
        return conditioner

    def _part(self, spec: object, kind: type[nn.Module]) -> Any:
        given = _object(spec, "a part")
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise _unreadable(f"the name of a part is {name!r}")
        if name not in self._parts:
            raise CheckpointError(
                f"this run uses a part named {name!r}, which xorflow does not have; "
                f"open it with xorflow.load(RUN, parts={{{name!r}: YourClass}})"
            )
        part = self._parts[name]
        _require(issubclass(part, kind), "name", name)
        # classes of others see to the types of their arguments themselves
        return _made(part, given) if PARTS.get(name) is part else _made(part, {}, **given)


def _made(maker: Callable[..., Any], given: Mapping[str, Any], /, **checked: Any) -> Any:
    """What a constructor makes of what is given, each of the type that it declares, and of what is checked already."""
    try:
        inspect.signature(maker).bind(**given, **checked)
    except TypeError as error:
        raise _unreadable(f"{maker.__name__}: {error}") from None
    hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    for name, value in given.items():
        try:
            accepted_value(value, hints[name])
        except ValueError:
            raise _unreadable(f"{name} of {maker.__name__} is {value!r}") from None
    return maker(**given, **checked)


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unreadable(f"{what} is an object, and this is {value!r}")
    return dict(value)


def _items(value: object, what: str) -> list[Any]:
    _require(isinstance(value, list) and len(value) > 0, what, value)
    return value  # pyright: ignore[reportReturnType]


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise _unreadable(f"{what} is {value!r}")


def _unreadable(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the model in this configuration is not one that this version can build ({reason}); "
        "it may be damaged, or written by another version"
    )


# ---- no larger than its weights ----

_ALWAYS = 2**26
"""So many numbers a model may make while it is built, however few weights it has: masks, orderings, receptive fields."""

_EACH = 100
"""And so many for each weight."""

_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}


def model_for(
    spec: Mapping[str, Any], weights: Mapping[str, Tensor], parts: Mapping[str, type[nn.Module]] | None = None
) -> Trainable:
    """The model of a spec, with fresh weights of the sizes of these; one of a larger model is refused before it is built."""
    numbers = sum(tensor.numel() for tensor in weights.values())
    layers, largest = _sizes_in(spec)
    with torch.random.fork_rng(devices=[]), _AtMost(_ALWAYS + _EACH * numbers) as limit:
        if layers > len(weights) or largest > max(numbers, 2**16):
            raise limit.error()
        return flow_from_spec(spec, parts)


def _sizes_in(spec: Mapping[str, Any]) -> tuple[int, int]:
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


class _AtMost(TorchFunctionMode):
    """Within this block no more than so many numbers are made, counted before they are."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self._left -= _count(func, args)
        if self._left < 0:
            raise self.error()
        return func(*args, **(kwargs or {}))

    def error(self) -> CheckpointError:
        return CheckpointError(
            "the model in this configuration is larger than its weights, so they are not of it; restore the folder"
        )


def _count(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """About how many numbers an operation makes: a factory's size, or that to which its operands are broadcast."""
    if func is torch.arange:
        return int(max((a for a in args if isinstance(a, int | float)), default=0))
    if func in _MAKERS:
        first = args[0] if args and not isinstance(args[0], int) else args
        return math.prod(size for size in first if isinstance(size, int))
    shapes = [argument.shape for argument in args if isinstance(argument, Tensor)]
    widths = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for place, size in enumerate(reversed(shape)):
            widths[place] = max(widths[place], size)
    return math.prod(widths)
