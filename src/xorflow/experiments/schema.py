"""What the file of a finished run holds at least: all that a report reads, with its type and length."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Rule = Callable[[Any, str], str | None]
"""What is wrong with a value that stands somewhere, in words; None if nothing is."""

_SHOWN = 40
"""How many letters of a wrong value are shown."""

_HUGE = 1e300
"""A whole number in JSON may be larger than any float."""


# ---- rules ----


def _of(words: str, holds: Callable[[Any], bool]) -> Rule:
    def rule(value: Any, where: str) -> str | None:
        return None if holds(value) else f"{where} is to be {words}, and is {_shown(value)}"

    return rule


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_HUGE < value < _HUGE


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


NUMBER = _of("a finite number", _is_number)
COUNT = _of("a whole number, at least 0", _is_count)
POSITIVE = _of("a whole number, at least 1", lambda value: _is_count(value) and value > 0)
TEXT = _of("text", lambda value: isinstance(value, str))
NOTHING = _of("null", lambda value: value is None)


def optional(rule: Rule) -> Rule:
    """Null, or what another rule asks."""
    return lambda value, where: None if value is None else rule(value, where)


def each(rule: Rule) -> Rule:
    """A list, not empty, of what another rule asks."""

    def check(value: Any, where: str) -> str | None:
        if not isinstance(value, list) or not value:
            return f"{where} is to be a list of at least one, and is {_shown(value)}"
        found = (rule(item, f"{where}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in found if problem is not None), None)

    return check


def record(parts: Mapping[str, Rule], *more: Rule, extra: Mapping[str, Rule] | None = None) -> Rule:
    """A JSON object with some parts, and others, `extra`, that may be absent; `more` are rules for the whole of it."""

    def check(value: Any, where: str) -> str | None:
        if not isinstance(value, dict):
            return f"{where or 'it'} is to be a JSON object, and is {_shown(value)}"
        lacking = next((key for key in parts if key not in value), None)
        if lacking is not None:
            return f"{where or 'it'} lacks {lacking!r}"
        present = {key: rule for key, rule in {**parts, **(extra or {})}.items() if key in value}
        inside = (rule(value[key], f"{where}.{key}" if where else key) for key, rule in present.items())
        whole = (rule(value, where) for rule in more)
        return next((problem for found in (inside, whole) for problem in found if problem is not None), None)

    return check


# ---- parts of a run ----


def _bound_has_samples(value: dict[str, Any], where: str) -> str | None:
    return None if value["kind"] == "exact" else POSITIVE(value["samples"], f"{where}.samples")


def _columns(value: dict[str, Any], where: str) -> str | None:
    lengths = {key: len(value[key]) for key in ("epoch", "validation_nll")}
    if len(set(lengths.values())) == 1:
        return None
    return f"{where} is to have a value for each epoch, and has {lengths['validation_nll']} of {lengths['epoch']}"


def _validated(value: dict[str, Any], where: str) -> str | None:
    known = any(nll is not None for nll in value["validation_nll"])
    return None if known else f"{where}.validation_nll is to have a value of some epoch, and has none"


def _packed_bits(value: dict[str, Any], where: str) -> str | None:
    """Eight pixels to a byte, as many as the shape says."""
    if len(value["shape"]) not in (2, 3):
        return f"{where}.shape is to be that of rows or of images, and is {_shown(value['shape'])}"
    content, wanted = _decoded(value["bits"]), -(-math.prod(value["shape"]) // 8)
    if content is not None and len(content) == wanted:
        return None
    came = "no base 64" if content is None else f"{len(content)} bytes"
    return f"{where}.bits is to be {wanted} bytes in base 64, as of the shape {value['shape']}, and is {came}"


def _packed_values(value: Any, where: str) -> str | None:
    """The likelihood of every image."""
    content = _decoded(value) if isinstance(value, str) else None
    whole = bool(content) and len(content) % 4 == 0 and bool(np.isfinite(np.frombuffer(content, "<f4")).all())
    return None if whole else f"{where} is to be finite float32 values in base 64, and is {_shown(value)}"


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


_LAYERS = each(record({"flip_rate": NUMBER, "greedy_flip_rate": NUMBER, "entropy": NUMBER}))
_LIKELIHOOD: Mapping[str, Rule] = {"nll": NUMBER, "kind": TEXT, "stderr": NUMBER}
_READINGS: Mapping[str, Rule] = {
    **_LIKELIHOOD,
    "samples": optional(POSITIVE),
    "greedy": NUMBER,
    "refit": NUMBER,
    "layers": _LAYERS,
}
_OF_THE_PAPER = record(
    {
        **_READINGS,
        "exact": optional(NUMBER),
        "elbo": optional(NUMBER),
        "argmax_posterior": optional(record({"value": NUMBER})),
    },
    _bound_has_samples,
)
_OF_DEPTH = record(
    {
        **_READINGS,
        "effective_depth": COUNT,
        "parameters": COUNT,
        "sampling_passes": COUNT,
        "sampling_seconds": NUMBER,
    },
    _bound_has_samples,
    extra={"values": _packed_values, "own": record(_READINGS, _bound_has_samples)},
)
_OF_STRONG = record(
    {
        **_LIKELIHOOD,
        "greedy": NUMBER,
        "greedy_fixed": NUMBER,
        "refit": NUMBER,
        "train_nll": NUMBER,
        "draws": record({"nll": each(NUMBER)}),
        "bf16": record({"difference": NUMBER}),
        "sampling": record({"seconds": NUMBER}),
    }
)
_SAMPLES = record({"reading": TEXT, "shape": each(COUNT), "bits": TEXT}, _packed_bits)
_METRICS: Mapping[str, Rule] = {"epoch": each(POSITIVE), "validation_nll": each(optional(NUMBER))}
_MADE: Mapping[str, Rule] = {
    "seed": COUNT,
    "parameters": COUNT,
    "seconds": NUMBER,
    "together": POSITIVE,
    "device_name": TEXT,
}
_TRAINED: Mapping[str, Rule] = {
    **_MADE,
    "variant": TEXT,
    "config": record({"estimator": TEXT, "select": TEXT}),
    "epochs": COUNT,
}


# ---- files ----


def _phases(selected: Rule, final: Rule) -> dict[str, Mapping[str, Rule]]:
    return {
        "select": {
            **_TRAINED,
            "evaluation": selected,
            "best_epoch": COUNT,
            "selection": record({"nll": NUMBER}),
            "metrics": record(_METRICS, _columns, _validated),
        },
        "final": {
            **_TRAINED,
            "evaluation": final,
            "samples": _SAMPLES,
            "metrics": record(_METRICS, _columns),
        },
    }


_REFERENCE: Mapping[str, Rule] = {
    "evaluation": record({"nll": NUMBER, "kind": TEXT, "stderr": optional(NUMBER), "samples": NOTHING})
}
_MIXED: Mapping[str, Rule] = {**_MADE, "evaluation": _OF_STRONG, "samples": _SAMPLES}
_FILES: Mapping[str, Mapping[str, Mapping[str, Rule]]] = {
    "reproduce": {**_phases(_OF_THE_PAPER, _OF_THE_PAPER), "reference": _REFERENCE},
    "depth": {**_phases(_OF_DEPTH, _OF_DEPTH), "reference": _REFERENCE},
    "strong": {**_phases(record(_LIKELIHOOD), _OF_STRONG), "mixed": _MIXED},
}
"""By command and phase."""


def damage_of_run(content: Mapping[str, Any], command: str) -> str | None:
    """What is wrong with the file of a finished run, in words; None if it is whole.

    >>> damage_of_run({"budget": "full", "row": "floor", "phase": "reference", "evaluation": {"nll": "x"}}, "reproduce")
    "evaluation lacks 'kind'"
    """
    phases = _FILES[command]
    among = _of(f"one of {', '.join(phases)}", lambda value: isinstance(value, str) and value in phases)
    shared = record({"budget": TEXT, "row": TEXT, "evaluation": record({}), "phase": among})(content, "")
    return shared or record(phases[content["phase"]])(content, "")


_PART = record(
    {
        **_LIKELIHOOD,
        "rows": COUNT,
        "greedy_nll": NUMBER,
        "greedy_stderr": NUMBER,
        "refit_nll": NUMBER,
        "refit_stderr": NUMBER,
        "layers": _LAYERS,
    }
)


def damage_of_result(content: Mapping[str, Any], part: str) -> str | None:
    """What is wrong with the `result.json` of a run that is to be evaluated on one part of its data."""
    best = COUNT if part == "validation" else optional(COUNT)
    parts = {"best_epoch": best, "parameters": COUNT, "seconds": NUMBER, "device": TEXT, "data": record({})}
    return record({**parts, part: _PART}, extra={"together": POSITIVE})(content, "")
