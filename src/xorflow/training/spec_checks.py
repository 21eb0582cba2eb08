"""Whether what a `config.json` holds of a model has the form of one: names, arguments and their types, before it is built."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from xorflow.bases import FactorisedBase
from xorflow.conditioners import Conditioner, SequenceConditioner
from xorflow.errors import CheckpointError
from xorflow.training.registry import PARTS
from xorflow.transforms import Transform

REORDERED = "reordered"
"""The name of a conditioner that shares the network of an earlier one of the same model, in another ordering."""

_Parts = Mapping[str, type[nn.Module]]


def check_spec(spec: object, parts: _Parts) -> None:
    """Raise a CheckpointError unless this can be built from `parts`, as far as its form says.

    Whether the model is legal, and whether the values of its arguments fit each other, is for constructors to say.
    """
    model = _keys(
        spec, "a model", {"components", "learned"} if _has(spec, "components") else {"layers", "base"}
    )
    if "learned" in model:
        _require(type(model["learned"]) is bool, "learned", model["learned"])
        flows = _items(model["components"], "components")
    else:
        flows = [model]
    shared = 0
    for flow in flows:
        flow = _keys(flow, "a flow", {"layers", "base"})
        for layer in _items(flow["layers"], "layers"):
            shared = _check_layer(layer, parts, shared)
        base = _keys(flow["base"], "a base")
        _check_arguments(FactorisedBase, base, typed=True)


def _check_layer(layer: object, parts: _Parts, shared: int) -> int:
    """Also how many networks there are so far that later layers may share."""
    kept = _keys(layer, "a layer", {"conditioner", "transform", "posterior"}, {"relative", "frozen"})
    for flag in ("relative", "frozen"):
        _require(type(kept.get(flag, False)) is bool, flag, kept.get(flag))
    conditioner = _keys(kept["conditioner"], "a conditioner")
    if conditioner.get("name") == REORDERED:
        again = _keys(conditioner, "a conditioner", {"name", "of", "order"})
        _require(type(again["of"]) is int and 0 <= again["of"] < shared, "of", again["of"])
        _require(_is_of(again["order"], str | Sequence[int]), "order", again["order"])
        shared += 1
    else:
        shared += issubclass(_check_part(conditioner, Conditioner, parts), SequenceConditioner)
    _check_part(kept["transform"], Transform, parts)
    if kept["posterior"] is not None:
        _check_part(kept["posterior"], Conditioner, parts)
    return shared


def _check_part(spec: object, kind: type[nn.Module], parts: _Parts) -> type[nn.Module]:
    arguments = _keys(spec, "a part")
    name = arguments.get("name")
    if not isinstance(name, str):
        raise _unknown(f"the name of a part is {name!r}")
    if name not in parts:
        raise CheckpointError(
            f"this run uses a part named {name!r}, which xorflow does not have; "
            f"open it with xorflow.load(RUN, parts={{{name!r}: YourClass}})"
        )
    part = parts[name]
    _require(issubclass(part, kind), "name", name)
    given = {key: value for key, value in arguments.items() if key != "name"}
    _check_arguments(part, given, typed=PARTS.get(name) is part)
    return part


def _check_arguments(maker: type[nn.Module], given: Mapping[str, Any], *, typed: bool) -> None:
    """Whether a constructor takes these; the types of our own are checked, classes of others see to theirs."""
    try:
        inspect.signature(maker).bind(**given)
    except TypeError as error:
        raise _unknown(f"{maker.__name__}: {error}") from None
    if typed:
        hints = get_type_hints(maker.__init__)
        for name, value in given.items():
            _require(_is_of(value, hints[name]), f"{name} of {maker.__name__}", value)


def _is_of(value: object, hint: Any) -> bool:
    """Whether a JSON value is of the type that an argument is annotated with."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_of(value, one) for one in inner)
    if origin is Literal:
        return value in inner and isinstance(value, str)
    if origin is Sequence:
        return isinstance(value, list) and all(_is_of(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_is_of(item, inner[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _keys(
    value: object, what: str, needed: set[str] | None = None, more: set[str] | None = None
) -> dict[str, Any]:
    """A JSON object, with these keys if any are named, and perhaps more."""
    if not isinstance(value, dict):
        raise _unknown(f"{what} is an object, and this is {value!r}")
    if needed is not None and (lacking := needed - value.keys()):
        raise _unknown(f"{what} has {min(lacking)!r}, and this has none")
    if needed is not None and (strange := value.keys() - needed - (more or set())):
        raise _unknown(f"{what} has no {min(strange)!r}")
    return value


def _items(value: object, what: str) -> list[Any]:
    _require(isinstance(value, list) and len(value) > 0, what, value)
    return value  # pyright: ignore[reportReturnType]


def _has(spec: object, key: str) -> bool:
    return isinstance(spec, dict) and key in spec


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise _unknown(f"{what} is {value!r}")


def _unknown(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the model in this configuration is not one that this version can build ({reason}); "
        "it may be damaged, or written by another version"
    )
