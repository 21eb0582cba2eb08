"""Runs that differ in their seed alone, as one: weights stacked, products batched, one launch for all.

The kernels of one small run leave most of a large GPU idle, and those of several runs side by side get in each other's way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.engine import (
    Feed,
    Machinery,
    StepNumber,
    draw_rows,
    draws_rows_at_once,
    move_average,
    products_are_quick,
    state_tensors,
    stats_of,
    undone,
)
from xorflow.training.optimiser import stack_optimiser
from xorflow.training.products import quick_products

PRECISIONS = ("auto", "32-true", "tf32", "64-true")
"""Those of which every operation has the same precision: the others are Fabric's business, which knows one run at a time."""


class Apart(Exception):
    """These runs cannot be trained as one; the message says why."""


class Ensemble:
    """The machinery of K runs as one piece of work for an engine.

    Every tensor that belongs to a run (its weights, the state of its estimator and of its optimiser, its average of weights)
    becomes a part of a stack (K, ...), and the run's own tensor a view of it: validation, checkpoints and results of each run
    work as if it were alone. Each run draws its own noise, from its own generator, as it would alone.

    A run equals the run alone to rounding, not bit for bit: batched products add up in another order. Nothing that happens to
    one run (a loss that is not finite, say) reaches another.

    Args:
        members: runs on the same data, with the same options but for the seed, at the same step.

    Raises:
        Apart: they are no such runs, or their step is none that can be stacked.
    """

    def __init__(self, members: Sequence[Machinery]) -> None:
        self.members = tuple(members)
        first = self.members[0]
        _require_alike(self.members)
        self.options, self.train = first.options, first.train
        self.batch_size, self.total_steps = first.batch_size, first.total_steps
        self._seeds = torch.cat([m.seeds for m in self.members])
        self._names = _first_names(first.step)
        self._weights = self._stack_states()
        self._slots = {name: self._weights[self._names[name]] for name in _slots(first.step)}
        stacks: dict[Tensor, Tensor] = {p: self._weights[name] for name, p in first.step.named_parameters()}
        self.optimiser = stack_optimiser(first.step, stacks, self.options, first.device)
        self.average = self._stack_averages()
        self.bound_sum = _stack([m.bound_sum for m in self.members])
        self._ones = torch.ones(len(self.members), dtype=first.flow.dtype, device=first.device)
        self._rehearse()
        self._stack_optimisers()  # from here on the runs count their steps together

    # ---- what an engine asks for ----

    @property
    def flow(self) -> LatentFlow:
        return self.members[0].flow

    @property
    def estimator(self) -> Estimator:
        return self.members[0].estimator

    @property
    def device(self) -> torch.device:
        return self.bound_sum.device

    @property
    def generators(self) -> Sequence[torch.Generator]:
        return [m.generator for m in self.members]

    @property
    def order_shape(self) -> tuple[int, ...]:
        return (len(self.members), len(self.train))

    def prepare(self, rows: Tensor, step: StepNumber) -> Feed:
        """The rows (K, B) of all runs in one gather, and the noise that each draws for itself."""
        size = rows.shape[1]
        x, context = self._rows(rows, step)
        draws = [m.estimator.draw(m.flow, size, m.generator) for m in self.members]
        context = context if self.flow.context_features else None
        chances = self.train.chances(rows.flatten()) if self.estimator.looks_at_grey else None
        return Feed(
            x=x.unflatten(0, (-1, size)),
            context=None if context is None else context.unflatten(0, (-1, size)),
            draws=torch.stack([d for d in draws if d is not None]) if draws[0] is not None else None,
            chances=None if chances is None else chances.unflatten(0, (-1, size)),
        )

    def _rows(self, rows: Tensor, step: StepNumber) -> tuple[Tensor, Tensor | None]:
        if draws_rows_at_once(self):
            return draw_rows(self.train, rows.flatten(), self._seeds, step)
        noise = None
        if self.train.stochastic:
            noise = torch.cat([self.train.draw_noise(rows.shape[1], g) for g in self.generators])
        batch = self.train.gather(rows.flatten(), noise)
        return self.flow.encode(batch.x), batch.context

    def run(self, feed: Feed, average_weight: float | Tensor) -> None:
        """One step of every run."""
        with quick_products(products_are_quick(self)):
            found = self._losses(feed)
            self._backward(found["loss"])
            if self.options.clip:
                self._clip()
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self._share_optimiser_state()
            stats = stats_of(found)
            for k, member in enumerate(self.members):
                member.estimator.update({name: value[k] for name, value in stats.items()})
            self.bound_sum += found["bound"]
            if self.average is not None:
                self._update_average(average_weight)

    def mutable_tensors(self) -> list[Tensor]:
        averages = [] if self.average is None else list(self.average.values())
        return [*self._weights.values(), *state_tensors(self.optimiser), *averages, self.bound_sum]

    # ---- the step ----

    def _losses(self, feed: Feed) -> dict[str, Tensor]:
        """What each run's step returns, stacked: one pass through the first run's module, with everyone's weights."""
        step = self.members[0].step

        def one(weights: dict[str, Tensor], *fed: Tensor | None):
            # torch's own treatment of shared weights leaves them behind in modules that are used twice
            return functional_call(step, weights, fed, tie_weights=False)

        fed = (feed.x, feed.context, feed.draws, feed.chances)
        given = [None if tensor is None else 0 for tensor in fed]
        return torch.vmap(one, in_dims=(0, *given))(self._slots, *fed)

    def _backward(self, losses: Tensor) -> None:
        losses.backward(self._ones.to(losses.dtype))  # as the sum's would be, in fewer launches

    @torch.no_grad()
    def _clip(self) -> None:
        gradients = [p.grad for p in self._weights.values() if p.grad is not None]
        squares = [g.flatten(1).square().sum(1) for g in gradients]
        norm = torch.stack(squares).sum(0).sqrt()  # (K,)
        scale = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1,) * (gradient.dim() - 1)))

    def _update_average(self, weight: float | Tensor) -> None:
        assert self.average is not None
        for name, tensor in self.average.items():
            move_average(tensor, self._weights[self._names[f"flow.{name}"]], weight)

    # ---- stacking ----

    def _stack_states(self) -> dict[str, Tensor]:
        """What a checkpoint would hold of each module is a run's own; masks, tables and the like are the same for all."""
        own = [m.step.state_dict(keep_vars=True) for m in self.members]
        stacks = {}
        for name in dict.fromkeys(self._names.values()):
            tensors = [state[name] for state in own]
            stacks[name] = _stack(tensors).requires_grad_(tensors[0].requires_grad)
        return stacks

    def _stack_averages(self) -> dict[str, Tensor] | None:
        averages = [m.average for m in self.members if m.average is not None]
        return {name: _stack([a[name] for a in averages]) for name in averages[0]} if averages else None

    def _stack_optimisers(self) -> None:
        """The states of optimisers that come from checkpoints; those of new runs are made by the first step."""
        for own, stack in self._pairs():
            states = [m.optimiser.state.get(p, {}) for m, p in zip(self.members, own, strict=True)]
            for key, value in states[0].items():
                if isinstance(value, Tensor):
                    joined = value if key == "step" else _stack([state[key] for state in states])
                    self.optimiser.state[stack][key] = joined
        self._shared = False
        self._share_optimiser_state()

    def _share_optimiser_state(self) -> None:
        """Give each run's optimiser its part of the state, once there is one; the count of steps is everyone's."""
        if self._shared or not self.optimiser.state:
            return
        for own, stack in self._pairs():
            state = self.optimiser.state[stack]
            for k, (member, parameter) in enumerate(zip(self.members, own, strict=True)):
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                member.optimiser.state[parameter] = {
                    key: value if key == "step" else value[k] for key, value in tensors.items()
                }
        self._shared = True

    def _pairs(self) -> list[tuple[list[Tensor], Tensor]]:
        """For each parameter that is trained, everyone's own and their stack."""
        named = [dict(m.step.named_parameters()) for m in self.members]
        return [
            ([parameters[name] for parameters in named], stack)
            for name, stack in self._weights.items()
            if stack.requires_grad
        ]

    # ---- what can go wrong ----

    def _rehearse(self) -> None:
        """Compute one gradient, to find out whether all of its operations can be stacked; it leaves no trace."""
        rows = torch.zeros(len(self.members), self.batch_size, dtype=torch.int64, device=self.device)
        first = StepNumber(torch.zeros(1, dtype=torch.int64, device=self.device), 0)
        with undone(self):
            try:
                self._backward(self._losses(self.prepare(rows, first))["loss"])
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).strip().splitlines()[0]
                raise Apart(f"their step cannot be stacked: {reason}") from error
            finally:
                self.optimiser.zero_grad(set_to_none=True)


def _first_names(step: nn.Module) -> dict[str, str]:
    """For each tensor of a module its first name: a part that is used twice has two."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in step.state_dict(keep_vars=True).items()}


def _slots(step: nn.Module) -> list[str]:
    """One name for each place where a module holds a tensor of its state; a module that is used twice is one place."""
    found: dict[tuple[nn.Module, str], str] = {}
    for name in step.state_dict():
        owner, _, attribute = name.rpartition(".")
        found.setdefault((step.get_submodule(owner), attribute), name)
    return list(found.values())


@torch.no_grad()
def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """A stack (K, ...) of which the given tensors become views, unnoticed by whoever holds them."""
    together = torch.stack([t.detach() for t in tensors])
    for own, part in zip(tensors, together, strict=True):
        own.data = part
    return together


def _require_alike(members: Sequence[Machinery]) -> None:
    first = members[0]
    if first.options.precision not in PRECISIONS:
        raise Apart(f"runs of precision {first.options.precision} are trained one by one")
    if first.options.optimiser == "muon":
        raise Apart("runs with Muon are trained one by one")
    reason = first.estimator.not_capturable(first.flow)
    if reason is not None:
        raise Apart(reason)
    for other in members[1:]:
        if other.options.alike() != first.options.alike():
            raise Apart("they differ in more than their seed")
        if other.train.values.data_ptr() != first.train.values.data_ptr():
            raise Apart("their data are not the same tensor")
        shapes, others = ([t.shape for t in m.step.state_dict().values()] for m in (first, other))
        if shapes != others or not _same_constants(first, other):
            raise Apart("their models are not the same")


def _same_constants(one: Machinery, other: Machinery) -> bool:
    kept = one.step.state_dict().keys()
    buffers, others = dict(one.step.named_buffers()), dict(other.step.named_buffers())
    return buffers.keys() == others.keys() and all(
        torch.equal(tensor, others[name]) for name, tensor in buffers.items() if name not in kept
    )
