"""From options to a data set, a flow and an estimator: the one table of names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xorflow import data
from xorflow.bases import FactorisedBase
from xorflow.conditioners import (
    MADE,
    MLP,
    CausalTransformer,
    Conditioner,
    Coupling,
    Diagonal,
    Recurrent,
    SequenceConditioner,
    resolve_order,
)
from xorflow.conditioners.orderings import OF_IMAGES, Order
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.estimators import (
    ARMS,
    VIMCO,
    Analytic,
    Concrete,
    DisARM,
    DoubleCV,
    Estimator,
    FullPosterior,
    LeaveOneOut,
    LocalExpectation,
    MaximumLikelihood,
    ProposalPrefix,
    Rebar,
    ReinMax,
    Relax,
    SpecialCase,
    StraightThrough,
    StraightThroughGumbel,
)
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.init import category_totals
from xorflow.training.options import Options
from xorflow.training.specs import Trainable
from xorflow.transforms import ModularAffine, ModularShift, Transform

ESTIMATORS: dict[str, type[Estimator]] = {
    "maximum-likelihood": MaximumLikelihood,
    "straight-through": StraightThrough,
    "special-case": SpecialCase,
    "full-posterior": FullPosterior,
    "proposal-prefix": ProposalPrefix,
    "analytic": Analytic,
    "leave-one-out": LeaveOneOut,
    "vimco": VIMCO,
    "disarm": DisARM,
    "arms": ARMS,
    "rebar": Rebar,
    "relax": Relax,
    "double-cv": DoubleCV,
    "concrete": Concrete,
    "st-gumbel": StraightThroughGumbel,
    "reinmax": ReinMax,
    "local-expectation": LocalExpectation,
}
"""The names by which options call estimators."""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build_data(options: Options) -> Dataset:
    """The data set that the options name."""
    if options.data == "mnist":
        if options.categories is not None:
            raise ConfigError("categories is of files, and MNIST's pixels have 2; leave --categories out")
        count = 10_000 if options.validation is None else options.validation
        if count != int(count):
            raise ConfigError(
                f"of MNIST, a whole number of training images validates; got validation={count}"
            )
        return data.mnist(
            validation=int(count), seed=options.data_seed, context="label" if options.label else None
        )
    if options.label:
        raise ConfigError("label conditions on MNIST's labels, and the data are a file; leave --label out")
    if "." not in options.data and not Path(options.data).exists():
        raise ConfigError(f"--data is 'mnist' or a .npy, .npz or .csv file; got {options.data!r}")
    return data.load(
        Path(options.data),
        validation=_part(0.1 if options.validation is None else options.validation),
        test=_part(options.test),
        seed=options.data_seed,
        categories=options.categories,
    )


def _part(value: float) -> int | float:
    """Options keep numbers as floats: from 1 on they count rows, below they are fractions."""
    if value >= 1 and value != int(value):
        raise ConfigError(
            f"--validation and --test are fractions below 1 or whole numbers of rows; got {value}"
        )
    return int(value) if value >= 1 or value == 0 else value


def build_flow(options: Options, dataset: Dataset) -> Trainable:
    """The flow, or the mixture of flows, that the options describe, with weights from the global generator of torch."""
    assert options.layers is not None
    if options.mixture == "none":
        return _build_one(options, dataset, layer_orders(options.order, options.layers))
    if options.layers > 1 or options.posterior != "none":
        raise ConfigError(
            "a mixture is trained by the exact likelihood of flows of one layer; leave --layers and --posterior out, or "
            "--mixture"
        )
    first, *others = mixture_orders(options.mixture, _image_shape(dataset) is not None)
    flow = _build_one(options, dataset, [first])
    estimator = build_estimator(options.estimator)
    # where each learns from a part of the batch, all count alike
    learned = not (isinstance(estimator, MaximumLikelihood) and estimator.split_batch)
    return Mixture(
        [flow, *(_build_another(options, dataset, flow, order) for order in others)], learned=learned
    )


def _build_another(options: Options, dataset: Dataset, flow: LatentFlow, order: str) -> LatentFlow:
    """The flow in another ordering; by the same network, if it can be shared."""
    layer = flow.layers[0]
    if not (options.shared and isinstance(layer.conditioner, SequenceConditioner)):
        return _build_one(options, dataset, [order])
    return LatentFlow([Layer(layer.conditioner.reordered(order), layer.transform)], _base(options, dataset))


def mixture_orders(text: str, images: bool) -> list[str]:
    """The orderings that are named, or so many of the usual ones.

    >>> mixture_orders("3", images=True)
    ['natural', 'reversed', 'columns']
    """
    try:
        count = int(text)
    except ValueError:
        return [part.strip() for part in text.split(",")]
    usual = ["natural", "reversed", *(("columns", "columns-reversed") if images else ())]
    if not 2 <= count <= _MOST_COMPONENTS:
        raise ConfigError(f"a mixture has 2 to {_MOST_COMPONENTS} components; got {count}")
    return [*usual, *(f"random:{seed}" for seed in range(count))][:count]


_MOST_COMPONENTS = 64


def _build_one(options: Options, dataset: Dataset, orders: Sequence[Order]) -> LatentFlow:
    transform = {"shift": ModularShift, "affine": ModularAffine}[options.transform](dataset.categories)
    # all generators before any posterior: whether there are posteriors does not change what the generators begin with
    nets = [_conditioner(options, dataset, index, order, transform) for index, order in enumerate(orders)]
    relative = options.posterior in ("linear", "diagonal")
    layers = [
        Layer(net, transform, _posterior(options, dataset, index, order, transform), relative=relative)
        for index, (net, order) in enumerate(zip(nets, orders, strict=True))
    ]
    return LatentFlow(layers, _base(options, dataset))


def _base(options: Options, dataset: Dataset) -> FactorisedBase:
    p0 = options.p0 if options.p0 is not None else (0.9 if options.base == "fixed" else 0.998)
    return FactorisedBase(
        dataset.features, p0, categories=dataset.categories, learned=options.base == "learned"
    )


def _image_shape(dataset: Dataset) -> tuple[int, ...] | None:
    return dataset.shape if dataset.shape is not None and len(dataset.shape) == 2 else None


def _conditioner(
    options: Options, dataset: Dataset, index: int, order: Order, transform: Transform
) -> Conditioner:
    shared, shape = _shared(dataset, transform), _image_shape(dataset)
    if options.conditioner == "made":
        known = resolve_order(order, dataset.features, shape) if order in OF_IMAGES else order
        hidden, sees = options.hidden, _sees(options, index)
        return MADE(dataset.features, hidden, order=known, sees=sees, direct=options.direct, **shared)
    if options.conditioner in ("transformer", "recurrent"):
        return _sequence_conditioner(options, dataset, order, shared | {"sees": _sees(options, index)})
    if options.variant == "chain" or options.own:
        raise ConfigError(
            "a coupling sees the running state alone; leave --variant chain and --own to --conditioner made"
        )
    if options.mask in ("checkerboard", "nested") and shape is None:
        raise ConfigError(
            f"a {options.mask} mask needs data with a two-dimensional shape; choose --mask halves or random"
        )
    mask, flip = layer_mask(options.mask, index)
    return Coupling(dataset.features, options.hidden, mask=mask, shape=shape, flip=flip, **shared)


def layer_mask(mask: str, index: int) -> tuple[str, bool]:
    """The mask of a coupling layer, and whether what is seen and what is transformed are exchanged.

    Of two layers the second exchanges the two of the first, so that every feature is transformed; the next two have another
    random mask. Nested masks go from grid to grid instead.

    >>> [layer_mask("random", index) for index in range(3)]
    [('random:0', False), ('random:0', True), ('random:1', False)]
    """
    if mask == "nested":
        return f"nested:{index}", False
    return f"random:{index // 2}" if mask == "random" else mask, index % 2 == 1


def _sequence_conditioner(
    options: Options, dataset: Dataset, order: Order, shared: dict[str, Any]
) -> Conditioner:
    shape = _image_shape(dataset)
    if options.reach and shape is None:
        raise ConfigError(
            "reach is of networks that see the pixels around them, and the data have no two-dimensional shape; leave "
            "--reach out"
        )
    shared = shared | {"order": order, "shape": shape, "dropout": options.dropout}
    shared["skipped"] = skipped_features(dataset, options.skip)
    given = {"width": options.width, "depth": options.blocks, "reach": options.reach}
    shared |= {name: value for name, value in given.items() if value is not None}
    if options.conditioner == "transformer":
        return CausalTransformer(dataset.features, heads=options.heads, rotary=options.rotary, **shared)
    return Recurrent(dataset.features, cell="lstm" if options.cell == "lstm" else "gru", **shared)


def skipped_features(dataset: Dataset, share: float) -> list[int]:
    """The features that have another value than their usual one in at most that share of the training rows."""
    if not share:
        return []
    train = dataset.train
    usual = torch.stack([total.max() for total in category_totals(train, dataset.categories)])
    others = (len(train) - usual) / len(train)
    features = (others <= share).nonzero().flatten().tolist()
    if len(features) == dataset.features:
        raise ConfigError(
            f"all {dataset.features} features have their usual value in all but a share of {share:g} of the rows, and at least "
            f"one must take a step; lower --skip below {float(others.max()):.3g}"
        )
    return features


def _shared(dataset: Dataset, transform: Transform) -> dict[str, Any]:
    return {
        "categories": dataset.categories,
        "choices": transform.choices.sizes,
        "context": dataset.context_features,
    }


def _sees(options: Options, index: int) -> dict[str, str]:
    """What the generator of a layer sees."""
    of_a_chain = {"x": "before"} if index == 0 else {"previous": "up to"}
    sees = of_a_chain if options.variant == "chain" else {"state": "before"}
    return sees | ({"own": "before"} if options.own else {})


def _posterior(
    options: Options, dataset: Dataset, index: int, order: Order, transform: Transform
) -> Conditioner | None:
    """The posterior of a layer: it sees the data and, beyond the first layer, what came before it."""
    if options.posterior == "none":
        return None
    before = [] if index == 0 else ["previous" if options.variant == "chain" else "state"]
    shared = _shared(dataset, transform)
    if options.posterior == "diagonal":
        return Diagonal(dataset.features, sees="state" if "state" in before else "x", **shared)
    # Bayes' rule, where posteriors begin, is linear
    direct = options.init != "biases"
    if options.posterior in ("mlp", "linear"):
        hidden = options.hidden if options.posterior == "mlp" else ()
        return MLP(dataset.features, hidden, sees=["x", *before], direct=direct, **shared)
    known = resolve_order(order, dataset.features, _image_shape(dataset)) if order in OF_IMAGES else order
    sees = dict.fromkeys(["x", *before], "up to")
    return MADE(dataset.features, options.hidden, order=known, sees=sees, direct=direct, **shared)


def layer_orders(order: str, layers: int) -> list[str]:
    """One ordering a layer.

    >>> layer_orders("alternating", 3)
    ['natural', 'reversed', 'natural']
    """
    if "," in order:
        named = [part.strip() for part in order.split(",")]
        if len(named) != layers:
            raise ConfigError(
                f"order names {len(named)} orderings, and there are {layers} layers; name one for each"
            )
        return named
    if order == "alternating":
        return [("natural", "reversed")[index % 2] for index in range(layers)]
    if order == "random":
        return [f"random:{index}" for index in range(layers)]
    return [order] * layers


def build_estimator(text: str) -> Estimator:
    """An estimator from its name and options.

    >>> build_estimator("maximum-likelihood:samples=8").samples
    8
    """
    name, _, tail = text.partition(":")
    if name not in ESTIMATORS:
        raise ConfigError(f"estimator is one of {', '.join(ESTIMATORS)}; got {name!r}")
    parameters = inspect.signature(ESTIMATORS[name]).parameters
    allowed = [key for key, parameter in parameters.items() if parameter.kind not in _VARIADIC]
    settings: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, separator, value = item.partition("=")
        if not separator or key not in allowed:
            known = f"takes {', '.join(allowed)}" if allowed else "takes no options"
            raise ConfigError(f"estimator {name!r} {known}, written as {name}:KEY=VALUE; got {item!r}")
        settings[key] = _literal(value)
        expected = _mismatch(str(parameters[key].annotation), settings[key])
        if expected:
            raise ConfigError(f"{key} of estimator {name!r} is {expected}; got {value!r} in {text!r}")
    try:
        return ESTIMATORS[name](**settings)
    except TypeError as error:
        raise ConfigError(f"estimator {text!r}: {error}") from None


def _mismatch(annotation: str, value: Any) -> str | None:
    """What a setting should have been, if it is not."""
    kinds: dict[str, tuple[type | tuple[type, ...], str]] = {
        "int": (int, "a whole number"),
        "float": ((int, float), "a number"),
        "bool": (bool, "true or false"),
    }
    if annotation not in kinds:
        return None if isinstance(value, str) else "a name"
    accepted, expected = kinds[annotation]
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and annotation != "bool")
    return expected if wrong else None


def estimator_text(estimator: Estimator) -> str:
    """The other way: what `build_estimator` would take; settings at their defaults are left out."""
    kind = type(estimator)
    name = next((n for n, cls in ESTIMATORS.items() if cls is kind), kind.__name__)
    parameters = inspect.signature(kind).parameters
    chosen = {
        key: value
        for key, value in estimator.config().items()
        if key not in parameters or parameters[key].default != value
    }
    settings = ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items()
    )
    return f"{name}:{settings}" if settings else name


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
