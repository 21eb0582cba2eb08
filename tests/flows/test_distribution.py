"""The public edge: a flow as a torch distribution over integers."""

import numpy as np
import pytest
import torch
from torch.distributions import Distribution

import zoo
from enumeration import all_states, enumerated
from expectations import score_function
from xorflow import MADE, DataError, FactorisedBase, Intractable, LatentFlow, Layer, Mixture, ModelError
from xorflow.estimators import MaximumLikelihood, StraightThrough


@pytest.fixture
def flow() -> LatentFlow:
    return zoo.make("K 2, 3, 4")


def test_shapes_without_context(flow):
    dist = flow()
    assert isinstance(dist, Distribution)
    assert (dist.event_shape, dist.batch_shape) == ((3,), ())
    assert dist.sample().shape == (3,)
    assert dist.sample((5,)).shape == (5, 3)
    assert dist.sample(torch.Size([2, 4])).shape == (2, 4, 3)
    assert dist.log_prob(dist.sample((2, 4))).shape == (2, 4)
    assert dist.log_prob(dist.sample()).shape == ()
    assert "LatentFlow" in repr(dist)


def test_shapes_with_context():
    flow = zoo.make("D3 context")
    dist = flow(torch.zeros(4, 5, 2))
    assert (dist.event_shape, dist.batch_shape) == ((3,), (4, 5))
    assert dist.sample((7,)).shape == (7, 4, 5, 3)
    assert dist.log_prob(dist.sample((7,))).shape == (7, 4, 5)
    assert dist.log_prob(torch.zeros(3, dtype=torch.int64)).shape == (4, 5)
    assert flow(torch.zeros(2)).sample().shape == (3,)


def test_each_row_of_context_has_its_own_distribution():
    flow = zoo.make("D3 depth 2 reversed")
    context_flow = zoo.make("D2 depth 2 context")
    rows = torch.tensor([[-1.0, 2.0], [0.5, 0.5], [3.0, -2.0]], dtype=torch.float64)
    x = all_states((2, 2))
    together = context_flow(rows).log_prob(x[:, None])  # (4, 3)
    alone = torch.stack([context_flow(row).log_prob(x) for row in rows], -1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(together.exp().sum(0), torch.ones(3).double(), rtol=0, atol=1e-10)
    assert float((together[:, 0] - together[:, 2]).detach().abs().max()) > 1e-3
    assert flow.context_features == 0


def test_support(flow):
    support = flow().support
    assert support.is_discrete
    assert support.event_dim == 1
    assert support.check(torch.tensor([[1, 2, 3], [2, 0, 0], [0, 3, 0], [0, -1, 0]])).tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert bool(support.check(flow().sample((100,))).all())


def test_a_shape_with_a_negative_size_is_refused(flow):
    with pytest.raises(DataError, match=r"sizes from 0, and got \(2, -1\)"):
        flow().sample((2, -1))


@pytest.mark.parametrize("name", ["D3 reversed", "K 2, 3, 4", "D2 depth 8"])
def test_integers_come_out(name):
    for flow in (zoo.make(name), zoo.make(name).greedy()):
        assert flow().sample((3,)).dtype == torch.int64
        assert flow().log_prob(flow().sample((3,))).dtype == torch.float64


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_integers_of_any_type_come_in(dtype):
    flow = zoo.make("D4 random")
    x = all_states((2,) * 4)
    torch.testing.assert_close(
        flow().log_prob(x.to(dtype)), enumerated("D4 random").log_p, rtol=0, atol=1e-12
    )
    assert torch.equal(flow().log_prob(np.asarray(x)), flow().log_prob(x))
    assert torch.equal(flow().log_prob(x.tolist()), flow().log_prob(x))
    assert torch.equal(flow().log_prob(np.asarray(x)[::-1, ::-1]), flow().log_prob(x.flip(0, 1)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0.0, float("nan"), 0.0], "NaN"),
        ([0.0, 0.5, 0.0], "integers"),
        ([0, 3, 0], r"0\.\.2"),
        ([0, 0, -1], r"0\.\.3"),
        ([2, 0, 0], "K = 2"),
        ([0, 0], "D = 3"),
        ([0, 0, 0, 0], "D = 3"),
        ([[0, 0, 0], [1]], "rectangular"),
        (np.full((2, 3), "a"), "got an array of <U1"),
        (torch.zeros(0, 2, dtype=torch.int64), r"got.* \(0, 2\)"),
        (torch.tensor(1), "shape"),
    ],
)
def test_bad_values_are_refused(flow, value, words):
    with pytest.raises(DataError, match=words):
        flow().log_prob(value)
    with pytest.raises(DataError, match=words):
        flow().complete(value, torch.zeros(3, dtype=torch.bool))


def test_what_has_no_exact_value_says_what_to_call():
    flow = LatentFlow([Layer(MADE(784, (4,))), Layer(MADE(784, (4,), order="reversed"))], FactorisedBase(784))
    x = torch.zeros(2, 784, dtype=torch.uint8)
    with pytest.raises(Intractable) as caught:
        flow().log_prob(x)
    message = str(caught.value)
    assert all(word in message for word in ("depth 2", "784", "2^784", "importance()", "greedy()"))
    assert flow.greedy()().log_prob(x).shape == (2,)


def test_a_chain_over_own_choices_has_no_closed_form_at_depth_one():
    flow = LatentFlow([Layer(MADE(40, (4,), sees=zoo.OWN))], FactorisedBase(40))
    with pytest.raises(Intractable, match="no closed form"):
        flow().log_prob(torch.zeros(1, 40, dtype=torch.int64))


def test_enumeration_is_cut_to_bounded_pieces(monkeypatch):
    """However many rows come, no pass holds more than the limit of terms; the values stay the same."""
    flow = zoo.make("D3 depth 3")
    x = all_states((2,) * 3).repeat(3, 1)
    whole = flow().log_prob(x)
    monkeypatch.setattr("xorflow.flows.flow.ENUMERATION_LIMIT", 130)  # 64 terms: two rows at a time
    seen: list[int] = []
    flow.layers[-1].conditioner.register_forward_hook(lambda *a: seen.append(a[2].shape[:-1].numel()))
    torch.testing.assert_close(flow().log_prob(x), whole, rtol=0, atol=1e-12)
    assert max(seen) <= 130
    assert len(seen) == 12


@pytest.mark.parametrize("context", [None, torch.zeros(3), torch.zeros(2, 1)])
def test_a_context_of_the_wrong_width_is_refused(context):
    with pytest.raises(ModelError, match="takes 2 context features"):
        zoo.make("D3 context")(context)


def test_a_context_that_nobody_sees_is_refused():
    with pytest.raises(ModelError, match="takes 0 context features, and got 2"):
        zoo.make("D3 reversed")(torch.zeros(2))


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_no_rows_have_no_likelihoods(name):
    flow = zoo.make(name)
    context = zoo.rows_of_context(flow, 0)
    for model in (flow, flow.greedy(), Mixture([flow, flow.greedy()]).double()):
        shape = () if context is not None else (0,)
        assert model(context).sample(shape).shape == (0, flow.features)
        assert model(context).log_prob(torch.zeros(0, flow.features)).shape == (0,)
    one = zoo.context(flow)
    assert flow(None if one is None else one[0]).log_prob(torch.zeros(2, 0, flow.features)).shape == (2, 0)


def test_rows_and_context_that_do_not_broadcast_are_refused():
    flow = zoo.make("D3 context")
    with pytest.raises(DataError, match=r"these have \(5,\) and \(4,\)"):
        flow(torch.zeros(4, 2)).log_prob(torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("shape", "words"), [((2, 4), r"D = 3 features, and got shape \(2, 4\)"), ((0, 3), "the batch has none")]
)
def test_estimators_refuse_other_features_and_no_rows(shape, words):
    for estimator in (MaximumLikelihood(), score_function(), StraightThrough()):
        with pytest.raises(DataError, match=words):
            estimator(zoo.make("D3 reversed"), torch.zeros(shape, dtype=torch.int64))
