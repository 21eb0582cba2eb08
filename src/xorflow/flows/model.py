"""What has a likelihood: the base class of flows and of mixtures of flows, and the distribution that it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from xorflow._repr import as_table, as_text
from xorflow._states import Alphabet
from xorflow.conditioners.base import common_lead
from xorflow.data import Batch, validate
from xorflow.errors import DataError, ModelError
from xorflow.flows.layer import Point

if TYPE_CHECKING:
    from xorflow.flows.conditionals import Conditionals
    from xorflow.flows.flow import Stack

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class SampleNoise:
    """The uniforms that samples are a function of: `base` (N, D), `layers` (N, L, D) and, of a mixture, `component` (N,)."""

    base: Tensor
    layers: Tensor
    component: Tensor | None = None


class Model(nn.Module, ABC):
    """A distribution over integers x (D,), each feature with categories of its own, perhaps given a context.

    `model(context)` is that distribution, as a `torch.distributions.Distribution`; it checks what comes in. The methods here
    take integers that fit, and are what it calls.

    Attributes:
        states: the space of x.
        features: D.
        categories: K_d, for each feature.
        context_features: how many context features it takes (0: none).
    """

    def __init__(self, states: Alphabet, context_features: int) -> None:
        super().__init__()
        self.states, self.features, self.categories = states, states.features, states.sizes
        self.context_features = context_features

    @property
    @abstractmethod
    def flows(self) -> Sequence[Stack]:
        """The flows that it is made of: itself, or a mixture's components."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of its weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    @abstractmethod
    def has_closed_form(self) -> bool:
        """Whether the exact likelihood is a pass of each network."""

    def __repr__(self) -> str:
        return as_text(type(self).__name__, self._rows())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return as_table(type(self).__name__, self._rows())

    def _rows(self) -> list[tuple[str, object]]:
        """What is shown of it, by name."""
        rows: list[tuple[str, object]] = [("features", self.states)]
        if self.context_features:
            rows.append(("context", f"{self.context_features} features"))
        return [*rows, ("weights", f"{sum(p.numel() for p in self.parameters()):,}")]

    def forward(self, context: Tensor | None = None) -> ModelDistribution:
        """The distribution of x, given `context`, as a `torch.distributions.Distribution`."""
        return ModelDistribution(self, context)

    def start(self, x: Tensor, context: Tensor | None = None) -> Point:
        """The beginning of a pass, from integers x (..., D) and what networks see beside them, (..., C)."""
        x = self.states.integers(x)
        return Point(x, x, context=context)

    def seen(self, context: Tensor | None) -> Tensor | None:
        """A context that comes along with data, as its networks take it; None if they were made to see none."""
        if context is None or not self.context_features:
            return None
        return context.to(self.device, self.dtype)

    @abstractmethod
    def log_likelihood(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Exact log p(x) in nats, (B,) float64, with gradient; `Intractable`, naming what to call instead, where there is none.

        Args:
            x: integers (B, D).
            context: (B, C) or None.
        """

    def combined(self, log_likelihoods: Sequence[Tensor]) -> Tensor:
        """log p(x), (B,), from that of each of its `flows`."""
        (log_likelihood,) = log_likelihoods
        return log_likelihood

    @abstractmethod
    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        """log p(x_d | what is before d) along an ordering; `Intractable` where the likelihood does not factorise so."""

    @abstractmethod
    def greedy(self) -> Model:
        """The deterministic model with these very weights: each layer takes its most probable u."""

    @abstractmethod
    def draw_noise(self, count: int, generator: torch.Generator | None = None) -> SampleNoise:
        """Fresh noise for some samples, on the model's device; more samples begin with those of fewer."""

    @abstractmethod
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        """Integers x (N, D), int64, as a function of given noise."""

    @abstractmethod
    def floor(self) -> Tensor:
        """No model on these bases has a smaller negative log-likelihood, in nats."""


def check_alike(kind: str, where: str, models: Sequence[Model]) -> None:
    """Raise `ModelError` unless all models, of some kind there, take the same rows, on one device and in one type."""
    first = _of_rows(models[0])
    for number, other in enumerate(models[1:], 2):
        for rule, its in _of_rows(other).items():
            if first[rule] != its:
                raise ModelError(
                    f"the {kind}s {where} {rule}: {kind} 1 {first[rule]}, and {kind} {number} {its}; build them alike, or "
                    "move one with .to(...)"
                )


def _of_rows(model: Model) -> dict[str, str]:
    """What must be the same, by rule."""
    return {
        "have the same features": f"has {model.features}",
        "have the same categories": f"has {model.states.short()}",
        "see the same context": f"takes {model.context_features} features of it",
        "have one type and one device": f"is {model.dtype} on {model.device}",
    }


class ModelDistribution(Distribution):
    """The distribution of x under a model. Integers in, checked once; int64 integers out.

    Args:
        model: a flow or a mixture of flows.
        context: (..., C), whose leading shape becomes the batch shape, or None.
    """

    has_rsample = False
    arg_constraints: ClassVar[  # pyright: ignore[reportIncompatibleMethodOverride]
        dict[str, constraints.Constraint]
    ] = {}  # the parameters are a model's, not tensors

    def __init__(self, model: Model, context: Tensor | None = None) -> None:
        came = 0 if context is None else context.shape[-1]
        if came != model.context_features:
            raise ModelError(f"this flow takes {model.context_features} context features, and got {came}")
        self.model = model
        self.context = model.seen(context)
        batch = torch.Size() if context is None else context.shape[:-1]
        super().__init__(batch, torch.Size([model.features]), validate_args=False)

    def __repr__(self) -> str:
        return f"ModelDistribution(batch_shape={tuple(self.batch_shape)}, model={self.model!r})"

    @property
    def support(self) -> constraints.Constraint:
        highest = torch.tensor(self.model.categories, device=self.model.device) - 1
        return constraints.independent(constraints.integer_interval(0, highest), 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log p(x) in nats; raises `Intractable`, naming what to call instead, where there is no exact value.

        Differentiable: `-model(context).log_prob(x).mean().backward()` trains a latent flow of depth 1 or a mixture of them.
        Of a deterministic `Flow` only the base has a gradient, since its layers' choices are hard. In training mode dropout,
        if a network has any, is on wherever a gradient is taken; under `torch.no_grad()` or after `eval()` the value is exact.
        """
        rows, lead = self._rows(value)
        # no rows are one empty batch, which fails where any would
        batches = rows.split(_ROWS_AT_A_TIME)
        log_probs = [self.model.log_likelihood(batch.x, batch.context) for batch in batches]
        return torch.cat(log_probs).reshape(lead)

    def log_prob_by_feature(self, value: Tensor) -> Tensor:
        """log p(x_d | what is before d) of each feature, (..., D) in nats, whose sum is `log_prob`; else `Intractable`.

        What is before d is told by `model.conditionals().order`: features that come late are explained by more of the others.
        """
        rows, lead = self._rows(value)
        return self.model.conditionals(rows.context).of(rows.x).reshape(*lead, self.model.features)

    @torch.no_grad()
    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws of x, int64 (*sample_shape, *batch_shape, D)."""
        if min(sample_shape, default=0) < 0:
            raise DataError(f"the shape of samples has sizes from 0, and got {tuple(sample_shape)}")
        lead = torch.Size(sample_shape) + self.batch_shape
        noise = self.model.draw_noise(lead.numel(), generator)
        return self.model.sample_with(noise, self._rows_of_context(lead)).reshape(*lead, self.model.features)

    @torch.no_grad()
    def complete(self, value: Tensor, known: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of x given its values at the features `known` (D,), one for each row of `value` (..., D).

        `value` is ignored elsewhere, but must hold valid integers there. The known features must be a prefix of the
        model's ordering, where the conditional is exact; otherwise the error says what is.
        """
        mask = torch.as_tensor(known, device=self.model.device)
        if mask.dtype != torch.bool or mask.shape != (self.model.features,):
            raise DataError(
                f"known is one boolean for each of the {self.model.features} features, got {mask.dtype} {tuple(mask.shape)}"
            )
        rows, lead = self._rows(value)
        uniforms = torch.rand(
            rows.x.shape, dtype=self.model.dtype, device=self.model.device, generator=generator
        )
        conditionals = self.model.conditionals(rows.context)
        return conditionals.complete(rows.x, mask, uniforms).long().reshape(*lead, self.model.features)

    def _rows(self, value: Tensor) -> tuple[Batch, torch.Size]:
        """Checked integers (N, D) in the type of states, their context, and the leading shape that they have together."""
        x = validate(value, self.model.categories, allow_empty=True)
        lead = common_lead(x.shape[:-1], self.batch_shape)
        x = self.model.states.integers(x.to(self.model.device))
        return Batch(_flat(x, lead), self._rows_of_context(lead)), lead

    def _rows_of_context(self, lead: torch.Size) -> Tensor | None:
        return None if self.context is None else _flat(self.context, lead)


def _flat(values: Tensor, lead: torch.Size) -> Tensor:
    """Values (..., W) as rows (N, W) of a leading shape of N in all."""
    width = values.shape[-1]
    return values.expand(*lead, width).reshape(lead.numel(), width)
