"""A finite mixture of flows: one of them, drawn at random, makes x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._states import by_inversion
from xorflow.errors import Intractable, ModelError
from xorflow.flows.conditionals import Conditionals, MixedConditionals
from xorflow.flows.flow import Flow, LatentFlow
from xorflow.flows.layer import Layer, Point
from xorflow.flows.model import Model, SampleNoise, check_alike

Component = Flow | LatentFlow


class Mixture(Model):
    r"""Flows over the same space, each with a weight,

    .. math:: p(x) = \sum_m w_m\, p_m(x),

    for example one network under several orderings, or several networks. Exact by log-sum-exp where every component is.

    .. math:: \log p(x) \ge \max_m\, [\log p_m(x) + \log w_m]

    so for each x it loses at most :math:`\log (1 / w_m)` nats to component m, which for equal weights is :math:`\log M`, and
    gains where the components differ.

    Args:
        components: at least two flows, over the same categories and with the same context.
        weights: their probabilities; equal ones by default.
        learned: whether training may change the weights.

    >>> from xorflow import FactorisedBase, Layer, MADE
    >>> flows = [LatentFlow([Layer(MADE(3, order=o))], FactorisedBase(3)) for o in ("natural", "reversed")]
    >>> Mixture(flows)().log_prob(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1])
    """

    def __init__(
        self,
        components: Sequence[Component],
        weights: Sequence[float] | Tensor | None = None,
        learned: bool = True,
    ) -> None:
        _check(components)
        super().__init__(components[0].states, components[0].context_features)
        self.components = nn.ModuleList(components)
        self.learned = learned
        start = _checked(weights, len(components)).log()
        self.logits = nn.Parameter(start.to(components[0].device, components[0].dtype), requires_grad=learned)

    def __iter__(self) -> Iterator[Component]:
        for component in self.components:
            assert isinstance(component, Component)
            yield component

    def __len__(self) -> int:
        return len(self.components)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, but for the weights, which may learn."""
        return {"components": list(self), "learned": self.learned}

    @property
    def flows(self) -> list[Component]:
        return list(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def has_closed_form(self) -> bool:
        return all(component.has_closed_form for component in self)

    # ---- what estimators ask of a flow ----

    @property
    def depth(self) -> int:
        """That of the deepest component."""
        return max(component.depth for component in self)

    @property
    def layers(self) -> list[Layer]:
        """Those of all components, one component after the other."""
        return [layer for component in self for layer in component.layers]

    @property
    def last_layer_summable(self) -> bool:
        """Whether every component is a latent flow whose last layer can be summed out."""
        return all(isinstance(flow, LatentFlow) and flow.last_layer_summable for flow in self)

    # ---- what it is itself ----

    def _rows(self) -> list[tuple[str, object]]:
        weights = self.log_weights().detach().exp().tolist()
        components = [
            (f"component {number}, of weight {weight:.4g}", component)
            for number, (weight, component) in enumerate(zip(weights, self, strict=True), 1)
        ]
        return [*super()._rows(), *components]

    def greedy(self) -> Mixture:
        """The mixture of the components' deterministic flows, with these very weights; exact at any depth."""
        return self.of([component.greedy() for component in self])

    def of(self, components: Sequence[Component]) -> Mixture:
        """Other components with these weights, which are shared."""
        twin = Mixture(components, learned=self.learned)
        twin.logits = self.logits
        return twin

    def log_weights(self) -> Tensor:
        """(M,)."""
        return torch.log_softmax(self.logits, 0)

    def log_likelihood(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        log_likelihoods = []
        for number, component in enumerate(self, 1):
            try:
                log_likelihoods.append(component.log_likelihood(x, context))
            except Intractable as error:
                raise Intractable(
                    f"the likelihood of a mixture needs that of every component, and component {number} has none: {error}"
                ) from None
        return self.combined(log_likelihoods)

    def conditionals(self, context: Tensor | None = None) -> Conditionals:
        return MixedConditionals([c.conditionals(context) for c in self], self.log_weights())

    def log_marginal_total(self, point: Point) -> Tensor:
        """log p(x), (B,), of components that are latent flows in closed form; for training."""
        return self.combined([flow.log_marginal_total(point) for flow in self.latent_components()])

    def latent_components(self) -> list[LatentFlow]:
        """Those that are latent flows; all, if it can be trained."""
        return [component for component in self if isinstance(component, LatentFlow)]

    def check_trainable(self) -> None:
        """Raise `ModelError` unless `log_marginal_total` is there: gradients need latent flows in closed form."""
        for number, component in enumerate(self, 1):
            if isinstance(component, Flow) or not component.has_closed_form:
                raise ModelError(
                    "a mixture is trained by the exact likelihood of latent flows of depth 1 that do not see their own u, "
                    f"and component {number} is none: train its components first, and mix them then"
                )

    def combined(self, log_likelihoods: Sequence[Tensor]) -> Tensor:
        values = torch.stack(list(log_likelihoods))
        return torch.logsumexp(values + self.log_weights().to(values.dtype).unsqueeze(-1), 0)

    @torch.no_grad()
    def floor(self) -> Tensor:
        r"""No mixture of flows on these bases has a smaller negative log-likelihood, in nats."""
        best = torch.stack([-component.base.floor() for component in self])
        return -torch.logsumexp(self.log_weights().double() + best, 0)

    def draw_noise(self, count: int, generator: torch.Generator | None = None) -> SampleNoise:
        depth = self.depth
        # all noise of a row lies side by side, so that more samples begin with those of fewer, as they do for flows
        size = (count, 1 + (depth + 1) * self.features)
        uniforms = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        rows = uniforms[:, 1:].unflatten(-1, (depth + 1, self.features))
        return SampleNoise(rows[:, 0], rows[:, 1:], uniforms[:, 0])

    @torch.no_grad()
    def sample_with(self, noise: SampleNoise, context: Tensor | None = None) -> Tensor:
        """Integers x (N, D) as a function of given noise: each row is made by one component."""
        assert noise.component is not None, "this noise was not drawn for a mixture"
        chosen = by_inversion(self.log_weights().exp(), noise.component)  # (N,)
        x = torch.empty(len(chosen), self.features, dtype=torch.int64, device=self.device)
        if context is not None:
            context = context.expand(len(chosen), context.shape[-1])
        for index, component in enumerate(self):
            rows = (chosen == index).nonzero()[:, 0]
            if not len(rows):
                continue
            component_noise = SampleNoise(noise.base[rows], noise.layers[rows, : component.depth])
            x[rows] = component.sample_with(component_noise, None if context is None else context[rows])
        return x


def _check(components: Sequence[Component]) -> None:
    if len(components) < 2:
        raise ModelError(
            f"a mixture has at least two components, and got {len(components)}; a single flow needs no mixture"
        )
    for number, component in enumerate(components, 1):
        if not isinstance(component, Component):
            raise ModelError(
                f"the components of a mixture are Flow or LatentFlow, and component {number} is a "
                f"{type(component).__name__}"
            )
    check_alike("component", "of a mixture", components)


def _checked(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    probabilities = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if probabilities.shape != (count,):
        raise ModelError(
            f"a mixture has one weight for each of its {count} components, and got shape {tuple(probabilities.shape)}"
        )
    if not bool((probabilities > 0).all()) or abs(float(probabilities.sum()) - 1) > 1e-6:
        raise ModelError(
            f"the weights of a mixture are positive and sum to 1, and got {[round(w, 6) for w in probabilities.tolist()]}"
        )
    return probabilities
