"""From options to a data set, an estimator, and a flow with the weights that its training begins with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xorflow import data
from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, MLP, Conditioner, Diagonal, SequenceConditioner, resolve_order
from xorflow.conditioners.base import Source
from xorflow.conditioners.orderings import OF_IMAGES, Order
from xorflow.data import Dataset, Split
from xorflow.errors import ConfigError
from xorflow.estimators import Estimator, MaximumLikelihood
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.config import Options
from xorflow.training.registry import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    POSTERIORS,
    TRANSFORMS,
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
    if not os.path.exists(options.data) and not any(mark in options.data for mark in ".*?["):
        raise ConfigError(
            f"data is 'mnist', a file, {', '.join(data.READABLE)}, or a folder of .parquet files; got {options.data!r}"
        )
    return data.load(
        Path(options.data),
        validation=_part(options.validation),
        test=_part(options.test),
        validation_data=options.validation_data,
        test_data=options.test_data,
        part=options.part,
        seed=options.data_seed,
        categories=options.categories,
        header=options.header,
        schema=options.schema,
        rare=options.rare,
        stream=options.stream,
    )


def _part(value: float | None) -> int | float | None:
    """Options keep numbers as floats: from 1 on they count rows, below they are fractions."""
    return int(value) if value is not None and value.is_integer() else value


def build_flow(options: Options, dataset: Dataset) -> Trainable:
    """The flow, or the mixture of flows, that the options describe, with weights from the global generator of torch."""
    assert options.layers is not None
    builder = _Builder(options, dataset)
    if options.mixture == "none":
        return builder.flow(layer_orders(options.order, options.layers))
    first, *others = mixture_orders(options.mixture, builder.shape is not None)
    flow = builder.flow([first])
    estimator = build_estimator(options.estimator)
    # where each learns from a part of the batch, all count alike
    learned = not (isinstance(estimator, MaximumLikelihood) and estimator.split_batch)
    return Mixture([flow, *(builder.another(flow, order) for order in others)], learned=learned)


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


class _Builder:
    """What flows on a data set are made of, as the options describe it."""

    def __init__(self, options: Options, dataset: Dataset) -> None:
        self.options, self.dataset = options, dataset
        self.shape = dataset.shape if dataset.shape is not None and len(dataset.shape) == 2 else None
        self.transform: Transform = TRANSFORMS.make(options.transform, categories=dataset.categories)

    def flow(self, orders: Sequence[Order]) -> LatentFlow:
        # all generators before any posterior: whether there are posteriors does not change what the generators begin with
        nets = [self.generator(index, order) for index, order in enumerate(orders)]
        relative = self.options.posterior in ("linear", "diagonal")
        layers = [
            Layer(net, self.transform, self.posterior(index, order), relative=relative)
            for index, (net, order) in enumerate(zip(nets, orders, strict=True))
        ]
        return LatentFlow(layers, self.base())

    def another(self, flow: LatentFlow, order: str) -> LatentFlow:
        """A flow of one layer in another ordering; by the same network, if it can be shared."""
        net = flow.layers[0].conditioner
        if not (self.options.shared and isinstance(net, SequenceConditioner)):
            return self.flow([order])
        return LatentFlow([Layer(net.reordered(order), self.transform)], self.base())

    def base(self) -> FactorisedBase:
        return BASES.make(
            self.options.base, features=self.dataset.features, categories=self.dataset.categories
        )

    def generator(self, index: int, order: Order) -> Conditioner:
        options = self.options
        call = CONDITIONERS.read(options.conditioner)
        if self.shape is None and "reach=" in options.conditioner:
            raise ConfigError(
                "reach is of networks that see the pixels around them, and the data have no two-dimensional shape; leave reach "
                "out"
            )
        of_a_chain = {"x": "before"} if index == 0 else {"previous": "up to"}
        sees = of_a_chain if options.variant == "chain" else {"state": "before"}
        given = self._given(order) | {"sees": sees | ({"own": "before"} if options.own else {})}
        if call["name"] == "coupling":
            if call["mask"] in ("checkerboard", "nested") and self.shape is None:
                raise ConfigError(
                    f"a {call['mask']} mask needs data with a two-dimensional shape; choose mask=halves or mask=random"
                )
            call["mask"], given["flip"] = layer_mask(call["mask"], index)
        elif call["name"] != "made":
            # their own `columns`, which a configuration then says
            given |= {"order": order, "skipped": skipped_features(self.dataset, options.skip)}
        return CONDITIONERS.make(call, **given, shape=self.shape)

    def posterior(self, index: int, order: Order) -> Conditioner | None:
        """It sees the data and, beyond the first layer, what came before it."""
        before = [] if index == 0 else ["previous" if self.options.variant == "chain" else "state"]
        call = POSTERIORS.read(self.options.posterior)
        sees: Any = ["x", *before]
        if call["name"] == "diagonal":
            sees = "state" if "state" in before else "x"
        elif call["name"] == "made":
            sees = dict.fromkeys(sees, "up to")
        return POSTERIORS.make(call, **self._given(order), sees=sees)

    def _given(self, order: Order) -> dict[str, Any]:
        """What the networks of a layer are told, as far as they take it."""
        data = self.dataset
        return {
            "features": data.features,
            "order": resolve_order(order, data.features, self.shape) if order in OF_IMAGES else order,
            "categories": data.categories,
            "choices": self.transform.choices.sizes,
            "context": data.context_features,
        }


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


# ---- where training begins: at the frequencies of the data, or where another run ended ----

_NEARLY_IDENTITY = 7.0
"""The log-odds of the identity in layers that are put before those of a run: of a thousand features about one is flipped,
enough to learn from, and too little to spoil what was learned."""


@torch.no_grad()
def init_from_flow(flow: LatentFlow, before: LatentFlow, what: str, *, keep_base: bool = False) -> None:
    """Begin with a trained flow: its layers become the last ones, its base the base; the others are near the identity.

    Args:
        flow: what is to be trained; it has as many layers or more.
        before: the trained flow.
        what: its name in errors.
        keep_base: begin with the layers alone.
    """
    offset = flow.depth - before.depth
    if offset < 0:
        raise ConfigError(
            f"{what} has {before.depth} layers, and a run that is initialised from it has as many or more; got {flow.depth}"
        )
    for number, (layer, other) in enumerate(zip(flow.layers[offset:], before.layers, strict=True), 1):
        mine, theirs = _described(layer), _described(other)
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                raise ConfigError(
                    f"layer {number} of {what} has another {name} than what is initialised from it: choose the same"
                )
        layer.load_state_dict(other.state_dict())
    if not keep_base:
        flow.base.load_state_dict(before.base.state_dict())
    for layer in flow.layers[:offset]:
        layer.conditioner.start_at(near_identity(layer, _NEARLY_IDENTITY))


def _described(layer: Layer) -> dict[str, Any]:
    """All that the weights of a layer were learned for, by what it is called."""
    described: dict[str, Any] = {}
    for part, net in (("conditioner", layer.conditioner), ("posterior", layer.posterior)):
        described[part] = type(net).__name__
        if net is not None:
            described |= {f"{name} of its {part}": value for name, value in net.config().items()}
            described[f"order of its {part}"] = net.order
            described[f"dropout of its {part}"] = None
    return described


# ---- frequencies of the data ----


@torch.no_grad()
def init_from_data(flow: Trainable, train: Split, *, posteriors: bool = True) -> None:
    """Begin where independent features are, as far as the base and the masks of couplings can express them.

    In orderings the last layer has the frequencies of the training data, and the others are near the identity; with a base
    concentrated on category 0, the choice u then has about the distribution of x. In couplings a learned base has the
    frequencies; on a fixed one each feature's last layer that moves it. Posteriors begin at Bayes' rule, which is linear in the
    state, so that no divergence is paid before anything is learned.

    Args:
        flow: what is to be trained.
        train: the data.
        posteriors: if not, only what this start gave before posteriors had one: biases of generators, and Bayes' rule for
            those posteriors that correct the generator. The rows of the paper began so.
    """
    if isinstance(flow, Mixture):
        for component in flow:
            if isinstance(component, LatentFlow):
                init_from_data(component, train, posteriors=posteriors)
        return
    start = _start_orderings if flow.layers[-1].conditioner.mask is None else _start_couplings
    for layer, (logits, taken) in zip(flow.layers, start(flow, train, posteriors), strict=True):
        layer.conditioner.start_at(logits)
        if layer.relative or posteriors:
            _start_at_bayes(layer, flow.base, logits, taken)


_Start = tuple[Tensor, Tensor]
"""The packed logits that a layer's generator begins with, and which features it takes to the base: booleans (D,)."""


def _start_orderings(flow: LatentFlow, train: Split, posteriors: bool) -> list[_Start]:
    """The last layer takes all features, by their frequencies."""
    at_data = _logits_at_data(flow, train, flow.layers[-1])
    odds = _odds_of_identity(flow) if posteriors else 3.0
    nothing = torch.zeros(flow.features, dtype=torch.bool)
    return [*((near_identity(layer, odds), nothing) for layer in flow.layers[:-1]), (at_data, ~nothing)]


def _start_couplings(flow: LatentFlow, train: Split, posteriors: bool) -> list[_Start]:
    """No layer moves all features: a learned base has the frequencies itself, and layers are near the identity.

    With posteriors that correct the generator, whose draws lead to the base as it is, layers take features over: one that sees
    enough of those that none has taken begins with the frequencies of its own, and the last layer with those of all that it
    can. On a fixed base, without them, the last layer that moves a feature takes it. A learned base keeps the rest.
    """
    guided = all(layer.relative for layer in flow.layers) and flow.states.binary
    if guided:
        taken = _taken(flow, early=True)
    elif posteriors and not flow.base.learned:
        taken = _taken(flow, early=False)
    else:
        taken = [torch.zeros(flow.features, dtype=torch.bool) for _ in flow.layers]
    # posteriors follow the generator where they correct nothing: flips that nothing asks for would have to be undone
    odds = _odds_of_identity(flow) if posteriors else 8.0 if guided else 5.0
    initial = []
    for layer, features in zip(flow.layers, taken, strict=True):
        logits, at_data = near_identity(layer, odds), _logits_at_data(flow, train, layer)
        chosen = features[layer.transform.choices.logit_features]
        initial.append((torch.where(chosen, at_data.to(logits), logits), features))
    if flow.base.learned:
        left = ~torch.stack(taken).any(0)
        flow.base.set_probabilities(category_frequencies(train, flow.categories), left)
    return initial


def _taken(flow: LatentFlow, *, early: bool) -> list[Tensor]:
    """Which features each layer takes: those that no layer before has, where it sees enough of the others, or none later."""
    left = torch.ones(flow.features, dtype=torch.bool)
    taken: list[Tensor] = []
    for layer in flow.layers if early else reversed(flow.layers):
        mask = layer.conditioner.mask
        assert mask is not None
        wanted, seen = left & ~mask.cpu(), left & mask.cpu()
        # layers before the last see the data as they are
        enough = not early or layer is flow.layers[-1] or 2 * int(seen.sum()) >= int(wanted.sum())
        taken.append(wanted if enough else torch.zeros_like(left))
        left = left & ~taken[-1]
    return taken if early else taken[::-1]


_FEWEST_ODDS, _MOST_ODDS = 3.0, 8.0


def _odds_of_identity(flow: LatentFlow) -> float:
    """The log-odds of the identity with which all layers together move about half a feature of a row.

    Each that is moved without need costs some nats at the start; what is never moved has no gradient to learn from.
    """
    others = max(layer.transform.choices.width for layer in flow.layers) - 1
    return min(max(math.log(2 * flow.features * flow.depth * others), _FEWEST_ODDS), _MOST_ODDS)


def near_identity(layer: Layer, log_odds: float) -> Tensor:
    """Packed logits of a layer's choices, with these odds of the identity against each other one."""
    choices = layer.transform.choices
    logits = torch.zeros(choices.flat)
    for group in choices.groups:
        if group.binary:
            logits[group.logits] = -log_odds
        else:
            logits[group.logits].view(-1, group.size)[:, 0] = log_odds
    return logits


def _start_at_bayes(layer: Layer, base: FactorisedBase, start: Tensor, taken: Tensor) -> None:
    """Begin a posterior at Bayes' rule: what a state says of u is log p(y), which is linear in the state.

    Only for features that lead to the base from here; for the others, which later layers take, it begins at the generator.
    """
    net = layer.posterior
    if not isinstance(net, MLP | MADE | Diagonal):
        return
    slope, level = _evidence(layer.transform, base, taken)
    if not layer.relative:
        level = level + start.to(level)
    # in a chain the state is not seen, but the data are, which layers near the identity hardly change
    source = Source.STATE if Source.STATE in net.sees else Source.X
    net.start_linear(source, slope, level)


def _evidence(transform: Transform, base: FactorisedBase, taken: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y) of each choice as a linear function of the state, (flat, flat) and (flat,), for the features `taken`."""
    states, choices = transform.states, transform.choices
    slope, level = base.logits.new_zeros(states.flat, choices.flat), base.logits.new_zeros(choices.flat)
    for feature in taken.nonzero()[:, 0].tolist():
        k = torch.arange(states.sizes[feature], device=level.device)[:, None]
        u = torch.arange(choices.sizes[feature], device=level.device)
        led_to = transform.value_to_base(k, u, torch.tensor(feature, device=level.device))  # (K, U)
        values = base.log_probs_of(feature)[led_to]
        values = values[:, 1:] - values[:, :1] if len(u) == 2 else values
        columns = choices.positions([feature])
        if len(k) == 2:
            level[columns] = values[0]
            values = values[1:] - values[0]
        slope[states.positions([feature])[:, None], columns] = values
    return slope, level


def _logits_at_data(flow: LatentFlow, train: Split, layer: Layer) -> Tensor:
    """The packed logits of a layer's choices with which, as the last layer, each feature that it takes has its frequencies, if
    the base spreads evenly what it does not give to category 0.
    """
    transform = layer.transform
    logits = torch.empty(transform.choices.flat, dtype=torch.float64)
    least = 5e-3 if transform.is_xor else 1e-3
    for feature, wanted in enumerate(category_frequencies(train, flow.categories)):
        first = flow.base.log_probs_of(feature)[0].detach().double().cpu().exp()
        rest = (1 - first) / max(len(wanted) - 1, 1)
        if first != rest:
            wanted = (wanted - rest) / (first - rest)
        u = torch.arange(transform.choices.sizes[feature], device=transform.sizes.device)
        reached = transform.value_to_data(
            torch.zeros_like(u), u, torch.tensor(feature, device=u.device)
        ).cpu()
        # the choices that lead from a category to 0 share what it should have
        sharing = reached.bincount(minlength=len(wanted))
        start = (wanted.clamp(least, 1 - least)[reached] / sharing[reached]).log()
        logits[transform.choices.positions([feature])] = start[1:] - start[:1] if len(u) == 2 else start
    return logits


def category_frequencies(train: Split, sizes: tuple[int, ...]) -> list[Tensor]:
    """How often each feature has each category in the training data, add-1/2 smoothed: by feature (K_d,) float64."""
    return [(total + 0.5) / (total + 0.5).sum() for total in category_totals(train, sizes)]


def category_totals(train: Split, sizes: tuple[int, ...]) -> list[Tensor]:
    """In how many rows each feature has each category, on average over draws: by feature (K_d,) float64, on the CPU."""
    if not train.stochastic:
        return category_counts(train.values, sizes)
    # intensities: the expected count needs no draw
    ones = train.values.sum(0, dtype=torch.int64).double().cpu() / 255
    return list(torch.stack((len(train) - ones, ones), -1))


def category_counts(values: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """How many of the rows (N, D) have each category of each feature: by feature (K_d,) float64, on the CPU."""
    columns = values.cpu().T.contiguous()
    return [torch.bincount(c, minlength=k)[:k].double() for c, k in zip(columns, sizes, strict=True)]
