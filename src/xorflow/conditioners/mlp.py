"""Linear layers with ReLUs between them: the multi-layer perceptron of a posterior, and the bipartite coupling conditioner."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import NEVER, Alphabet
from xorflow.conditioners.base import Conditioner, Source
from xorflow.conditioners.embedding import Reader, Table, reset_beside, start_linear
from xorflow.conditioners.masked import Linear, linear_layers, through
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
            layers += [Linear(width_in, width_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.table = Table(self.reader, sizes[0]) if self.reader.rows else None
        reset_beside(self.table, self.layers[0])

    @property
    def linear(self) -> list[Linear]:
        return linear_layers(self.layers)

    @property
    def last(self) -> Linear:
        return self.linear[-1]

    def forward(self, states: Sequence[Tensor], context: Tensor | None) -> Tensor:
        layers = self.linear
        reading = self.reader(states, context, layers[-1].bias.dtype)
        return through(layers, reading.dense, None if self.table is None else self.table(reading))


class FeedForward(Conditioner):
    """What networks of linear layers and ReLUs share: direct connections from the input to the output, and where they begin.

    Attributes:
        reader: of the first layer, and of direct connections.
        skip: direct connections of bits and context, or None.
        skip_table: those of categories, or None.
    """

    hidden: tuple[int, ...]
    reader: Reader
    skip: nn.Linear | None
    skip_table: Table | None

    @property
    @abstractmethod
    def stack(self) -> tuple[list[Linear], Table | None]:
        """Its layers, and the table beside the first one."""

    def arranged(self, logits: Tensor) -> Tensor:
        """Packed logits as the last layer gives them."""
        return logits

    @property
    def direct(self) -> bool:
        """Whether there are direct connections."""
        return self.skip is not None or self.skip_table is not None

    def outputs(self, states: Sequence[Tensor], context: Tensor | None) -> Tensor:
        """What the last layer and direct connections give."""
        layers, table = self.stack
        reading = self.reader(states, context, layers[-1].bias.dtype)
        out = through(layers, reading.dense, None if table is None else table(reading))
        if self.skip is not None:
            out = out + self.skip(reading.dense)
        return out if self.skip_table is None else out + self.skip_table(reading)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        bias = self.stack[0][-1].bias
        bias.copy_(self.arranged(logits.to(bias)))

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (its `flat`, that of the choices), as far as there is a linear path."""
        layers, table = self.stack
        number, slope = list(self.sees).index(source), self.arranged(slope)
        if not self.hidden:
            start_linear(self.reader, number, slope, layers[0], table)
        elif self.direct:
            start_linear(self.reader, number, slope, self.skip, self.skip_table)
        self.start_at(level)


class MLP(FeedForward):
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
        self.reader = reader
        self.skip = nn.Linear(reader.dense, self.choices.flat, bias=False) if skips and reader.dense else None
        self.skip_table = Table(reader, self.choices.flat) if skips and reader.rows else None
        reset_beside(self.skip_table, self.skip)

    @property
    def stack(self) -> tuple[list[Linear], Table | None]:
        return self.net.linear, self.net.table

    def config(self) -> dict[str, Any]:
        return super().config() | {"sees": [str(source) for source in self.sees]}

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        return self.outputs(*self.states_of(inputs, context))


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
            inputs = into.positions(alike).view(len(alike), -1)
            outputs.append(out.positions(alike))
            shape = (*inputs.shape, len(outputs[-1]) // len(alike))
            self.slopes.append(nn.Parameter(0.01 * torch.randn(shape)))
            self.register_buffer(f"features_{number}", torch.tensor(alike), persistent=False)
            self.register_buffer(f"inputs_{number}", inputs, persistent=False)
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
            rows = self.get_buffer(f"inputs_{number}")
            columns = self.choices.positions(features).view(len(features), 1, -1)
            weights.copy_(slope[rows[:, :, None], columns.to(rows.device)])
        self.start_at(level)


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
        self.shape, self.flip = None, False  # a checkpoint keeps the mask itself
        self.hidden = tuple(hidden)
        seen, moved = self.mask.nonzero()[:, 0].tolist(), (~self.mask).nonzero()[:, 0].tolist()
        identity = torch.full((self.choices.flat,), NEVER)  # what is left alone is u = 0, with certainty
        firsts = [self.choices.first_logits[d] for d in seen if self.choices.sizes[d] != 2]
        identity[firsts] = 0
        self.register_buffer("seen", torch.tensor(seen), persistent=False)
        self.register_buffer("seen_logits", self.states.positions(seen), persistent=False)
        self.register_buffer("moved_logits", self.choices.positions(moved), persistent=False)
        self.register_buffer("identity", identity, persistent=False)
        widths = [*self.hidden, len(self.moved_logits)]
        self.net = Perceptron([self.states.of(seen)], context, widths)

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        (state,), context = self.states_of(inputs, context)
        visible = state.index_select(-1, self.seen_logits if state.is_floating_point() else self.seen)
        out = self.net([visible], context)
        identity = self.identity.to(out.dtype).expand(*out.shape[:-1], -1)
        return identity.index_copy(-1, self.moved_logits, out)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        bias = self.net.last.bias
        bias.copy_(logits.to(bias)[self.moved_logits])
