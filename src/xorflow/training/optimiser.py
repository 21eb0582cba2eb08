"""Optimisers: fused, and on CUDA without a number from the host, so that a step can be captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._cuda import devices, kernels
from xorflow.conditioners import MaskedLinear
from xorflow.conditioners.embedding import Table
from xorflow.training.config import Options
from xorflow.training.muon import Muon, hidden_matrices


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW with one launch for each parameter, which fills the device; its state is that of torch's own.

    PyTorch's fused Adam cuts all parameters into pieces of 65,536 numbers, one for each multiprocessor: a network of a million
    weights then leaves most of a large GPU idle, and the optimiser takes longer than the passes.

    Args:
        params: parameters or groups, float32 on a CUDA device.
        lr: the learning rate, a tensor on the device.
        decoupled: AdamW's decay of the weights.
        seen: by masked parameter, how many columns of each row are not masked; the others cost nothing.
    """

    def __init__(
        self, params: Any, *, lr: Tensor, decoupled: bool, seen: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": decoupled}
        defaults["capturable"] = True  # by which torch knows that the count of steps is kept on the device
        super().__init__(params, defaults)
        self._seen = dict(seen or {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        due = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in due:
            self._change(p, group)
        torch._foreach_add_([self.state[p]["step"] for p, _ in due], 1)

    def _change(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self._state_of(p)
        kernels.adam(
            p,
            p.grad,
            (state["exp_avg"], state["exp_avg_sq"]),
            group["lr"],
            state["step"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled"],
            seen=self._seen.get(p),
        )

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state


def make_optimiser(module: nn.Module, options: Options, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser that the options name; on CUDA its learning rate is a tensor, which a captured step can change.

    Weight decay reaches the matrices of linear and recurrent layers only, and the tables by which categories enter them:
    decaying a bias or the base would pull the likelihood itself, and embeddings and gains are no maps whose size it would
    limit.
    """
    groups = _groups(module, options.weight_decay)
    if options.optimiser == "muon":
        return _muon(module, groups, options, device)
    return _make(groups, _seen(module), options, device)


def _make(
    groups: list[dict[str, Any]], seen: Mapping[Tensor, Tensor], options: Options, device: torch.device
) -> torch.optim.Optimizer:
    rate, fused = _rate(options, device), _fused(options)
    if options.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=rate, fused=fused)
    decoupled = options.optimiser == "adamw"
    plain = all(p.dtype == torch.float32 for group in groups for p in group["params"])
    if isinstance(rate, Tensor) and devices.has_kernels(device) and plain and fused:
        return FusedAdam(groups, lr=rate, decoupled=decoupled, seen=seen)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(groups, lr=rate, fused=fused, capturable=devices.captures(device))


def _muon(module: nn.Module, groups: list[dict[str, Any]], options: Options, device: torch.device) -> Muon:
    """Hidden matrices leave their groups for those of their own."""
    matrices = {
        count: [p for p in weights if p.requires_grad] for count, weights in hidden_matrices(module).items()
    }
    taken = {id(p) for weights in matrices.values() for p in weights}
    others = [group | {"params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    hidden = [{"params": p, "weight_decay": options.weight_decay, "parts": n} for n, p in matrices.items()]
    groups = [group for group in (*hidden, *others) if group["params"]]
    return Muon(groups, lr=_rate(options, device), fused=_fused(options), capturable=devices.captures(device))


def _rate(options: Options, device: torch.device) -> float | Tensor:
    return torch.tensor(options.lr, device=device) if devices.captures(device) else options.lr


def _fused(options: Options) -> bool:
    """A fused optimiser would unscale 16-mixed gradients by itself, and those of Muon's matrices not at all."""
    return options.precision != "16-mixed"


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    if not weight_decay:  # one group less to go through in every step
        return [{"params": [p for p in module.parameters() if p.requires_grad], "weight_decay": 0.0}]
    matrices = [m.weight for m in module.modules() if isinstance(m, nn.Linear | Table)]
    cells = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    matrices += [p for m in cells for name, p in m.named_parameters() if name.startswith("weight")]
    chosen = {id(p) for p in matrices}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
    matrices = [p for p in matrices if p.requires_grad]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _seen(module: nn.Module) -> dict[Tensor, Tensor]:
    masked = (m for m in module.modules() if isinstance(m, MaskedLinear) and m.weight.requires_grad)
    return {m.weight: m.seen for m in masked if m.seen is not None}
