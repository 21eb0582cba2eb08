"""Estimators as they are used, on uniforms: the mean of 100,000 gradients against the exact one, within its standard error."""

from typing import Literal

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, gradient
from expectations import bound, everything, evidence, rows, score_function, state, trainable
from research.estimators.oracles import enumerated_value
from xorflow import LatentFlow
from xorflow.estimators import (
    ARMS,
    VIMCO,
    Concrete,
    DisARM,
    DoubleCV,
    Estimator,
    LocalExpectation,
    MaximumLikelihood,
    ProposalPrefix,
    Rebar,
    ReinMax,
    Relax,
    StraightThroughGumbel,
    Target,
)


class Disturbed(Relax):
    """RELAX, its network with weights as after some training."""

    def make_parameters(self, layers: int, like: Tensor) -> None:
        super().make_parameters(layers, like)
        with torch.no_grad():
            for index, parameter in enumerate(self.networks.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))


BATCHES = 80
FIRST, SECOND = 800, 480  # examples of the two states: shares 1 and 0.6


def summed_out(flow: LatentFlow) -> Tensor:
    """E[log M] of the two states: the last layer summed out, the others enumerated."""
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "p", flow.depth - 1)
        value = flow.log_marginal(trace.end).sum(-1)
        total = total + share * (trace.log_p().sum((-1, -2)).exp() * value).sum()
    return total


def of_several(samples: int, proposal: Literal["p", "q"] = "p", sum_last: bool = False):
    """The bound of several samples of the two states, as a plain sum over all tuples of choices."""
    objective = Target("importance", samples=samples, proposal=proposal, sum_last=sum_last)
    return lambda flow: torch.stack(
        [share * enumerated_value(objective, flow, state(flow, row), None) for row, share in rows(flow)]
    ).sum()


def z_scores(estimator: Estimator, flow: LatentFlow, objective: Tensor) -> Tensor:
    """How many standard errors the mean gradient is from the exact one, in every coordinate that varies.

    The state is updated after each batch, as in training; the standard error is that of the batches' means.
    """
    (first, _), (second, _) = rows(flow)
    index = torch.tensor([first] * FIRST + [second] * SECOND)
    x, context = all_states(flow.states.sizes)[index], zoo.rows_of_context(flow, len(index))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(BATCHES):
        loss = estimator(flow, x, context, generator=generator)
        found.append(-gradient(loss.surrogate, trainable(flow)))
        estimator.update(loss.stats)
    each = torch.stack(found)
    error = each.std(0) / BATCHES**0.5
    exact = gradient(objective, trainable(flow)) / 1.6
    off = (each.mean(0) - exact).abs().detach()
    fixed = error < 1e-12
    assert float(off[fixed].max() if bool(fixed.any()) else 0) < 1e-10
    return off[~fixed] / error[~fixed]


CASES = {
    "no baseline": ("D3 depth 2 reversed", lambda: score_function("baseline=none"), bound),
    "running mean, own u": ("D4 own", lambda: score_function(), bound),
    "greedy critic, chain": ("chain D2 depth 3", lambda: score_function("baseline=greedy"), bound),
    "sampled critic, K = 3": ("K3 depth 2", lambda: score_function("baseline=sampled"), bound),
    "all rewards": ("chain K3 depth 2", lambda: score_function("credit=all"), bound),
    "two samples and a critic": (
        "chain D3 depth 2", lambda: score_function("credit=two-term,two_samples=true,baseline=sampled"), bound
    ),
    "entropy": ("D3 depth 3", lambda: score_function("entropy=0.7"), lambda flow: bound(flow, 0.7)),
    "learned base, last layer summed out": ("D3 depth 2 learned base", lambda: score_function("sum_last=true"), bound),
    "prefixes from a proposal": ("D4 own", lambda: ProposalPrefix(0.3), bound),
    "posterior": ("D3 depth 2 posterior", lambda: score_function("objective=elbo"), evidence),
    "posterior, suffix, chain": (
        "chain depth 3 posterior sees x, previous",
        lambda: score_function("objective=elbo,divergence=cross-entropy,baseline=sampled"), evidence
    ),
    "posterior, vanilla, K = 3": (
        "K3 depth 2 posterior",
        lambda: score_function("objective=elbo,divergence=sampled,credit=all,baseline=greedy"), evidence
    ),
    "posterior, last layer summed out": (
        "D2 depth 3 posterior sees x", lambda: score_function("objective=elbo,sum_last=true"), evidence
    ),
    "marginal": ("D2 depth 3", lambda: MaximumLikelihood(samples=3), summed_out),
    "leave-one-out, own u": ("D3 depth 2 own", lambda: score_function("baseline=leave-one-out,samples=2"), bound),
    "leave-one-out, posterior": (
        "D2 depth 3 posterior sees x",
        lambda: score_function("objective=elbo,baseline=leave-one-out,samples=3,sum_last=true"), evidence
    ),
    "several samples": ("D3 depth 2 reversed", lambda: VIMCO(2), of_several(2)),
    "several samples, posterior": ("chain depth 2 relative posterior", lambda: VIMCO(3, "q"), of_several(3, "q")),
    "several samples, last layer summed out": (
        "D3 depth 2 posterior", lambda: VIMCO(3, "q", sum_last=True), of_several(3, "q", sum_last=True)
    ),
    "disarm, depth 3": ("D3 depth 3", lambda: DisARM(), bound),
    "disarm, one order": ("D2 depth 3 one order", lambda: DisARM(), bound),
    "disarm, chain, last layer summed out": ("chain depth 3 posterior sees state", lambda: DisARM(True), bound),
    "disarm, common uniforms": ("D2 depth 3", lambda: DisARM(common=True), bound),
    "arms, depth 3": ("D3 depth 3", lambda: ARMS(3), bound),
    "arms, one order": ("D2 depth 3 one order", lambda: ARMS(3), bound),
    "arms, chain": ("chain depth 3 posterior sees state", lambda: ARMS(4), bound),
    "arms, common uniforms": ("D3 depth 2 learned base", lambda: ARMS(3, common=True), bound),
    "arms, last layer summed out": ("made and coupling", lambda: ARMS(2, True), bound),
    "rebar, depth 3": ("D3 depth 3", lambda: Rebar(0.6), bound),
    "rebar, one order": ("D2 depth 3 one order", lambda: Rebar(0.6), bound),
    "rebar, chain": ("chain depth 3 posterior sees state", lambda: Rebar(0.9, 0.3), bound),
    "rebar, last layer summed out": ("D3 depth 2 learned base", lambda: Rebar(sum_last=True), bound),
    "relax": ("D2 depth 3", lambda: Disturbed(), bound),
    "relax, one order": ("D2 depth 3 one order", lambda: Disturbed(), bound),
    "double control variates, K = 3": ("K3 depth 2", lambda: DoubleCV(2), bound),
    "double control variates, chain": ("chain D2 depth 3", lambda: DoubleCV(3, 0.5), bound),
    "local expectations, own u": ("D3 depth 2 own", lambda: LocalExpectation(), bound),
    "local expectations, depth 3": ("D3 depth 3", lambda: LocalExpectation(True), bound),
    "reinmax at depth 1": ("K 2, 3, 4", lambda: ReinMax(), bound),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_mean_gradient_is_the_exact_one(case):
    name, make, objective = CASES[case]
    flow = zoo.make(name)
    z = z_scores(make(), flow, objective(flow))
    assert len(z) > 10
    assert float(z.max()) < 4.5


BIASED = {
    "impatient": lambda: score_function("credit=impatient"),
    "concrete": lambda: Concrete(0.5),
    "straight-through gumbel": lambda: StraightThroughGumbel(1.0),
}


@pytest.mark.parametrize("case", BIASED)
def test_a_bias_is_seen(case):
    """The power of the test: estimators that are biased at depth 2 fail it by far."""
    flow = zoo.make("D3 depth 2 one order")
    assert float(z_scores(BIASED[case](), flow, bound(flow)).max()) > 20
