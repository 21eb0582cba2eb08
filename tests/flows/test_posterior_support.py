"""A posterior lives where its generator does: choices that a layer does not have get no mass from q."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states
from xorflow import LatentFlow
from xorflow._states import NEVER

POSTERIORS = zoo.names(lambda flow: flow.has_posterior)
COUPLINGS = zoo.names(
    lambda flow: flow.has_posterior and any(layer.conditioner.mask is not None for layer in flow.layers)
)


def enumerated(flow: LatentFlow) -> tuple[Tensor, Tensor]:
    """log p and log q of every choice, by layer and feature, at every x: (T, X, L, D)."""
    x, u = all_states(flow.states.sizes), all_choices(flow)
    trace = flow.run(flow.start(x, zoo.context(flow)), draws=u[:, None], proposal="q")
    shape = (len(u), len(x), flow.depth, flow.features)
    return trace.log_p().expand(shape), trace.log_q().expand(shape)


def test_there_are_couplings_with_posteriors() -> None:
    assert len(COUPLINGS) >= 3


@pytest.mark.parametrize("name", POSTERIORS)
def test_what_the_generator_never_chooses_the_posterior_never_does(name: str) -> None:
    log_p, log_q = enumerated(zoo.make(name))
    impossible = log_p < NEVER / 2
    assert bool((log_q[impossible].exp() == 0).all())
    assert bool(impossible.any()) is (name in COUPLINGS)


@pytest.mark.parametrize("name", POSTERIORS)
def test_the_divergence_is_that_of_the_choices_there_are(name: str) -> None:
    """Enumerated over the choices of the layers that exist, q sums to one, and its divergence from p is a few nats."""
    log_p, log_q = (part.sum((-1, -2)) for part in enumerated(zoo.make(name)))
    q = log_q.exp()
    assert torch.allclose(q.sum(0), torch.ones_like(q[0]), atol=1e-12)
    possible = q > 0
    divergence = torch.where(possible, q * (log_q - log_p), 0.0).sum(0)
    assert bool((divergence > -1e-12).all())
    assert float(divergence.detach().max()) < 100


@pytest.mark.parametrize("name", COUPLINGS)
def test_features_that_are_left_alone_have_no_divergence_and_no_gradient(name: str) -> None:
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    trace = flow.run(x, draws="greedy", proposal="q")
    assert trace.posterior is not None
    for layer, p, q in zip(flow.layers, trace.generator, trace.posterior, strict=True):
        assert layer.conditioner.mask is not None
        still = torch.broadcast_to(layer.conditioner.mask, q.kl(p).shape)  # pyright: ignore[reportArgumentType]
        assert bool((q.kl(p)[still] == 0).all())  # pyright: ignore[reportArgumentType]
        assert bool((q.entropy()[still].detach().abs() < 1e-300).all())
        parts = [q.kl(p)[still].sum(), q.entropy()[still].sum()]  # pyright: ignore[reportArgumentType]
        for part in parts:
            grads = torch.autograd.grad(
                part, [*flow.layers.parameters()], retain_graph=True, allow_unused=True
            )
            assert all(grad is None or bool((grad == 0).all()) for grad in grads)
