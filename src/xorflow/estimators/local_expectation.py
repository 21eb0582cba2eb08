"""Every choice taken both ways, or all ways, with all else as drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.descendants import FeatureSum, structure
from xorflow.estimators.layerwise import after, descendant_sums, end_rewards, require_summable
from xorflow.flows import LatentFlow, Point
from xorflow.flows.choices import choose


class LocalExpectation(Estimator):
    r"""Local expectation gradients: the exact expectation over each choice, the others drawn.

    .. math:: S = \sum_{l,d} \sum_k p(u^{(l)}_d = k \mid \cdot)\; \mathrm{sg}\big[A_{l,d}(u^{(l)}_d = k, \text{the rest})\big]

    with A the rewards that u^(l)_d can change. The rest is one sample u ~ p(u | x): earlier layers and the other choices of
    the layer as drawn; choices that see u^(l)_d, in the layer itself and in those after it, are drawn again for each value k,
    from the same uniforms.

    Unbiased for the gradient of the special-case bound :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`, for every model. Where
    a choice changes only its own feature's reward, as in the last layer or at depth 1 without own u, it is the analytic
    gradient. A learned base gets the gradient of the rewards.

    Cost: L passes and, for each layer whose choices change other rewards, (U - 1) D passes through the layers after it, without
    gradient, as one batch. For more features than `limit` it is refused. Titsias and Lázaro-Gredilla (2015).

    Args:
        sum_last: take the expectation over the last layer's choices in the rewards, too: less variance, unbiased too.
        limit: the most features to change one by one.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> LocalExpectation()(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, sum_last: bool = False, limit: int = 64) -> None:
        super().__init__()
        if limit < 1:
            raise ConfigError(f"limit, the most features to change one by one, is at least 1; got {limit}")
        self.sum_last, self.limit = sum_last, limit
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None

    def config(self) -> dict[str, Any]:
        return {"sum_last": self.sum_last, "limit": self.limit}

    def _drawn_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self._drawn_layers(flow)
        return (1, layers, flow.features) if layers else None

    def check(self, flow: LatentFlow) -> None:
        if self.sum_last:
            require_summable(flow)
        if flow.features <= self.limit:
            return
        self.prepare(flow)
        for index, rows in enumerate(self.sums):
            if not _is_separable(rows):
                raise ModelError(
                    f"local expectations change the {flow.features} features of layer {index + 1} one by one, and pass "
                    f"through the rest of the flow for each; the limit is {self.limit}: use disarm or leave-one-out, or "
                    "set limit"
                )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        key = (flow.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = descendant_sums(flow, self._drawn_layers(flow))

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        stop, point, passed = self._drawn_layers(flow), flow.start(x), []
        if draws is not None:
            draws = draws[0]
            trace = flow.run(x, draws=draws, context=context, stop=stop)
            for choices, u in zip(trace.generator, trace.us, strict=True):
                passed.append((point, choices, u))
                point = after(flow, point, u)
        rewards = end_rewards(flow, point, context)  # (B, D)
        value = rewards.sum(-1)
        surrogate = value  # the gradient of a learned base and, where it is summed out, of the last layer
        for before, choices, u in passed:
            assert draws is not None
            with torch.no_grad():
                ends = self._ends(flow, before, u, rewards.detach(), draws, context)
            surrogate = surrogate + choices.expectation(ends).sum(-1)
        return Loss(surrogate=-surrogate.mean(), bound=value.detach().mean())

    def _ends(
        self,
        flow: LatentFlow,
        before: Point,
        u: Tensor,
        rewards: Tensor,
        draws: Tensor,
        context: Tensor | None,
    ) -> list[Tensor]:
        """The rewards that each choice leads to, by group of choices, (B, n, U)."""
        layer, rows = flow.layers[before.layer], self.sums[before.layer]
        alphabet, drawn = layer.transform.choices, u.long()  # (B, D)
        sizes = torch.tensor(alphabet.sizes, device=u.device)
        taken_up = rows(rewards).expand(drawn.shape)
        ends = [
            part.unsqueeze(-1).expand(*part.shape, group.size)
            for group, part in zip(alphabet.groups, layer.layout.split(taken_up), strict=True)
        ]
        for step in range(1, alphabet.width):
            changed = (drawn + step) % sizes
            if _is_separable(rows):  # all features at once: none changes another's reward
                taken = alphabet.integers(changed)
                changed_rewards = self._suffix(flow, after(flow, before, taken), draws, context)
            else:
                diagonal = torch.eye(flow.features, dtype=torch.bool, device=u.device).unsqueeze(
                    1
                )  # (D, 1, D)
                taken = self._redrawn(
                    flow, before, torch.where(diagonal, changed, drawn), diagonal, draws, context
                )
                changed_rewards = self._suffix(flow, after(flow, before, taken), draws, context)
                changed_rewards = rows(changed_rewards).diagonal(dim1=0, dim2=-1)
            by_group = zip(layer.layout.split(changed), layer.layout.split(changed_rewards), strict=True)
            ends = [
                part.scatter(-1, values.unsqueeze(-1), reward.unsqueeze(-1))
                for part, (values, reward) in zip(ends, by_group, strict=True)
            ]
        return ends

    def _redrawn(
        self,
        flow: LatentFlow,
        before: Point,
        changed: Tensor,
        kept: Tensor,
        draws: Tensor,
        context: Tensor | None,
    ) -> Tensor:
        """The layer's choices (D, B, D), with what is `kept` as changed and, if the layer sees them, the rest anew."""
        layer = flow.layers[before.layer]
        alphabet = layer.transform.choices
        taken = alphabet.integers(changed)
        if not layer.autoregressive_in_u:
            return taken
        layer_draws = draws[..., before.layer, :]
        for _ in range(flow.features + 1):
            again = choose(layer.generator_choices(before, context, taken), layer_draws)
            following = torch.where(kept, alphabet.integers(changed), again)
            if torch.equal(following, taken):
                break
            taken = following
        return taken

    def _suffix(self, flow: LatentFlow, point: Point, draws: Tensor, context: Tensor | None) -> Tensor:
        later = draws[..., point.layer :, :]
        trace = flow.run(point, draws=later, context=context, stop=self._drawn_layers(flow))
        return end_rewards(flow, trace.end, context)


def _is_separable(rows: nn.Module) -> bool:
    """Whether every choice changes the reward of its own feature only."""
    return isinstance(rows, FeatureSum) and rows.kind == "identity"
