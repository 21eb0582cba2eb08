"""What an estimator is: something beside the flow that turns a batch into a loss."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from xorflow.data import Batch
from xorflow.errors import DataError, ModelError
from xorflow.flows import LatentFlow, Mixture, Point


@dataclass(frozen=True)
class Minibatch:
    """Rows with all that their loss needs beside the weights.

    They are cut into pieces that pass one after the other, or in several processes.
    """

    x: Tensor  # integers
    context: Tensor | None
    draws: Tensor | None
    probabilities: Tensor | None  # with which x was drawn, for estimators with soft targets
    share: float = 1.0  # of the rows of a step

    def split(self, count: int, parts: int = 1) -> list[Minibatch]:
        """About equal pieces, each with its share of every one of so many equal parts."""
        if count == 1:
            return [self]
        every = torch.arange(len(self.x), device=self.x.device).tensor_split(parts)
        cut = [rows.tensor_split(min(count, len(self.x))) for rows in every]
        return [self._of(torch.cat(rows)) for rows in zip(*cut, strict=True)]

    def _of(self, rows: Tensor) -> Minibatch:
        def take(tensor: Tensor | None, dim: int = 0) -> Tensor | None:
            return None if tensor is None else tensor.index_select(dim, rows)

        rest = take(self.context), take(self.draws, 1), take(self.probabilities)
        return Minibatch(self.x.index_select(0, rows), *rest, self.share * len(rows) / len(self.x))


@dataclass(frozen=True)
class Loss:
    """What a training step needs.

    Attributes:
        surrogate: a scalar to minimise; its gradient is the estimator, its value may mean nothing.
        bound: the batch's mean of the objective (a bound on log p, or log p itself) in nats, detached.
        control: a second scalar to minimise, which reaches only the estimator's own parameters; or None.
        stats: what the estimator's state is updated from after the backward pass, and what a log may show.
    """

    surrogate: Tensor
    bound: Tensor
    control: Tensor | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, surrogate: Tensor, bound: Tensor, **more: Any) -> Loss:
        """From what is to be maximised, and the objective, both of any shape."""
        return cls(surrogate=-surrogate.mean(), bound=bound.detach().mean(), **more)


@dataclass(frozen=True)
class Part:
    """Parameters whose gradient can have a bias of its own: a layer's generator or posterior, or a learned base.

    Attributes:
        role: whose they are.
        layer: of which layer, from 1; None of the base.
    """

    role: Literal["generator", "posterior", "base"]
    layer: int | None = None

    def __str__(self) -> str:
        return self.role if self.layer is None else f"{self.role}{self.layer}"


@dataclass(frozen=True)
class Bias:
    """How an estimator's expectation differs from the gradient of its objective.

    Attributes:
        reason: why.
        rescaled: whether only its length differs: the gradient divided by one number.
    """

    reason: str
    rescaled: bool = False


@dataclass(frozen=True)
class Target:
    """The function of the parameters whose gradient an estimator estimates.

    Attributes:
        kind: the special-case bound, the evidence lower bound, log p(x), the bound with the last layer summed out, or the
            importance-weighted bound.
        entropy: the weight of an entropy bonus, in the last layer.
        earlier: the factor of that weight in the layers before.
        samples: of an importance-weighted bound.
        sum_last: whether its weights have the last layer summed out.
        proposal: where its samples come from.
    """

    kind: Literal["bound", "elbo", "log-likelihood", "summed", "importance"]
    entropy: float = 0.0
    earlier: float = 1.0
    samples: int = 1
    sum_last: bool = False
    proposal: Literal["p", "q"] = "p"


class Configured:
    """What its own arguments make again: each is kept as an attribute of its name."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


class Estimator(Configured, nn.Module, ABC):
    """An objective for a `LatentFlow` and an estimate of its gradient.

    A new estimator is one method, `loss`; one that draws also says how many uniforms it needs for one example, `noise_shape`;
    one of another objective than the special-case bound says so in `target`, and one with a bias in `bias_of`. State
    (baselines, running statistics) is kept in buffers, made by `prepare` and changed by `update`, after the backward pass.
    """

    trains_mixtures: ClassVar[bool] = False
    """Whether a `Mixture`, which has a likelihood but no one pass from data to base, may stand in for a flow."""

    takes_soft_targets: bool = False
    """Whether it takes the probabilities with which data were drawn (`soft_target_loss`), and not the draw alone."""

    proposal: Literal["p", "q"] = "p"
    """What draws its choices: the generator (p) or the posterior (q)."""

    def target(self, flow: LatentFlow) -> Target:
        """What its gradient is the gradient of; or would be, without its bias."""
        del flow
        return Target("bound")

    def bias(self, flow: LatentFlow) -> Bias | None:
        """Why its expectation is not the gradient of its target, or that it is only rescaled; None if it is unbiased."""
        biases = [bias for part in parts_of(flow) if (bias := self.bias_of(flow, part)) is not None]
        return next((bias for bias in biases if not bias.rescaled), biases[0] if biases else None)

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        """The same, of the gradient of one part."""
        del flow, part
        return None

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        """(S, L', D) uniforms for one example, or None for an estimator that draws nothing."""
        del flow
        return None

    def admit(self, flow: LatentFlow | Mixture) -> LatentFlow:
        """The flow, or the mixture in its place, if this estimator can train it; `ModelError`, with the reason, if not."""
        if isinstance(flow, Mixture) and not self.trains_mixtures:
            raise ModelError(
                f"{type(self).__name__} trains single flows, and this is a mixture; train that by its exact likelihood, with "
                "MaximumLikelihood (maximum-likelihood)"
            )
        admitted = cast(LatentFlow, flow)  # all that such an estimator asks of a flow, a mixture answers
        self.check(admitted)
        return admitted

    def check(self, flow: LatentFlow) -> None:
        """Raise `ModelError`, with the reason, for a flow that this estimator is not defined for."""
        if self.proposal == "q" and not flow.has_posterior:
            raise ModelError(
                f"{type(self).__name__} draws from a posterior here, and needs a posterior in every layer; build "
                "Layer(..., posterior=MLP(...)), or train with posterior=mlp"
            )

    def not_capturable(self, flow: LatentFlow) -> str | None:
        """Why a step needs a decision by the host, so that it cannot be captured as a CUDA graph; None if it does not."""
        if (
            self.proposal == "q"
        ):  # the generator is evaluated at the posterior's choices, and never drawn from
            return None
        if any(layer.autoregressive_in_u for layer in flow.layers):
            return "layers that see their own u are drawn until nothing changes"
        return None

    def parts_of_batch(self, flow: LatentFlow) -> int:
        """Into how many equal parts it cuts the rows of a batch; others take all rows alike, and their mean."""
        del flow
        return 1

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        """Make room for what depends on the flow's size, before anything is loaded or captured; calling it again changes
        nothing.

        Args:
            flow: the model that will be trained.
            total_steps: how many steps there will be, for estimators with a schedule.
        """
        del flow, total_steps

    @abstractmethod
    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        """The loss of the rows (B, D) that passes start from, with their context, given the draws (S, B, L', D)."""

    def soft_target_loss(self, flow: LatentFlow, start: Point, probabilities: Tensor) -> Loss:
        """The loss of rows x (B, D) that were drawn with these probabilities (B, D); of estimators that use them."""
        del flow, start, probabilities
        raise ModelError(f"{type(self).__name__} takes no soft targets")

    def update(self, stats: Mapping[str, Tensor]) -> None:
        """Change the estimator's state after the backward pass, from the (globally reduced) statistics of its loss."""
        del stats

    def draw(self, flow: LatentFlow, batch: int, generator: torch.Generator | None = None) -> Tensor | None:
        """Fresh uniforms for a batch, (S, B, L', D), on the flow's device; None if none are needed."""
        shape = self.noise_shape(flow)
        if shape is None:
            return None
        size = (shape[0], batch, *shape[1:])
        return torch.rand(size, dtype=flow.dtype, device=flow.device, generator=generator)

    def forward(
        self,
        flow: LatentFlow | Mixture,
        x: Batch | Tensor,
        context: Tensor | None = None,
        *,
        draws: Tensor | None = None,
        generator: torch.Generator | None = None,
        probabilities: Tensor | None = None,
    ) -> Loss:
        """The loss of a batch of integers (B, D).

        Args:
            flow: the model.
            x: integers, or a `Batch`, which brings its own context.
            context: (B, C) or None.
            draws: the noise; uniforms, or (as integers) the choices themselves. Drawn anew if not given.
            generator: where fresh noise comes from.
            probabilities: the probabilities (B, D) with which x was drawn, for an estimator that uses them.
        """
        flow = self.admit(flow)
        self.prepare(flow)
        if isinstance(x, Batch):
            # labels that come along with the data are left out if the flow sees none, as in evaluation
            x, context = x.x, flow.seen(x.context)
        _check_rows(flow, x)
        start = flow.start(x, context)
        if self.takes_soft_targets:
            if probabilities is None:
                raise ModelError(
                    f"this {type(self).__name__} takes soft targets: give probabilities, those with which x was drawn"
                )
            return self.soft_target_loss(flow, start, probabilities)
        if draws is None:
            draws = self.draw(flow, len(x), generator)
        return self.loss(flow, start, draws)


def parts_of(flow: LatentFlow) -> list[Part]:
    """Everything that learns, by layer, and then the base."""
    parts = []
    for number, layer in enumerate(flow.layers, 1):
        parts.append(Part("generator", number))
        if layer.posterior is not None:
            parts.append(Part("posterior", number))
    return [*parts, Part("base")] if flow.base.learned else parts


def _check_rows(flow: LatentFlow, x: Tensor) -> None:
    """Shapes alone: looking at values would wait for the device in every step."""
    if x.dim() != 2 or x.shape[-1] != flow.features:
        raise DataError(
            f"an estimator takes rows (B, D) with D = {flow.features} features, and got shape {tuple(x.shape)}; give every row "
            "the features that the model was built for"
        )
    if len(x) == 0:
        raise DataError("a loss is a mean over rows, and the batch has none; give at least one row")
