"""The public edge: a flow, given a context, as a `torch.distributions.Distribution` over integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from xorflow._states import Alphabet
from xorflow.conditioners.base import common_lead
from xorflow.data import validate
from xorflow.errors import DataError, ModelError
from xorflow.flows.sampling import SampleNoise, complete
from xorflow.flows.stack import GREEDY

if TYPE_CHECKING:
    from xorflow.flows.flow import Flow
    from xorflow.flows.latent import LatentFlow


_ROWS_AT_A_TIME = 4096


class Model(Protocol):
    """What has a likelihood: a flow, or a mixture of flows."""

    @property
    def states(self) -> Alphabet: ...
    @property
    def features(self) -> int: ...
    @property
    def context_features(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def encode(self, x: Tensor) -> Tensor: ...
    def log_likelihood(self, x: Tensor, context: Tensor | None = None) -> Tensor: ...


class ModelDistribution(Distribution):
    """The distribution of x under a model: what does not depend on how it is sampled.

    Args:
        model: a flow or a mixture.
        context: (..., C), whose leading shape becomes the batch shape, or None.
    """

    has_rsample = False
    arg_constraints: ClassVar[  # pyright: ignore[reportIncompatibleMethodOverride]
        dict[str, constraints.Constraint]
    ] = {}  # the parameters are a flow's, not tensors

    def __init__(self, model: Model, context: Tensor | None = None) -> None:
        came = 0 if context is None else context.shape[-1]
        if came != model.context_features:
            raise ModelError(f"this flow takes {model.context_features} context features, and got {came}")
        self._model = model
        self.context = None if context is None else context.to(model.device, model.dtype)
        batch = torch.Size() if context is None else context.shape[:-1]
        super().__init__(batch, torch.Size([model.features]), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        highest = torch.tensor(self._model.states.sizes, device=self._model.device) - 1
        return constraints.independent(constraints.integer_interval(0, highest), 1)

    @torch.no_grad()
    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log p(x) in nats; raises `Intractable`, naming what to call instead, where there is no exact value."""
        x = validate(torch.as_tensor(value), self._model.states.sizes, allow_empty=True)
        x = x.to(self._model.device)
        lead = common_lead(x.shape[:-1], self.batch_shape)
        rows = x.expand(*lead, self._model.features).reshape(lead.numel(), self._model.features)
        context = self._rows_of_context(lead)
        size = _ROWS_AT_A_TIME
        log_probs = [
            self._model.log_likelihood(
                self._model.encode(rows[i : i + size]), None if context is None else context[i : i + size]
            )
            for i in range(
                0, max(1, len(rows)), size
            )  # no rows are one empty batch, which fails where any would
        ]
        return torch.cat(log_probs).reshape(lead)

    def _rows_of_context(self, lead: torch.Size) -> Tensor | None:
        return (
            None
            if self.context is None
            else self.context.expand(*lead, self.context.shape[-1]).reshape(
                lead.numel(), self.context.shape[-1]
            )
        )


class FlowDistribution(ModelDistribution):
    """The distribution of x under a flow. Integers in, checked once; int64 integers out.

    Args:
        flow: the model.
        context: (..., C), whose leading shape becomes the batch shape, or None.
    """

    def __init__(self, flow: Flow | LatentFlow, context: Tensor | None = None) -> None:
        super().__init__(flow, context)
        self.flow = flow

    @torch.no_grad()
    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws of x, int64 (*sample_shape, *batch_shape, D)."""
        lead = torch.Size(sample_shape) + self.batch_shape
        noise = SampleNoise.draw(self.flow, torch.Size([lead.numel()]), generator)
        return self.flow.sample_with(noise, self._rows_of_context(lead)).reshape(*lead, self.flow.features)

    @torch.no_grad()
    def complete(self, value: Tensor, known: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of x given its values at the features `known` (D,), one for each row of `value` (..., D).

        `value` is ignored elsewhere, but must hold valid integers there. The known features must be a prefix of the
        flow's ordering, where the conditional is exact; otherwise the error says what is.
        """
        x = validate(torch.as_tensor(value), self.flow.states.sizes).to(self.flow.device)
        mask = torch.as_tensor(known, device=self.flow.device)
        if mask.dtype != torch.bool or mask.shape != (self.flow.features,):
            raise DataError(
                f"known is one boolean for each of the {self.flow.features} features, got {mask.dtype} {tuple(mask.shape)}"
            )
        lead = common_lead(x.shape[:-1], self.batch_shape)
        rows = self.flow.encode(x.expand(*lead, -1).reshape(-1, self.flow.features))
        noise = SampleNoise.draw(self.flow, torch.Size([len(rows)]), generator)
        y = self.flow.encode(self.flow.base.sample(noise.base))
        draws = GREEDY if self.flow.is_deterministic else noise.layers
        done = complete(self.flow, rows, mask, y, draws, self._rows_of_context(lead))
        return self.flow.states.decode(done).reshape(*lead, self.flow.features)
