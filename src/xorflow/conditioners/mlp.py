"""Perceptrons without an ordering: that of a posterior, which sees all, the bipartite coupling, and a diagonal one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import add_buffers
from xorflow.conditioners.base import BySource, Conditioner, Sizes, Source
from xorflow.conditioners.linear import Reader
from xorflow.conditioners.made import FeedForward, Perceptron
from xorflow.conditioners.orderings import coupling_mask


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
        categories: Sizes = 2,
        choices: Sizes | None = None,
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
        self.hidden, self.direct = tuple(hidden), direct and bool(hidden)
        reader = Reader([self.alphabet(source) for source in self.sees], context)
        self.net = Perceptron(reader, self.hidden, self.choices.flat, direct=self.direct)

    def config(self) -> dict[str, Any]:
        return super().config() | {"sees": [str(source) for source in self.sees]}


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

    inputs: Tensor
    outputs: Tensor
    first: Tensor
    step: Tensor
    owners: Tensor

    def __init__(
        self,
        features: int,
        *,
        categories: Sizes = 2,
        choices: Sizes | None = None,
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
        # what each slope connects, feature by feature; of each logit the first slope, and how far the next category's is
        inputs, outputs, count = [], [], 0
        first, step = torch.zeros(2, out.flat, dtype=torch.int64)
        for d in range(features):
            rows, columns = into.positions([d]), out.positions([d])
            first[columns] = count + torch.arange(len(columns))
            step[columns] = 0 if into.sizes[d] == 2 else len(columns)  # a bit multiplies its only one
            inputs.append(rows.repeat_interleave(len(columns)))
            outputs.append(columns.repeat(len(rows)))
            count += len(inputs[-1])
        pairs = {"inputs": torch.cat(inputs), "outputs": torch.cat(outputs)}
        add_buffers(self, **pairs, first=first, step=step, owners=out.logit_features)
        self.slope = nn.Parameter(0.01 * torch.randn(count))
        self.level = nn.Parameter(torch.zeros(out.flat))

    def config(self) -> dict[str, Any]:
        return super().config() | {"sees": str(self._source)}

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        self._check_context(context)
        state = inputs[self._source]
        if state.is_floating_point():
            terms = state.index_select(-1, self.inputs) * self.slope
            return self.level.expand(*terms.shape[:-1], -1).index_add(-1, self.outputs, terms)
        values = state.index_select(-1, self.owners)
        if self.alphabet(self._source).binary:
            return values * self.slope[self.first] + self.level
        slope = self.slope[self.first + values.long() * self.step]
        return torch.where(self.step == 0, values * slope, slope) + self.level

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.level.copy_(logits.to(self.level))

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin at a linear map of the source, as far as each logit is of its own feature."""
        assert source is self._source
        self.slope.copy_(slope[self.inputs, self.outputs])
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
        categories: Sizes = 2,
        choices: Sizes | None = None,
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
        add_buffers(
            self,
            seen=torch.tensor(seen),
            seen_logits=self.states.positions(seen),
            moved_logits=self.choices.positions(moved),
            identity=self.choices.certain_zero(),
        )
        self.net = Perceptron(Reader([self.states.of(seen)], context), self.hidden, len(self.moved_logits))

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        (state,), context = self.states_of(inputs, context)
        visible = state.index_select(-1, self.seen_logits if state.is_floating_point() else self.seen)
        out = self.net([visible], context)
        identity = self.identity.to(out.dtype).expand(*out.shape[:-1], -1)
        return identity.index_copy(-1, self.moved_logits, out)

    def start_at(self, logits: Tensor) -> None:
        self.net.start_at(logits[self.moved_logits.to(logits.device)])
