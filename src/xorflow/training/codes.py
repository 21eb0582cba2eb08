r"""A start in which the layers before the last write a code of the data into features that hardly vary.

On a fixed base a feature that never varies costs :math:`-\log(1 - \beta)`, however certain it is, and one flip among N such
features costs :math:`\log\frac{1-\beta}{\beta}` more, whichever it is: 2.2 nats on the base 0.9 / 0.1. Yet it can say
:math:`\log N` nats, 4.6 for a hundred blank pixels. A layer that flips one of N blank features, by the cluster that the others
fall into, tells the layers that come first in generation what the data will look like, at less than what that is worth.

From noise near the identity such a code is not found: its flips cost something at once, and are worth something only when the
last layer has learned to read them. Here the layers are fitted to it first; training then changes them at will.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from xorflow.conditioners.base import Source
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow, Layer

_STILL = 0.02
"""A feature that differs from its usual value in fewer rows than this hardly varies."""
_GROUPS = 4
"""How many codes there are, each of one flip; at least two for each layer that writes."""
_CLUSTERED, _ROUNDS = 20_000, 15
_PASSES, _LEAST_PASSES = 10, 5
"""Over the data, of all layers that write and of each: with several of them, each has less to learn."""
_BATCH, _RATE = 256, 2e-3
_LEAST_STEPS = 200
_QUIET = -6.0
"""The logit at which the fit of every flip begins."""
_SHARP = 4.0
"""By how much logits are multiplied after the fit: choices that are nearly certain carry little noise to the last layer, and
their gradient is small until it has learned to read them."""


@dataclass(frozen=True)
class Codebook:
    """A clustering, and the features that stand for its clusters.

    Attributes:
        sees: the features that are clustered.
        centres: (N, len(sees)).
        slots: (N,) the feature that is flipped for each cluster.
    """

    sees: Tensor
    centres: Tensor
    slots: Tensor


def start_from_code(
    flow: LatentFlow,
    train: Split,
    device: torch.device,
    seed: int = 0,
    shape: Sequence[int] | None = None,
) -> None:
    """Fit the layers before the last to a code; they share its parts. The flow comes back on the device that it was on.

    Args:
        flow: binary, of at least two layers, those before the last with an ordering.
        train: the data that are clustered.
        device: where to compute.
        seed: of the clusterings and of the order of rows.
        shape: of the images, if the data are images.
    """
    if (
        flow.depth < 2
        or not flow.states.binary
        or any(la.conditioner.order is None for la in flow.layers[:-1])
    ):
        raise ConfigError(
            "start=code is for flows of two layers or more on binary data, whose layers before the last have an ordering; "
            "choose --start data"
        )
    home = flow.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = _Rows(train, device, generator)
    some = rows.draw(rows.some(_CLUSTERED))
    books = make_codebooks(some, flow.layers[0], flow.depth - 1, generator, shape)
    flow.to(device)
    written: list[Codebook] = []
    steps = max(_LEAST_STEPS, max(_LEAST_PASSES, _PASSES // (flow.depth - 1)) * len(rows) // _BATCH)
    for index, layer in enumerate(flow.layers[:-1]):
        own = books[index :: flow.depth - 1]
        _fit(layer, written, own, rows, steps)
        written += own
    flow.to(home)


def make_codebooks(
    x: Tensor, layer: Layer, layers: int, generator: torch.Generator, shape: Sequence[int] | None = None
) -> list[Codebook]:
    """Clusterings of the parts of the first half of a layer's ordering; of an image, the parts are sectors around its middle.

    The slots are the features of the other half that hardly vary; of data without such features, those that vary least.
    """
    order = torch.tensor(layer.conditioner.order, device=x.device)
    sees, later = order[: len(order) // 2], order[len(order) // 2 :]
    sees = sees[_angles(sees, shape).argsort(stable=True)]
    ones = x[:, later].mean(0)
    varies = torch.minimum(ones, 1 - ones)
    groups = max(_GROUPS, 2 * layers)  # one flip of 784 would hardly count as depth
    count = max(int((varies < _STILL).sum()), len(later) // 2) // groups
    slots = later[varies.argsort(stable=True)[: count * groups]].unflatten(0, (groups, count))
    parts = sees.tensor_split(groups)
    return [
        Codebook(part, _cluster(x[:, part], count, generator), own)
        for part, own in zip(parts, slots, strict=True)
    ]


def _angles(features: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Where features lie around the middle of an image; of other data, simply which they are."""
    if shape is None or len(shape) != 2:
        return features.float()
    down = features // shape[1] - (shape[0] - 1) / 2
    across = features % shape[1] - (shape[1] - 1) / 2
    return torch.atan2(down, across)


def write(x: Tensor, books: Sequence[Codebook], last: int) -> tuple[Tensor, Tensor]:
    """Rows x (B, D) with the flips of the codes before the last ones, and the flips (B, D) of those."""
    states, flips = x, torch.zeros_like(x)
    for number, book in enumerate(books):
        flip = one_hot(book.slots[nearest(x[:, book.sees], book.centres)], x.shape[-1]).to(x.dtype)
        if number < len(books) - last:
            states = states + flip - 2 * states * flip
        else:
            flips = flips + flip
    return states, flips


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """For each of the rows (B, C), which of the centres (N, C) is nearest."""
    return (2 * rows @ centres.T - centres.square().sum(-1)).argmax(-1)


def _cluster(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm, from rows chosen at random."""
    first = torch.randint(len(rows), (count,), generator=generator, device=rows.device)
    centres = rows[first]
    for _ in range(_ROUNDS):
        found = one_hot(nearest(rows, centres), count).to(rows.dtype)  # (B, N)
        centres = found.T @ rows / found.sum(0).clamp_min(1)[:, None]
    return centres


def _fit(layer: Layer, before: Sequence[Codebook], own: Sequence[Codebook], rows: _Rows, steps: int) -> None:
    """Teach a layer to flip what its codes flip, and nothing else."""
    layer.conditioner.start_at(torch.full((rows.features,), _SHARP * _QUIET))
    books = [*before, *own]
    optimiser = torch.optim.Adam(layer.conditioner.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        states, flips = write(rows.draw(rows.some(_BATCH)), books, len(own))
        logits = layer.conditioner({Source.STATE: states, Source.X: states, Source.PREVIOUS: states})
        binary_cross_entropy_with_logits(logits / _SHARP, flips).mul(rows.features).backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()


class _Rows:
    """Training rows on a device, binarised afresh for each draw where they are intensities."""

    def __init__(self, train: Split, device: torch.device, generator: torch.Generator) -> None:
        self._values = train.values.to(device)
        self._stochastic = train.stochastic
        self._generator = generator
        self.features = train.features

    def __len__(self) -> int:
        return len(self._values)

    def some(self, count: int) -> Tensor:
        count = min(count, len(self))
        return torch.randint(len(self), (count,), generator=self._generator, device=self._values.device)

    def draw(self, index: Tensor) -> Tensor:
        values = self._values[index]
        if not self._stochastic:
            return values.float()
        noise = torch.rand(values.shape, generator=self._generator, device=values.device)
        return (noise < values.float() / 255).float()
