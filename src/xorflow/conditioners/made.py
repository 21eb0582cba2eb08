"""MADE: a multi-layer perceptron whose weights are masked so that the logits of feature d see its predecessors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.conditioners.orderings import Order, ranks, resolve_order
from xorflow.errors import ModelError


class _MaskGradient(torch.autograd.Function):
    """The identity forward; backward, the gradient times a mask."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None


class MaskedLinear(nn.Linear):
    """A linear layer whose weight is zero, and stays zero, where `mask` is.

    The weight itself is stored masked, so the forward pass is a plain matrix product; only its gradient is masked.
    An optimiser that leaves a zero weight with a zero gradient alone (SGD, Adam, AdamW, with decay or not) therefore
    keeps it masked; whoever writes to the weight by other means calls `apply_mask`.
    """

    mask: Tensor

    def __init__(self, mask: Tensor, *, bias: bool = True) -> None:
        super().__init__(mask.shape[1], mask.shape[0], bias=bias)
        self.register_buffer("mask", mask.to(self.weight.dtype), persistent=False)
        self.apply_mask()

    @torch.no_grad()
    def apply_mask(self) -> None:
        """Set to zero what the mask forbids."""
        self.weight.mul_(self.mask)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.requires_grad and torch.is_grad_enabled():
            weight = _MaskGradient.apply(weight, self.mask)
        return linear(input, weight, self.bias)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.apply_mask()  # loaded weights may come from elsewhere; a leak would make every likelihood wrong


class MADE(Conditioner):
    r"""Masked autoencoder for distribution estimation (Germain et al., 2015) as a conditioner.

    Hidden unit j of degree :math:`m_j` sees the inputs of rank below :math:`m_j` in the ordering, and the logits of the
    feature of rank r see the hidden units of degree at most r. Degrees are spread evenly and ascend with j.

    Args:
        features: D.
        hidden: the widths of the hidden layers; may be empty (a masked linear map).
        order: `"natural"`, `"reversed"`, `"random:SEED"` or a permutation.
        categories: K, or K_d for each feature.
        choices: U_d, the number of values of u; as many as categories by default (a shift).
        sees: the inputs, `{"state": "before"}` by default.
        direct: add masked connections from the input to the output.
        context: the number of context features, which every unit sees.

    >>> net = MADE(3, hidden=(8,))
    >>> net({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (1024,),
        *,
        order: Order = "natural",
        categories: int | Sequence[int] = 2,
        choices: int | Sequence[int] | None = None,
        sees: Mapping[str, str] | None = None,
        direct: bool = False,
        context: int = 0,
    ) -> None:
        super().__init__(
            features,
            categories=categories,
            choices=choices,
            sees=sees or {"state": "before"},
            order=resolve_order(order, features),
            context=context,
        )
        if any(width < 1 for width in hidden):
            raise ModelError(f"hidden widths are at least 1, and got {tuple(hidden)}")
        if Dependence.COUPLED in self.sees.values():
            raise ModelError("MADE sees its inputs by an ordering, not by a mask; use Coupling for a mask")
        self.hidden = tuple(hidden)
        into, out = self._input_degrees(), self._output_degrees()
        layers: list[nn.Module] = []
        degrees = into
        for width in self.hidden:
            upper = self._hidden_degrees(width)
            layers += [MaskedLinear(upper[:, None] >= degrees[None, :]), nn.ReLU()]
            degrees = upper
        layers.append(MaskedLinear(out[:, None] >= degrees[None, :]))
        self.net = nn.Sequential(*layers)
        self.skip = MaskedLinear(out[:, None] >= into[None, :], bias=False) if direct and self.hidden else None
        # without a hidden unit of degree 0 the first feature would not see the context
        self.context_skip = nn.Linear(context, self.choices.flat, bias=False) if context and self.hidden else None

    def _input_degrees(self) -> Tensor:
        """The smallest degree of a hidden unit that may see each input."""
        assert self.order is not None
        rank = ranks(self.order)
        least = {Dependence.BEFORE: rank + 1, Dependence.UP_TO: rank, Dependence.ALL: torch.zeros_like(rank)}
        parts = [
            least[dependence].repeat_interleave(self.alphabet(source).flat // self.features)
            for source, dependence in self.sees.items()
        ]
        return torch.cat([*parts, torch.zeros(self.context_features, dtype=torch.int64)])

    def _hidden_degrees(self, width: int) -> Tensor:
        # degree 0 sees nothing unless an input of degree 0 exists, degree D is read by no output
        lowest = int(self.features > 1 and not {Dependence.UP_TO, Dependence.ALL} & set(self.sees.values()))
        highest = self.features - 1
        return lowest + torch.arange(width) * (highest - lowest + 1) // width

    def _output_degrees(self) -> Tensor:
        assert self.order is not None
        return ranks(self.order).repeat_interleave(self.choices.flat // self.features)

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        flat = self.flatten(inputs, context)
        out = self.net(flat)
        if self.skip is not None:
            out = out + self.skip(flat)
        if self.context_skip is not None and context is not None:
            out = out + self.context_skip(context.to(out.dtype))
        return self.shape_logits(out)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        last = self.net[-1]
        assert isinstance(last, MaskedLinear)
        last.bias.copy_(logits.flatten().to(last.bias))
