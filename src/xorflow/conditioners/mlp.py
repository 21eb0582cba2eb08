"""Unmasked networks: the multi-layer perceptron of a posterior, and the bipartite coupling conditioner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import NEVER
from xorflow.conditioners.base import Conditioner, Source, linear_map
from xorflow.conditioners.orderings import coupling_mask
from xorflow.errors import ModelError


def _perceptron(sizes: Sequence[int]) -> nn.Sequential:
    if min(sizes[1:]) < 1:
        raise ModelError(f"layer widths are at least 1, and got {tuple(sizes[1:])}")
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


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
        width = sum(self.alphabet(s).flat for s in self.sees) + context
        self.net = _perceptron([width, *self.hidden, self.choices.flat])
        self.skip = nn.Linear(width, self.choices.flat, bias=False) if direct and self.hidden else None

    def config(self) -> dict[str, Any]:
        config = super().config() | {
            "hidden": list(self.hidden),
            "sees": [str(source) for source in self.sees],
        }
        return config | ({} if self.skip is None else {"direct": True})

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        flat = self.flatten(inputs, context)
        out = self.net(flat)
        return self.shape_logits(out if self.skip is None else out + self.skip(flat))

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (floats of a state, floats of the logits), where there is a linear path."""
        linear = self.skip if self.hidden else self.net[-1]
        if isinstance(linear, nn.Linear):
            linear.weight.copy_(linear_map(self, source, slope).T)
        self.start_at(level)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        bias = self.net[-1].bias
        assert isinstance(bias, Tensor)
        bias.copy_(logits.flatten().to(bias))


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
        into = 1 if self.alphabet(self._source).binary else self.alphabet(self._source).width
        out = 1 if self.choices.binary else self.choices.width
        self.slope = nn.Parameter(0.01 * torch.randn(features, into, out))
        self.level = nn.Parameter(torch.zeros(features, out))

    def config(self) -> dict[str, Any]:
        return super().config() | {"sees": str(self._source)}

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        self._check_context(context)
        value = inputs[self._source]
        value = value.unsqueeze(-1) if self.alphabet(self._source).binary else value  # (..., D, into)
        logits = (value.unsqueeze(-1) * self.slope).sum(-2) + self.level
        return logits.squeeze(-1) if self.choices.binary else logits

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.level.copy_(logits.reshape(self.level.shape).to(self.level))

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin at a linear map of the source, as far as each logit is of its own feature."""
        assert source is self._source
        features, into, out = self.slope.shape
        every = torch.arange(features)
        self.slope.copy_(slope.reshape(features, into, features, out)[every, :, every])
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
    moved: Tensor
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
        seen, moved = self.mask.nonzero()[:, 0], (~self.mask).nonzero()[:, 0]
        self.register_buffer("seen", seen, persistent=False)
        self.register_buffer("moved", moved, persistent=False)
        self.register_buffer("place", torch.cat([moved, seen]).argsort(), persistent=False)
        wide_in = self.states.flat // features
        self._wide_out = self.choices.flat // features
        self.net = _perceptron([len(seen) * wide_in + context, *self.hidden, len(moved) * self._wide_out])

    def config(self) -> dict[str, Any]:
        assert self.mask is not None
        return super().config() | {"hidden": list(self.hidden), "mask": self.mask.tolist()}

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        features_dim = -1 if self.states.binary else -2
        seen = inputs[Source.STATE].index_select(features_dim, self.seen)
        out = self.net(self.flatten({Source.STATE: seen}, context))
        rest = self._fixed_logits(out)
        if self.choices.binary:
            return torch.cat([out, rest], -1).index_select(-1, self.place)
        moved = out.unflatten(-1, (len(self.moved), self.choices.width))
        return torch.cat([moved, rest], -2).index_select(-2, self.place)

    def _fixed_logits(self, like: Tensor) -> Tensor:
        """Logits that choose u = 0 with certainty, for the features that are left alone."""
        batch = like.shape[:-1]
        if self.choices.binary:
            return like.new_full((*batch, len(self.seen)), NEVER)
        logits = like.new_full((*batch, len(self.seen), self.choices.width), NEVER)
        logits[..., 0] = 0
        return logits

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        bias = self.net[-1].bias
        assert isinstance(bias, Tensor)
        bias.copy_(logits[self.moved].flatten().to(bias))
