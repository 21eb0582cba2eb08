"""Completion of what is given, as users call it; that it is exact is in test_conditionals."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import enumerated, visiting_order
from xorflow import MADE, DataError, FactorisedBase, Intractable, LatentFlow, Layer, ModelError


def offered(flow) -> bool:
    return flow.has_closed_form


def prefixes(flow) -> list[Tensor]:
    """Every mask whose known features are a prefix of the (first layer's) order."""
    order = visiting_order(flow.layers[0].conditioner)
    found = []
    for count in range(flow.features + 1):
        known = torch.zeros(flow.features, dtype=torch.bool)
        known[order[:count]] = True
        found.append(known)
    return found


@pytest.mark.parametrize("name", zoo.every(lambda flow: offered(flow) and flow.features in (2, 3)))
def test_completions_have_the_conditional_law(name):
    """50,000 draws given a prefix, every frequency within five standard errors of p(x) / p(prefix)."""
    flow, joint, count = zoo.make(name), enumerated(name), 50_000
    known = prefixes(flow)[1]
    given = joint.x[-1]
    context = zoo.context(flow)
    dist = flow(None if context is None else context[0])
    rows = given.expand(count, -1)
    done = dist.complete(rows, known, generator=torch.Generator().manual_seed(0))
    fits = (joint.x[:, known] == given[known]).all(-1)
    p = (joint.log_p.exp() * fits) / (joint.log_p.exp() * fits).sum()
    frequency = torch.stack([(done == x).all(-1).double().mean() for x in joint.x])
    assert bool((frequency[~fits] == 0).all())
    assert bool(((frequency - p).abs()[fits] < 5 * (p[fits] / count).sqrt()).all())


@pytest.mark.parametrize("name", ["D3 depth 2 reversed", "chain D3 depth 2", "coupling D5 halves"])
def test_a_latent_flow_of_depth_two_refuses(name):
    flow = zoo.make(name)
    x, known = torch.zeros(1, flow.features, dtype=torch.int64), prefixes(flow)[1]
    with pytest.raises(Intractable, match=r"depth 2.*flow.greedy\(\)"):
        flow().complete(x, known)


@pytest.mark.parametrize("name", ["D4 own", "K 3, 1, 2 own"])
def test_a_latent_flow_that_sees_its_own_choices_refuses(name):
    """Given x, earlier choices are not determined, so what p(u) draws for them is not their law given x."""
    flow = zoo.make(name)
    x = torch.zeros(1, flow.features, dtype=torch.int64)
    with pytest.raises(Intractable, match="do not see their own u"):
        flow().complete(x, prefixes(flow)[1])
    assert flow.greedy()().complete(x, prefixes(flow)[1]).shape == x.shape


def test_a_deterministic_flow_of_two_orderings_refuses():
    flow = zoo.make("D3 depth 2 reversed").greedy()
    with pytest.raises(Intractable, match="layers in one ordering"):
        flow().complete(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([True, False, False]))


def test_only_a_prefix_can_be_given():
    flow = zoo.make("D3 reversed")
    with pytest.raises(ModelError, match=r"prefix.*feature 2 is missing among the first 1"):
        flow().complete(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([True, False, False]))


def test_a_coupling_layer_needs_what_it_sees():
    flow = zoo.make("coupling D4 checkerboard")  # sees 0 and 3
    x = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match="together with all features that it sees"):
        flow().complete(x, torch.tensor([True, True, False, False]))
    for known in ([True, False, False, False], [True, True, False, True]):
        assert flow().complete(x, torch.tensor(known)).shape == (2, 4)


@pytest.mark.parametrize("known", [torch.tensor([1, 0, 0]), torch.tensor([True, False])])
def test_known_is_one_boolean_for_each_feature(known):
    with pytest.raises(DataError, match="one boolean for each of the 3 features"):
        zoo.make("D3 linear")().complete(torch.zeros(1, 3, dtype=torch.int64), known)


def test_no_rows_are_completed_to_none():
    flow = LatentFlow([Layer(MADE(3, hidden=(4,)))], FactorisedBase(3))
    known = torch.tensor([True, False, False])
    assert flow().complete(torch.zeros(0, 3, dtype=torch.int64), known).shape == (0, 3)
