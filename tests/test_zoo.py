"""The zoo itself: its members differ from trivial models, so that the property tests mean something."""

import pytest
import torch

import zoo
from enumeration import all_choices, all_states

NAMES = zoo.every()


def test_the_zoo_covers_what_it_promises():
    flows = [zoo.make(name) for name in NAMES]
    assert {2, 3, 4, 5} <= {k for flow in flows for k in flow.states.sizes}
    assert {1, 2, 3, 4, 5} <= {flow.features for flow in flows}
    assert {1, 2, 3, 8} <= {flow.depth for flow in flows}
    for trait in ("is_chain", "has_posterior", "last_layer_summable", "shares_one_order"):
        assert {getattr(flow, trait) for flow in flows} == {True, False}
    assert zoo.DRAWS.keys() <= zoo.MEMBERS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_members_are_sharp_and_the_same_every_time(name):
    flow, again = zoo.make(name), zoo.make(name)
    assert all(torch.equal(a, b) for a, b in zip(flow.parameters(), again.parameters(), strict=True))
    x = all_states(flow.states.sizes)
    u = all_choices(flow)[-1]
    log_p = flow.run(flow.start(x, zoo.context(flow)), draws=u).log_p().detach()  # (X, L, D)
    choices = torch.tensor([layer.transform.choices.sizes for layer in flow.layers])
    assert float((log_p + choices.log()).abs().max()) > 0.2
    assert float(torch.cat([table.detach().flatten() for table in flow.base.log_table()]).std()) > 0.02
