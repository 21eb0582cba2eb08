"""Optimisers: fused, and on CUDA without a number from the host, so that a step can be captured; Muon, for hidden matrices."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xorflow import _devices as devices
from xorflow._cuda.steps import FusedAdam
from xorflow.conditioners import MaskedLinear
from xorflow.conditioners.linear import Table
from xorflow.conditioners.transformer import AttentionBlock
from xorflow.training.config import Options


def learning_rate(options: Options, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`."""
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    if options.schedule == "constant":
        return options.lr
    done = (step - options.warmup) / max(1, total - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimiser(module: nn.Module, options: Options, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser that the options name; on CUDA its learning rate is a tensor, which a captured step can change.

    Weight decay reaches the matrices of linear and recurrent layers only, and the tables by which categories enter them:
    decaying a bias or the base would pull the likelihood itself, and embeddings and gains are no maps whose size it would
    limit.
    """
    muon, capturable = options.optimiser == "muon", devices.captures(device)
    groups = _groups(module, options.weight_decay, hidden_matrices(module) if muon else {})
    rate = torch.tensor(options.lr, device=device) if capturable else options.lr
    if muon:
        return Muon(groups, lr=rate, fused=True, capturable=capturable)
    if options.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=rate, fused=True)
    decoupled = options.optimiser == "adamw"
    plain = all(p.dtype == torch.float32 for group in groups for p in group["params"])
    if isinstance(rate, Tensor) and devices.has_kernels(device) and plain:
        return FusedAdam(groups, lr=rate, decoupled=decoupled, seen=_seen(module))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(groups, lr=rate, fused=True, capturable=capturable)


def _groups(
    module: nn.Module, weight_decay: float, hidden: Mapping[int, list[Tensor]]
) -> list[dict[str, Any]]:
    """Parameters by whether they decay, and by how many matrices for Muon lie below one another in them."""
    pieces = {id(p): count for count, weights in hidden.items() for p in weights}
    decaying = {
        id(p)
        for layer in module.modules()
        if isinstance(layer, nn.Linear | Table | nn.RNNBase)
        for name, p in layer.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    groups: dict[tuple[int, float], list[Tensor]] = defaultdict(list)
    for p in module.parameters():
        if p.requires_grad:
            groups[pieces.get(id(p), 0), weight_decay if id(p) in decaying else 0.0].append(p)
    return [{"params": ps, "parts": count, "weight_decay": decay} for (count, decay), ps in groups.items()]


def _seen(module: nn.Module) -> dict[Tensor, Tensor]:
    masked = (m for m in module.modules() if isinstance(m, MaskedLinear) and m.weight.requires_grad)
    return {m.weight: m.seen for m in masked if m.seen is not None}


# ---- Muon ----

_MOMENTUM = 0.95

_AGAINST_ADAM = 10.0
"""How many times the learning rate an orthogonal matrix is scaled by: rates that suit Adam then suit both."""

_ROUNDS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of an odd polynomial that, applied some times over, brings all singular values near one (Jordan et al., 2024)."""

_TINY = 1e-7


class Muon(torch.optim.AdamW):
    """AdamW, but for the groups with `parts`: these are matrices, each of so many that lie below one another.

    A matrix moves by a multiple of about :math:`U V^T`, where :math:`U \\Sigma V^T` is its momentum: in all directions by much
    the same amount, down to those that have a five-hundredth of its norm (Jordan et al., 2024). The multiple is ten times
    the learning rate, and :math:`\\sqrt{\\text{rows} / \\text{columns}}` times that where there are more rows. torch's own Muon
    takes one matrix at a time, and asks the device for the learning rate, which a captured step can't.

    Args:
        groups: of parameters; `parts` in a group of matrices.
        lr: the learning rate of all.
        options: of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float | Tensor, **options: Any) -> None:
        super().__init__([{"parts": 0, **group} for group in groups], lr=lr, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        groups = self.param_groups
        for group in groups:
            if group["parts"]:
                self._turn(group)
        self.param_groups = [group for group in groups if not group["parts"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _turn(self, group: dict[str, Any]) -> None:
        """One step of the matrices of a group, those of a shape together."""
        due = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: p.shape)
        for shape, alike in itertools.groupby(due, key=lambda p: p.shape):
            matrices = list(alike)
            momentum = torch.stack(self._momenta(matrices))
            cut = momentum.unflatten(1, (group["parts"], -1)).flatten(0, 1)
            rows, columns = shape[0] // group["parts"], shape[1]
            rate = group["lr"] * _AGAINST_ADAM * max(1.0, rows / columns) ** 0.5
            change = (rate * orthogonal(cut)).reshape(momentum.shape)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(matrices, list(change))

    def _momenta(self, matrices: list[Tensor]) -> list[Tensor]:
        """Each momentum after this gradient, and a part of the gradient beyond it (Nesterov's)."""
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        kept = [self.state[p]["momentum"] for p in matrices]
        gradients = [p.grad for p in matrices if p.grad is not None]
        torch._foreach_lerp_(kept, gradients, 1 - _MOMENTUM)
        return list(torch._foreach_lerp(gradients, kept, _MOMENTUM))


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal matrices that are nearest to those given, (M, rows, columns).

    Singular values become 0.6 to 1.3, but for those below a five-hundredth of their matrix's norm, which become about 480 times
    as large. On CUDA float32 is rounded to bfloat16.

    >>> directions = orthogonal(torch.diag(torch.tensor([3.0, 0.2, -5.0])).unsqueeze(0))
    >>> sizes = directions.diagonal(dim1=1, dim2=2).abs()
    >>> bool(((sizes > 0.6) & (sizes < 1.3)).all())
    True
    """
    # rounding only makes a direction that is rough anyway a little rougher
    rounded = devices.captures(matrices.device) and matrices.dtype == torch.float32
    x = matrices.bfloat16() if rounded else matrices
    tall = matrices.shape[1] > matrices.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ROUNDS):
        squares = x @ x.mT
        x = first * x + torch.baddbmm(squares, squares, squares, beta=third, alpha=fifth) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def hidden_matrices(module: nn.Module) -> dict[int, list[Tensor]]:
    """The matrices that Muon is for, within transformers and recurrent networks, by how many lie below one another in one."""
    matrices: dict[int, list[Tensor]] = defaultdict(list)
    for part in module.modules():
        if isinstance(part, AttentionBlock):
            matrices[3].append(part.queries.weight)
            matrices[1] += [layer.weight for layer in (part.attended, part.wide, part.narrow)]
        elif isinstance(part, nn.RNNBase) and part.mode in _GATES:
            stacks = [p for name, p in part.named_parameters() if name.startswith(("weight_ih", "weight_hh"))]
            matrices[_GATES[part.mode]] += stacks
    return matrices


_GATES = {"GRU": 3, "LSTM": 4}
"""How many matrices a cell's parameter has one below the other."""
