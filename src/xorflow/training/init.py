"""Where a run begins: at the frequencies of its data, or where another run ended."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, MLP, Conditioner, Diagonal, SequenceConditioner
from xorflow.conditioners.base import Source
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow, Layer, Mixture
from xorflow.training.step import Trainable
from xorflow.transforms import Transform

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
            f"{what} has other weights than what is initialised from it: choose the same conditioner, hidden widths, "
            "posterior and data"
        )
    for name, option in (("rotary", "rotary"), ("skipped", "skip"), ("heads", "heads")):  # of no shape
        if _settings_of(module, name) != _settings_of(other, name):
            raise ConfigError(
                f"{what} has another {option} than what is initialised from it: choose the same"
            )
    if isinstance(module, Layer) and isinstance(other, Layer):
        _require_same_order(module.conditioner, other.conditioner, what)
    module.load_state_dict(theirs)


def _require_same_order(net: Conditioner, before: Conditioner, what: str) -> None:
    """Weights that were learned for features before others mean nothing in another ordering."""
    if net.order != before.order:
        raise ConfigError(
            f"{what} has another ordering than the layer that is initialised from it: choose the same order for the last "
            "layers"
        )


def _settings_of(module: nn.Module, name: str) -> list[Any]:
    """Of its networks on sequences."""
    return [part.config().get(name) for part in module.modules() if isinstance(part, SequenceConditioner)]


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
"""The logits (D,) or (D, U) that a layer's generator begins with, and which features it takes to the base: booleans (D,)."""


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
        taken = _taken_early(flow)
    elif posteriors and not flow.base.learned:
        taken = _taken_late(flow)
    else:
        taken = [torch.zeros(flow.features, dtype=torch.bool) for _ in flow.layers]
    # posteriors follow the generator where they correct nothing: flips that nothing asks for would have to be undone
    odds = _odds_of_identity(flow) if posteriors else 8.0 if guided else 5.0
    starts = []
    for layer, features in zip(flow.layers, taken, strict=True):
        logits, at_data = near_identity(layer, odds), _logits_at_data(flow, train, layer)
        chosen = features if layer.transform.choices.binary else features[:, None]
        starts.append((torch.where(chosen, at_data.to(logits), logits), features))
    if flow.base.learned:
        left = ~torch.stack(taken).any(0)
        logs = category_frequencies(train, flow.states.sizes).clamp_min(_LEAST).log()  # finite at the padding
        rates = logs[:, 1] - logs[:, 0] if flow.states.binary else logs
        flow.base.logits[left] = rates.to(flow.base.logits)[left]
    return starts


def _taken_early(flow: LatentFlow) -> list[Tensor]:
    left, taken = torch.ones(flow.features, dtype=torch.bool), []
    for layer in flow.layers:
        mask = layer.conditioner.mask
        assert mask is not None
        wanted, seen = left & ~mask.cpu(), left & mask.cpu()
        enough = layer is flow.layers[-1] or 2 * int(seen.sum()) >= int(wanted.sum())
        taken.append(wanted if enough else torch.zeros_like(left))
        left = left & ~taken[-1]
    return taken


def _taken_late(flow: LatentFlow) -> list[Tensor]:
    """Layers before see the data as they are."""
    left, taken = torch.ones(flow.features, dtype=torch.bool), []
    for layer in reversed(flow.layers):
        mask = layer.conditioner.mask
        assert mask is not None
        taken.append(left & ~mask.cpu())
        left = left & mask.cpu()
    return taken[::-1]


_LEAST = 1e-300
_FEWEST_ODDS, _MOST_ODDS = 3.0, 8.0


def _odds_of_identity(flow: LatentFlow) -> float:
    """The log-odds of the identity with which all layers together move about half a feature of a row.

    Each that is moved without need costs some nats at the start; what is never moved has no gradient to learn from.
    """
    others = max(layer.transform.choices.width for layer in flow.layers) - 1
    return min(max(math.log(2 * flow.features * flow.depth * others), _FEWEST_ODDS), _MOST_ODDS)


def near_identity(layer: Layer, log_odds: float) -> Tensor:
    """Logits of a layer's choices, with these odds of the identity against each other one."""
    choices = layer.transform.choices
    logits = torch.zeros(choices.features, choices.width)
    logits[:, 0] = log_odds
    return logits[:, 1] - logits[:, 0] if choices.binary else logits


def _start_at_bayes(layer: Layer, base: FactorisedBase, start: Tensor, taken: Tensor) -> None:
    """Begin a posterior at Bayes' rule: what a state says of u is log p(y), which is linear in the state.

    Only for features that lead to the base from here; for the others, which later layers take, it begins at the generator.
    """
    net = layer.posterior
    if not isinstance(net, MLP | MADE | Diagonal):
        return
    states, table = layer.transform.states, base.log_table()
    units = torch.eye(states.flat).to(table)
    units = units if states.binary else units.unflatten(-1, (states.features, states.width))
    evidence = layer.transform.outcomes(table, torch.cat([torch.zeros_like(units[:1]), units]))
    binary = layer.transform.choices.binary
    logits = (evidence[..., 1:] - evidence[..., :1]) if binary else evidence  # (1 + states, D, U)
    here = taken.to(table)[:, None]
    slope, level = (logits[1:] - logits[0]) * here, logits[0] * here
    if not layer.relative:
        level = level + start.to(level).reshape(level.shape)
    # in a chain the state is not seen, but the data are, which layers near the identity hardly change
    source = Source.STATE if Source.STATE in net.sees else Source.X
    net.start_linear(source, slope.flatten(1), level.flatten())


def _logits_at_data(flow: LatentFlow, train: Split, layer: Layer) -> Tensor:
    """The logits of a layer's choices with which features that it takes have their frequencies."""
    frequencies = category_frequencies(train, flow.states.sizes)
    return start_logits(frequencies, flow.base.log_table().exp().double().cpu(), layer.transform)


def start_logits(frequencies: Tensor, table: Tensor, transform: Transform) -> Tensor:
    """With which a last layer on the base `table` (D, K) has frequencies (D, K), if the base spreads the rest evenly."""
    if transform.is_xor:
        beta = table[:, 1]
        flip = ((frequencies[:, 1] - beta) / (1 - 2 * beta)).clamp(5e-3, 1 - 5e-3)
        return torch.logit(flip)
    first = table[:, :1]
    rest = (1 - first) / (torch.tensor(transform.states.sizes)[:, None] - 1).clamp_min(1)
    wanted = torch.where(first > rest, (frequencies - rest) / (first - rest), frequencies)
    # the choices that lead from a category to 0 share what it should have
    valid = transform.choices.valid()
    reached = transform.to_data_table[..., 0].cpu().expand(valid.shape)  # (D, U)
    sharing = torch.zeros_like(frequencies).scatter_add_(-1, reached, valid.double())
    probabilities = wanted.clamp_min(1e-3).gather(-1, reached) / sharing.gather(-1, reached).clamp_min(1)
    logits = probabilities.log()
    return logits[:, 1] - logits[:, 0] if transform.choices.binary else logits


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
