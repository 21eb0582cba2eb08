"""From options to a data set, a flow and an estimator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xorflow import data
from xorflow.bases import FactorisedBase
from xorflow.conditioners import Conditioner, SequenceConditioner, resolve_order
from xorflow.conditioners.orderings import OF_IMAGES, Order
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.estimators import Estimator, MaximumLikelihood
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.config import Options
from xorflow.training.init import category_totals
from xorflow.training.registry import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    POSTERIORS,
    TRANSFORMS,
    Call,
    Trainable,
)
from xorflow.transforms import Transform


def build_data(options: Options) -> Dataset:
    """The data set that the options name."""
    if options.data == "mnist":
        count = 10_000 if options.validation is None else options.validation
        if count != int(count):
            raise ConfigError(
                f"of MNIST, a whole number of training images validates; got validation={count}"
            )
        return data.mnist(
            validation=int(count), seed=options.data_seed, context="label" if options.label else None
        )
    if "." not in options.data and not Path(options.data).exists():
        raise ConfigError(f"data is 'mnist' or a .npy, .npz or .csv file; got {options.data!r}")
    return data.load(
        Path(options.data),
        validation=_part(0.1 if options.validation is None else options.validation),
        test=_part(options.test),
        seed=options.data_seed,
        categories=options.categories,
    )


def _part(value: float) -> int | float:
    """Options keep numbers as floats: from 1 on they count rows, below they are fractions."""
    return int(value) if value.is_integer() else value


def build_flow(options: Options, dataset: Dataset) -> Trainable:
    """The flow, or the mixture of flows, that the options describe, with weights from the global generator of torch."""
    assert options.layers is not None
    if options.mixture == "none":
        return _build_one(options, dataset, layer_orders(options.order, options.layers))
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
    transform: Transform = TRANSFORMS.make(options.transform, categories=dataset.categories)
    # all generators before any posterior: whether there are posteriors does not change what the generators begin with
    nets = [_conditioner(options, dataset, index, order, transform) for index, order in enumerate(orders)]
    relative = options.posterior in ("linear", "diagonal")
    layers = [
        Layer(net, transform, _posterior(options, dataset, index, order, transform), relative=relative)
        for index, (net, order) in enumerate(zip(nets, orders, strict=True))
    ]
    return LatentFlow(layers, _base(options, dataset))


def _base(options: Options, dataset: Dataset) -> FactorisedBase:
    return BASES.make(options.base, features=dataset.features, categories=dataset.categories)


def _image_shape(dataset: Dataset) -> tuple[int, ...] | None:
    return dataset.shape if dataset.shape is not None and len(dataset.shape) == 2 else None


def _conditioner(
    options: Options, dataset: Dataset, index: int, order: Order, transform: Transform
) -> Conditioner:
    call, shape = CONDITIONERS.read(options.conditioner), _image_shape(dataset)
    if "reach=" in options.conditioner and shape is None:
        raise ConfigError(
            "reach is of networks that see the pixels around them, and the data have no two-dimensional shape; leave reach out"
        )
    given = _of_a_layer(dataset, order, transform) | {"sees": _sees(options, index)}
    if call["name"] == "coupling":
        call, given["flip"] = _masked(call, index, shape)
    elif call["name"] != "made":
        # their own `columns`, which a configuration then says
        given |= {"order": order, "skipped": skipped_features(dataset, options.skip)}
    return CONDITIONERS.make(call, **given, shape=shape)


def _masked(call: Call, index: int, shape: tuple[int, ...] | None) -> tuple[Call, bool]:
    """A coupling with the mask of a layer, and whether that is flipped."""
    if call["mask"] in ("checkerboard", "nested") and shape is None:
        raise ConfigError(
            f"a {call['mask']} mask needs data with a two-dimensional shape; choose mask=halves or mask=random"
        )
    mask, flip = layer_mask(call["mask"], index)
    return call | {"mask": mask}, flip


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
            f"one must take a step; lower skip below {float(others.max()):.3g}"
        )
    return features


def _of_a_layer(dataset: Dataset, order: Order, transform: Transform) -> dict[str, Any]:
    """What the networks of a layer are told, as far as they take it."""
    shape = _image_shape(dataset)
    return {
        "features": dataset.features,
        "order": resolve_order(order, dataset.features, shape) if order in OF_IMAGES else order,
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
    before = [] if index == 0 else ["previous" if options.variant == "chain" else "state"]
    call = POSTERIORS.read(options.posterior)
    sees: Any = ["x", *before]
    if call["name"] == "diagonal":
        sees = "state" if "state" in before else "x"
    elif call["name"] == "made":
        sees = dict.fromkeys(sees, "up to")
    return POSTERIORS.make(call, **_of_a_layer(dataset, order, transform), sees=sees)


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
    """An estimator from its name and settings.

    >>> build_estimator("maximum-likelihood:samples=8").samples
    8
    """
    return ESTIMATORS.make(text)
