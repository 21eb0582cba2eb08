"""Every choice taken both ways, or all ways, with all else as drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.credit import FeatureSum
from xorflow.estimators.layerwise import ByLayer, Step, end_rewards
from xorflow.flows import LatentFlow
from xorflow.flows.choices import choose
from xorflow.flows.layer import fixed_point


class LocalExpectation(ByLayer):
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
        super().__init__(sum_last)
        if limit < 1:
            raise ConfigError(f"limit, the most features to change one by one, is at least 1; got {limit}")
        self.limit = limit

    def check(self, flow: LatentFlow) -> None:
        super().check(flow)
        if flow.features <= self.limit:
            return
        self.prepare(flow)
        for index, rows in enumerate(self.sums):
            if not _is_separable(rows):
                raise ModelError(
                    f"local expectations change the {flow.features} features of layer {index + 1} one by one, and pass "
                    f"through the rest of the flow for each; the limit is {self.limit}: use disarm or score-function, or "
                    "set limit"
                )

    def estimate(self, step: Step, rewards: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            ends = self._ends(step, rewards)
        return step.choices.expectation(ends).sum(-1), None

    def _ends(self, step: Step, rewards: Tensor) -> list[Tensor]:
        """The rewards that each choice leads to, by group of choices, (B, n, U)."""
        layout, rows = step.layer.layout, self.sums[step.index]
        alphabet, drawn = layout.alphabet, step.drawn[0].long()  # (B, D)
        by_shift = [layout.split(rows(rewards).expand(drawn.shape))]
        for shift in range(1, alphabet.width):
            changed = layout.joined(
                [(part + shift) % group.size for group, part in alphabet.grouped(layout.split(drawn))]
            )
            if _is_separable(rows):  # all features at once: none changes another's reward
                changed_rewards = self._suffix(step, alphabet.integers(changed))
            else:
                one = torch.eye(drawn.shape[-1], dtype=torch.bool, device=drawn.device)[:, None]  # (D, 1, D)
                taken = self._redrawn(step, alphabet.integers(torch.where(one, changed, drawn)), one)
                changed_rewards = rows(self._suffix(step, taken)).diagonal(dim1=0, dim2=-1)
            by_shift.append(layout.split(changed_rewards))
        ends = []
        for group, u, *shifted in alphabet.grouped(layout.split(drawn), *by_shift):
            shift = (torch.arange(group.size, device=u.device) - u.unsqueeze(-1)) % group.size
            ends.append(torch.stack(shifted[: group.size], -1).gather(-1, shift))
        return ends

    def _redrawn(self, step: Step, changed: Tensor, kept: Tensor) -> Tensor:
        """The layer's choices (D, B, D), with what is `kept` as changed and, if the layer sees them, the rest anew."""
        if not step.layer.autoregressive_in_u:
            return changed
        noise = step.draws[0, ..., step.index, :]

        def again(u: Tensor) -> Tensor:
            return torch.where(kept, changed, choose(step.layer.generator_choices(step.before, u), noise))

        return fixed_point(again, changed)

    def _suffix(self, step: Step, u: Tensor) -> Tensor:
        """The rewards after other choices of the layer, all else from the same draws."""
        point = step.after(u)
        later = step.draws[0, ..., point.layer :, :]
        trace = step.flow.run(point, draws=later, stop=self.drawn_layers(step.flow))
        return end_rewards(step.flow, trace.end)


def _is_separable(rows: nn.Module) -> bool:
    """Whether every choice changes the reward of its own feature only."""
    return isinstance(rows, FeatureSum) and rows.kind == "identity"
