"""Likelihoods of data, each with its kind, exact or a lower bound, within a given memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._math import philox_uniforms
from xorflow.data import Batch, Split, validate
from xorflow.errors import ConfigError, DataError, ModelError
from xorflow.flows import GREEDY, LatentFlow, Model, Point, Stack
from xorflow.flows.model import check_alike

Kind = Literal["exact", "lower bound"]

_ROWS, _ROWS_ON_CUDA = 1000, 2**14
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
    """`exact` of several models on the same data; layers that several of them share are passed once, where that tells all.

    So it is in a flow of depth 1 and its deterministic flow, on its own base or another, and in a mixture and its components.

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
    check_alike("model", "of one evaluation", flows)
    values: list[list[Tensor]] = [[] for _ in flows]
    rows = min(rows_at_a_time(flow, memory, batch_size) for flow in flows)
    with torch.autocast(first.device.type, dtype=autocast, enabled=autocast is not None):
        for start in _starts(first, data, context, rows):
            of_batch = _log_likelihoods(flows, start)
            for of_flow, value in zip(values, of_batch, strict=True):
                of_flow.append(value)
    return [_of_rows(torch.cat(of_flow), data, "exact", first.features) for of_flow in values]


def _of_rows(
    values: Tensor, data: Split | Tensor, kind: Kind, features: int, *of_a_bound: Any
) -> LogLikelihood:
    """log p of states as log p of rows: where a state is more than one value, the place within it adds to it."""
    if isinstance(data, Split) and data.log_density is not None:
        values = values + data.log_density.to(values.device)
    return LogLikelihood(values, kind, features, *of_a_bound)


def _log_likelihoods(models: Sequence[Model], start: Point) -> list[Tensor]:
    """Of each model; what several flows in closed form need of the same layers is read off one pass."""
    if len(models) == 1:
        return [models[0].log_likelihood(start.x, start.context)]
    flows = dict.fromkeys(flow for model in models for flow in model.flows)
    values: dict[Stack, Tensor] = {}
    for layers in dict.fromkeys(flow.layers for flow in flows):
        sharing = [flow for flow in flows if flow.layers is layers]
        closed = [flow for flow in sharing if flow.has_closed_form]
        trace = closed[0].run(start, draws=GREEDY) if len(closed) > 1 else None
        for flow in sharing:
            if trace is None or not flow.has_closed_form:
                values[flow] = flow.log_likelihood(start.x, start.context)
            else:
                values[flow] = flow.by_feature(trace).double().sum(-1)
    return [model.combined([values[flow] for flow in model.flows]) for model in models]


def greedy(
    flow: Model,
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
    noise: Literal["place", "row"] = "place",
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
        noise: of a row follows from its place, or from what the row holds: its bound then depends on no other row.
    """
    _require_latent(flow)
    stop = flow.depth - 1 if sum_last and flow.last_layer_summable else flow.depth
    of_rows = noise == "row"
    sums, squares, _ = _weigh(flow, data, context, samples, seed, proposal, stop, memory, of_rows)
    values, effective = sums - math.log(samples), torch.exp(2 * sums - squares)
    return _of_rows(values, data, "lower bound", flow.features, samples, effective)


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
    _require_latent(flow)
    _, _, logs = _weigh(flow, data, context, samples, seed, proposal, flow.depth, memory)
    return _of_rows(logs / samples, data, "lower bound", flow.features, samples)


def _require_latent(flow: object) -> None:
    if not isinstance(flow, LatentFlow):
        raise ModelError(
            f"importance samples are of the choices of one latent flow, and got a {type(flow).__name__}: use evaluate.exact"
        )


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
    totals = torch.zeros(3, flow.depth, dtype=torch.float64, device=flow.device)
    for index, start in enumerate(_starts(flow, data, context, most)):
        rows = (index * most, len(start.x))
        noise = _noise(flow, seed, (0, 1), rows, len(data), flow.depth)[0]
        drawn, hard = (flow.run(start, draws=draws) for draws in (noise, GREEDY))
        # a network that sees nothing has logits without rows
        shape = (rows[1], flow.depth, flow.features)
        for total, values in zip(totals, (drawn.u != 0, hard.u != 0, drawn.entropy()), strict=True):
            total += values.double().expand(shape).sum((0, 2))
    each = (totals / len(data)).tolist()
    return [
        LayerUse(flip / flow.features, hard / flow.features, nats)
        for flip, hard, nats in zip(*each, strict=True)
    ]


def _weigh(
    flow: LatentFlow,
    data: Split | Tensor,
    context: Tensor | None,
    samples: int,
    seed: int,
    proposal: Literal["p", "q"],
    stop: int,
    memory: int | None,
    of_rows: bool = False,
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
    for index, start in enumerate(_starts(flow, data, context, rows)):
        count = len(start.x)
        powers = torch.full((2, count), -torch.inf, dtype=torch.float64, device=flow.device)
        logs = torch.zeros_like(powers[:1])
        for first in range(0, samples, chunk):
            drawn = (first, min(chunk, samples - first))
            if of_rows:
                noise = _noise_of_rows(flow, seed, drawn, start.x, stop)
            else:
                noise = _noise(flow, seed, drawn, (index * rows, count), total, stop)
            log_weights = _log_weights(flow, start, noise, stop, proposal)
            both = torch.stack((log_weights, 2 * log_weights))
            powers = torch.logaddexp(powers, both.logsumexp(1))
            logs = logs + log_weights.sum(0)
        each.append(torch.cat((powers, logs)))
    sums, squares, logs = torch.cat(each, -1)
    return sums, squares, logs


def _log_weights(
    flow: LatentFlow, start: Point, noise: Tensor, stop: int, proposal: Literal["p", "q"]
) -> Tensor:
    trace = flow.run(start, draws=noise, stop=stop, proposal=proposal)
    reward = flow.log_marginal(trace.end).double().sum(-1)
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


def _noise_of_rows(flow: LatentFlow, seed: int, drawn: tuple[int, int], x: Tensor, layers: int) -> Tensor:
    """Uniforms (S', B, L', D): a window of an array (S, L', D) that the seed and the row's content name."""
    first, count = (number * layers * flow.features for number in drawn)
    salt = seed.to_bytes(16, "little")
    names = [blake2b(row.tobytes(), digest_size=8, salt=salt) for row in x.cpu().numpy().astype("<i8")]
    keys = [int.from_bytes(name.digest(), "little") for name in names]
    uniforms = np.stack([philox_uniforms(key, _IMPORTANCE_STREAM, first, count) for key in keys])
    shape = (len(x), drawn[1], layers, flow.features)
    return torch.from_numpy(uniforms).reshape(shape).transpose(0, 1).to(flow.device, flow.dtype)


def _starts(flow: Model, data: Split | Tensor, context: Tensor | None, size: int) -> Iterator[Point]:
    """Of passes of so many rows at a time; labels that come along with the data are left out if the flow sees none."""
    if len(data) == 0:
        raise DataError("a likelihood needs at least one row, and the data are empty")
    if isinstance(data, Split):
        # the rows may have been made for more categories
        batches = (replace(batch, x=validate(batch.x, flow.categories)) for batch in data.batches(size))
    else:
        x = validate(data, flow.categories)
        if x.ndim != 2:
            raise DataError(
                f"a likelihood takes rows, a table (N, D), and got shape {tuple(x.shape)}; reshape it"
            )
        batches = Batch(x, context).split(size)
    for batch in batches:
        yield flow.start(batch.x.to(flow.device), flow.seen(batch.context))


def rows_at_a_time(flow: Model, memory: int | None, at_most: int | None = None) -> int:
    """How many rows pass at once within `memory` bytes, at most `at_most`.

    Without either: a number that leaves a CPU's caches room, and on CUDA as many as fill the device, for whose launches fewer
    rows would only wait.

    Raises:
        ConfigError: if one row takes more.
    """
    on_cuda = flow.device.type == "cuda"
    if memory is None and (at_most is not None or not on_cuda):
        return at_most or _ROWS
    of_a_row = max(bytes_of_a_draw(part, part.depth) for part in flow.flows)
    if memory is None:
        return max(_ROWS, min(_ROWS_ON_CUDA, 2**31 // of_a_row))
    most = at_most or (_ROWS_ON_CUDA if on_cuda else _ROWS)
    return min(most, fitting(memory, of_a_row, "a pass of one row"))


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

    hooks = [module.register_forward_hook(record) for module in flow.layers.modules()]
    try:
        row = torch.zeros(1, flow.features, dtype=torch.int64, device=flow.device)
        context = torch.zeros(1, flow.context_features, dtype=flow.dtype, device=flow.device)
        proposal = "q" if flow.has_posterior else "p"
        with torch.no_grad():  # blocks that are compiled where gradients are taken run as they are
            start = flow.start(row, context if flow.context_features else None)
            flow.run(start, draws=GREEDY, proposal=proposal)
    finally:
        for hook in hooks:
            hook.remove()
    return max(widths)
