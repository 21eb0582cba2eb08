r"""Layers that write the values of some features, as one flip among many, into features that hardly vary.

On a fixed base, whose features are 1 with probability :math:`\beta = 0.1`, a depth-1 flow pays for every feature at least
:math:`-\log(1-\beta) = 0.105` nats, however certain it is: the border of an image is as dear as it is blank. But a blank
feature is also a place to say something. One flip among N of them costs :math:`\log\frac{1-\beta}{\beta} = 2.2` nats more,
whichever it is, and it can tell :math:`N + 1` cases apart. The values of seven pixels that are like coins cost 4.9 nats one by
one; written as one flip among 127 blank ones they cost 2.2, and the pixels themselves, certain then, 0.7.

That is a flow of two layers. The first, the writer, leaves all features alone but the blank ones, the slots: it flips the slot
that stands for what the chosen features are, a word. A word is a conjunction, :math:`x_1 \wedge \neg x_2 \wedge \dots`, which
a linear map and a threshold tell exactly, so the writer needs no hidden units, is known at once, and is not trained. The last
layer visits the slots first, then the chosen features, which direct connections from the slots make certain, then all others,
which see the chosen features themselves: it has nothing to learn that a flow of depth 1 in its ordering would not.

One flow of depth 1 cannot do this: a feature's flip would have to depend on features that come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow import MADE, ConfigError, LatentFlow, Layer
from xorflow.conditioners import MaskedLinear, ranks, resolve_order
from xorflow.data import Dataset, Split
from xorflow.training import BASES, CONDITIONERS, Options

_STILL, _NEARLY = 0.01, 0.2
"""A feature that differs from its usual value in fewer rows than the first hardly varies; where there are few of them, the
second will do."""
_FEW = 6
"""Of so many features that are not written, one at least should be a slot."""
_ROWS = 50_000
"""At most, from which the words are counted."""
_CERTAIN = 20.0
"""The log-odds of what a writer does."""
_SURE = 6.0
"""The log-odds that the last layer begins with of what a word tells."""


@dataclass(frozen=True)
class Group:
    """Features, and the slots that stand for what they are.

    Attributes:
        features: (M,) whose values are written.
        slots: (N,) of which at most one is flipped.
        codewords: (N, M) what each slot stands for, zeros and ones.
        told: (N,) how often that is so.
        silence: (M,) how often each feature is 1 where no slot is flipped.
    """

    features: Tensor
    slots: Tensor
    codewords: Tensor
    told: Tensor
    silence: Tensor


@dataclass(frozen=True)
class Code:
    """What is written where, and by which layer.

    Attributes:
        writers: the groups of each layer before the last.
        ones: (D,) how often each feature of the data is 1.
    """

    writers: tuple[tuple[Group, ...], ...]
    ones: Tensor

    @property
    def groups(self) -> list[Group]:
        return [group for groups in self.writers for group in groups]

    def written(self) -> Tensor:
        """How often each feature is 1 (D,) after the layers that write; of slots about, as if flips did not depend on them."""
        ones = self.ones.clone()
        for group in self.groups:
            before = ones[group.slots]
            ones[group.slots] = before + group.told - 2 * before * group.told
        return ones

    def orders(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """The orderings of the layers: the last visits slots, what they stand for, and the others in `order`; the writers the
        other way round."""
        first = [int(d) for group in self.groups for d in group.slots]
        first += [int(d) for group in self.groups for d in group.features]
        taken = set(first)
        reader = (*first, *(d for d in order if d not in taken))
        return [reader[::-1]] * len(self.writers) + [reader]


def choose_code(count: int, size: int, train: Split, depth: int) -> Code:
    """The code of data that writes so many groups of so many features, for a flow of so many layers.

    The features are chosen one after the other, each the one that those before it, linearly, tell least of; the most frequent
    of what they can be is told by silence, and the next ones by a slot each, as far as there are slots.
    """
    ones, covariance = _moments(train)
    features = _most_independent(covariance, count * size)
    slots = _slots(torch.minimum(ones, 1 - ones), features, count)
    rows = train.subset(min(len(train), _ROWS)).frozen(0).values.cpu()  # the same draw on every device
    groups = [_group(rows, features[first::count], slots[first::count]) for first in range(count)]
    return Code(tuple(tuple(groups[first :: depth - 1]) for first in range(depth - 1)), ones.float())


def _slots(varies: Tensor, features: Tensor, count: int) -> Tensor:
    """The features that vary least, but for those that are written."""
    varies = varies.clone()
    varies[features] = 1.0
    wanted = max(int((varies < _STILL).sum()), (len(varies) - len(features)) // _FEW, count)
    slots = varies.argsort(stable=True)[: min(wanted, int((varies < _NEARLY).sum()))]
    if len(slots) < count:
        raise ConfigError(
            f"a code writes {count} groups, each into features that differ from their usual value in fewer than one row "
            f"in {1 / _NEARLY:.0f}, and the data have {len(slots)} of them beside those that are written; choose fewer "
            "groups"
        )
    return slots


def _moments(train: Split) -> tuple[Tensor, Tensor]:
    """Means and covariances of the features, of grey values those of what is drawn from them; float64."""
    scale = 255 if train.stochastic else 1
    total = torch.zeros(train.values.shape[1], train.values.shape[1], dtype=torch.float64)
    for part in train.values.cpu().split(10_000):
        whole = part.double()
        total += whole.T @ whole  # exact, whole numbers as they are, and so the same on every machine
    ones = train.values.cpu().sum(0, dtype=torch.int64).double() / (scale * len(train))
    covariance = total / (scale**2 * len(train)) - ones[:, None] * ones
    covariance.diagonal().copy_(ones * (1 - ones))
    return ones, covariance


def _most_independent(covariance: Tensor, count: int) -> Tensor:
    """So many features, each with the largest variance given those before it: Cholesky's pivots."""
    left, pivots = covariance.diagonal().clone(), []
    factor = covariance.new_zeros(len(covariance), count)
    for step in range(count):
        pivot = int(left.argmax())
        column = covariance[:, pivot] - factor[:, :step] @ factor[pivot, :step]
        factor[:, step] = column / left[pivot].clamp_min(1e-12).sqrt()
        left -= factor[:, step].square()
        pivots.append(pivot)
        left[pivots] = -1.0
    return torch.tensor(pivots)


def _group(rows: Tensor, features: Tensor, slots: Tensor) -> Group:
    places = 2 ** torch.arange(len(features))
    counts = torch.bincount((rows[:, features].long() * places).sum(1), minlength=2 ** len(features))
    patterns = (torch.arange(len(counts))[:, None] // places % 2).double()
    silent, *spoken = counts.argsort(descending=True, stable=True)[: len(slots) + 1].tolist()
    unwritten = counts.double()
    unwritten[spoken] = 0
    unwritten[silent] += 1e-3  # where there are no rows at all
    return Group(
        features,
        slots[: len(spoken)],
        patterns[spoken].float(),
        counts[spoken].float() / len(rows),
        (unwritten @ patterns / unwritten.sum()).float(),
    )


def coded_flow(groups: int, size: int, options: Options, dataset: Dataset) -> LatentFlow:
    """The flow of a code: the layers before the last write it, without hidden units, and are frozen; the last reads it.

    Args:
        groups: how many groups of features are written.
        size: how many features are in each.
        options: of the run: depth, hidden units of the last layer, base, seed, and the ordering of features that are not coded.
        dataset: the data.
    """
    assert options.layers is not None
    code = choose_code(groups, size, dataset.train, options.layers)
    orders = code.orders(resolve_order(options.order, dataset.features, dataset.shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        widths = [()] * len(code.writers) + [CONDITIONERS.read(options.conditioner)["hidden"]]
        networks = [
            MADE(dataset.features, hidden, order=order, direct=True)
            for hidden, order in zip(widths, orders, strict=True)
        ]
    base = BASES.make(options.base, features=dataset.features)
    flow = LatentFlow([Layer(network) for network in networks], base)
    start_from_code(flow, code)
    flow.layers[:-1].requires_grad_(False)
    return flow


@torch.no_grad()
def start_from_code(flow: LatentFlow, code: Code) -> None:
    """Give the layers before the last the code, and the last one what it knows of it; all are in the code's orderings."""
    for layer, groups in zip(flow.layers, code.writers, strict=False):
        assert isinstance(layer.conditioner, MADE)
        _write(layer.conditioner, groups)
    reader = flow.layers[-1].conditioner
    assert isinstance(reader, MADE)
    ones, still = code.written(), (code.ones > 0.5).float()
    base = torch.sigmoid(flow.base.logits).to(ones)
    logits = torch.logit(((ones - base) / (1 - 2 * base)).clamp(5e-3, 1 - 5e-3))
    for group in code.groups:
        _read(reader, group, still, logits)
    reader.start_at(logits)


def _write(writer: MADE, groups: Sequence[Group]) -> None:
    """Flip the slot of the word that is there: a linear map, above zero where all of its features are as it says."""
    _direct(writer).weight.zero_()
    logits = torch.full((writer.features,), -_CERTAIN)
    for group in groups:
        slope = (
            2 * _CERTAIN * (2 * group.codewords - 1)
        )  # (N, M): a step away from the word lowers the logit by this
        _connect(writer, group.features, group.slots, slope.T)
        logits[group.slots] = _CERTAIN - 2 * _CERTAIN * group.codewords.sum(1)
    writer.start_at(logits)


def _read(reader: MADE, group: Group, still: Tensor, logits: Tensor) -> None:
    """Direct connections from the slots to what they stand for; `logits`, the biases, are those of silence."""
    silent = torch.logit(group.silence.clamp(1e-6, 1 - 1e-6)).clamp(-_SURE, _SURE)
    told = _SURE * (2 * group.codewords - 1) - silent  # (N, M)
    usual = still[group.slots, None]
    _connect(reader, group.slots, group.features, told * (1 - 2 * usual))
    logits[group.features] = silent + (told * usual).sum(0)  # a slot that is usually 1 speaks by being 0


def _connect(network: MADE, inputs: Tensor, outputs: Tensor, weights: Tensor) -> None:
    """Set direct connections (I, O) from features of the state to the logits of others, as far as the ordering lets them."""
    assert network.order is not None
    direct, place = (
        _direct(network),
        ranks(network.order),
    )  # inside, inputs and outputs are arranged in the ordering
    rows, columns = place[outputs][:, None], place[inputs]
    direct.weight[rows, columns] = weights.T.to(direct.weight)
    direct.apply_mask()


def _direct(network: MADE) -> MaskedLinear:
    direct = network.net.skip if network.hidden else network.net.linear[0]
    assert isinstance(direct, MaskedLinear)
    return direct
