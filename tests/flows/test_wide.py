"""Many categories: states beyond a byte, ninety thousand of them summed over."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import draw_noise, sequential_sample
from xorflow import FactorisedBase, LatentFlow, Layer, Mixture, evaluate
from xorflow._math import enumerate_states
from xorflow.conditioners import MADE, Coupling

K = 300
SIZES = (K, K)


def wide(tied: bool, net: MADE | Coupling) -> LatentFlow:
    """With probabilities from all over the range."""
    generator = torch.Generator().manual_seed(1)
    options = {} if tied else {"probabilities": torch.randn(2, K, generator=generator).double().softmax(-1)}
    base = FactorisedBase(2, 0.4, categories=SIZES, tied=tied, **options)
    return zoo.sharpen(LatentFlow([Layer(net)], base)).double()


def made(order: str) -> MADE:
    torch.manual_seed(0)
    return MADE(2, (8,), order=order, categories=SIZES)


MODELS = {
    "MADE": lambda: wide(False, made("reversed")),
    "MADE, tied": lambda: wide(True, made("natural")),
    "coupling, tied": lambda: wide(True, Coupling(2, (8,), categories=SIZES)),
    "transformer": lambda: wide(True, zoo.transformer(2, categories=SIZES).conditioner),
    "deterministic": lambda: wide(False, made("natural")).greedy(),
    "mixture": lambda: Mixture([wide(True, made("natural")), wide(False, made("natural"))]).double(),
}


@pytest.fixture(scope="module")
def states() -> Tensor:
    return enumerate_states(SIZES)


@pytest.mark.parametrize("name", MODELS)
def test_ninety_thousand_states_sum_to_one(name, states):
    torch.manual_seed(0)
    model = MODELS[name]()
    assert model.states.dtype == torch.int16
    log_p = evaluate.exact(model, states).values
    assert abs(float(log_p.exp().sum()) - 1) < 1e-10
    # what is told step by step is what the table of all states says, for the first feature and a few rows of the second
    table = log_p.exp().reshape(SIZES)
    steps = model.conditionals().steps(3)
    first, second = steps.order
    marginal = table.sum(second)
    torch.testing.assert_close(steps.log_probs().exp(), marginal.expand(3, -1), rtol=0, atol=1e-12)
    values = torch.tensor([0, 123, K - 1])
    steps.append(values)
    expected = table.index_select(first, values).movedim(first, 0) / marginal[values, None]
    torch.testing.assert_close(steps.log_probs().exp(), expected, rtol=0, atol=1e-12)


def test_a_wide_bijection_comes_back(states):
    flow = wide(False, made("reversed")).greedy()
    y = flow.to_base(states)
    assert y.dtype == torch.int64
    assert torch.equal(torch.unique(y, dim=0), states)
    assert torch.equal(flow.to_data(y), states)


def test_wide_samples_are_those_of_one_feature_at_a_time():
    for name in ("MADE", "MADE, tied", "coupling, tied", "transformer"):
        torch.manual_seed(0)
        flow = MODELS[name]()
        noise = draw_noise(flow, 500)
        x = flow.sample_with(noise)
        assert int(x.max()) > 255
        with torch.no_grad():
            assert torch.equal(x, sequential_sample(flow, flow.base.sample(noise.base), noise.layers, None))
