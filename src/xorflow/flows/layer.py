"""One layer: a transform, the generator's conditioner, and optionally the posterior's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor, nn

from xorflow._states import NEVER, Layout
from xorflow.conditioners.base import Conditioner, Source
from xorflow.errors import ModelError
from xorflow.flows.choices import Choices
from xorflow.flows.trace import Point
from xorflow.transforms import ModularShift, Transform


class Layer(nn.Module):
    """One step from data to base.

    A coupling leaves the features of its mask alone: there p puts all mass on u = 0, and so does q, whatever its network says.

    Args:
        conditioner: the generator's network, p(u | what it sees).
        transform: the bijections to choose from; a shift modulo K (xor for K = 2) by default.
        posterior: an optional network for q(u | what it sees), which may look at anything but u itself.
        relative: the posterior's logits are added to the generator's: it has to learn only how the data change them.
    """

    unmoved: Tensor | None

    def __init__(
        self,
        conditioner: Conditioner,
        transform: Transform | None = None,
        posterior: Conditioner | None = None,
        relative: bool = False,
    ) -> None:
        super().__init__()
        self.conditioner = conditioner
        self.transform = transform or ModularShift(conditioner.states.sizes)
        self.posterior = posterior
        self.relative = relative
        for role, network in (("conditioner", conditioner), ("posterior", posterior)):
            if network is not None:
                self._check_fit(role, network)
        if posterior is not None and Source.OWN in posterior.sees:
            raise ModelError("the posterior is mean-field within a layer: it may see anything but its own u")
        if conditioner.mask is not None and not self.transform.keeps(conditioner.mask):
            raise ModelError(
                "a coupling layer leaves alone what its network sees, by the choice u = 0, and that of "
                f"{type(self.transform).__name__} is not the identity there; use an autoregressive conditioner, or let u = 0 "
                "be the identity"
            )
        if relative and (posterior is None or self.autoregressive_in_u):
            raise ModelError(
                "relative=True adds a posterior's logits to those of a generator that does not see its own u: "
                "give a posterior, and a conditioner without 'own'"
            )
        self.layout = Layout(self.transform.choices)
        mask = conditioner.mask
        self.register_buffer("unmoved", None if mask is None else mask.clone(), persistent=False)

    def __repr__(self) -> str:
        shown = [repr(self.conditioner)]
        if type(self.transform) is not ModularShift:
            shown.append(repr(self.transform))
        if self.posterior is not None:
            shown.append(f"posterior={self.posterior!r}")
        if self.relative:
            shown.append("relative=True")
        return f"Layer({', '.join(shown)})"

    def _check_fit(self, role: str, network: Conditioner) -> None:
        for what, have, need in (
            ("categories", network.states, self.transform.states),
            ("choices", network.choices, self.transform.choices),
        ):
            if have != need:
                raise ModelError(
                    f"the {role}'s {what} must be those of its transform, {_short(need.sizes)}, "
                    f"and are {_short(have.sizes)}; build it with {what}=..."
                )

    @property
    def autoregressive_in_u(self) -> bool:
        """Whether p(u) is a chain over features, so that a draw of u needs several passes."""
        return Source.OWN in self.conditioner.sees

    def generator_choices(self, point: Point, context: Tensor | None, own: Tensor | None = None) -> Choices:
        """p(u | what it sees) at a point of the pass; `own` is u itself, for a layer that sees it."""
        return Choices(self.conditioner(point.inputs(own), context), self.layout)

    def posterior_choices(
        self, point: Point, context: Tensor | None, generator: Choices | None = None
    ) -> Choices:
        """q(u | what it sees) at a point of the pass; `generator` is p there, if it is known already."""
        if self.posterior is None:
            raise ModelError("this needs a posterior in every layer; build Layer(..., posterior=MLP(...))")
        logits = self.posterior(point.inputs(), context)
        if self.relative:
            logits = logits + (generator or self.generator_choices(point, context)).logits
        return Choices(self._on_support(logits), self.layout)

    def _on_support(self, logits: Tensor) -> Tensor:
        """Logits that are certain of u = 0, and have no gradient, at features that the layer leaves alone."""
        if self.unmoved is None:
            return logits
        parts = []
        for part, unmoved in zip(self.layout.logits(logits), self.layout.split(self.unmoved), strict=True):
            if part.dim() == logits.dim():  # log-odds of bits
                parts.append(part.masked_fill(unmoved, NEVER))
            else:
                identity = torch.arange(part.shape[-1], device=part.device) == 0
                parts.append(torch.where(unmoved[:, None], torch.where(identity, 0.0, NEVER).to(part), part))
        return self.layout.packed(parts)


class LayerList(nn.ModuleList):
    """An `nn.ModuleList` that says what it holds."""

    def __iter__(self) -> Iterator[Layer]:
        return super().__iter__()  # pyright: ignore[reportReturnType]

    @overload
    def __getitem__(self, idx: int) -> Layer: ...
    @overload
    def __getitem__(self, idx: slice) -> LayerList: ...
    def __getitem__(self, idx: int | slice) -> Layer | LayerList:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__getitem__(idx)  # pyright: ignore[reportReturnType]


def _short(sizes: tuple[int, ...]) -> str:
    if len(set(sizes)) == 1:
        return f"{sizes[0]} for each of {len(sizes)} features"
    return f"{list(sizes[:8])}{' ...' if len(sizes) > 8 else ''}"
