"""A flow on another base: one of binary data on a given base, or a deterministic one on a base fitted to its residuals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xorflow._states import NEVER
from xorflow.bases import FactorisedBase
from xorflow.conditioners.base import BySource, Conditioner, Dependence
from xorflow.data import Batch
from xorflow.errors import ModelError
from xorflow.flows.flow import Flow, LatentFlow
from xorflow.flows.layer import Layer


def with_base(flow: LatentFlow, base: FactorisedBase) -> LatentFlow:
    r"""The flow on `base` that is nearest to a flow of binary data; it shares that flow's networks.

    The last layer's state is one in feature d with probability :math:`P_d = \beta_d + (1 - 2 \beta_d) f_d` given what is
    before it, and on another base, of probabilities b, the same :math:`P_d` needs

    .. math:: f_d = \mathrm{clip}\big((P_d - b_d) / (1 - 2 b_d),\, 0,\, 1\big).

    Where nothing is clipped both are the same distribution. Where :math:`P_d` lies outside of what the base can reach,
    the flow takes the nearest value, which is the best choice for data that follow P. So a model trained as a plain
    likelihood, on a base that is certain, becomes a flow on the paper's base: at depth 1 of exact likelihood, deeper with the
    same layers before the last.

    Args:
        flow: on binary data, without posteriors, whose last layer flips bits (xor) and does not see its own u. A coupling
            becomes a flow in an ordering that begins with what its network sees: these features, which the coupling leaves
            alone, have to be flipped on another base.
        base: for the same features, with no probability of one half.

    >>> from xorflow import MADE
    >>> sure = LatentFlow([Layer(MADE(3, hidden=(8,)))], FactorisedBase(3, p0=0.999))
    >>> round(float(with_base(sure, FactorisedBase(3)).base.floor()), 4)  # no likelihood on the new base is above 0.9^3
    0.3161
    """
    if not flow.states.binary or not flow.last_layer_summable or flow.has_posterior:
        raise ModelError(
            "only a flow on binary data, without posteriors, whose last layer does not see its own u can be rebased"
        )
    if not flow.layers[-1].transform.is_xor:
        raise ModelError(
            f"a flow is rebased by other flip probabilities, and the {type(flow.layers[-1].transform).__name__} of "
            "its last layer does not flip by u = 1 and keep by u = 0; use Xor or ModularShift there"
        )
    if base.states != flow.states:
        raise ModelError(
            "a flow is rebased to a base for the same features and categories, and this one is not"
        )
    if bool((base.logits == 0).any()):
        raise ModelError(
            "on a base with a probability of one half no flip changes anything; choose another base"
        )
    *earlier, last = flow.layers
    rebased = Layer(_Rebased(last, flow.base, base), last.transform)
    return LatentFlow([*earlier, rebased], base)


@torch.no_grad()
def refit_base(
    flow: Flow, x: Tensor, context: Tensor | None = None, *, batch_size: int = 4096
) -> FactorisedBase:
    """A base fitted to the residuals y of a deterministic flow on training data, with add-1/2 smoothing.

    Frequencies are the maximum-likelihood base for a fixed bijection; use training data, never the test set.

    Args:
        flow: the deterministic flow.
        x: integers (N, D), the training data.
        context: (N, C) or None.
        batch_size: rows passed at a time.
    """
    counts = [torch.zeros(k, dtype=torch.int64, device=flow.device) for k in flow.categories]
    for batch in Batch(x, context).split(batch_size):
        seen = None if batch.context is None else batch.context.to(flow.device)
        y = flow.to_base(batch.x.to(flow.device), seen)
        for count, column in zip(counts, y.unbind(-1), strict=True):
            count += torch.bincount(column, minlength=len(count))
    smoothed = [count.double() + 0.5 for count in counts]
    probabilities = [count / count.sum() for count in smoothed]
    base = FactorisedBase(flow.features, categories=flow.categories, probabilities=probabilities)
    return base.to(flow.device, flow.dtype)


class _Rebased(Conditioner):
    """The logits on one base that give the probabilities of a conditioner's logits on another."""

    def __init__(self, layer: Layer, before: FactorisedBase, after: FactorisedBase) -> None:
        network = layer.conditioner
        declared = network.declared()
        # a coupling sees as a network in the order of its layer does
        sees = {
            source: seen.replace(Dependence.COUPLED, Dependence.BEFORE)
            for source, seen in declared["sees"].items()
        }
        super().__init__(network.features, **declared | {"sees": sees, "order": layer.order})
        self.network, self.before, self.after = network, before, after

    def config(self) -> dict[str, Any]:
        raise ModelError("a rebased flow is not saved; save the flow that it was made from")

    def __repr__(self) -> str:
        return f"{self.network!r} on another base"

    def start_at(self, logits: Tensor) -> None:
        del logits
        raise ModelError("a rebased flow is not trained; train the flow that it was made from")

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        # in float64, where 1 - f keeps its digits
        logits = self.network(inputs, context).double()
        beta, b = torch.sigmoid(self.before.logits.double()), torch.sigmoid(self.after.logits.double())
        one = beta + (1 - 2 * beta) * torch.sigmoid(logits)
        flip = ((one - b) / (1 - 2 * b)).clamp(0, 1)
        return torch.logit(flip).clamp(NEVER, -NEVER).to(self.after.logits.dtype)
