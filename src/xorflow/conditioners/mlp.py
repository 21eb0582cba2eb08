"""Unmasked networks: the multi-layer perceptron of a posterior, and the bipartite coupling conditioner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import NEVER, Alphabet
from xorflow.conditioners.base import Conditioner, Source
from xorflow.conditioners.embedding import Reader, Reading, Table, reset_beside, start_linear
from xorflow.conditioners.orderings import coupling_mask
from xorflow.errors import ModelError


class Perceptron(nn.Module):
    """Linear layers with ReLUs between them, the first of which reads states.

    Args:
        alphabets: of the sources that it reads.
        context: how many numbers come with them.
        sizes: widths of the hidden layers, and of the output.
    """

    def __init__(self, alphabets: Sequence[Alphabet], context: int, sizes: Sequence[int]) -> None:
        super().__init__()
        if min(sizes) < 1:
            raise ModelError(f"layer widths are at least 1, and got {tuple(sizes)}")
        self.reader = Reader(alphabets, context)
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise([self.reader.dense, *sizes]):
            layers += [_linear(width_in, width_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.table = Table(self.reader, sizes[0]) if self.reader.rows else None
        reset_beside(self.table, self.layers[0])

    def read(self, states: Sequence[Tensor], context: Tensor | None) -> Reading:
        """What the first layer takes."""
        return self.reader(states, context, self.last.bias.dtype)

    def forward(self, reading: Reading) -> Tensor:
        first, *others = self.layers
        hidden = first(reading.dense)
        if self.table is not None:
            hidden = hidden + self.table(reading)
        for layer in others:
            hidden = layer(hidden)
        return hidden

    @property
    def last(self) -> nn.Linear:
        layer = self.layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer


class _Empty(nn.Linear):
    """A linear layer that reads nothing but its bias, where all inputs are categories."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def _linear(width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out) if width_in else _Empty(0, width_out)


class MLP(Conditioner):
    """A perceptron that sees all of its inputs: for posteriors, which may see anything.

    Args:
        features: D.
        hidden: the widths of the hidden layers.
        categories: K, or K_d for each feature.
        choices: U_d; as many as categories by default.
        sees: the sources, each seen wholly; `("x",)` by default.
        direct: add connections from the input to the output.
        context: the number of context features.
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (1024,),
        *,
        categories: int | Sequence[int] = 2,
        choices: int | Sequence[int] | None = None,
        sees: Sequence[str] = ("x",),
        direct: bool = False,
        context: int = 0,
    ) -> None:
        super().__init__(
            features,
            categories=categories,
            choices=choices,
            sees=dict.fromkeys(sees, "all"),
            order=None,
            context=context,
        )
        self.hidden = tuple(hidden)
        alphabets = [self.alphabet(source) for source in self.sees]
        self.net = Perceptron(alphabets, context, [*self.hidden, self.choices.flat])
        reader, skips = self.net.reader, direct and bool(self.hidden)
        self.skip = nn.Linear(reader.dense, self.choices.flat, bias=False) if skips and reader.dense else None
        self.skip_table = Table(reader, self.choices.flat) if skips and reader.rows else None
        reset_beside(self.skip_table, self.skip)

    def config(self) -> dict[str, Any]:
        settings = {"hidden": list(self.hidden), "sees": [str(source) for source in self.sees]}
        return super().config() | settings | ({"direct": True} if self._direct else {})

    @property
    def _direct(self) -> bool:
        return self.skip is not None or self.skip_table is not None

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        reading = self.net.read(*self.states_of(inputs, context))
        out = self.net(reading)
        if self.skip is not None:
            out = out + self.skip(reading.dense)
        return out if self.skip_table is None else out + self.skip_table(reading)

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (its `flat`, that of the choices), where there is a linear path."""
        number, reader = list(self.sees).index(source), self.net.reader
        if not self.hidden:
            start_linear(reader, number, slope, self.net.last, self.net.table)
        elif self._direct:
            start_linear(reader, number, slope, self.skip, self.skip_table)
        self.start_at(level)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.net.last.bias.copy_(logits.to(self.net.last.bias))


class Diagonal(Conditioner):
    """A linear map of each feature's own value, for posteriors that correct the generator's logits by what a state says.

    With so few weights it stays near Bayes' rule, where it begins, under gradients that are mostly noise.

    Args:
        features: D.
        categories: K, or K_d for each feature.
        choices: U_d; as many as categories by default.
        sees: the one source, `"state"` by default.
        context: the number of context features, which it does not read.
    """

    def __init__(
        self,
        features: int,
        *,
        categories: int | Sequence[int] = 2,
        choices: int | Sequence[int] | None = None,
        sees: str = "state",
        context: int = 0,
    ) -> None:
        super().__init__(
            features,
            categories=categories,
            choices=choices,
            sees={sees: "all"},
            order=None,
            context=context,
        )
        (self._source,) = self.sees
        into, out = self.alphabet(self._source), self.choices
        pairs: dict[tuple[int, int], list[int]] = {}  # features alike in both, which share an operation
        for feature, sizes in enumerate(zip(into.sizes, out.sizes, strict=True)):
            pairs.setdefault(sizes, []).append(feature)
        self.slopes = nn.ParameterList()
        self._pairs = list(pairs.values())
        outputs = []
        for number, alike in enumerate(self._pairs):
            first = alike[0]
            each_in, each_out = (1 if a.sizes[first] == 2 else a.sizes[first] for a in (into, out))
            self.slopes.append(nn.Parameter(0.01 * torch.randn(len(alike), each_in, each_out)))
            self.register_buffer(f"features_{number}", torch.tensor(alike), persistent=False)
            self.register_buffer(f"inputs_{number}", _logits_of(into, alike), persistent=False)
            outputs.append(_logits_of(out, alike).flatten())
        self.register_buffer("place", torch.cat(outputs).argsort(), persistent=False)
        self.level = nn.Parameter(torch.zeros(out.flat))

    def config(self) -> dict[str, Any]:
        return super().config() | {"sees": str(self._source)}

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        self._check_context(context)
        state = inputs[self._source]
        outputs = [self._of_pair(number, state, slope) for number, slope in enumerate(self.slopes)]
        return torch.cat(outputs, -1).index_select(-1, self.get_buffer("place")) + self.level

    def _of_pair(self, number: int, state: Tensor, slope: Tensor) -> Tensor:
        """(..., n * out) of features that are alike."""
        if state.is_floating_point():
            values = state[..., self.get_buffer(f"inputs_{number}")]  # (..., n, into)
            return (values.unsqueeze(-1) * slope).sum(-2).flatten(-2)
        values = state.index_select(-1, self.get_buffer(f"features_{number}"))
        if self.alphabet(self._source).sizes[self._pairs[number][0]] == 2:
            return (values.unsqueeze(-1).to(slope.dtype) * slope[:, 0]).flatten(-2)
        return slope[torch.arange(len(slope), device=slope.device), values.long()].flatten(-2)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.level.copy_(logits.to(self.level))

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin at a linear map of the source, as far as each logit is of its own feature."""
        assert source is self._source
        for number, (features, weights) in enumerate(zip(self._pairs, self.slopes, strict=True)):
            rows, columns = self.get_buffer(f"inputs_{number}"), _logits_of(self.choices, features)
            weights.copy_(slope[rows[:, :, None], columns.to(rows.device)[:, None, :]])
        self.start_at(level)


def _logits_of(alphabet: Alphabet, features: Sequence[int]) -> Tensor:
    """Where the logits of features of one size lie, (n, how many each has)."""
    each = 1 if alphabet.sizes[features[0]] == 2 else alphabet.sizes[features[0]]
    return torch.tensor([alphabet.first_logits[d] for d in features])[:, None] + torch.arange(each)


class Coupling(Conditioner):
    """Bipartite coupling: the features of a mask are seen and left alone, the others are transformed.

    Inverting such a layer takes one pass of the network, whatever D is.

    Args:
        features: D.
        hidden: the widths of the hidden layers.
        mask: `"halves"`, `"alternate"`, `"checkerboard"`, `"random:SEED"`, `"nested:LEVEL"` or booleans (True: seen).
        shape: the shape of the image, for a checkerboard and nested grids.
        flip: exchange what is seen and what is transformed.
        categories: K, or K_d for each feature.
        choices: U_d; as many as categories by default.
        context: the number of context features.
    """

    seen: Tensor
    seen_logits: Tensor
    moved_logits: Tensor
    identity: Tensor
    place: Tensor

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (1024,),
        *,
        mask: str | Sequence[bool] | Tensor = "halves",
        shape: Sequence[int] | None = None,
        flip: bool = False,
        categories: int | Sequence[int] = 2,
        choices: int | Sequence[int] | None = None,
        context: int = 0,
    ) -> None:
        super().__init__(
            features,
            categories=categories,
            choices=choices,
            sees={"state": "coupled"},
            order=None,
            context=context,
        )
        self.mask = coupling_mask(mask, features, shape=shape, flip=flip)
        self.hidden = tuple(hidden)
        seen, moved = self.mask.nonzero()[:, 0].tolist(), (~self.mask).nonzero()[:, 0].tolist()
        kept = self.choices.of(seen)
        identity = torch.full((kept.flat,), NEVER)
        for group in kept.groups:
            if not group.binary:  # the first logit of each feature is that of u = 0
                identity[group.logits].view(-1, group.size)[:, 0] = 0
        positions = [self.choices.positions(moved), self.choices.positions(seen)]
        self.register_buffer("seen", torch.tensor(seen), persistent=False)
        self.register_buffer("seen_logits", self.states.positions(seen), persistent=False)
        self.register_buffer("moved_logits", positions[0], persistent=False)
        self.register_buffer("identity", identity, persistent=False)
        self.register_buffer("place", torch.cat(positions).argsort(), persistent=False)
        widths = [*self.hidden, self.choices.of(moved).flat]
        self.net = Perceptron([self.states.of(seen)], context, widths)

    def config(self) -> dict[str, Any]:
        assert self.mask is not None
        return super().config() | {"hidden": list(self.hidden), "mask": self.mask.tolist()}

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        (state,), context = self.states_of(inputs, context)
        visible = state.index_select(-1, self.seen_logits if state.is_floating_point() else self.seen)
        out = self.net(self.net.read([visible], context))
        rest = self.identity.to(out.dtype).expand(
            *out.shape[:-1], -1
        )  # what is left alone is u = 0, with certainty
        return torch.cat([out, rest], -1).index_select(-1, self.place)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.net.last.bias.copy_(logits[self.moved_logits.to(logits.device)].to(self.net.last.bias))
