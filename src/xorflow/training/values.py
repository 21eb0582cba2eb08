"""Values by their annotation, that of an option or of a constructor's argument: read from text, checked, written."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

_Numbers = Sequence[int]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")) if text else ()


def _named(text: str, values: dict[str, Any]) -> Any:
    if text not in values:
        raise ValueError(text)
    return values[text]


_KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", lambda text: _named(text, {"true": True, "false": False})),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("a text", str),
    types.NoneType: ("none", lambda text: _named(text, {"none": None})),
    _Numbers: ("whole numbers joined by +", _numbers),
}
"""What can be written, by its type: in words, and how it is read. A constructor may take more, which no text stands for."""


def _alternatives(annotation: Any) -> list[Any]:
    """The types that an annotation allows, of which one can be written."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation] if annotation in _KINDS or get_origin(annotation) is Literal else []


def expected(annotation: Any) -> str:
    """What a value should be, in words.

    >>> expected(int | None), expected(Literal["gru", "lstm"])
    ('a whole number or none', 'one of gru, lstm')
    """
    return " or ".join(
        f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _KINDS[kind][0]
        for kind in _alternatives(annotation)
    )


def read(text: str, annotation: Any) -> Any:
    """The value that a text stands for; ValueError if it stands for none.

    >>> read("512+256", Sequence[int]), read("none", int | None), read("1e-3", float)
    ((512, 256), None, 0.001)
    """
    for kind in _alternatives(annotation):
        try:
            if get_origin(kind) is Literal:
                return _named(text, {str(value): value for value in get_args(kind)})
            return _KINDS[kind][1](text)
        except ValueError:
            continue
    raise ValueError(text)


def accept(value: Any, annotation: Any) -> Any:
    """The value, if it is of the type (a whole number is a number, too); otherwise ValueError."""
    for kind in _alternatives(annotation):
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        else:
            fits = isinstance(value, (int, float) if kind is float else kind)
            fits = fits and (kind is bool or not isinstance(value, bool))
        if fits:
            return float(value) if kind is float else value
    raise ValueError(value)


def write(value: Any) -> str:
    """The text that `read` reads.

    >>> write((512, 256)), write(True), write(0.5), write(None)
    ('512+256', 'true', '0.5', 'none')
    """
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def nearest(name: str, among: Iterable[str]) -> str:
    """Which name may be meant by one that is not there; empty if none is near.

    >>> nearest("epoch", ["lr", "epochs"])
    'epochs'
    """
    return next(iter(get_close_matches(name, among, n=1)), "")
