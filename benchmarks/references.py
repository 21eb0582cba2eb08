"""What we measure ourselves against: the same computations as one would first write them in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

import xorflow as xf
from xorflow.conditioners import MaskedLinear, Source
from xorflow.flows import SampleNoise
from xorflow.flows.layer import by_decoding, by_passes

PLAIN = "plain eager PyTorch loop"
ONE_DRAW = "plain eager PyTorch, one draw at a time"
D_PASSES = "D-pass sampler"
ZUKO = "zuko's MAF of the same size"
SAMPLERS = {"passes": "passes of all features until nothing changes", "blocks": "blocks of features"}


class PlainMADE(nn.Module):
    """A MADE of one hidden layer that multiplies its weights by their masks in every pass."""

    def __init__(self, made: xf.MADE) -> None:
        super().__init__()
        layers = [layer for layer in made.net.linear if isinstance(layer, MaskedLinear)]
        for index, layer in enumerate(layers):
            self.register_buffer(f"mask{index}", layer.mask.clone())
            self.register_parameter(f"weight{index}", nn.Parameter(layer.weight.detach().clone()))
            self.register_parameter(f"bias{index}", nn.Parameter(layer.bias.detach().clone()))
        self.register_buffer("arrange", made.net.reader.arrange)
        self.register_buffer("rearrange", made.net.rearrange)
        self.base = nn.Parameter(torch.full((made.features,), -6.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.arrange is not None:
            x = x[:, self.arrange]
        hidden = torch.relu(linear(x, self.weight0 * self.mask0, self.bias0))
        out = linear(hidden, self.weight1 * self.mask1, self.bias1)
        return out if self.rearrange is None else out[:, self.rearrange]


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


@torch.inference_mode()
def plain_bound(flow: xf.LatentFlow, x: Tensor, draws: int, batch_size: int = 1000) -> Tensor:
    """The importance-sampled bound of each row, every layer sampled: one draw at a time through plain networks."""
    networks = [PlainMADE(layer.conditioner).to(flow.device) for layer in flow.layers]
    base = flow.base.logits
    log_p = []
    for rows in x.to(flow.device, torch.float32).split(batch_size):
        weights = []
        for _ in range(draws):
            state = rows
            for network in networks:
                u = torch.bernoulli(torch.sigmoid(network(state)))
                state = state + u - 2 * state * u
            weights.append((state * logsigmoid(base) + (1 - state) * logsigmoid(-base)).double().sum(-1))
        log_p.append(torch.logsumexp(torch.stack(weights), 0) - math.log(draws))
    return torch.cat(log_p)


def sample_by(sampler: str, flow: xf.LatentFlow, noise: SampleNoise) -> Tensor:
    """Our own sampler, kept to one of `SAMPLERS`."""
    state = flow.base.sample(noise.base)
    with torch.no_grad():
        for index in reversed(range(flow.depth)):
            layer, draws = flow.layers[index], noise.layers[:, index]
            guess = by_decoding(layer, state, draws, None) if sampler == "blocks" else None
            state = by_passes(layer, state, draws, None, guess)
    return state.long()


def sequential_sample(flow: xf.LatentFlow, noise: SampleNoise) -> Tensor:
    """Ancestral sampling at depth 1 with one pass of the network for each feature."""
    network, order = flow.layers[0].conditioner, flow.layers[0].conditioner.order
    with torch.inference_mode():
        y = flow.base.sample(noise.base)
        x = torch.zeros_like(y)
        for d in order:
            logit = network({Source.STATE: x})[:, d]
            u = (noise.layers[:, 0, d] > torch.sigmoid(-logit)).to(y.dtype)
            x[:, d] = y[:, d] ^ u
    return x.long()


def recomputed(flow: xf.LatentFlow, noise: SampleNoise, x: Tensor) -> Tensor:
    """What `sequential_sample` gives wherever it agrees with the samples x on all features before; in one pass, at depth 1."""
    with torch.inference_mode():
        y = flow.base.sample(noise.base)
        logits = flow.layers[0].conditioner({Source.STATE: x})
        u = noise.layers[:, 0] > torch.sigmoid(-logits)
    return (y.long() + u) % 2


def zuko_flow(features: int, hidden: int, device: torch.device) -> nn.Module | None:
    """zuko's masked autoregressive flow of the same size (a continuous flow); None if zuko is not installed."""
    try:
        import zuko
    except ImportError:
        return None
    return zuko.flows.MAF(features=features, transforms=1, hidden_features=(hidden,)).to(device)


def zuko_sampler(flow: nn.Module, batch: int) -> Callable[[], Tensor]:
    def sample() -> Tensor:
        with torch.inference_mode():
            return flow().sample((batch,))

    return sample


def zuko_training_step(flow: nn.Module, intensities: Tensor, batch_size: int) -> Callable[[], None]:
    """A step on the grey values, made continuous by uniform noise as usual; Adam as PyTorch comes."""
    optimiser = torch.optim.Adam(flow.parameters(), lr=1e-3)
    grey = intensities.float()

    def step() -> None:
        rows = grey[torch.randint(len(grey), (batch_size,), device=grey.device)]
        loss = -flow().log_prob((rows + torch.rand_like(rows)) / 256).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step
