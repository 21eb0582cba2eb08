"""References by brute force: every x, every u, plain sums."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

import zoo
from xorflow import FactorisedBase
from xorflow._states import Alphabet
from xorflow.conditioners import MADE, Conditioner
from xorflow.flows import Flow, LatentFlow, Point, SampleNoise
from xorflow.flows.choices import Choices


def all_states(sizes) -> Tensor:
    """Every state (X, D)."""
    states = list(itertools.product(*map(range, sizes)))
    return torch.tensor(states, dtype=torch.int64).reshape(len(states), len(sizes))


def all_choices(flow: LatentFlow, stop: int | None = None) -> Tensor:
    """Every value of all choices of the layers before `stop`, (T, L', D)."""
    layers = list(flow.layers)[:stop]
    sizes = [k for layer in layers for k in layer.transform.choices.sizes]
    return all_states(sizes).unflatten(-1, (len(layers), flow.features))


@dataclass(frozen=True)
class Joint:
    """All that a latent flow says about all x and all u.

    Attributes:
        x: every state (X, D).
        u: every value of all choices (T, L, D).
        log_p_u: log p(u given x), (T, X).
        rewards: log p_Y(y) of each feature, (T, X, D).
        y: where u takes x, computed on integers, (T, X, D).
    """

    x: Tensor
    u: Tensor
    log_p_u: Tensor
    rewards: Tensor
    y: Tensor

    @cached_property
    def log_p(self) -> Tensor:
        return torch.logsumexp(self.log_p_u + self.rewards.sum(-1), 0)

    @cached_property
    def bound(self) -> Tensor:
        """E[log p_Y] under p(u given x), (X,)."""
        return (self.log_p_u.exp() * self.rewards.sum(-1)).sum(0)

    @cached_property
    def total(self) -> float:
        """The sum of p(x) over all x."""
        return float(self.log_p.exp().sum())


def joint(flow: LatentFlow) -> Joint:
    """Sum nothing out: the choices' log-probabilities from `run`, the states and rewards on integers."""
    x, u = all_states(flow.states.sizes), all_choices(flow)
    context = zoo.context(flow)
    trace = flow.run(flow.start(x, context), draws=u[:, None])
    y = x.expand(len(u), -1, -1)
    for index, layer in enumerate(flow.layers):
        y = layer.transform.to_base(y, u[:, None, index].expand_as(y))
    assert torch.equal(trace.end.state, y)
    log_p_u = trace.log_p().sum((-1, -2)).expand(len(u), len(x))
    return Joint(x, u, log_p_u, base_table_lookup(flow, y), y)


@cache
def enumerated(name: str) -> Joint:
    """The joint of a member of the zoo, without graph, computed once."""
    with torch.no_grad():
        return joint(zoo.make(name))


def base_table_lookup(flow: LatentFlow | Flow, y: Tensor) -> Tensor:
    """log p_d(y_d) for integers y (..., D)."""
    tables = [flow.base.log_probs_of(d) for d in range(flow.features)]
    return torch.stack([table[y[..., d].long()] for d, table in enumerate(tables)], -1)


def base_of(logits: Tensor) -> FactorisedBase:
    """A base with these log-odds, also where they are no parameter."""
    base = FactorisedBase(logits.shape[-1])
    del base.logits
    base.logits = logits
    return base


def probabilities(choices: Choices) -> Tensor:
    """Of each value of each feature, (..., D, U), zero where a feature has fewer values."""
    return padded([log_probs.exp() for log_probs in choices.log_probs()], choices.alphabet)


def gradient(value: Tensor, parameters: list[Tensor]) -> Tensor:
    """d value / d parameters, as one vector; the graph is kept for another."""
    found = torch.autograd.grad(
        value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.flatten() for part in found])


def plain_probabilities(net: MADE, x: Tensor) -> np.ndarray:
    """p(u given x) of a MADE on the running state for integers x (N, D), in numpy, (N, D, U).

    The network holds its inputs and outputs in the order in which features are visited.
    """
    order = list(net.order or ())
    visited = x.numpy()[:, order]
    sizes = np.array(net.states.sizes)[order]
    bits = visited[:, sizes == 2].astype(np.float64)

    def looked_up(table) -> np.ndarray | float:
        """The rows of a table that come with the features that are no bits: by size, and then by number."""
        if table is None:
            return 0.0
        others = sorted(
            (d for d in range(net.features) if net.states.sizes[d] != 2), key=lambda d: net.states.sizes[d]
        )
        first, total = 0, 0.0
        for d in others:
            total = total + table.weight.detach().numpy()[first + x[:, d].numpy()]
            first += net.states.sizes[d]
        return total

    hidden = bits
    linears = net.net.linear
    for index, layer in enumerate(linears):
        hidden = hidden @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        hidden = hidden + (looked_up(linears[0].table) if index == 0 else 0.0)
        hidden = np.maximum(hidden, 0) if index < len(linears) - 1 else hidden
    if net.net.skip is not None:
        hidden = hidden + bits @ net.net.skip.weight.detach().numpy().T + looked_up(net.net.skip.table)
    probabilities = np.zeros((len(x), net.features, max(net.choices.sizes)))
    first = 0
    for d in order:
        size = net.choices.sizes[d]
        logits = hidden[:, first : first + (1 if size == 2 else size)]
        first += logits.shape[1]
        weights = np.exp(np.concatenate([0 * logits, logits], -1) if size == 2 else logits)
        probabilities[:, d, :size] = weights / weights.sum(-1, keepdims=True)
    return probabilities


def plain_base(flow: LatentFlow) -> np.ndarray:
    """p_d(k), (D, K), in numpy, from the base's parameters."""
    logits = flow.base.logits.detach().numpy().astype(np.float64)
    table = np.zeros((flow.features, max(flow.categories)))
    if flow.base.tied:
        for d, size in enumerate(flow.categories):
            elsewhere = 1 / (1 + np.exp(-logits[d])) if size > 1 else 0.0
            table[d, :size] = [1 - elsewhere, *[elsewhere / max(size - 1, 1)] * (size - 1)]
        return table
    first = 0
    for d in sorted(range(flow.features), key=lambda d: (flow.categories[d] != 2, flow.categories[d])):
        size = flow.categories[d]
        of_feature = logits[first : first + (1 if size == 2 else size)]
        first += len(of_feature)
        weights = np.exp(np.concatenate([0 * of_feature, of_feature]) if size == 2 else of_feature)
        table[d, :size] = weights / weights.sum()
    return table


def visiting_order(net: Conditioner) -> list[int]:
    """The order in which a layer can be inverted feature by feature."""
    if net.order is not None:
        return list(net.order)
    assert net.mask is not None
    return [*net.mask.nonzero()[:, 0].tolist(), *(~net.mask).nonzero()[:, 0].tolist()]


def sequential_sample(
    flow: LatentFlow | Flow, y: Tensor, noise: Tensor | None, context: Tensor | None
) -> Tensor:
    """Integers x from integers y (N, D), one feature after the other; greedy choices if there is no noise."""
    if flow.is_chain:
        return _sequential_chain(flow, y, noise, context)
    for index in reversed(range(flow.depth)):
        y = _sequential_layer(flow, index, y, None if noise is None else noise[:, index], context)
    return y


def _sequential_layer(flow, index: int, y: Tensor, noise: Tensor | None, context: Tensor | None) -> Tensor:
    """D passes of one layer's network; what is not known yet has its highest value."""
    layer = flow.layers[index]
    x, u = _highest(flow.states, y), _highest(layer.transform.choices, y)
    for d in visiting_order(layer.conditioner):
        state, own = x.clone(), u.clone()
        choices = layer.generator_choices(Point(state, state, None, index, context), own)
        u[:, d] = _choose(layer, choices, noise)[:, d]
        x[:, d] = layer.transform.to_data(y, u)[:, d]
    return x


def _sequential_chain(flow, y: Tensor, noise: Tensor | None, context: Tensor | None) -> Tensor:
    """D x L passes: for each feature in the shared order, all layers, then x."""
    x = _highest(flow.states, y)
    us = [_highest(layer.transform.choices, y) for layer in flow.layers]
    for d in visiting_order(flow.layers[0].conditioner):
        for index, layer in enumerate(flow.layers):
            choices = layer.generator_choices(*_chain_inputs(flow, x, us, index, context))
            us[index][:, d] = _choose(layer, choices, None if noise is None else noise[:, index])[:, d]
        back = y
        for layer, u in zip(reversed(flow.layers), reversed(us), strict=True):
            back = layer.transform.to_data(back, u)
        x[:, d] = back[:, d]
    return x


def _chain_inputs(flow, x: Tensor, us: list[Tensor], index: int, context: Tensor | None):
    state = x
    for layer, u in zip(list(flow.layers)[:index], us, strict=False):
        state = layer.transform.to_base(state, u)
    previous = us[index - 1].clone() if index else None
    return Point(x.clone(), state, previous, index, context), us[index].clone()


def _highest(alphabet, like: Tensor) -> Tensor:
    return (torch.tensor(alphabet.sizes) - 1).expand_as(like).clone()


def _choose(layer, choices: Choices, noise: Tensor | None) -> Tensor:
    return (choices.mode() if noise is None else choices.sample(noise)).long()


def draw_noise(flow: LatentFlow | Flow, count: int, seed: int = 0) -> SampleNoise:
    return flow.draw_noise(count, torch.Generator().manual_seed(seed))


def padded(parts: Sequence[Tensor], alphabet: Alphabet, fill: float = 0.0) -> Tensor:
    """Numbers for each value, by group (..., n, K), as one tensor by feature (..., D, widest); what is no value is `fill`."""
    lead = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    table = parts[0].new_full((*lead, alphabet.features, alphabet.width), fill)
    for group, part in zip(alphabet.groups, parts, strict=True):
        table[..., list(group.features), : group.size] = part
    return table
