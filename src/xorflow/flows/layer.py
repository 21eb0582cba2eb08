r"""Layers, each a transform and its networks: the pass through them from data to base, and its inverse.

That pass is the one primitive which likelihoods, estimators and samples are made of: a `Point` says where it stands, and a
`Trace` is the record of it.

A layer's inverse solves :math:`x = t_u(y),\ u = u(x, \text{noise})`, where u_d sees x before d only. With the noise held,
a fixed-point iteration on the whole vector gets at least one more feature of the ordering right in each pass, so it converges
within D + 1 passes, in practice within few: it ends with a full pass that changes nothing. How a layer is inverted is a rule: a
coupling takes one pass; a network that can be evaluated along its ordering is, on CUDA in one launch where there is one, and
otherwise block by block; any other network is iterated from y. What decoding gives is right but for rounding, and the iteration
goes on from there, as a rule for the one pass that confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from xorflow._repr import as_call, brief
from xorflow._states import Layout, add_buffers
from xorflow.conditioners.base import Conditioner, Incremental, Source
from xorflow.errors import ModelError
from xorflow.flows.choices import Choices, Draws, choose
from xorflow.transforms import ModularShift, Transform

Proposal = Literal["p", "q"]
"""Whose distribution choices are drawn from: the generator's p or the posterior's q."""


@dataclass(frozen=True)
class Point:
    """All that the layers still to come can see.

    Attributes:
        x: the data, integers (..., D); or relaxed, see `Alphabet`, in estimators that differentiate through states.
        state: the running state x^(l).
        previous: u^(l), the choice of the layer just applied (`None` before the first).
        layer: how many layers have been applied.
        context: what all networks see beside these, (..., C) or None.
    """

    x: Tensor
    state: Tensor
    previous: Tensor | None = None
    layer: int = 0
    context: Tensor | None = None

    def inputs(self, own: Tensor | None = None) -> dict[Source, Tensor]:
        """By source, what a conditioner can ask for here."""
        # the paper's u^(0) := x; posteriors of the first layer use it
        previous = self.x if self.previous is None else self.previous
        inputs = {Source.X: self.x, Source.STATE: self.state, Source.PREVIOUS: previous}
        return inputs if own is None else inputs | {Source.OWN: own}

    def after(self, layer: Layer, u: Tensor) -> Point:
        """The point behind the next layer, which is this one, where it takes the choice u."""
        return Point(self.x, layer.transform.to_base(self.state, u), u, self.layer + 1, self.context)


@dataclass(frozen=True)
class Trace:
    """The record of a pass through some layers: choices, their distributions, and where it ended.

    Leading shapes broadcast: with draws (S, B, L, D) and data (B, D), what depends on draws has shape (S, B, ...), and
    what does not, such as the first layer's logits, is computed once for all S.

    Attributes:
        start: where the pass began.
        end: where it ended.
        us: the choices, integers, one tensor for each layer passed.
        generator: p's choices, one for each layer passed.
        posterior: q's choices, if u was drawn from q.
    """

    start: Point
    end: Point
    us: tuple[Tensor, ...]
    generator: tuple[Choices, ...]
    posterior: tuple[Choices, ...] | None = None

    @property
    def u(self) -> Tensor:
        """The choices as integers (..., L, D)."""
        return _stacked(self.us)

    def entropy(self) -> Tensor:
        """That of each choice given its parents, in nats, (..., L, D)."""
        return _stacked([p.entropy() for p in self.generator])

    def log_p(self) -> Tensor:
        """log p(u_d | parents) of every choice, (..., L, D), with graph."""
        return _stacked([p.log_prob(u) for p, u in zip(self.generator, self.us, strict=True)])

    def log_q(self) -> Tensor:
        """log q(u_d | inputs) of every choice, (..., L, D), with graph."""
        assert self.posterior is not None, "the choices of this trace were not drawn from the posterior"
        return _stacked([q.log_prob(u) for q, u in zip(self.posterior, self.us, strict=True)])


def _stacked(by_layer: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*by_layer), -2)


class Layer(nn.Module):
    """One step from data to base.

    A coupling leaves the features of its mask alone: there p puts all mass on u = 0, and so does q, whatever its network says.

    Args:
        conditioner: the generator's network, p(u | what it sees).
        transform: the bijections to choose from; a shift modulo K (xor for K = 2) by default.
        posterior: an optional network for q(u | what it sees), which may look at anything but u itself.
        relative: the posterior's logits are added to the generator's: it has to learn only how the data change them.
        frozen: its weights stay as they are.
    """

    held: Tensor | None  # whether a logit is of a feature that a coupling leaves alone, (flat,)
    identity: Tensor | None  # logits that are certain of u = 0, (flat,)

    def __init__(
        self,
        conditioner: Conditioner,
        transform: Transform | None = None,
        posterior: Conditioner | None = None,
        relative: bool = False,
        frozen: bool = False,
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
        self.layout = self.transform.layout
        mask, choices = conditioner.mask, self.transform.choices
        held = None if mask is None else mask[choices.logit_features]
        add_buffers(self, held=held, identity=None if held is None else choices.certain_zero())
        if frozen:
            self.requires_grad_(False)

    @property
    def frozen(self) -> bool:
        """Whether it has weights, and none of them learns."""
        learns = [weight.requires_grad for weight in self.parameters()]
        return bool(learns) and not any(learns)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("conditioner", "transform", "posterior", "relative", "frozen")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        settings = self.config()
        if type(self.transform) is ModularShift:
            settings["transform"] = None
        return as_call(self, settings, repr(settings.pop("conditioner")))

    def _check_fit(self, role: str, network: Conditioner) -> None:
        for what, have, need in (
            ("categories", network.states, self.transform.states),
            ("choices", network.choices, self.transform.choices),
        ):
            if have != need:
                raise ModelError(
                    f"the {role}'s {what} must be those of its transform, {brief(need.sizes)}, "
                    f"and are {brief(have.sizes)}; build it with {what}=..."
                )

    @property
    def order(self) -> tuple[int, ...] | None:
        """That of its network; of a coupling, first the features that it leaves alone, which tell all others."""
        mask = self.conditioner.mask
        if mask is None:
            return self.conditioner.order
        return tuple(torch.argsort((~mask).int(), stable=True).tolist())

    @property
    def autoregressive_in_u(self) -> bool:
        """Whether p(u) is a chain over features, so that a draw of u needs several passes."""
        return Source.OWN in self.conditioner.sees

    def generator_choices(self, point: Point, own: Tensor | None = None) -> Choices:
        """p(u | what it sees) at a point of the pass; `own` is u itself, for a layer that sees it."""
        return Choices(self.conditioner(point.inputs(own), point.context), self.layout)

    def posterior_choices(self, point: Point, generator: Choices | None = None) -> Choices:
        """q(u | what it sees) at a point of the pass; `generator` is p there, if it is known already."""
        if self.posterior is None:
            raise ModelError("this needs a posterior in every layer; build Layer(..., posterior=MLP(...))")
        logits = self.posterior(point.inputs(), point.context)
        if self.relative:
            logits = logits + (generator or self.generator_choices(point)).logits
        return Choices(self._on_support(logits), self.layout)

    def choose(
        self, point: Point, draws: Draws, proposal: Proposal = "p"
    ) -> tuple[Tensor, Choices, Choices | None]:
        """u by the draws (..., D) from the proposal, p(u | what it sees) and, if that is the proposal, q(u | what it sees)."""
        p = None if self.autoregressive_in_u else self.generator_choices(point)
        q = self.posterior_choices(point, p) if proposal == "q" else None
        drawn = q or p
        u = self._choose_in_order(point, draws) if drawn is None else choose(drawn, draws)
        return u, p or self.generator_choices(point, u), q

    @torch.no_grad()
    def _choose_in_order(self, point: Point, draws: Draws) -> Tensor:
        """u of a layer that sees its own u: the fixed point of whole vectors with the noise held."""
        choices = self.transform.choices
        if isinstance(draws, Tensor) and not draws.is_floating_point():
            return choices.integers(draws)
        start = torch.zeros_like(point.state, dtype=choices.dtype)
        return fixed_point(lambda u: choose(self.generator_choices(point, u), draws), start)

    def _on_support(self, logits: Tensor) -> Tensor:
        """Logits that are certain of u = 0, and have no gradient, at features that the layer leaves alone."""
        if self.held is None or self.identity is None:
            return logits
        return torch.where(self.held, self.identity.to(logits.dtype), logits)


class LayerList(nn.ModuleList):
    """Layers from data to base: an `nn.ModuleList` that says what it holds."""

    def __iter__(self) -> Iterator[Layer]:
        return super().__iter__()  # pyright: ignore[reportReturnType]

    @overload
    def __getitem__(self, idx: int) -> Layer: ...
    @overload
    def __getitem__(self, idx: slice) -> LayerList: ...
    def __getitem__(self, idx: int | slice) -> Layer | LayerList:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__getitem__(idx)  # pyright: ignore[reportReturnType]


# ---- from base to data ----

_BLOCK_SIZE = 56
"""Features decoded together: large enough to amortise a block's overhead, small enough to converge in few rounds."""


def invert_layer(layer: Layer, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """x from y of one layer, by the rule above."""
    if layer.conditioner.mask is not None:  # a coupling layer's network sees only what the layer leaves alone
        return _step(layer, y, y, draws, context)
    return by_passes(layer, y, draws, context, by_decoding(layer, y, draws, context))


def by_passes(
    layer: Layer, y: Tensor, draws: Draws, context: Tensor | None, guess: Tensor | None = None
) -> Tensor:
    """The fixed-point iteration, from y or from a better guess."""
    return fixed_point(lambda x: _step(layer, x, y, draws, context), y if guess is None else guess)


def by_decoding(layer: Layer, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor | None:
    """x, right but for rounding, by a network that can be evaluated along its ordering; None if it can't."""
    decoder = layer.conditioner.incremental(len(y), context, _BLOCK_SIZE) if y.dim() == 2 else None
    if decoder is None:
        return None
    order = torch.tensor(layer.conditioner.order, device=y.device)
    base = y.index_select(-1, order)
    noise = draws if isinstance(draws, str) else draws.index_select(-1, order)
    decoded = None
    if layer.transform.is_xor:
        # uniforms of one half are what the most probable choice is drawn by
        halves = torch.full(base.shape, 0.5, device=y.device) if isinstance(noise, str) else noise
        decoded = decoder.decode(base, halves)
    if decoded is None:
        decoded = _decode(layer, decoder, order, base, noise)
    return torch.empty_like(decoded).index_copy_(-1, order, decoded)


def _decode(layer: Layer, decoder: Incremental, order: Tensor, base: Tensor, noise: Draws) -> Tensor:
    """x in the arrangement of the ordering, decoded block by block."""
    decoded = torch.empty_like(base)
    layouts: dict[tuple[int, ...], Layout] = {}
    for ranks in decoder.blocks:
        features = order[ranks]
        sizes = layer.transform.choices.of(features.tolist()).sizes
        if sizes not in layouts:
            layouts[sizes] = layer.layout.of(features.tolist())
        block_noise = noise if isinstance(noise, str) else noise[..., ranks]
        x, size = base[:, ranks], ranks.stop - ranks.start
        for trial in range(size):  # trial k gets at least the block's first k + 1 features right
            u = choose(Choices(decoder.logits(ranks, x), layouts[sizes]), block_noise)
            before, x = x, layer.transform.to_data(base[:, ranks], u, features)
            # a comparison makes the host wait for the device
            if trial + 1 < size and torch.equal(x, before):
                break
        decoder.update(ranks, x)
        decoded[:, ranks] = x
    return decoded


def _step(layer: Layer, x: Tensor, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """x from y by the choices that a guess of x leads to."""
    u, *_ = layer.choose(Point(x, x, context=context), draws)
    return layer.transform.to_data(y, u)


def fixed_point(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """What a step leaves as it is, from `start` on; each step gets one more feature of an ordering right."""
    x = start
    for _ in range(x.shape[-1] + 1):
        following = step(x)
        if torch.equal(following, x):
            return x
        x = following
    raise ModelError(
        "an autoregressive layer is inverted within D + 1 passes, and this one is not: its logits are not finite, or its "
        "network sees what it must not; train again with a smaller lr, or mend the network"
    )
