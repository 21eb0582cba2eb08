"""What every estimator shares: a new one is one method, and each says what it is."""

import inspect
import re

import pytest
import torch

import zoo
from enumeration import all_states
from xorflow import estimators
from xorflow.data import Batch
from xorflow.estimators import Baseline, Credit, Estimator, Loss, Standardiser


class Reward(Estimator):
    """E[log p_Y] of one draw of everything."""

    def noise_shape(self, flow):
        return (2, flow.depth, flow.features)

    def loss(self, flow, start, draws):
        value = flow.base.log_prob(flow.run(start, draws=draws).end.state).sum(-1).mean()
        return Loss(surrogate=-value, bound=value.detach(), stats={"mean": value.detach()})


class Silent(Estimator):
    """Draws nothing."""

    def loss(self, flow, start, draws):
        assert draws is None
        value = flow.log_likelihood(start.x, start.context).mean()
        return Loss(surrogate=-value, bound=value.detach())


def test_the_one_method_is_required():
    with pytest.raises(TypeError, match="abstract"):
        Estimator()


@pytest.mark.parametrize("name", zoo.names())
def test_a_new_estimator_takes_every_flow(name):
    flow = zoo.make(name)
    x = all_states(flow.states.sizes)[:5]
    context = zoo.rows_of_context(flow, len(x))
    drawn = Reward()(flow, x, context, generator=torch.Generator().manual_seed(0))
    again = Reward()(flow, Batch(x.to(torch.uint8), context), generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.bound, again.bound)
    assert Reward().draw(flow, 5).shape == (2, 5, flow.depth, flow.features)
    silent = Silent()(flow, x, context)
    torch.testing.assert_close(silent.bound, -silent.surrogate.detach())


def test_what_an_estimator_need_not_say():
    estimator, flow = Silent(), zoo.make("D2")
    assert estimator.noise_shape(flow) is None
    assert estimator.draw(flow, 3) is None
    assert estimator.check(flow) is None
    assert estimator.update({}) is None
    assert list(estimator.parameters()) == []
    loss = estimator(flow, all_states((2, 2)))
    assert loss.control is None
    assert loss.stats == {}


EXPLAINED = [
    name
    for name in estimators.__all__
    if issubclass(getattr(estimators, name), (Estimator, Baseline, Credit, Standardiser))
    and name != "Estimator"
]


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_docstring_says_identity_bias_cost_and_reference_and_has_an_example(name):
    text = inspect.getdoc(getattr(estimators, name))
    assert ".. math::" in text
    assert re.search(r"\b(un)?biased\b", text, flags=re.IGNORECASE)
    cost = re.search(r"^Cost: (.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert cost is not None
    assert "pass" in cost[1]
    assert re.search(r"[A-Z]\w+ (et al\. )?\(\d{4}\)", cost[1].replace("\n", " "))  # an author and a year
    assert re.search(r"^>>> ", text, flags=re.MULTILINE)
