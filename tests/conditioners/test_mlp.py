"""The perceptron and the coupling conditioner."""

import pytest
import torch

from enumeration import all_states, padded
from xorflow import MLP, Coupling, ModelError
from xorflow._states import Layout
from xorflow.conditioners import Diagonal, Source
from xorflow.flows import Choices


@pytest.mark.parametrize("categories", [2, 3, (2, 3, 4, 2)])
@pytest.mark.parametrize("hidden", [(), (5,), (5, 6)])
def test_shapes(categories, hidden):
    for net in (
        MLP(4, hidden, categories=categories, sees=("state",)),
        Coupling(4, hidden, categories=categories),
    ):
        x = torch.zeros(7, 6, 4, dtype=torch.int64)
        assert net({Source.STATE: x}).shape == (7, 6, net.choices.flat)


def test_inputs_of_different_leading_shapes_broadcast():
    net = MLP(3, (4,), sees=("x", "state"), context=2)
    inputs = {Source.X: torch.zeros(5, 3).int(), Source.STATE: torch.zeros(7, 5, 3).int()}
    assert net(inputs, torch.zeros(5, 2)).shape == (7, 5, 3)


@pytest.mark.parametrize("categories", [2, 3, (2, 3, 4, 2)])
def test_what_a_coupling_layer_sees_it_leaves_alone(categories):
    torch.manual_seed(0)
    net = Coupling(4, (5,), categories=categories, mask=[True, False, True, False]).double()
    choices = Choices(net({Source.STATE: torch.zeros(1, 4, dtype=torch.int64)}), Layout(net.choices))
    p = padded(choices.log_probs(), net.choices).exp()[0]
    assert p[[0, 2], 0].tolist() == [1, 1]  # exactly: no probability is lost to a choice that never comes
    assert bool((p[[1, 3], 0] < 1).all())


@pytest.mark.parametrize("categories", [2, (2, 3, 4, 2)])
def test_they_start_where_they_are_told(categories):
    torch.manual_seed(0)
    for net in (
        Coupling(4, (5,), categories=categories),
        MLP(4, (5,), sees=("state",), categories=categories),
    ):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        logits = torch.randn(net.choices.flat)
        net.start_at(logits)
        x = torch.zeros(1, 4, dtype=torch.int64)
        moved = slice(None) if net.mask is None else ~net.mask[net.choices.logit_features]
        torch.testing.assert_close(net({Source.STATE: x})[0, moved], logits[moved], rtol=0, atol=0)


@pytest.mark.parametrize("build", [MLP, Coupling])
def test_a_width_of_zero_is_refused(build):
    with pytest.raises(ModelError, match="at least 1, and got"):
        build(4, (0,))


@pytest.mark.parametrize("build", [MLP, Coupling])
def test_a_context_of_the_wrong_width_is_refused(build):
    net = build(4, (3,), context=2)
    inputs = dict.fromkeys((Source.X, Source.STATE), torch.zeros(1, 4).int())
    with pytest.raises(ModelError, match="made for 2 context features, and got 0"):
        net(inputs)


@pytest.mark.parametrize("categories", [2, 3, (2, 3, 4)])
def test_a_diagonal_map_looks_at_each_feature_alone(categories) -> None:
    torch.manual_seed(0)
    net = Diagonal(3, categories=categories)
    again = Diagonal(**net.config())
    again.load_state_dict(net.state_dict())
    x = all_states(net.states.sizes)
    out = net({Source.STATE: x})
    torch.testing.assert_close(again({Source.STATE: x}), out)
    for d, size in enumerate(net.states.sizes):
        of_feature = net.choices.logit_features == d
        for value in range(size):
            same = out[x[:, d] == value][:, of_feature]
            torch.testing.assert_close(same, same[:1].expand_as(same))
        assert len(torch.unique(out[:, of_feature], dim=0)) == size
    assert out.shape == (len(x), net.choices.flat)
