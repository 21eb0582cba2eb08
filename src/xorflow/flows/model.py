"""What has a likelihood: the base class of flows and of mixtures of flows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from xorflow._repr import as_table, as_text
from xorflow._states import Alphabet
from xorflow.flows.distribution import ModelDistribution
from xorflow.flows.trace import Known

if TYPE_CHECKING:
    from xorflow.flows.conditionals import Conditionals
    from xorflow.flows.layer import Layer
    from xorflow.flows.sampling import SampleNoise


class Model(nn.Module, ABC):
    """A distribution over integers x (D,), each feature with categories of its own, perhaps given a context.

    `model(context)` is that distribution, as a `torch.distributions.Distribution`; it checks what comes in. The methods here
    take integers that fit, and are what it calls.
    """

    @property
    @abstractmethod
    def states(self) -> Alphabet:
        """The space of x."""

    @property
    @abstractmethod
    def context_features(self) -> int:
        """How many context features it takes (0: none)."""

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

    @property
    @abstractmethod
    def has_posterior(self) -> bool:
        """Whether every layer has a posterior to draw choices from."""

    @property
    @abstractmethod
    def first_layers(self) -> list[Layer]:
        """The layers that see the data as they are, whose choices other models may have computed already."""

    @property
    def features(self) -> int:
        return self.states.features

    @property
    def categories(self) -> tuple[int, ...]:
        """K_d, for each feature."""
        return self.states.sizes

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

    @abstractmethod
    def log_likelihood(
        self, x: Tensor, context: Tensor | None = None, *, known: Known | None = None
    ) -> Tensor:
        """Exact log p(x) in nats, (B,) float64, with gradient; `Intractable`, naming what to call instead, where there is none.

        Args:
            x: integers (B, D).
            context: (B, C) or None.
            known: choices of first layers for these very rows and context, computed already.
        """

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
