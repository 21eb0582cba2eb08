"""Where a run begins: at the frequencies of its data, or where another run ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xorflow.bases import FactorisedBase
from xorflow.conditioners import MLP, Conditioner, Diagonal, SequenceConditioner
from xorflow.conditioners.base import Source
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.step import Trainable

_NEARLY_IDENTITY = 7.0
"""The log-odds of the identity in layers that are put before those of a run: of a thousand features about one is flipped,
enough to learn from, and too little to spoil what was learned."""


@torch.no_grad()
def start_from_flow(flow: LatentFlow, before: LatentFlow, what: str, *, keep_base: bool = False) -> None:
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
            f"{what} has {before.depth} layers, and a run that starts from it has as many or more; got {flow.depth}"
        )
    for number, layer in enumerate(before.layers, 1):
        _take_over(flow.layers[offset + number - 1], layer, f"layer {number} of {what}")
    if not keep_base:
        _take_over(flow.base, before.base, f"the base of {what}")
    for layer in flow.layers[:offset]:
        layer.conditioner.start_at(near_identity(layer, _NEARLY_IDENTITY))


def _take_over(module: nn.Module, other: nn.Module, what: str) -> None:
    mine, theirs = module.state_dict(), other.state_dict()
    if {name: t.shape for name, t in mine.items()} != {name: t.shape for name, t in theirs.items()}:
        raise ConfigError(
            f"{what} has other weights than what should start from it: choose the same conditioner, hidden widths, "
            "posterior and data"
        )
    for name in ("rotary", "quiet", "heads"):  # of no shape
        own, before = _settings_of(module, name), _settings_of(other, name)
        if own != before:
            raise ConfigError(f"{what} has another --{name} than what should start from it: choose the same")
    if isinstance(module, Layer) and isinstance(other, Layer):
        _require_same_order(module.conditioner, other.conditioner, what)
    module.load_state_dict(theirs)


def _require_same_order(net: Conditioner, before: Conditioner, what: str) -> None:
    """Weights that were learned for features before others mean nothing in another ordering."""
    if net.order != before.order:
        raise ConfigError(
            f"{what} has another ordering than the layer that should start from it: choose the same --order for the last layers"
        )


def _settings_of(module: nn.Module, name: str) -> list[Any]:
    """Of its networks that walk along an ordering."""
    return [part.config().get(name) for part in module.modules() if isinstance(part, SequenceConditioner)]


# ---- frequencies of the data ----


@torch.no_grad()
def start_from_data(flow: Trainable, train: Split) -> None:
    """Begin where independent features are: the last layer from frequencies, the others near the identity.

    The frequencies are those of the training data; with a base concentrated on category 0, the choice u
    then has about the distribution of x. Couplings leave the frequencies to a learned base.
    """
    if isinstance(flow, Mixture):
        for component in flow:
            if isinstance(component, LatentFlow):
                start_from_data(component, train)
        return
    start = _start_orderings if flow.layers[-1].conditioner.mask is None else _start_couplings
    for layer, taken in zip(flow.layers, start(flow, train), strict=True):
        _start_at_bayes(layer, flow.base, taken)


def _start_orderings(flow: LatentFlow, train: Split) -> list[Tensor]:
    """Give the last layer the frequencies; returns, for each layer, whose frequencies it has."""
    table = flow.base.log_table().exp().double().cpu()  # (D, K)
    frequencies = category_frequencies(train, flow.states.sizes)
    last = flow.layers[-1]
    if last.transform.choices == last.transform.states:
        last.conditioner.start_at(start_logits(frequencies, table, flow.states.binary))
    for layer in flow.layers[:-1]:
        layer.conditioner.start_at(near_identity(layer, 3.0))
    nothing = torch.zeros(flow.features, dtype=torch.bool)
    return [*(nothing for _ in flow.layers[:-1]), ~nothing]


def _start_couplings(flow: LatentFlow, train: Split) -> list[Tensor]:
    """No layer transforms all features: a learned base has the frequencies itself, and every layer is near the identity.

    With posteriors that begin at Bayes' rule, whose draws lead to the base as it is, layers take features over: one that sees
    enough of those that none has taken begins with the frequencies of its own, and the last layer with those of all that it
    can. The base keeps the rest. Returns, for each layer, what it has taken.
    """
    frequencies = category_frequencies(train, flow.states.sizes)
    at_data = start_logits(frequencies, flow.base.log_table().exp().double().cpu(), flow.states.binary)
    guided = all(layer.relative for layer in flow.layers) and flow.states.binary
    left = torch.ones(flow.features, dtype=torch.bool)
    taken = []
    for layer in flow.layers:
        # posteriors follow the generator where they correct nothing: flips that nothing asks for would have to be undone
        logits, mask = near_identity(layer, 8.0 if guided else 5.0), layer.conditioner.mask
        own = torch.zeros_like(left)
        if guided and mask is not None:
            wanted, seen = left & ~mask, left & mask
            if layer is flow.layers[-1] or 2 * int(seen.sum()) >= int(wanted.sum()):
                own = wanted
        layer.conditioner.start_at(torch.where(own, at_data.to(logits), logits) if guided else logits)
        left = left & ~own
        taken.append(own)
    if flow.base.learned:
        logs = frequencies.clamp_min(1e-300).log()  # finite at the padding of features with fewer categories
        rates = logs[:, 1] - logs[:, 0] if flow.states.binary else logs
        flow.base.logits[left] = rates.to(flow.base.logits)[left]
    return taken


def near_identity(layer: Layer, log_odds: float) -> Tensor:
    """Logits of a layer's choices, with these odds of the identity against each other one."""
    choices = layer.transform.choices
    logits = torch.zeros(choices.features, choices.width)
    logits[:, 0] = log_odds
    return logits[:, 1] - logits[:, 0] if choices.binary else logits


def _start_at_bayes(layer: Layer, base: FactorisedBase, taken: Tensor) -> None:
    """Begin a correction of the generator at Bayes' rule: what a state says of u is log p(y), which is linear in the state.

    Only for features that lead to the base from here; for the others, which later layers take, there is no correction.
    """
    net = layer.posterior
    if not layer.relative or net is None or Source.PREVIOUS in net.sees:
        return
    states, table = layer.transform.states, base.log_table()
    units = torch.eye(states.flat).to(table)
    units = units if states.binary else units.unflatten(-1, (states.features, states.width))
    evidence = layer.transform.outcomes(table, torch.cat([torch.zeros_like(units[:1]), units]))
    binary = layer.transform.choices.binary
    logits = (evidence[..., 1:] - evidence[..., :1]) if binary else evidence  # (1 + states, D, U)
    here = taken.to(table)[:, None]
    slope, level = (logits[1:] - logits[0]) * here, logits[0] * here
    if isinstance(net, Diagonal):
        own = torch.arange(states.features)
        slope = slope.unflatten(0, (states.features, -1))[own, :, own]  # a unit speaks of its own feature
        net.slope.copy_(slope.to(net.slope))
        net.level.copy_(level.to(net.level))
    elif isinstance(net, MLP) and not net.hidden:
        _set_linear(net, slope.flatten(1), level.flatten())


def _set_linear(net: MLP, slope: Tensor, level: Tensor) -> None:
    """Give a linear posterior the map of the state, or of the data where these are the state, that it begins with."""
    sources = list(net.sees)
    place = sources.index(Source.STATE if Source.STATE in sources else Source.X) * len(slope)
    linear = net.net[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.zero_()  # what else it sees, such as context, says nothing more
    linear.weight[:, place : place + len(slope)] = slope.T.to(linear.weight)
    linear.bias.copy_(level)


def start_logits(frequencies: Tensor, table: Tensor, binary: bool) -> Tensor:
    """With which a last layer on the base `table` (D, K) has frequencies (D, K)."""
    if not binary:
        return frequencies.clamp_min(1e-3).log()
    beta = table[:, 1]
    flip = ((frequencies[:, 1] - beta) / (1 - 2 * beta)).clamp(5e-3, 1 - 5e-3)
    return torch.logit(flip)


def category_frequencies(train: Split, sizes: tuple[int, ...]) -> Tensor:
    """How often each feature has each category in the training data, add-1/2 smoothed: (D, K) float64."""
    valid = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    smoothed = (category_totals(train, sizes) + 0.5) * valid
    return smoothed / smoothed.sum(-1, keepdim=True)


def category_totals(train: Split, sizes: tuple[int, ...]) -> Tensor:
    """In how many rows each feature has each category, on average over draws: (D, K) float64, on the CPU."""
    if not train.stochastic:
        return category_counts(train.values, sizes)
    # intensities: the expected count needs no draw
    ones = train.values.sum(0, dtype=torch.int64).double() / 255
    return torch.stack((len(train) - ones, ones), -1).cpu()


def category_counts(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """How many of the rows (N, D) have each category of each feature: (D, K) float64, on the CPU."""
    return torch.stack([(values == k).sum(0) for k in range(max(sizes))], -1).double().cpu()
