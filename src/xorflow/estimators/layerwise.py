"""What estimators that go through a flow layer by layer share: steps, ends, sums of rewards, and reasons to refuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xorflow._states import Layout
from xorflow.errors import ModelError
from xorflow.estimators.descendants import Descendants, FeatureSum
from xorflow.flows import LatentFlow, Point


def after(flow: LatentFlow, point: Point, u: Tensor) -> Point:
    """The point behind the next layer, where it takes the choice u."""
    state = flow.layers[point.layer].transform.to_base(point.state, u)
    return Point(point.x, state, u, point.layer + 1)


def end_rewards(flow: LatentFlow, point: Point, context: Tensor | None) -> Tensor:
    """The log base probabilities (..., D) at the end of a pass, or expected of the last layer if the pass ends before it."""
    if point.layer == flow.depth:
        return flow.base.log_prob(point.state)
    choices, outcomes = flow.last_choices(point, context)
    return choices.expectation(outcomes)


def descendant_sums(flow: LatentFlow, layers: int) -> nn.ModuleList:
    """For each of the first layers: from rewards (..., D) to the sums of those that each choice of the layer can change."""
    descendants = Descendants(flow, "p")
    sums = nn.ModuleList(FeatureSum(descendants.rewards(layer)) for layer in range(layers))
    return sums.to(flow.device)


def pushed(mean: Tensor, direction: Tensor, layout: Layout) -> Tensor:
    r"""How probabilities `mean` move with their logits in a direction: :math:`\mathrm{diag}(\pi) v - \pi \pi^\top v`."""
    by_group = [
        p * (1 - p) * v if group.binary else p * (v - (p * v).sum(-1, keepdim=True))
        for group, p, v in zip(
            layout.alphabet.groups, layout.logits(mean), layout.logits(direction), strict=True
        )
    ]
    return layout.packed(by_group)


def require_summable(flow: LatentFlow) -> None:
    if not flow.last_layer_summable:
        raise ModelError("sum_last sums the last layer out, which must not see its own u; leave it out")


def require_binary(flow: LatentFlow, name: str) -> None:
    for index, layer in enumerate(flow.layers):
        if not layer.transform.choices.binary:
            widest = layer.transform.choices.width
            raise ModelError(
                f"{name} is for choices between two values, and layer {index + 1} has features with {widest}; "
                "use leave-one-out, double-cv or vimco"
            )


def require_no_own(flow: LatentFlow, name: str, why: str) -> None:
    for index, layer in enumerate(flow.layers):
        if layer.autoregressive_in_u:
            raise ModelError(
                f"{name} {why}, and layer {index + 1} sees its own u; use leave-one-out or the special case"
            )


def logit_of(uniforms: Tensor) -> Tensor:
    """log v - log(1 - v), finite for the zeros that a generator may give."""
    return torch.logit(uniforms, eps=torch.finfo(uniforms.dtype).eps)
