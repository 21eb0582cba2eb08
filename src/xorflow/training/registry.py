"""What a text or a file can name: conditioners, posteriors, transforms, bases and estimators, with the arguments that their
constructors declare.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

from torch import nn

from xorflow import estimators
from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, MLP, CausalTransformer, Coupling, Diagonal, Recurrent
from xorflow.errors import ConfigError
from xorflow.transforms import ModularAffine, ModularShift, Xor

# ---- values by their annotation ----

_RULES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "none",
    Sequence[int]: "whole numbers joined by +",
}
"""What a text can stand for, in words. A constructor may take more, which no text stands for."""


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def value_rule(annotation: Any) -> str:
    """What a value should be, in words.

    >>> value_rule(int | None), value_rule(Literal["gru", "lstm"])
    ('a whole number or none', 'one of gru, lstm')
    """
    return " or ".join(
        f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _RULES[kind]
        for kind in _alternatives(annotation)
        if kind in _RULES or get_origin(kind) is Literal
    )


def accepted_value(value: Any, annotation: Any) -> Any:
    """The value, if it is of the type, a whole number also where a number is asked for; otherwise ValueError."""
    for kind in _alternatives(annotation):
        origin, inner = get_origin(kind), get_args(kind)
        with suppress(ValueError, OverflowError):
            if origin is Sequence and isinstance(value, list | tuple):
                return tuple(accepted_value(item, inner[0]) for item in value)
            if origin is Mapping and isinstance(value, dict):
                return {key: accepted_value(item, inner[1]) for key, item in value.items()}
            if origin is Literal and isinstance(value, str) and value in inner:
                return value
            if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            if isinstance(kind, type) and type(value) is kind:
                return value
    raise ValueError(value)


def _readings(text: str) -> Iterator[Any]:
    """What a text may stand for."""
    if text in _CONSTANTS:
        yield _CONSTANTS[text]
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)
    yield text
    with suppress(ValueError):
        yield [int(part) for part in text.split("+")] if text else []


_CONSTANTS = {"true": True, "false": False, "none": None}


def read_value(text: str, annotation: Any) -> Any:
    """The value that a text stands for; ValueError if it stands for none.

    >>> read_value("512+256", Sequence[int]), read_value("none", int | None), read_value("1e-3", float)
    ((512, 256), None, 0.001)
    """
    for value in _readings(text):
        with suppress(ValueError):
            return accepted_value(value, annotation)
    raise ValueError(text)


def value_text(value: Any) -> str:
    """The text that `read_value` reads.

    >>> value_text((512, 256)), value_text(True), value_text(0.5), value_text(None)
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


def _hint(name: str, among: Iterable[str]) -> str:
    meant = nearest(name, among)
    return f"; did you mean {meant!r}?" if meant and meant != name else ""


# ---- constructors by their name ----

_MOST = 2**31
"""Of whatever is counted: more is a slip of the finger."""


@dataclass(frozen=True)
class Call:
    """What a text such as `made:hidden=512+512,direct=true` says.

    Attributes:
        name: of the constructor.
        settings: arguments that were given; one that is itself named is a `Call`.
        defaults: those that may be.
    """

    name: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, setting: str) -> Any:
        return self.settings.get(setting, self.defaults[setting])

    def having(self, **settings: Any) -> Call:
        """The same with other settings, as far as the constructor has them."""
        known = {key: value for key, value in settings.items() if key in self.defaults}
        return replace(self, settings={**self.settings, **known})

    def __str__(self) -> str:
        # the settings of what is named inside follow it: NAME:KEY=INNER,KEY_OF_INNER=VALUE
        settings = ",".join(
            f"{key}={str(value).replace(':', ',', 1) if isinstance(value, Call) else value_text(value)}"
            for key, value in self.settings.items()
        )
        return f"{self.name}:{settings}" if settings else self.name


class Registry:
    """Constructors by name, and the text that calls one: `NAME`, or `NAME:SETTING=VALUE,SETTING=VALUE`.

    Settings, their types and their defaults are those of the constructor's arguments. Where an argument is itself one of a
    registry, its value is a name there, and its settings stand beside the others.

    Args:
        what: what is constructed.
        makers: the constructors.
        given: arguments that never come from a text.
        inner: registries of arguments, by their names.

    >>> ESTIMATORS.make("maximum-likelihood:samples=8").samples
    8
    >>> str(CONDITIONERS.read("made:hidden=64").having(hidden=[16, 16]))
    'made:hidden=16+16'
    """

    def __init__(
        self,
        what: str,
        makers: Mapping[str, Callable[..., Any]],
        given: Sequence[str] = (),
        inner: Mapping[str, Registry] | None = None,
    ) -> None:
        self.what, self.makers, self.inner = what, makers, inner or {}
        self._given = frozenset(given)

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def settings(self, name: str) -> dict[str, inspect.Parameter]:
        """The arguments of a constructor that a text may give."""
        parameters = inspect.signature(self.makers[name], eval_str=True).parameters
        return {key: parameter for key, parameter in parameters.items() if key not in self._given}

    def read(self, text: str) -> Call:
        """What a text says, checked: the name, the names of the settings, and the types of their values."""
        name, _, tail = text.partition(":")
        items = [item for item in tail.split(",") if item]
        call, left, allowed = self._take(name, items, text)
        if left:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no settings"
            raise ConfigError(
                f"{self.what} {name!r} {takes}, written as {name}:KEY=VALUE; got {left[0]!r}"
                f"{_hint(left[0].partition('=')[0].strip(), allowed)}"
            )
        return call

    def _take(self, name: str, items: list[str], text: str) -> tuple[Call, list[str], list[str]]:
        """A call with those of the items that it has, those that it has not, and what it may have."""
        if name not in self.makers:
            raise ConfigError(f"{self.what} is one of {', '.join(self)}; got {name!r}{_hint(name, self)}")
        allowed, left = self.settings(name), []
        given: dict[str, Any] = {}
        for item in items:
            key, separator, value = (part.strip() for part in item.partition("="))
            if separator and key in allowed and key not in given:
                inside = key in self.inner
                given[key] = value if inside else self._value(key, value, allowed[key].annotation, text)
            else:
                left.append(item)
        names = [*allowed]
        for key in self.inner.keys() & given.keys():
            given[key], left, more = self.inner[key]._take(given[key], left, text)
            names += more
        return Call(name, given, {key: parameter.default for key, parameter in allowed.items()}), left, names

    def _value(self, key: str, text: str, annotation: Any, whole: str) -> Any:
        try:
            value = read_value(text, annotation)
        except ValueError:
            rule = value_rule(annotation)
            raise ConfigError(f"{key} of {self.what} {whole!r} is {rule}; got {text!r}") from None
        if any(type(n) is int and abs(n) >= _MOST for n in (value if isinstance(value, tuple) else [value])):
            raise ConfigError(f"{key} of {self.what} {whole!r} is below 2^31; got {text}")
        return value

    def make(self, what: str | Call, **given: Any) -> Any:
        """What a text calls; the constructor takes what it needs of the other arguments."""
        call = self.read(what) if isinstance(what, str) else what
        maker = self.makers[call.name]
        takes = inspect.signature(maker).parameters
        settings = {
            key: self.inner[key].make(value) if isinstance(value, Call) else value
            for key, value in call.settings.items()
        }
        return maker(**{key: value for key, value in given.items() if key in takes}, **settings)

    def text(self, part: Any) -> str:
        """The other way, of what has a `config`; settings at their defaults are left out."""
        return str(self._call(part))

    def _call(self, part: Any) -> Call:
        name = next((name for name, maker in self.makers.items() if maker is type(part)), type(part).__name__)
        parameters = inspect.signature(type(part)).parameters
        chosen = {
            key: self.inner[key]._call(value) if key in self.inner else value
            for key, value in part.config().items()
            if key not in parameters or parameters[key].default != value
        }
        return Call(name, chosen, {})


# ---- what can be named ----


def _no_posterior() -> None:
    """A layer without one: only its generator is trained."""


def _linear(
    features: int, *, categories: Sequence[int], choices: Sequence[int], sees: Sequence[str], context: int
) -> MLP:
    """A linear map of all that it sees, which corrects the generator's logits."""
    return MLP(features, (), categories=categories, choices=choices, sees=sees, context=context)


_OF_A_LAYER = ("features", "order", "shape", "flip", "categories", "choices", "sees", "context", "skipped")
"""What data, orderings and other layers say of a network."""

_NETWORKS = {"made": MADE, "coupling": Coupling, "transformer": CausalTransformer, "recurrent": Recurrent}
CONDITIONERS = Registry("conditioner", _NETWORKS, _OF_A_LAYER)
POSTERIORS = Registry(
    "posterior",
    {
        "none": _no_posterior,
        # Bayes' rule, where posteriors begin, is linear
        "mlp": functools.partial(MLP, direct=True),
        "made": functools.partial(MADE, direct=True),
        "linear": _linear,
        "diagonal": Diagonal,
    },
    _OF_A_LAYER,
)
_TRANSFORMS = {"shift": ModularShift, "affine": ModularAffine}
TRANSFORMS = Registry("transform", _TRANSFORMS, ("categories",))
BASES = Registry(
    "base",
    {"learned": functools.partial(FactorisedBase, p0=0.998, learned=True), "fixed": FactorisedBase},
    ("features", "categories", "learned", "probabilities"),
)
ESTIMATORS = Registry(
    "estimator",
    {
        "maximum-likelihood": estimators.MaximumLikelihood,
        "straight-through": estimators.StraightThrough,
        "special-case": estimators.SpecialCase,
        "full-posterior": estimators.FullPosterior,
        "proposal-prefix": estimators.ProposalPrefix,
        "analytic": estimators.Analytic,
        "leave-one-out": estimators.LeaveOneOut,
        "vimco": estimators.VIMCO,
        "disarm": estimators.DisARM,
        "arms": estimators.ARMS,
        "rebar": estimators.Rebar,
        "relax": estimators.Relax,
        "double-cv": estimators.DoubleCV,
        "concrete": estimators.Concrete,
        "st-gumbel": estimators.StraightThroughGumbel,
        "reinmax": estimators.ReinMax,
        "local-expectation": estimators.LocalExpectation,
    },
)

PARTS: dict[str, type[nn.Module]] = {
    **_NETWORKS,
    **_TRANSFORMS,
    "mlp": MLP,
    "diagonal": Diagonal,
    "xor": Xor,
}
"""The names by which the `model` of a `config.json` calls conditioners and transforms."""
