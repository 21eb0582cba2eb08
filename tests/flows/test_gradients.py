"""The likelihood of a distribution is what trains a model: its gradient is that of the enumerated likelihood."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, base_table_lookup, gradient, joint
from xorflow import Flow, LatentFlow, Mixture
from xorflow.estimators import MaximumLikelihood
from xorflow.flows import Model


def trained(model: Model) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def by_log_prob(model: Model, x: Tensor) -> Tensor:
    context = zoo.rows_of_context(model, len(x))
    return gradient(-model(context).log_prob(x).mean(), trained(model))


@pytest.mark.parametrize("name", zoo.names(zoo.closed_form))
def test_of_a_latent_flow_it_is_that_of_maximum_likelihood(name):
    flow = zoo.make(name)
    x = all_states(flow.categories)
    context = zoo.rows_of_context(flow, len(x))
    found = by_log_prob(flow, x)
    expected = gradient(MaximumLikelihood()(flow, x, context).surrogate, trained(flow))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    enumerated = gradient(-joint(flow).log_p.mean(), trained(flow))
    torch.testing.assert_close(found, enumerated, rtol=0, atol=1e-12)
    assert bool((found != 0).any())


DEEP = zoo.names(lambda flow: not flow.has_closed_form and flow.depth < 4)


@pytest.mark.parametrize("name", DEEP)
def test_of_a_deep_latent_flow_it_is_that_of_the_sum_over_choices(name):
    flow = zoo.make(name)
    found = by_log_prob(flow, all_states(flow.categories))
    expected = gradient(-joint(flow).log_p.mean(), trained(flow))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4)])
def test_of_a_mixture_it_is_that_of_its_exact_likelihood(sizes, learned):
    torch.manual_seed(0)
    parts = [
        zoo.sharpen(make(zoo.made(3, order, categories=sizes), learned=True))
        for make, order in ((zoo.flow, "natural"), (zoo.tied, "random:1"), (zoo.flow, "natural"))
    ]
    mixture = Mixture(parts, [0.5, 0.2, 0.3], learned=learned).double()
    x = all_states(sizes)
    found = by_log_prob(mixture, x)
    expected = gradient(MaximumLikelihood()(mixture, x).surrogate, trained(mixture))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = mixture.logits.softmax(0)
    by_sums = sum(w * joint(part).log_p.exp() for w, part in zip(weights, parts, strict=True)).log()
    torch.testing.assert_close(found, gradient(-by_sums.mean(), trained(mixture)), rtol=0, atol=1e-12)
    assert (mixture.logits in set(trained(mixture))) is learned


@pytest.mark.parametrize("name", zoo.names())
def test_a_deterministic_flow_has_one_for_its_base_alone(name):
    flow = zoo.make(name).greedy()
    flow.base.logits.requires_grad_(True)
    x = all_states(flow.categories)
    context = zoo.rows_of_context(flow, len(x))
    loss = -flow(context).log_prob(x).mean()
    slopes = torch.autograd.grad(loss, [*flow.layers.parameters()], retain_graph=True, allow_unused=True)
    assert all(slope is None for slope in slopes)
    y = flow.to_base(x, context)
    expected = -base_table_lookup(flow, y).sum(-1).mean()
    found, wanted = (gradient(value, [flow.base.logits]) for value in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert isinstance(flow, Flow)


def test_many_rows_and_several_leading_shapes_are_the_sum_of_their_parts(monkeypatch):
    monkeypatch.setattr("xorflow.flows.model._ROWS_AT_A_TIME", 5)
    flow = zoo.make("K 4, 2, 3 posterior")
    x = all_states(flow.categories).reshape(2, 3, 4, 3)
    context = torch.randn(3, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = trained(flow)
    found = gradient(flow(context).log_prob(x).sum(), parameters)
    rows, each = x.flatten(0, 2), context.expand(2, 3, 4, 1).flatten(0, 2)
    one_by_one = [gradient(flow(c).log_prob(row), parameters) for row, c in zip(rows, each, strict=True)]
    torch.testing.assert_close(found, torch.stack(one_by_one).sum(0), rtol=0, atol=1e-12)


def test_a_few_steps_raise_the_likelihood():
    flow: LatentFlow = zoo.make("K 3, 2, 4 direct")
    x = flow().sample((256,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(0.25)
    optimiser = torch.optim.Adam(trained(flow), lr=0.05)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = -flow().log_prob(x).mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
