"""Likelihoods of data, each with its kind, exact or a lower bound, within a given memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._math import philox_uniforms
from xorflow.data import Batch, Split, validate
from xorflow.errors import ConfigError, DataError, ModelError
from xorflow.flows import GREEDY, Known, LatentFlow, Mixture, Model, Point, Stack

Kind = Literal["exact", "lower bound"]

_ROWS, _ROWS_ON_CUDA = 2000, 2**14
"""That pass at once where memory is not limited."""

_DRAWS_AT_A_TIME = 16
"""Of a row, if memory allows: the first layer's network sees no draw, and is evaluated once for all of them."""

_IMPORTANCE_STREAM = 4
"""Which of a seed's sequences importance sampling draws from; the data sets use the first ones."""


@dataclass(frozen=True)
class LogLikelihood:
    """log p of every row, and what kind of number that is.

    Attributes:
        values: (N,) float64, in nats.
        kind: `"exact"`, or `"lower bound"`: an estimate whose expectation is at most log p.
        features: D, for bits per dimension.
        samples: S of an importance-sampled bound.
        effective_samples: (N,) effective sample size of each row's weights.
    """

    values: Tensor
    kind: Kind
    features: int
    samples: int | None = None
    effective_samples: Tensor | None = None

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood (or the bound on it), in nats."""
        return -float(self.values.mean())

    @property
    def stderr(self) -> float:
        """The standard error of `nll` over rows; it contains the noise of sampling, which is independent between rows."""
        return float(self.values.std() / math.sqrt(len(self.values))) if len(self.values) > 1 else math.nan

    @property
    def bits_per_dim(self) -> float:
        return self.nll / (self.features * math.log(2))

    @property
    def ess(self) -> float | None:
        """The mean effective sample size, of `samples`."""
        return None if self.effective_samples is None else float(self.effective_samples.mean())

    def summary(self) -> dict[str, float | int | str | None]:
        """For result files."""
        summary: dict[str, float | int | str | None] = {
            "nll": self.nll,
            "kind": self.kind,
            "stderr": None if math.isnan(self.stderr) else self.stderr,
            "bits_per_dim": self.bits_per_dim,
            "rows": len(self.values),
        }
        return summary | ({} if self.samples is None else {"samples": self.samples, "ess": self.ess})


@torch.no_grad()
def exact(
    flow: Model,
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    batch_size: int | None = None,
    memory: int | None = None,
    autocast: torch.dtype | None = None,
) -> LogLikelihood:
    """Exact log p(x) of each row: any `Flow`, a `LatentFlow` of depth 1, small spaces by enumeration, or a mixture of these.

    Args:
        flow: the model.
        data: rows.
        context: (N, C), if `data` is a tensor.
        batch_size: rows at a time, at most; by default what suits the device.
        memory: at most about how many bytes a pass takes, with fewer rows at a time if need be; an enumeration has a limit of
            its own.
        autocast: compute the networks' products in this type, `torch.bfloat16` say, to see what that does to a likelihood;
            logits, logs and sums are float32 or more all the same. By default everything has the type of the weights.

    Raises:
        Intractable: where there is no exact value; the message names what to call instead.
    """
    return exact_each([flow], data, context, batch_size=batch_size, memory=memory, autocast=autocast)[0]


@torch.no_grad()
def exact_each(
    flows: Sequence[Model],
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    batch_size: int | None = None,
    memory: int | None = None,
    autocast: torch.dtype | None = None,
) -> list[LogLikelihood]:
    """`exact` of several models on the same data; a first layer that several of them share is evaluated once.

    So it is in a flow and its deterministic flow, on its own base or on another, and in a mixture and its components.

    Args:
        flows: models over the same space, on one device and of one type.
        data: see `exact`, like all that follow.
        context: (N, C), if `data` is a tensor.
        batch_size: rows at a time, at most.
        memory: at most about how many bytes a pass takes.
        autocast: compute the networks' products in this type.
    """
    if not flows:
        raise ModelError("models are evaluated together, and none were given; give at least one")
    first = flows[0]
    for other in flows[1:]:
        _check_alike(first, other)
    values: list[list[Tensor]] = [[] for _ in flows]
    kept = kept_of_a_row(flows) if len(flows) > 1 else 0
    rows = min(rows_at_a_time(flow, memory, batch_size, kept) for flow in flows)
    with torch.autocast(first.device.type, dtype=autocast, enabled=autocast is not None):
        for batch in _batches(first, data, context, rows):
            x = first.states.integers(batch.x)
            known = _shared_choices(flows, x, batch.context)
            for flow, of_flow in zip(flows, values, strict=True):
                of_flow.append(flow.log_likelihood(x, batch.context, known=known))
    return [LogLikelihood(torch.cat(of_flow), "exact", first.features) for of_flow in values]


def _shared_choices(models: Sequence[Model], x: Tensor, context: Tensor | None) -> Known:
    """The choices of first layers that occur more than once."""
    layers = [flow.layers[0] for model in models for flow in model.flows]
    shared = {layer for layer in layers if layers.count(layer) > 1 and not layer.autoregressive_in_u}
    return {layer: layer.generator_choices(Point(x, x), context) for layer in shared}


def _check_alike(first: Model, other: Model) -> None:
    """Raise unless both take the same rows."""
    for what in ("states", "context_features", "dtype", "device"):
        if getattr(first, what) != getattr(other, what):
            raise ModelError(
                f"models that are evaluated together have the same categories, context, type and device, and their {what} "
                "differ; evaluate each of them by itself"
            )


def greedy(
    flow: LatentFlow | Mixture,
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    batch_size: int | None = None,
    memory: int | None = None,
) -> LogLikelihood:
    """Exact log p(x) under the deterministic flow: the generator's own most probable u, layer by layer.

    The likelihood of another model than the latent flow's. The most probable value of a posterior is never used: it may see all
    of x, and then gives no distribution.
    """
    return exact(flow.greedy(), data, context, batch_size=batch_size, memory=memory)


@torch.no_grad()
def importance(
    flow: LatentFlow,
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    samples: int = 1000,
    seed: int = 0,
    proposal: Literal["p", "q"] = "p",
    sum_last: bool = True,
    memory: int | None = None,
) -> LogLikelihood:
    r"""A lower bound on log p(x) of each row by importance sampling,

    .. math:: \log \frac1S \sum_s w_s, \qquad w_s = p_Y(y_s) \frac{p(u_s \mid x)}{\mathrm{proposal}(u_s \mid x)},

    whose expectation rises with S towards log p(x).

    Args:
        flow: the model.
        data: rows.
        context: (N, C), if `data` is a tensor.
        samples: S.
        seed: names the noise, which is the same on every device and does not depend on `memory`.
        proposal: draw u from the generator (p) or from the posterior (q).
        sum_last: sum the last layer out instead of sampling it, where that is possible: the same target, a tighter bound.
        memory: at most about how many bytes the draws take at a time; the result does not depend on it. By default 2^28 on the
            CPU, where more would only leave its caches, and 2^31 elsewhere.
    """
    stop = flow.depth - 1 if sum_last and flow.last_layer_summable else flow.depth
    sums, squares, _ = _weigh(flow, data, context, samples, seed, proposal, stop, memory)
    values, effective = sums - math.log(samples), torch.exp(2 * sums - squares)
    return LogLikelihood(values, "lower bound", flow.features, samples, effective)


@torch.no_grad()
def elbo(
    flow: LatentFlow,
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    samples: int = 1,
    seed: int = 0,
    proposal: Literal["p", "q"] = "q",
    memory: int | None = None,
) -> LogLikelihood:
    r"""The evidence lower bound :math:`E_q[\log p_Y(y) + \log p(u \mid x) - \log q(u \mid x)]` of each row, by S samples' mean.

    With the generator as proposal it is the bound of the special case, :math:`E_p[\log p_Y(y)]`. Every layer is sampled. Unlike
    the importance-sampled bound it does not rise with S; S only reduces its noise.

    Args:
        flow: the model; for proposal q, with a posterior in every layer.
        data: rows.
        context: (N, C), if `data` is a tensor.
        samples: S.
        seed: names the noise.
        proposal: draw u from the generator (p) or from the posterior (q).
        memory: at most about how many bytes the draws take at a time; the result does not depend on it. By default 2^28 on the
            CPU, where more would only leave its caches, and 2^31 elsewhere.
    """
    _, _, logs = _weigh(flow, data, context, samples, seed, proposal, flow.depth, memory)
    return LogLikelihood(logs / samples, "lower bound", flow.features, samples)


@dataclass(frozen=True)
class LayerUse:
    """What a layer does to data, on average over rows and features.

    Attributes:
        flip_rate: how often a choice drawn from the generator is not the identity.
        greedy_flip_rate: how often the most probable choice is not, along the deterministic flow.
        entropy: of the choices of one row, in nats, along a drawn pass.
    """

    flip_rate: float
    greedy_flip_rate: float
    entropy: float


@torch.no_grad()
def layer_use(
    flow: LatentFlow,
    data: Split | Tensor,
    context: Tensor | None = None,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    memory: int | None = None,
) -> list[LayerUse]:
    """How much each layer does, from one draw of every row: a layer that flips nothing adds no depth.

    Args:
        flow: the model.
        data: rows.
        context: (N, C), if `data` is a tensor.
        seed: names the noise, which does not depend on how the rows are cut.
        batch_size: rows at a time, at most; by default what suits the device.
        memory: at most about how many bytes a pass takes, with fewer rows at a time if need be.
    """
    most = rows_at_a_time(flow, memory, batch_size)
    totals = torch.zeros(flow.depth, 3, dtype=torch.float64, device=flow.device)
    for index, batch in enumerate(_batches(flow, data, context, most)):
        x, rows = flow.states.integers(batch.x), (index * most, len(batch.x))
        noise = _noise(flow, seed, (0, 1), rows, len(data), flow.depth)[0]
        known = _shared_choices([flow, flow], x, batch.context)
        drawn = flow.run(x, draws=noise, context=batch.context, known=known)
        hard = flow.run(x, draws=GREEDY, context=batch.context, known=known)
        # a network that sees nothing has logits without rows
        shape = (len(x), flow.depth, flow.features)
        entropies = torch.stack(
            torch.broadcast_tensors(*(choices.entropy() for choices in drawn.generator)), -2
        )
        for column, values in enumerate((drawn.u != 0, hard.u != 0, entropies)):
            totals[:, column] += values.double().expand(shape).sum((0, 2))
    cells = len(data) * flow.features
    scale = torch.tensor([cells, cells, len(data)], dtype=torch.float64, device=flow.device)
    return [LayerUse(*map(float, row)) for row in (totals / scale).tolist()]


def _weigh(
    flow: LatentFlow,
    data: Split | Tensor,
    context: Tensor | None,
    samples: int,
    seed: int,
    proposal: Literal["p", "q"],
    stop: int,
    memory: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log sum w, log sum w^2 and sum log w of each row's importance weights: by blocks of rows, streamed over samples."""
    if samples < 1:
        raise ConfigError(f"importance sampling needs at least one sample, and got samples={samples}")
    if proposal not in ("p", "q"):
        raise ConfigError(f"proposal is 'p' (the generator) or 'q' (the posterior), and got {proposal!r}")
    if memory is None:
        memory = 2**28 if flow.device.type == "cpu" else 2**31
        most = max(1, memory // bytes_of_a_draw(flow, stop))
    else:
        most = fitting(memory, bytes_of_a_draw(flow, stop), "one draw of one row")
    total = len(data)
    rows = max(1, min(total, 1024, most // _DRAWS_AT_A_TIME))
    chunk = min(samples, max(1, most // rows))
    each = []
    for index, batch in enumerate(_batches(flow, data, context, rows)):
        x, count = flow.states.integers(batch.x), len(batch.x)
        sums = torch.full((count,), -torch.inf, dtype=torch.float64, device=flow.device)
        squares, logs = sums, torch.zeros_like(sums)
        for first in range(0, samples, chunk):
            drawn = (first, min(chunk, samples - first))
            noise = _noise(flow, seed, drawn, (index * rows, count), total, stop)
            log_weights = _log_weights(flow, x, batch.context, noise, stop, proposal)
            sums = torch.logaddexp(sums, torch.logsumexp(log_weights, 0))
            squares = torch.logaddexp(squares, torch.logsumexp(2 * log_weights, 0))
            logs = logs + log_weights.sum(0)
        each.append((sums, squares, logs))
    sums, squares, logs = (torch.cat(of_rows) for of_rows in zip(*each, strict=True))
    return sums, squares, logs


def _log_weights(
    flow: LatentFlow, x: Tensor, context: Tensor | None, noise: Tensor, stop: int, proposal: Literal["p", "q"]
) -> Tensor:
    trace = flow.run(x, draws=noise, context=context, stop=stop, proposal=proposal)
    if stop < flow.depth:
        reward = flow.log_marginal(trace.end, context).double().sum(-1)
    else:
        reward = flow.base.log_prob(trace.end.state).double().sum(-1)
    reward = reward.expand(*noise.shape[:2])  # (S, B): nothing was drawn if the only layer is summed out
    if proposal == "q" and stop > 0:
        reward = reward + (trace.log_p() - trace.log_q()).double().sum((-1, -2))
    return reward


def _noise(
    flow: LatentFlow, seed: int, drawn: tuple[int, int], rows: tuple[int, int], total: int, layers: int
) -> Tensor:
    """Uniforms (S', B, L', D): a window of one array (S, N, L', D) that does not depend on how it is cut."""
    per_row = layers * flow.features
    count, first = rows[1] * per_row, (drawn[0] * total + rows[0]) * per_row
    shape = (drawn[1], rows[1], layers, flow.features)
    if not per_row:
        return torch.empty(shape, device=flow.device, dtype=flow.dtype)
    if devices.has_kernels(flow.device):
        windows = (first, total * per_row)
        uniforms = kernels.philox_uniforms(seed, _IMPORTANCE_STREAM, windows, drawn[1], count, flow.device)
        return uniforms.reshape(shape).to(flow.dtype)
    uniforms = np.empty((drawn[1], count), dtype=np.float32)
    for s in range(drawn[1]):
        uniforms[s] = philox_uniforms(seed, _IMPORTANCE_STREAM, first + s * total * per_row, count)
    return torch.from_numpy(uniforms).reshape(shape).to(flow.device, flow.dtype)


def _batches(flow: Model, data: Split | Tensor, context: Tensor | None, batch_size: int) -> Iterator[Batch]:
    if len(data) == 0:
        raise DataError("a likelihood needs at least one row, and the data are empty")
    if isinstance(data, Split):
        if data.features != flow.features:
            raise DataError(f"this flow has {flow.features} features, and the data have {data.features}")
        for batch in data.batches(batch_size):
            x = validate(batch.x, flow.states.sizes)  # the rows may have been made for more categories
            yield Batch(x.to(flow.device), _context(flow, batch.context))
        return
    x = validate(data, flow.states.sizes)
    if x.ndim != 2:
        raise DataError(
            f"a likelihood takes rows, a table (N, D), and got shape {tuple(x.shape)}; reshape it"
        )
    for first in range(0, len(x), batch_size):
        part = slice(first, first + batch_size)
        yield Batch(x[part].to(flow.device), _context(flow, None if context is None else context[part]))


def _context(flow: Model, context: Tensor | None) -> Tensor | None:
    """What the flow was made to see; labels that come along with the data are left out if it sees none."""
    if context is None or flow.context_features == 0:
        return None
    return context.to(flow.device, flow.dtype)


def rows_at_a_time(flow: Model, memory: int | None, at_most: int | None = None, kept: int = 0) -> int:
    """How many rows pass at once within `memory` bytes, at most `at_most`; `kept` bytes of each are there beside its pass.

    Without either: a number that leaves a CPU's caches room, and on CUDA as many as fill the device, for whose launches fewer
    rows would only wait.

    Raises:
        ConfigError: if one row takes more.
    """
    on_cuda = flow.device.type == "cuda"
    if memory is not None:
        return min(
            at_most or (_ROWS_ON_CUDA if on_cuda else _ROWS),
            fitting(memory, _of_a_row(flow) + kept, "a pass of one row"),
        )
    if at_most is not None or not on_cuda:
        return at_most or _ROWS
    return max(_ROWS, min(_ROWS_ON_CUDA, 2**31 // (_of_a_row(flow) + kept)))


def _of_a_row(flow: Model) -> int:
    return max(bytes_of_a_draw(part, part.depth) for part in flow.flows)


def kept_of_a_row(flows: Sequence[Model]) -> int:
    """What remembered first layers take beside the pass of one of them: the logits of all others."""
    layers = {part.layers[0] for flow in flows for part in flow.flows}
    widths = [layer.transform.choices.flat for layer in layers]
    return torch.finfo(flows[0].dtype).bits // 8 * (sum(widths) - max(widths))


def fitting(memory: int, of_one: int, what: str) -> int:
    """How many fit; at least one must."""
    if memory < of_one:
        raise ConfigError(
            f"{what} takes about {of_one:,} bytes, and memory allows {memory:,}; allow at least {of_one:,}"
        )
    return memory // of_one


def bytes_of_a_draw(flow: Stack, stop: int) -> int:
    """About what the draws of one row take, from noise to weight, where `stop` layers are drawn.

    For each number of a row: the noise, and in each layer what it became, logits and probabilities among it, until the trace is
    weighed; measured on traces of depth 1 and 4. And twice the widest output inside a network: what it was made from is there,
    too. Where not all choices are bits, each value has the state that it leads to, an int64, and its log-probabilities.
    """
    number = torch.finfo(flow.dtype).bits // 8
    width = max(layer.transform.choices.flat for layer in flow.layers)
    values = 0 if flow.states.binary else 6 * max(sum(layer.transform.choices.sizes) for layer in flow.layers)
    return number * (width * (8 + 13 * max(stop, 1)) + values + 2 * _widest_output(flow))


def _widest_output(flow: Stack) -> int:
    """Of all modules inside the networks, for one row."""
    widths = [0]

    def record(module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs
        if isinstance(output, Tensor):
            widths.append(output.numel())

    networks = [n for layer in flow.layers for n in (layer.conditioner, layer.posterior) if n is not None]
    hooks = [module.register_forward_hook(record) for network in networks for module in network.modules()]
    try:
        row = torch.zeros(1, flow.features, dtype=torch.int64, device=flow.device)
        context = torch.zeros(1, flow.context_features, dtype=flow.dtype, device=flow.device)
        proposal = "q" if flow.has_posterior else "p"
        with torch.no_grad():  # blocks that are compiled where gradients are taken run as they are
            flow.run(row, draws=GREEDY, context=context if flow.context_features else None, proposal=proposal)
    finally:
        for hook in hooks:
            hook.remove()
    return max(widths)
