"""What we measure ourselves against: the same computations as one would first write them in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

import xorflow as xf
from xorflow.conditioners import MaskedLinear, Source
from xorflow.flows import SampleNoise


class PlainMADE(nn.Module):
    """A MADE of one hidden layer that multiplies its weights by their masks in every pass."""

    def __init__(self, made: xf.MADE) -> None:
        super().__init__()
        layers = [layer for layer in made.net if isinstance(layer, MaskedLinear)]
        for index, layer in enumerate(layers):
            self.register_buffer(f"mask{index}", layer.mask.clone())
            self.register_parameter(f"weight{index}", nn.Parameter(layer.weight.detach().clone()))
            self.register_parameter(f"bias{index}", nn.Parameter(layer.bias.detach().clone()))
        self.base = nn.Parameter(torch.full((made.features,), -6.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(linear(x, self.weight0 * self.mask0, self.bias0))
        return linear(hidden, self.weight1 * self.mask1, self.bias1)


def plain_training_step(made: xf.MADE, intensities: Tensor, batch_size: int) -> Callable[[], None]:
    """An eager loop's step: fresh binarisation, marginal likelihood by autograd, Adam as PyTorch comes."""
    device = intensities.device
    model = PlainMADE(made).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    grey = intensities.float() / 255

    def step() -> None:
        rows = torch.randint(len(grey), (batch_size,), device=device)
        x = torch.bernoulli(grey[rows])
        logits = model(x)
        here = x * logsigmoid(model.base) + (1 - x) * logsigmoid(-model.base)
        there = x * logsigmoid(-model.base) + (1 - x) * logsigmoid(model.base)
        mixed = torch.logaddexp(logsigmoid(-logits) + here, logsigmoid(logits) + there)
        loss = -mixed.sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def sequential_sample(flow: xf.LatentFlow, noise: SampleNoise) -> Tensor:
    """Ancestral sampling at depth 1 with one pass of the network for each feature."""
    network, order = flow.layers[0].conditioner, flow.layers[0].conditioner.order
    with torch.inference_mode():
        y = flow.encode(flow.base.sample(noise.base))
        x = torch.zeros_like(y)
        for d in order:
            logit = network({Source.STATE: x})[:, d]
            u = (noise.layers[:, 0, d] > torch.sigmoid(-logit)).to(y.dtype)
            x[:, d] = y[:, d] + u - 2 * y[:, d] * u
    return x.long()


def zuko_sampler(features: int, hidden: int, batch: int, device: torch.device) -> Callable[[], Tensor] | None:
    """zuko's masked autoregressive flow of the same size (a continuous flow); None if zuko is not installed."""
    try:
        import zuko
    except ImportError:
        return None
    flow = zuko.flows.MAF(features=features, transforms=1, hidden_features=(hidden,)).to(device)

    def sample() -> Tensor:
        with torch.inference_mode():
            return flow().sample((batch,))

    return sample
