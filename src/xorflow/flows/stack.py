"""What latent and deterministic flows share: layers, a base, and the pass from data to base."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xorflow._states import Alphabet
from xorflow.bases import FactorisedBase
from xorflow.conditioners.base import Source
from xorflow.errors import ModelError
from xorflow.flows import passes
from xorflow.flows.choices import Choices
from xorflow.flows.layer import Layer, LayerList
from xorflow.flows.likelihood import outcomes
from xorflow.flows.model import Model
from xorflow.flows.passes import Proposal
from xorflow.flows.sampling import SampleNoise
from xorflow.flows.trace import Draws, Known, Point, Trace
from xorflow.flows.validity import check_normalised, is_chain


class Stack(Model):
    """Layers and a base, checked to fit together and to be normalised when built.

    Args:
        layers: from data to base.
        base: the distribution of y.
    """

    def __init__(self, layers: Sequence[Layer] | LayerList, base: FactorisedBase) -> None:
        super().__init__()
        if not layers:
            raise ModelError("a flow needs at least one layer, and got none")
        self.layers = layers if isinstance(layers, LayerList) else LayerList(layers)
        self.base = base
        for index, layer in enumerate(self.layers):
            if layer.transform.states != base.states:
                raise ModelError(
                    f"every layer works on the features and categories of the base: layer {index + 1} has "
                    f"{layer.transform.states.features} features, the base {base.features}, or their categories differ"
                )
        widths = {layer.conditioner.context_features for layer in self.layers}
        if len(widths) > 1:
            raise ModelError(
                f"all layers see the same context, and these were made for widths {sorted(widths)}"
            )
        self._check_previous()
        generators = [layer.conditioner for layer in self.layers]
        check_normalised(generators)
        self.is_chain = is_chain(generators)

    def _check_previous(self) -> None:
        before = self.base.states  # the first layer's "previous" is the data
        for index, layer in enumerate(self.layers):
            for network in (layer.conditioner, layer.posterior):
                if network is not None and Source.PREVIOUS in network.sees and network.choices != before:
                    raise ModelError(
                        f"layer {index + 1} sees 'previous', which needs as many choices as the layer before has (or, in "
                        "layer 1, as the data have categories), and has others; use the same transform in both"
                    )
            before = layer.transform.choices

    @property
    def states(self) -> Alphabet:
        return self.base.states

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def context_features(self) -> int:
        return self.layers[0].conditioner.context_features

    @property
    def has_posterior(self) -> bool:
        return all(layer.posterior is not None for layer in self.layers)

    @property
    def first_layers(self) -> list[Layer]:
        return [self.layers[0]]

    @property
    def last_layer_summable(self) -> bool:
        """Whether the last layer's choices are independent given its inputs, so that they can be summed out."""
        return not self.layers[-1].autoregressive_in_u

    @property
    def shares_one_order(self) -> bool:
        """Whether all layers visit the features in one and the same ordering."""
        orders = {layer.conditioner.order for layer in self.layers}
        return len(orders) == 1 and None not in orders

    @property
    def dtype(self) -> torch.dtype:
        return self.base.logits.dtype

    @property
    def device(self) -> torch.device:
        return self.base.logits.device

    def _rows(self) -> list[tuple[str, object]]:
        layers = [(f"layer {number} of {self.depth}", layer) for number, layer in enumerate(self.layers, 1)]
        return [*super()._rows(), *layers, ("base", self.base)]

    def start(self, x: Tensor) -> Point:
        """The beginning of a pass, from integers x (..., D)."""
        x = self.states.integers(x)
        return Point(x=x, state=x)

    def run(
        self,
        start: Tensor | Point,
        *,
        draws: Draws,
        context: Tensor | None = None,
        stop: int | None = None,
        proposal: Proposal = "p",
        known: Known | None = None,
    ) -> Trace:
        """Pass from data (integers), or from any point of an earlier pass, towards the base.

        Args:
            start: integers (..., D), or a `Point`.
            draws: (..., L', D) for the L' layers passed; see `Draws`. Choices carry no gradient; log terms do.
            context: (..., C).
            stop: pass the layers before this one (default: all).
            proposal: whose distribution the choices are drawn from, the generator's p or the posterior's q.
            known: p of first layers at these very data, computed already.
        """
        point = start if isinstance(start, Point) else self.start(start)
        layers = list(self.layers)[point.layer : stop]
        return passes.run(layers, point, draws, context, proposal=proposal, known=known)

    def last_generator(self, point: Point, context: Tensor | None, known: Known | None = None) -> Choices:
        """The last layer's choice at a point before it, for layers whose choices can be summed out."""
        if not self.last_layer_summable:
            raise ModelError(
                "the last layer is autoregressive in its own u: its choices cannot be summed out"
            )
        last = self.layers[-1]
        return known[last] if known and last in known else last.generator_choices(point, context)

    def last_choices(self, point: Point, context: Tensor | None) -> tuple[Choices, list[Tensor]]:
        """The last layer's choice and the log base probability that each of its values leads to, by group (..., n, U)."""
        choices = self.last_generator(point, context)
        return choices, outcomes(self.layers[-1].transform, self.base, point.state)

    def draw_noise(self, count: int, generator: torch.Generator | None = None) -> SampleNoise:
        return SampleNoise.draw(self, count, generator)

    def floor(self) -> Tensor:
        return self.base.floor()
