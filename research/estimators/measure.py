"""One estimator on one batch at given weights: its draws, the figures they give, and what a draw costs in passes and time."""

from __future__ import annotations

import copy
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from research.estimators.oracles import Oracle, description, find_oracle
from research.estimators.statistics import CHANCE, Stream, figures, groups_of, rounded
from research.results import Record
from xorflow import LatentFlow
from xorflow.data import Batch
from xorflow.estimators import Estimator, Part, Target
from xorflow.training import build_estimator, tf32_matmul

_CONTROL_RATE = 0.01
"""The learning rate of an estimator's own parameters at first; it falls to zero, so that they converge."""

_MORE_DRAWS = (4, 16)
"""How many times the draws decide about a bias that chance alone seldom makes."""


class Bench:
    """A flow at given weights and one batch; exact gradients are computed once for all estimators.

    Gradients are taken in float64, so that what an unbiased estimator is off by is noise and not rounding. Time is taken on
    the flow as it is trained.

    Args:
        flow: the model, as it is trained.
        batch: the data.
        others: batches from which running estimates and control variates learn before they are frozen.
        draws: of each estimator.
        seed: of all noise.
    """

    def __init__(
        self, flow: LatentFlow, batch: Batch, others: Sequence[Batch], draws: int, seed: int = 0
    ) -> None:
        self.plain = _without_dropout(flow)
        self.flow = copy.deepcopy(self.plain).double()
        self._draws, self._seed = draws, seed
        self._batch = self._of_batch(self.flow, batch)
        self._plain_batch = self._of_batch(self.plain, batch)
        self._others = [self._of_batch(self.flow, other) for other in others]
        self._oracles: dict[tuple[Target, int], Oracle | None] = {}
        self._offset = self._add_offset()
        self.parts, self._slices, self._parameters = self._lay_out()
        size = sum(p.numel() for p in self._parameters)
        self._pixels = slice(size, size + self._offset.numel())

    def _of_batch(self, flow: LatentFlow, batch: Batch) -> tuple[Tensor, Tensor | None]:
        context = batch.context if flow.context_features else None
        x = flow.states.integers(batch.x.to(flow.device))
        return x, None if context is None else context.to(flow.device, flow.dtype)

    def _add_offset(self) -> Tensor:
        """Zeros that are added to the last layer's logits: their gradient is that of its output biases, in any network."""
        last = self.flow.layers[-1]
        shape = last.transform.choices.flat
        offset = torch.zeros(shape, dtype=torch.float64, device=self.flow.device, requires_grad=True)

        def shifted(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            del module, inputs
            return output + offset

        last.conditioner.register_forward_hook(shifted)
        return offset

    def _lay_out(self) -> tuple[list[Part], list[slice], list[Tensor]]:
        """Which parts learn, where each lies in a gradient, and all parameters one after the other."""
        owners: list[tuple[Part, nn.Module]] = []
        for number, layer in enumerate(self.flow.layers, 1):
            owners.append((Part("generator", number), layer.conditioner))
            if layer.posterior is not None:
                owners.append((Part("posterior", number), layer.posterior))
        owners.append((Part("base", None), self.flow.base))
        parts, slices, parameters = [], [], []
        first = 0
        for part, owner in owners:
            learning = [p for p in owner.parameters() if p.requires_grad]
            if learning:
                size = sum(p.numel() for p in learning)
                parts.append(part)
                slices.append(slice(first, first + size))
                parameters += learning
                first += size
        return parts, slices, parameters

    # ---- gradients ----

    def gradient(self, value: Tensor) -> Tensor:
        """Of a value with graph, in all parameters and then in the last layer's output biases, as one vector (P,)."""
        inputs = [*self._parameters, self._offset]
        slopes = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        return torch.cat([slope.flatten() for slope in slopes])

    def _draw(self, estimator: Estimator, generator: torch.Generator) -> Tensor:
        x, context = self._batch
        draws = estimator.draw(self.flow, len(x), generator)
        return self.gradient(-estimator.loss(self.flow, self.flow.start(x, context), draws).surrogate)

    def collect(
        self, estimator: Estimator, name: str, centre: Tensor | None = None, draws: int | None = None
    ) -> Stream:
        """The draws of an estimator, in independent groups; a single one of an estimator that draws nothing."""
        size = self._pixels.stop
        middle = torch.zeros(size, dtype=torch.float64, device=self.flow.device) if centre is None else centre
        if estimator.noise_shape(self.flow) is None:
            stream = Stream(self._slices, size, 1, middle, self._pixels)
            stream.add(self._draw(estimator, self._generator(name)))
            stream.close(0, 1)
            return stream
        groups, count = groups_of(draws or self._draws)
        stream = Stream(self._slices, size, groups, middle, self._pixels)
        advance, _ = self._repeatable(
            estimator, self.flow, lambda generator: stream.add(self._draw(estimator, generator)), name
        )
        stream.clear()
        for group in range(groups):
            for _ in range(count):
                advance()
            stream.close(group, count)
        return stream

    def _repeatable(
        self, estimator: Estimator, flow: LatentFlow, step: Callable[[torch.Generator], object], name: str
    ) -> tuple[Callable[[], object], str]:
        """A step of an estimator, to be repeated, captured if it can be; see `repeatable`."""
        captured = estimator.not_capturable(flow) is None
        return repeatable(step, lambda: self._generator(name), flow.device, captured=captured)

    def _generator(self, name: str) -> torch.Generator:
        """Noise of its own for whatever has a name, so that nothing depends on what was measured before."""
        seed = (self._seed << 32) + zlib.crc32(name.encode())
        return torch.Generator(self.flow.device).manual_seed(seed)

    def oracle(self, target: Target, draws: int) -> Oracle | None:
        """The exact gradient of an objective; if it has to be averaged, over so many draws."""

        def average(estimator: Estimator) -> tuple[Tensor, int]:
            estimator.check(self.flow)
            estimator.prepare(self.flow)
            stream = self.collect(estimator, f"oracle {target} {draws}", draws=draws)
            return stream.means(slice(0, self._pixels.stop)), stream.count

        if (target, draws) not in self._oracles:
            x, context = self._batch
            oracle = find_oracle(target, self.flow, x, context, self.gradient, average)
            self._oracles[target, draws] = oracle
        return self._oracles[target, draws]

    # ---- an estimator ----

    def measure(self, text: str) -> Record:
        """Everything about an estimator: a row for each part that it reaches, and a map of its variance over the features.

        A bias of more than three standard errors where none is claimed is measured again, with more draws and fresh noise, and
        once more: chance is not repeated, a bias is, and stands out from less noise each time. What was found before is kept.
        """
        estimator = build_estimator(text)
        estimator.check(self.flow)
        warmed = self._warm_up(estimator, f"warm-up {text}")
        rows, stream = self._rows(estimator, text, self._draws)
        for number, draws in enumerate(_MORE_DRAWS, 1):
            if not any(map(_is_suspect, rows)):
                break
            before = {(row["part"], row["layer"]): row for row in rows}
            name = f"{text} again" + (f" {number}" if number > 1 else "")
            rows, stream = self._rows(estimator, name, draws * self._draws)
            for row in rows:
                last = before[row["part"], row["layer"]]
                bias = {key: last[key] for key in ("bias", "bias_stderr", "bias_noise", "draws")}
                row["earlier"] = [*last.get("earlier", ()), bias]
        shared = {"batch": len(self._batch[0]), "warm_up": warmed, **self.cost(text)}
        return {"rows": [row | shared for row in rows], "variance_by_feature": self._map(stream)}

    def _rows(self, estimator: Estimator, name: str, draws: int) -> tuple[list[Record], Stream]:
        """The figures of every part that the estimator reaches, and the draws that they come from."""
        target = estimator.target(self.flow)
        oracle = self.oracle(target, draws)
        centre = None if oracle is None else oracle.means.mean(0)
        stream = self.collect(estimator, name, centre, draws)
        rows = []
        for index, part in enumerate(self.parts):
            exact = None if oracle is None else oracle.means[:, self._slices[index]]
            of_part = figures(stream, index, exact)
            if of_part is None:
                continue
            about = {
                "part": part.role,
                "layer": part.layer,
                "claim": "biased" if estimator.bias_of(self.flow, part) else "unbiased",
                "objective": description(target),
                "oracle": None if oracle is None else oracle.description(part, self.flow.depth),
            }
            rows.append(about | rounded(of_part) | {"draws": stream.count, "groups": len(stream.counts)})
        return rows, stream

    def _map(self, stream: Stream) -> list[float]:
        """The variance of the gradient in the last layer's output biases, one for each feature."""
        by_entry = stream.entry_variances().reshape(self._offset.shape)
        by_feature = by_entry if by_entry.dim() == 1 else by_entry.sum(-1)
        return [float(f"{value:.3g}") for value in by_feature.clamp_min(0).tolist()]

    def _warm_up(self, estimator: Estimator, name: str) -> int:
        """Let running estimates and control variates learn, from other batches; how many steps they had."""
        estimator.prepare(self.flow)
        if not estimator.state_dict() or not self._others:
            return 0
        controls = list(estimator.parameters())
        optimiser = torch.optim.Adam(controls, lr=_CONTROL_RATE) if controls else None
        generator = self._generator(name)
        for step, (x, context) in enumerate(self._others):
            draws = estimator.draw(self.flow, len(x), generator)
            loss = estimator.loss(self.flow, self.flow.start(x, context), draws)
            if optimiser is not None and loss.control is not None:
                for parameter, slope in zip(
                    controls, torch.autograd.grad(loss.control, controls), strict=True
                ):
                    parameter.grad = slope
                optimiser.param_groups[0]["lr"] = _CONTROL_RATE * (1 - step / len(self._others))
                optimiser.step()
            estimator.update(loss.stats)
        return len(self._others)

    # ---- cost ----

    def cost(self, text: str) -> Record:
        """Network passes and time of one gradient, of all that learns."""
        estimator = build_estimator(text)
        estimator.prepare(self.plain)
        x, context = self._plain_batch
        learns = [p for module in (self.plain, estimator) for p in module.parameters() if p.requires_grad]

        def step(generator: torch.Generator) -> None:
            draws = estimator.draw(self.plain, len(x), generator)
            loss = estimator.loss(self.plain, self.plain.start(x, context), draws)
            total = loss.surrogate if loss.control is None else loss.surrogate + loss.control
            torch.autograd.grad(total, learns, allow_unused=True)

        with counted_passes(self.plain, len(x)) as passes:
            step(self._generator(text))
        device = self.plain.device
        with tf32_matmul(device.type == "cuda"):
            advance, kind = self._repeatable(estimator, self.plain, step, f"cost {text}")
            taken = milliseconds(advance, device)
        counts = {"passes": passes["forward"], "backward_passes": passes["backward"]}
        return rounded(counts | {"milliseconds": taken}, 4) | {"step": kind}


def _is_suspect(row: Record) -> bool:
    """Whether an estimator that claims to have no bias seems to have one.

    By the error of an unbiased estimator: that of the bias itself grows with the bias, and would hide it.
    """
    if row["claim"] != "unbiased" or row["bias"] is None or not row["bias_noise"]:
        return False
    return abs(row["bias"]) > CHANCE * row["bias_noise"]


def _without_dropout(flow: LatentFlow) -> LatentFlow:
    """A copy in training mode, which recurrent kernels need for gradients, but with every unit there."""
    copied = copy.deepcopy(flow).train()
    for module in copied.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return copied


# ---- cost: network passes and time; and how a step is repeated, as one captured launch where it can be ----


_TIMED_BLOCKS, _STEPS_A_BLOCK = 5, {"cuda": 40, "cpu": 1}
_WARM_UP_STEPS = 3
"""Before a capture: libraries allocate what they will."""


@contextmanager
def counted_passes(flow: LatentFlow, rows: int) -> Iterator[dict[str, float]]:
    """Counts evaluations of networks, in batches; `backward` are those that a gradient goes back through."""
    passes = {"forward": 0.0, "backward": 0.0}

    def count(module: Any, inputs: object, output: Tensor) -> None:
        del inputs
        share = output.numel() / module.choices.flat / rows
        passes["forward"] += share
        passes["backward"] += share * output.requires_grad

    networks = [n for layer in flow.layers for n in (layer.conditioner, layer.posterior) if n is not None]
    hooks = [network.register_forward_hook(count) for network in networks]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def repeatable(
    step: Callable[[torch.Generator], object],
    noise: Callable[[], torch.Generator],
    device: torch.device,
    *,
    captured: bool,
) -> tuple[Callable[[], object], str]:
    """The step as something to be called again and again, and whether that is one captured launch or not.

    It has then been executed a few times.
    """
    if device.type == "cuda" and captured:
        try:
            return _captured(step, noise(), device), "captured"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a step that copies from the host, such as one of a network that we do not know
            torch.cuda.synchronize(device)
    generator = noise()  # a generator that a capture failed with is of no use any more
    step(generator)
    return lambda: step(generator), "eager"


def _captured(
    step: Callable[[torch.Generator], object], generator: torch.Generator, device: torch.device
) -> Callable[[], object]:
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP_STEPS):
            step(generator)
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step(generator)
    return graph.replay


def milliseconds(advance: Callable[[], object], device: torch.device) -> float:
    """The median time of a step, with whatever a device still has to do for it."""
    timer = Timer("advance()", globals={"advance": advance}, num_threads=torch.get_num_threads())
    steps = _STEPS_A_BLOCK.get(device.type, 1)
    return 1000 * statistics.median(timer.timeit(steps).mean for _ in range(_TIMED_BLOCKS))
