"""How many rows, or draws of rows, pass at once within a given memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.flows import GREEDY, Model, Stack

_ROWS, _ROWS_ON_CUDA = 2000, 2**14
"""That pass at once where memory is not limited."""


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
