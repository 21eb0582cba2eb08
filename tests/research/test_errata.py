"""Errata of the paper that no other test shows, on models small enough to enumerate; and the page that lists them all."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, gradient
from expectations import BIASED, bound_gradient, everything, gap, networks, rows
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, estimators
from xorflow.estimators import ScoreFunction
from xorflow.training import ESTIMATORS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/derivations.md").read_text(encoding="utf-8")


# ---- the page ----


def test_every_erratum_names_tests_that_exist() -> None:
    _, errata = PAGE.split("## Errata")
    entries = re.split(r"^- \*\*(E\d+)\. ", errata, flags=re.MULTILINE)[1:]
    assert entries[::2] == [f"E{number}" for number in range(1, 18)]
    for name, text in zip(entries[::2], entries[1::2], strict=True):
        named = re.findall(r"\[`(test_\w+)`\]\(\.\./([\w/]+\.py)\)", text)
        assert named, name
        assert text.count("`test_") == len(named), name
        for test, path in named:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{name}: {path}::{test}"


def test_every_name_in_the_table_of_equations_exists() -> None:
    found = re.findall(r"`(xorflow(?:\.\w+)+)`", PAGE)
    assert len(found) > 20
    for name in found:
        parts = name.split(".")
        value = importlib.import_module(parts[0])
        for count, part in enumerate(parts[1:], 2):
            if not hasattr(value, part):
                importlib.import_module(".".join(parts[:count]))
            value = getattr(value, part)


PAPER = {
    "score function of the evidence lower bound": "score-function:objective=elbo",
    "self-critic": "score-function:baseline=sampled",
    "greedy self-critic": "score-function:baseline=greedy",
    "running average": "score-function",
    "standardised, each pixel": "score-function:standardise=feature",
    "standardised, one number": "score-function:standardise=one",
    "local KL": "score-function:objective=elbo,credit=local-divergence",
    "local KL, constant": "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none",
    "better KL": "score-function:objective=elbo,divergence=cross-entropy",
    "SFE of the KL": "score-function:objective=elbo,divergence=sampled,credit=all",
    "better KL as printed": "score-function:objective=elbo,divergence=cross-entropy,credit=printed-divergence",
    "special case": "score-function",
    "two terms": "score-function:credit=two-term",
    "two terms, constant": "score-function:credit=two-term,second=0.5,discount=0.9",
    "two terms, two samples": "score-function:credit=two-term,two_samples=true",
    "impatience": "score-function:credit=impatient",
    "impatience, full posterior": "score-function:objective=elbo,credit=impatient",
    "appendix C as printed": "score-function:credit=printed-rewards",
}
"""Every variant of a score function that the paper speaks of, by its names; the prefixes of appendix C are `ProposalPrefix`."""


def test_every_variant_of_the_paper_is_in_the_table_and_trains() -> None:
    known = {name: getattr(estimators, name) for name in estimators.__all__}
    made = {ESTIMATORS.text(eval(code, known)) for code in re.findall(r"`(ScoreFunction\([^`]*\))`", PAGE)}
    assert made == set(PAPER.values())
    flow = zoo.make("chain posterior")
    for text in PAPER.values():
        estimator = ESTIMATORS.make(text)
        assert isinstance(estimator, ScoreFunction)
        loss = estimator(flow, all_states(flow.states.sizes), generator=torch.Generator().manual_seed(0))
        assert any(
            bool(g.any())
            for g in torch.autograd.grad(loss.surrogate, networks(flow), allow_unused=True)
            if g is not None
        )


# ---- errata ----


def _logs(logits: Tensor) -> Tensor:
    """log p(u given parent) of one bit, [parent, u]."""
    return torch.stack((-logits, logits), -1).mul(0.5).log_softmax(-1)


@pytest.mark.parametrize("seed", range(5))
def test_the_second_local_term_needs_the_networks_of_the_next_layer(seed: int) -> None:
    """E3, for one bit and two layers: the networks of layer l at the choices of layer l + 1 give another gradient."""
    torch.manual_seed(seed)
    p1, q1, p2, q2 = (torch.randn(2, dtype=torch.float64) for _ in range(4))
    q1.requires_grad_()
    x = 1
    log_q1, log_p1 = _logs(q1), _logs(p1)
    log_q2, log_p2 = _logs(q2), _logs(p2)  # [u1, u2]
    first = (log_q1[x] - log_p1[x])[:, None]
    joint = (log_q1[x][:, None] + log_q2).exp()
    (exact,) = torch.autograd.grad(-(joint * (first + log_q2 - log_p2)).sum(), q1, retain_graph=True)

    def estimate(second: Tensor) -> Tensor:
        weight = joint.detach() * (-first + second).detach()
        return torch.autograd.grad((weight * log_q1[x][:, None]).sum(), q1, retain_graph=True)[0]

    torch.testing.assert_close(estimate(log_p2 - log_q2), exact, rtol=0, atol=1e-12)
    assert gap(estimate(log_p1 - log_q1), exact) > BIASED


@pytest.mark.parametrize("name", ["D3 posterior", "D3 depth 2 posterior", "K3 posterior"])
def test_the_score_of_log_q_is_minus_the_gradient_of_the_entropy(name: str) -> None:
    """E5, for the first layer's posterior."""
    flow = zoo.make(name)
    parameters = list(flow.layers[0].posterior.parameters())
    trace = everything(flow, rows(flow)[0][0], "q", stop=1)
    log_q = trace.log_q().sum((-1, -2))
    score = gradient((log_q.detach().exp() * log_q.detach() * log_q).sum(), parameters)
    entropy = trace.posterior[0].entropy().expand(1, flow.features).sum()
    torch.testing.assert_close(score, -gradient(entropy, parameters), rtol=0, atol=1e-12)
    assert score.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["D2", "D3 reversed", "D4 random"])
def test_gradients_of_p_instead_of_log_p_are_biased(name: str) -> None:
    """E7, at depth 1, where the first term alone is the whole gradient."""
    flow = zoo.make(name)
    found = {"log p": torch.zeros((), dtype=torch.float64), "p": torch.zeros((), dtype=torch.float64)}
    for row, share in rows(flow):
        trace = everything(flow, row, "p")
        log_p = trace.log_p()[..., 0, :]
        weight = log_p.detach().sum(-1, keepdim=True).exp() * flow.base.log_prob(trace.end.state).detach()
        found["log p"] = found["log p"] + share * (weight * log_p).sum()
        found["p"] = found["p"] + share * (weight * log_p.exp()).sum()
    exact = bound_gradient(name)
    assert gap(gradient(found["log p"], networks(flow)), exact) < 1e-10
    assert gap(gradient(found["p"], networks(flow)), exact) > BIASED


@pytest.mark.parametrize("name", ["K3 D1", "K3 D3", "K4 D2"])
def test_the_wrong_direction_is_normalised_but_another_law(name: str) -> None:
    """E9: with y = x + u instead of y = x - u, for K > 2."""
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)
    table = flow.base.log_table()[0].exp()  # (D, K)
    u = torch.arange(table.shape[1])
    chosen = flow.layers[0].generator_choices(flow.start(x)).log_probs()[0].exp()
    laws = {}
    for sign in (1, -1):
        y = (x[..., None] + sign * u) % table.shape[1]  # (X, D, U)
        reached = table.expand(len(x), -1, -1).gather(-1, y)
        laws[sign] = (chosen * reached).sum(-1).prod(-1).detach()
        assert float(laws[sign].sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(laws[-1], flow().log_prob(x).exp().detach(), rtol=0, atol=1e-12)
    assert gap(laws[1], laws[-1]) > 1e-3


def test_a_fixed_base_loses_generality() -> None:
    """E12, for one pixel: P(x = 1) is never outside the base's range, and deterministically one of two values."""
    flow = LatentFlow([Layer(MADE(1, hidden=()))], FactorisedBase(1, p0=0.9)).double()
    one, latent, hard = torch.tensor([[1]]), [], []
    for logit in torch.linspace(-40, 40, 81):
        flow.layers[0].conditioner.start_at(logit.reshape(1))
        latent.append(flow().log_prob(one).exp().item())
        hard.append(round(flow.greedy()().log_prob(one).exp().item(), 6))  # the base is kept in float32
    assert min(latent) == pytest.approx(0.1)
    assert max(latent) == pytest.approx(0.9)
    assert set(hard) == {0.1, 0.9}
