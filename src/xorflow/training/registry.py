"""Constructors called by name, with arguments that are checked against what they declare.

A call is a dict: a `name`, and arguments, which may be calls themselves. Options have it as a text; `config.json` has a model
as JSON, the calls of all its parts one inside the other, which `spec` reads.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, Protocol, Union, get_args, get_origin, runtime_checkable

from torch import nn

from xorflow import estimators
from xorflow.bases import FactorisedBase
from xorflow.conditioners import (
    MADE,
    MLP,
    BoostedTrees,
    CausalTransformer,
    Coupling,
    Diagonal,
    Recurrent,
    SequenceConditioner,
    Stacked,
)
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.transforms import ModularAffine, ModularShift, Xor

Trainable = LatentFlow | Mixture
"""What a run trains."""

Call = dict[str, Any]
Makers = Mapping[str, Callable[..., Any]]


@runtime_checkable
class Configured(Protocol):
    """What its own arguments make again."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: plain values, and other things that are `Configured`."""
        ...


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
            if origin is Literal and value in inner:
                return value
            if isinstance(value, bool) and kind is not bool:  # which Python takes for a number
                continue
            if kind is float and isinstance(value, int | float):
                return float(value)
            if isinstance(kind, type) and isinstance(value, kind):
                return value
    raise ValueError(value)


def accepted_record(record: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a record that `kinds` names, each of its type; otherwise ValueError, which says what is amiss."""
    accepted = {}
    for name, kind in kinds.items():
        try:
            accepted[name] = accepted_value(record[name], kind)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name!r} is not there, or not whole") from None
    return accepted


_CONSTANTS = {"true": True, "false": False, "none": None}
_READERS: tuple[Callable[[str], Any], ...] = (
    _CONSTANTS.__getitem__,
    int,
    float,
    str,
    lambda text: [int(part) for part in text.split("+") if text],
)
"""What a text may stand for."""


def read_value(text: str, annotation: Any) -> Any:
    """The value that a text stands for; ValueError if it stands for none.

    >>> read_value("512+256", Sequence[int]), read_value("none", int | None), read_value("1e-3", float)
    ((512, 256), None, 0.001)
    """
    for read in _READERS:
        with suppress(KeyError, ValueError):
            return accepted_value(read(text), annotation)
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


# ---- calls as texts ----

_FROM_DATA = {
    "features",
    "order",
    "shape",
    "flip",
    "categories",
    "choices",
    "sees",
    "context",
    "skipped",
    "learned",
    "probabilities",
}
"""Arguments that no text gives: data, orderings, other layers and names say them."""

MOST = 2**31
"""Of whatever is counted: more is a slip of the finger."""


@dataclass(frozen=True, eq=False)
class Registry:
    """Constructors by name, and the text that calls one: `NAME`, or `NAME:SETTING=VALUE,SETTING=VALUE`.

    Settings, their types and their defaults are those of the constructor's arguments. Where an argument is itself one of a
    registry, its value is a name there, the first one by default, and its settings stand beside the others.

    Args:
        what: what is constructed.
        makers: the constructors.
        inner: registries of arguments, by their names.

    >>> CONDITIONERS.read("made:hidden=16+8")
    {'name': 'made', 'hidden': (16, 8), 'direct': False, 'dropout': 0.0, 'input_dropout': 0.0}
    >>> CONDITIONERS.text({"name": "made", "hidden": [64]})
    'made:hidden=64'
    """

    what: str
    makers: Makers
    inner: Mapping[str, Registry] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def settings(self, name: str) -> dict[str, inspect.Parameter]:
        """The arguments of a constructor that a text may give."""
        parameters = inspect.signature(self.makers[name], eval_str=True).parameters
        return {key: parameter for key, parameter in parameters.items() if key not in _FROM_DATA}

    def default(self, name: str, setting: str) -> str:
        """The text of a setting that is not given."""
        if setting in self.inner:
            return next(iter(self.inner[setting]))
        return value_text(self.settings(name)[setting].default)

    def read(self, text: str) -> Call:
        """The call of a text, with all settings: names are checked, and the types of values."""
        name, _, tail = text.partition(":")
        items = [item for item in tail.split(",") if item]
        call, allowed = self._take(name, items, text)
        if items:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no settings"
            raise ConfigError(
                f"{self.what} {name!r} {takes}, written as {name}:KEY=VALUE; got {items[0]!r}"
                f"{_hint(items[0].partition('=')[0].strip(), allowed)}"
            )
        return call

    def _take(self, name: str, items: list[str], text: str) -> tuple[Call, list[str]]:
        """A call with those of the items that are its settings, which are then taken out, and the names of all that may be."""
        if name not in self.makers:
            raise ConfigError(f"{self.what} is one of {', '.join(self)}; got {name!r}{_hint(name, self)}")
        settings = self.settings(name)
        given: dict[str, str] = {}
        for item in [*items]:
            key, separator, value = (part.strip() for part in item.partition("="))
            if separator and key in settings and key not in given:
                given[key] = value
                items.remove(item)
        call, names = (
            {"name": name} | {key: setting.default for key, setting in settings.items()},
            [*settings],
        )
        # what is named stands before the settings of it, and those of what is not named are taken last
        for key in sorted(settings, key=[*given, *settings].index):
            if key in self.inner:
                inner = self.inner[key]
                call[key], more = inner._take(given.get(key, next(iter(inner))), items, text)
                names += more
            elif key in given:
                what = f"{key} of {self.what} {text!r}"
                call[key] = self._value(what, given[key], settings[key].annotation)
        return call, names

    def _value(self, what: str, text: str, annotation: Any) -> Any:
        try:
            value = read_value(text, annotation)
        except ValueError:
            raise ConfigError(f"{what} is {value_rule(annotation)}; got {text!r}") from None
        if any(type(n) is int and abs(n) >= MOST for n in (value if isinstance(value, tuple) else [value])):
            raise ConfigError(f"{what} is below 2^31; got {text}")
        return value

    def make(self, what: str | Call, **given: Any) -> Any:
        """What a text calls; the constructor takes what it needs of the other arguments."""
        call = self.read(what) if isinstance(what, str) else what
        maker = self.makers[call["name"]]
        takes = inspect.signature(maker).parameters
        settings = {
            key: self.inner[key].make(value) if key in self.inner and isinstance(value, dict) else value
            for key, value in call.items()
            if key != "name"
        }
        return maker(**{key: value for key, value in given.items() if key in takes}, **settings)

    def text(self, what: Call | Configured) -> str:
        """The other way, of a call or of what it made; settings at their defaults are left out."""
        registries = (self, *self.inner.values())
        names = {maker: name for registry in registries for name, maker in registry.makers.items()}
        call = what if isinstance(what, dict) else call_of(what, names)
        known = self.settings(call["name"]) if call["name"] in self.makers else {}
        settings = []
        for key, value in call.items():
            inner = self.inner.get(key) if isinstance(value, dict) else None
            # the settings of what is named inside follow it: NAME:KEY=INNER,KEY_OF_INNER=VALUE
            written = value_text(value) if inner is None else inner.text(value).replace(":", ",", 1)
            if key != "name" and not (key in known and written == self.default(call["name"], key)):
                settings.append(f"{key}={written}")
        return f"{call['name']}:{','.join(settings)}" if settings else call["name"]


# ---- calls as JSON ----


def call_of(thing: object, names: Mapping[Any, str], shared: list[SequenceConditioner] | None = None) -> Any:
    """What makes a thing again; classes without a name here are called by their own.

    Args:
        thing: what is `Configured`, a list of such things, or a plain value.
        names: of the constructors.
        shared: networks so far whose weights others may share.
    """
    shared = [] if shared is None else shared
    if isinstance(thing, list | tuple | nn.ModuleList):
        return [call_of(item, names, shared) for item in thing]
    if not isinstance(thing, Configured):
        return thing
    if isinstance(thing, SequenceConditioner):
        shared.append(thing)
        first = next(number for number, other in enumerate(shared) if other.net is thing.net)
        if first < len(shared) - 1:
            return {"name": REORDERED, "of": first, "order": thing.config()["order"]}
    name = names.get(type(thing), type(thing).__name__)
    return {"name": name} | {key: call_of(value, names, shared) for key, value in thing.config().items()}


REORDERED = "reordered"
"""The name of a conditioner that shares the network of an earlier one of the same model, in another ordering."""


def flow_to_spec(flow: Trainable) -> Call:
    """The architecture as JSON; conditioners and transforms outside `PARTS` are named by their class."""
    return call_of(flow, {maker: name for name, maker in PARTS.items()})


# ---- what can be named ----


def _none() -> None:
    """Nothing: no posterior, no standardiser."""


def _linear(
    features: int, *, categories: Sequence[int], choices: Sequence[int], sees: Sequence[str], context: int
) -> MLP:
    """A linear map of all that it sees, which corrects the generator's logits."""
    return MLP(features, (), categories=categories, choices=choices, sees=sees, context=context)


_NETWORKS = {"made": MADE, "coupling": Coupling, "transformer": CausalTransformer, "recurrent": Recurrent}
CONDITIONERS = Registry("conditioner", _NETWORKS)
POSTERIORS = Registry(
    "posterior",
    {
        "none": _none,
        # Bayes' rule, where posteriors begin, is linear
        "mlp": functools.partial(MLP, direct=True),
        "made": functools.partial(MADE, direct=True),
        "linear": _linear,
        "diagonal": Diagonal,
    },
)
_TRANSFORMS = {"shift": ModularShift, "affine": ModularAffine}
TRANSFORMS = Registry("transform", _TRANSFORMS)
BASES = Registry(
    "base", {"learned": functools.partial(FactorisedBase, p0=0.998, learned=True), "fixed": FactorisedBase}
)


OBJECTIVES = Registry("objective", {"bound": estimators.Bound, "elbo": estimators.ELBO})
_CREDITS = {
    "descendants": estimators.Descendants,
    "all": estimators.All,
    "impatient": estimators.Impatient,
    "two-term": estimators.TwoTerm,
    "printed-rewards": estimators.PrintedRewards,
    "printed-divergence": estimators.PrintedDivergence,
}
CREDITS = Registry(
    "credit",
    _CREDITS | {"local-divergence": estimators.LocalDivergence},
    {"of": Registry("credit", _CREDITS)},
)
BASELINES = Registry(
    "baseline",
    {
        "running-mean": estimators.RunningMean,
        "none": estimators.NoBaseline,
        "sampled": estimators.SampledCritic,
        "greedy": estimators.GreedyCritic,
        "leave-one-out": estimators.LeaveOneOut,
    },
)
STANDARDISERS = Registry(
    "standardiser",
    {"none": _none, "one": estimators.OneScale, "feature": estimators.FeatureScale},
)
ESTIMATORS = Registry(
    "estimator",
    {
        "maximum-likelihood": estimators.MaximumLikelihood,
        "straight-through": estimators.StraightThrough,
        "score-function": estimators.ScoreFunction,
        "analytic": estimators.Analytic,
        "proposal-prefix": estimators.ProposalPrefix,
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
    {"objective": OBJECTIVES, "credit": CREDITS, "baseline": BASELINES, "standardise": STANDARDISERS},
)

PARTS: dict[str, type[nn.Module]] = {
    "flow": LatentFlow,
    "mixture": Mixture,
    "layer": Layer,
    "base": FactorisedBase,
    **_NETWORKS,
    "mlp": MLP,
    "diagonal": Diagonal,
    "trees": BoostedTrees,
    "stacked": Stacked,
    **_TRANSFORMS,
    "xor": Xor,
}
"""The names by which the `model` of a `config.json` calls what it is made of."""
