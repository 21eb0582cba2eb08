"""What every estimator shares: a new one is one method."""

import pytest
import torch

import zoo
from enumeration import all_states
from xorflow.data import Batch
from xorflow.estimators import Estimator, Loss


class Reward(Estimator):
    """E[log p_Y] of one draw of everything."""

    def noise_shape(self, flow):
        return (2, flow.depth, flow.features)

    def loss(self, flow, x, context, draws):
        value = flow.base.log_prob(flow.run(x, draws=draws, context=context).end.state).sum(-1).mean()
        return Loss(surrogate=-value, bound=value.detach(), stats={"mean": value.detach()})


class Silent(Estimator):
    """Draws nothing."""

    def loss(self, flow, x, context, draws):
        assert draws is None
        value = flow.log_likelihood(x, context).mean()
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
