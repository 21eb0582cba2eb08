"""Logits of several conditioners, weighed: the zoo proves that they are a distribution, and here what they are."""

import pytest
import torch

import zoo
from enumeration import all_states
from xorflow import MADE, FactorisedBase, LatentFlow, ModelError
from xorflow.conditioners import Source, Stacked
from xorflow.training.registry import flow_to_spec
from xorflow.training.spec import flow_from_spec


def test_logits_are_added_by_weights_of_each_feature():
    torch.manual_seed(0)
    net = zoo.stacked(3, "reversed", categories=(3, 2, 4)).conditioner.double()
    x = {Source.STATE: all_states((3, 2, 4))}
    expected = sum(w[net.states.logit_features] * m(x) for w, m in zip(net.weights(), net, strict=True))
    torch.testing.assert_close(net(x), expected, rtol=0, atol=1e-12)
    assert bool((net.weights() > 0).all())


def test_equal_members_are_that_member():
    torch.manual_seed(0)
    net = MADE(3, (8,), categories=3)
    x = {Source.STATE: all_states((3,) * 3)}
    torch.testing.assert_close(Stacked([net, net])(x), net(x))


def test_it_begins_where_its_networks_do():
    net = Stacked([MADE(3, (8,)), MADE(3, ())])
    start = torch.tensor([0.3, -1.0, 2.0])
    net.start_at(start)
    x = {Source.STATE: torch.zeros(1, 3)}
    torch.testing.assert_close(net(x)[0], start, rtol=0, atol=0.8)


def test_a_mixture_of_stacked_orderings_is_built_again():
    torch.manual_seed(0)
    mixture = zoo.flow(zoo.stacked(3, "random:2", categories=(3, 2, 4)))
    again = flow_from_spec(flow_to_spec(mixture))
    again.load_state_dict(mixture.state_dict())
    x = all_states((3, 2, 4))
    assert torch.equal(again().log_prob(x), mixture().log_prob(x))


@pytest.mark.parametrize(
    "other",
    [
        MADE(3, (8,), order="reversed"),
        MADE(3, (8,), categories=3),
        MADE(3, (8,), sees={"x": "before"}),
        MADE(3, (8,), context=1),
    ],
)
def test_members_have_one_ordering_and_see_the_same(other):
    with pytest.raises(ModelError, match="member 2 has others than the first"):
        Stacked([MADE(3, (8,)), other])


def test_something_is_stacked():
    with pytest.raises(ModelError, match="none was given"):
        Stacked([])


def test_what_a_base_makes_of_it_is_exact():
    torch.manual_seed(0)
    layer = zoo.stacked(4, "random:1")
    flow = LatentFlow([layer], FactorisedBase(4, p0=1 - 1e-6, tied=True)).double()
    assert abs(float(flow().log_prob(all_states((2,) * 4)).exp().sum().detach()) - 1) < 1e-12
