"""What latent and deterministic flows share: layers, a base, and the pass from data to base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from xorflow._states import Alphabet
from xorflow.bases import FactorisedBase
from xorflow.conditioners.base import Source
from xorflow.errors import ModelError
from xorflow.flows.choices import Choices
from xorflow.flows.layer import Layer, LayerList
from xorflow.flows.legality import check_normalised, is_chain
from xorflow.flows.trace import Point, Trace

GREEDY: Literal["greedy"] = "greedy"
Draws = Tensor | Literal["greedy"]
"""Uniforms in (0, 1) if floating, the choices u themselves if integers, both (..., L, D); or the most probable choice."""


class Stack(nn.Module):
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
    def features(self) -> int:
        return self.base.features

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

    def encode(self, x: Tensor) -> Tensor:
        """Integers to the networks' floats."""
        return self.states.encode(x, self.dtype)

    def start(self, x: Tensor, remember: bool = False) -> Point:
        """The beginning of a pass, from encoded data.

        Args:
            x: encoded data.
            remember: whether it keeps the choices of the first layer, so that several passes from here, with the same context,
                evaluate its network once.
        """
        return Point(x=x, state=x, known={} if remember else None)

    def run(
        self,
        start: Tensor | Point,
        *,
        draws: Draws,
        context: Tensor | None = None,
        stop: int | None = None,
        proposal: Literal["p", "q"] = "p",
    ) -> Trace:
        """Pass from data (encoded), or from any point of an earlier pass, towards the base.

        Args:
            start: encoded data, or a `Point`.
            draws: (..., L', D) for the L' layers passed; see `Draws`. Choices carry no gradient; log terms do.
            context: (..., C).
            stop: pass the layers before this one (default: all).
            proposal: whose distribution the choices are drawn from, the generator's p or the posterior's q.
        """
        point = start if isinstance(start, Point) else self.start(start)
        first, stop = point.layer, self.depth if stop is None else stop
        us: list[Tensor] = []
        generator: list[Choices] = []
        posterior: list[Choices] = []
        beginning = point
        for index in range(first, stop):
            layer = self.layers[index]
            layer_draws = draws if isinstance(draws, str) else draws[..., index - first, :]
            if proposal == "q":
                p = None if layer.autoregressive_in_u else layer.generator_choices(point, context)
                q = layer.posterior_choices(point, context, p)
                u = choose(q, layer_draws, layer.transform.choices, self.dtype)
                p = p or layer.generator_choices(point, context, u)
                posterior.append(q)
            else:
                p, u = _draw_from_generator(layer, point, layer_draws, context, self.dtype)
            us.append(u)
            generator.append(p)
            point = Point(point.x, layer.transform.relaxed_to_base(point.state, u), u, index + 1)
        passed = tuple(self.layers[i].transform.choices for i in range(first, stop))
        return Trace(
            beginning,
            point,
            passed,
            tuple(us),
            tuple(generator),
            tuple(posterior) if proposal == "q" else None,
        )

    def last_generator(self, point: Point, context: Tensor | None) -> Choices:
        """The last layer's choice at a point before it, for layers whose choices can be summed out."""
        if not self.last_layer_summable:
            raise ModelError(
                "the last layer is autoregressive in its own u: its choices cannot be summed out"
            )
        return self.layers[-1].generator_choices(point, context)

    def last_choices(self, point: Point, context: Tensor | None) -> tuple[Choices, Tensor]:
        """The last layer's choice and, for each of its values, the log base probability it leads to (..., D, U)."""
        choices = self.last_generator(point, context)
        return choices, self.layers[-1].transform.outcomes(self.base.log_table(), point.state)


def choose(choices: Choices, draws: Draws, alphabet: Alphabet, dtype: torch.dtype) -> Tensor:
    """u by the draws: the most probable value, by inversion of uniforms, or given as integers; without gradient."""
    with torch.no_grad():
        if isinstance(draws, str):
            return choices.mode()
        return choices.sample(draws) if draws.is_floating_point() else alphabet.encode(draws, dtype)


def _draw_from_generator(
    layer: Layer, point: Point, draws: Draws, context: Tensor | None, dtype: torch.dtype
) -> tuple[Choices, Tensor]:
    if not layer.autoregressive_in_u:
        choices = layer.generator_choices(point, context)
        return choices, choose(choices, draws, layer.transform.choices, dtype)
    u = _sequential_choice(layer, point, draws, context, dtype)
    return layer.generator_choices(point, context, u), u


@torch.no_grad()
def _sequential_choice(
    layer: Layer, point: Point, draws: Draws, context: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """u of a layer that sees its own u: a fixed-point iteration on the whole vector, the noise held.

    After pass k at least the first k features of the ordering are right, so D + 1 passes always do; usually far fewer.
    """
    alphabet = layer.transform.choices
    if isinstance(draws, Tensor) and not draws.is_floating_point():
        return alphabet.encode(draws, dtype)
    lead = layer.transform.states.batch_shape(point.state)
    zero = torch.zeros(*lead, alphabet.features, dtype=torch.int64, device=point.state.device)
    u = alphabet.encode(zero, dtype)
    for _ in range(alphabet.features + 1):
        following = choose(layer.generator_choices(point, context, u), draws, alphabet, dtype)
        if following.shape == u.shape and torch.equal(following, u):
            return u
        u = following
    raise AssertionError("a strictly autoregressive layer converges within D + 1 passes")
