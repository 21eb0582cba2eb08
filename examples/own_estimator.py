"""An estimator of one's own, proved by enumeration, then trained with: a score function less the expected reward."""

import itertools

import torch
from torch import Tensor

import xorflow as xf
from xorflow.estimators import Analytic, Estimator, Loss
from xorflow.flows import Point


class ExpectedReward(Estimator):
    """Unbiased for the gradient of E[log p_Y(y)]: what is subtracted from a reward depends on x alone. Depth 1 only."""

    def noise_shape(self, flow: xf.LatentFlow) -> tuple[int, int, int]:
        return 1, flow.depth, flow.features

    def loss(self, flow: xf.LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        assert draws is not None
        trace = flow.run(start, draws=draws)
        rewards = flow.base.log_prob(trace.end.state)  # (1, B, D)
        choices, outcomes = flow.last_choices(start)
        signal = (rewards - choices.expectation(outcomes)).detach()
        score = (signal * trace.log_p()[..., 0, :]).sum(-1)
        value = rewards.sum(-1)
        return Loss(surrogate=-(score + value).mean(), bound=value.detach().mean())


def gradient(loss: Loss, flow: xf.LatentFlow) -> Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(-loss.surrogate, list(flow.layers.parameters()))]
    )


# proof: over all choices, weighted by their probabilities, the gradient is the analytic one
flow = xf.LatentFlow([xf.Layer(xf.MADE(3, hidden=(8,)))], xf.FactorisedBase(3)).double()
x = torch.tensor([[0, 1, 1]])
expected = torch.zeros_like(gradient(Analytic()(flow, x), flow))
for choice in itertools.product((0, 1), repeat=3):
    u = torch.tensor(choice).reshape(1, 1, 1, 3)  # (S, B, L, D)
    probability = flow.run(x, draws=u).log_p().sum().exp().detach()
    expected += probability * gradient(ExpectedReward()(flow, x, draws=u), flow)
torch.testing.assert_close(expected, gradient(Analytic()(flow, x), flow), rtol=0, atol=1e-12)
print("unbiased: the expectation is the gradient")

# training, by a loop of one's own
rows = torch.randint(2, (500, 1)).repeat(1, 3) ^ (torch.rand(500, 3) < 0.1)
flow = xf.LatentFlow([xf.Layer(xf.MADE(3, hidden=(8,)))], xf.FactorisedBase(3))
estimator, optimiser = ExpectedReward(), torch.optim.Adam(flow.parameters(), 0.02)
for _ in range(200):
    optimiser.zero_grad()
    estimator(flow, rows).surrogate.backward()
    optimiser.step()
print(f"exact likelihood after training: {-flow().log_prob(rows).mean():.3f} nats")
