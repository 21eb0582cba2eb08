"""DisARM and ARMS: exact over the intervals of their uniforms, identities sample by sample, and the copula's correlation."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, gradient
from expectations import (
    EXACT,
    bound,
    bound_gradient,
    drawn_rules,
    expected_gradient,
    expected_over,
    gap,
    local,
    per_draw,
    score_function,
    state,
    trainable,
)
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow._states import Alphabet, Layout
from xorflow.estimators import ARMS, DisARM
from xorflow.estimators.antithetic import dirichlet_copula, one_less_correlation
from xorflow.flows import Choices


def of_bits(logits: Tensor) -> Choices:
    return Choices(logits, Layout(Alphabet((2,) * logits.shape[-1])))


PREVIOUS = {"previous": "up to"}
FLOWS = {
    "depth 2": lambda: zoo.make("D2 depth 2 context"),
    "chain": lambda: local(partial(zoo.made, 2, sees={"x": "before"}), partial(zoo.made, 2, sees=PREVIOUS)),
    "learned base": lambda: local(partial(zoo.made, 2, "reversed"), partial(zoo.made, 2), learned=True),
    "coupling": lambda: local(partial(zoo.made, 2), partial(zoo.coupling, 2)),
    "depth 3 of one feature": lambda: zoo.make("D1 depth 3 posterior"),
}
DEPTH_ONE = zoo.names(lambda flow: flow.has_closed_form and zoo.binary(flow) and flow.features < 5)


def disarm_rules(flow: LatentFlow, layers: int, row: int):
    """The pass mirrors its uniforms; the other arm's suffix after each layer has its own."""
    rules = drawn_rules(flow, row, 0, range(layers), mirrored=True)
    for layer in range(layers - 1):
        rules |= drawn_rules(flow, row, 1 + layer, range(layer + 1, layers))
    return rules


@pytest.mark.parametrize("name", DEPTH_ONE)
def test_disarm_is_unbiased_at_depth_one(name):
    flow = zoo.make(name)
    found = expected_over(DisARM(), flow, partial(disarm_rules, flow, 1))
    assert gap(found, bound_gradient(name)) < EXACT


@pytest.mark.parametrize("sum_last", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_disarm_is_unbiased_in_a_hierarchy(name, sum_last):
    flow = FLOWS[name]()
    expected = gradient(bound(flow), trainable(flow))
    found = expected_over(DisARM(sum_last), flow, partial(disarm_rules, flow, flow.depth - sum_last))
    assert gap(found, expected) < EXACT
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("sum_last", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_disarm_is_unbiased_with_common_uniforms(name, sum_last):
    flow = FLOWS[name]()
    layers = flow.depth - sum_last
    rules = lambda row: drawn_rules(flow, row, 0, range(layers), mirrored=True)  # noqa: E731
    found = expected_over(DisARM(sum_last, common=True), flow, rules)
    assert gap(found, gradient(bound(flow), trainable(flow))) < EXACT


def test_disarm_is_unbiased_for_three_layers_of_one_order():
    """Fresh suffixes with the last layer summed out: with all three drawn there are too many intervals."""
    name = "D2 depth 3 one order"
    flow = zoo.make(name)
    fresh = expected_over(DisARM(sum_last=True), flow, partial(disarm_rules, flow, 2))
    rules = lambda row: drawn_rules(flow, row, 0, range(3), mirrored=True)  # noqa: E731
    common = expected_over(DisARM(common=True), flow, rules)
    assert max(gap(fresh, bound_gradient(name)), gap(common, bound_gradient(name))) < EXACT


# sample by sample


def as_waits(e: Tensor) -> Tensor:
    """Uniforms whose exponential waiting times lie on the simplex at (e, 1 - e)."""
    return torch.exp(-torch.stack((e, 1 - e)))


@pytest.mark.parametrize("name", ["D1", "D3 reversed", "D4 random", "coupling D4 checkerboard"])
def test_two_arms_of_arms_are_disarm(name):
    flow = zoo.make(name)
    generator = torch.Generator().manual_seed(0)
    e = torch.rand(40, 1, 1, flow.features, dtype=torch.float64, generator=generator)
    row = len(all_states(flow.states.sizes)) // 3
    logits = flow.layers[0].generator_choices(flow.start(state(flow, row))).logits
    # the copula takes the rarer value where its uniform is small; DisARM's first arm where e is large
    first = torch.where(logits < 0, 1 - e, e)
    waits = as_waits(1 - first[:, 0]).movedim(0, 1)
    for one, two in zip(per_draw(DisARM(), flow, row, e), per_draw(ARMS(2), flow, row, waits), strict=True):
        found, expected = (gradient(value, trainable(flow)) for value in (two, one))
        assert gap(found, expected) < 1e-14


def test_the_formulas_agree_for_any_arms_and_rewards():
    """DisARM's and, for two arms, ARMS's, at all four pairs of arms that can occur together, whatever the rewards."""
    generator = torch.Generator().manual_seed(1)
    choices = of_bits(4 * torch.randn(500, dtype=torch.float64, generator=generator))
    e = torch.rand(1, 500, dtype=torch.float64, generator=generator)
    arms, rewards = DisARM().choose(choices, e), torch.randn(2, 500, dtype=torch.float64, generator=generator)
    assert gap(DisARM().slope(choices, arms, rewards), ARMS(2).slope(choices, arms, rewards)) < 1e-14


def test_independent_arms_would_be_leave_one_out():
    """With no correlation the formula is that of leave-one-out, so the factor is all that the coupling changes."""
    flow, row = zoo.make("D3 linear"), 2
    generator = torch.Generator().manual_seed(2)
    u = torch.randint(2, (3, 1, 3), generator=generator)
    logits = flow.layers[0].generator_choices(flow.start(state(flow, row))).logits[0]
    rewards = flow.base.log_prob(flow.run(state(flow, row), draws=u[:, None]).end.state)[:, 0]
    slope = ARMS(3).slope(of_bits(logits), u[:, 0].double(), rewards) * one_less_correlation(logits, 3)
    expected = gradient((slope.detach() * logits).sum(), list(flow.layers.parameters()))
    found = gradient(
        per_draw(score_function("baseline=leave-one-out,samples=3"), flow, row, u[None])[0],
        list(flow.layers.parameters()),
    )
    assert gap(found, expected) < 1e-13


# the copula


@pytest.mark.parametrize("arms", [2, 3, 4, 8])
def test_each_arm_of_the_copula_is_uniform_and_pairs_have_the_stated_correlation(arms):
    """400,000 draws; moments within 4.5 standard errors."""
    count = 400_000
    generator = torch.Generator().manual_seed(arms)
    v = dirichlet_copula(torch.rand(arms, count, dtype=torch.float64, generator=generator))
    for r in (0.03, 0.2, 0.5):
        rare = (v < r).double()
        error = math.sqrt(r * (1 - r) / count)
        assert float((rare.mean(1) - r).abs().max()) < 4.5 * error
        both = max(0.0, 2 * r ** (1 / (arms - 1)) - 1) ** (arms - 1)
        for i, j in itertools.combinations(range(min(arms, 3)), 2):
            found = float((rare[i] * rare[j]).mean())
            assert abs(found - both) <= 4.5 * math.sqrt(max(both * (1 - both), 1e-12) / count)
        correlation = (both - r * r) / (r * (1 - r))
        for logit in (math.log(r / (1 - r)), math.log((1 - r) / r)):
            stated = 1 - float(one_less_correlation(torch.tensor(logit, dtype=torch.float64), arms))
            assert abs(stated - correlation) < 1e-12


def test_the_stated_correlation_is_that_of_the_distribution_function():
    """P(U_i < p, U_j < p) = 2 p - 1 + max(0, 2 (1 - p)^(1/(n-1)) - 1)^(n-1) for U = 1 - V, at the likelier value's p."""
    for arms, p in itertools.product((2, 3, 5, 20), (0.5, 0.6, 0.9, 0.999)):
        both = 2 * p - 1 + max(0.0, 2 * (1 - p) ** (1 / (arms - 1)) - 1) ** (arms - 1)
        correlation = (both - p * p) / (p * (1 - p))
        stated = 1 - float(
            one_less_correlation(torch.tensor(math.log(p / (1 - p)), dtype=torch.float64), arms)
        )
        assert abs(stated - correlation) < 1e-9
        assert -1 <= correlation <= 0


def pattern_probability(pattern: tuple[int, ...], r: float) -> float:
    """P(exactly these arms take the rarer value), by inclusion and exclusion over the simplex."""
    arms, chosen = len(pattern), [i for i, taken in enumerate(pattern) if taken]
    t = 1 - r ** (1 / (arms - 1))  # V < r where the arm's part of the simplex exceeds t
    rest = [i for i in range(arms) if i not in chosen]
    total = 0.0
    for extra in range(len(rest) + 1):
        both = max(0.0, 1 - (len(chosen) + extra) * t) ** (arms - 1)
        total += (-1) ** extra * math.comb(len(rest), extra) * both
    return total


@pytest.mark.parametrize("arms", [2, 3, 4])
def test_arms_is_unbiased_over_all_patterns(arms):
    """D = 2, a reward that is no sum over features: the expectation over all arms' choices, exactly."""
    table = torch.tensor([[0.3, -1.2], [2.0, 0.7]], dtype=torch.float64)
    logits = torch.tensor([-0.8, 1.7], dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(logits)
    marginal = torch.stack((1 - p[0], p[0]))[:, None] * torch.stack((1 - p[1], p[1]))[None]
    (exact,) = torch.autograd.grad((marginal * table).sum(), logits)
    choices, total, mass = of_bits(logits.detach()), torch.zeros(2, dtype=torch.float64), 0.0
    rarer = torch.sigmoid(-logits.detach().abs()).tolist()
    for first, second in itertools.product(itertools.product((0, 1), repeat=arms), repeat=2):
        weight = pattern_probability(first, rarer[0]) * pattern_probability(second, rarer[1])
        u = torch.tensor([first, second]).T  # the rarer value of the second feature is 0
        u = torch.stack((u[:, 0], 1 - u[:, 1]), 1)
        rewards = table[u[:, 0], u[:, 1]][:, None].expand(arms, 2)
        total += weight * ARMS(arms).slope(choices, u.double(), rewards)
        mass += weight
    assert abs(mass - 1) < 1e-12
    assert gap(total, exact) < 1e-12


def test_certain_choices_stay_finite():
    choices = of_bits(torch.tensor([-90.0, -20.0, 0.0, 20.0, 90.0]))
    for estimator, n in ((DisARM(), 1), (ARMS(2), 2), (ARMS(5), 5)):
        for noise in (torch.zeros(n, 5), torch.rand(n, 5, generator=torch.Generator().manual_seed(0))):
            arms = estimator.choose(choices, noise)
            assert bool(estimator.slope(choices, arms, torch.randn(len(arms), 5)).isfinite().all())


# what it costs, what it refuses


def test_noise():
    flow = zoo.make("D3 depth 3")
    assert DisARM().noise_shape(flow) == (1 + 2, 3, 3)
    assert DisARM(sum_last=True).noise_shape(flow) == (1 + 1, 2, 3)
    assert ARMS(4).noise_shape(flow) == (4 + 3 * 2, 3, 3)
    assert ARMS(4, common=True).noise_shape(flow) == (4, 3, 3)
    assert DisARM(sum_last=True).noise_shape(zoo.make("D2")) is None


def test_one_layer_summed_out_is_exact():
    flow = zoo.make("D4 random")
    for estimator in (DisARM(True), ARMS(3, True)):
        assert gap(expected_gradient(estimator, flow), bound_gradient("D4 random")) < 1e-12


@pytest.mark.parametrize("estimator", [DisARM(), ARMS()])
def test_refusals(estimator):
    with pytest.raises(ModelError, match="layer 1 sees its own u; use score-function"):
        estimator(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="for choices between two values, and layer 1 has features with 3"):
        estimator(zoo.make("K3 D3"), torch.zeros(1, 3, dtype=torch.int64))


def test_a_layer_of_a_chain_that_sees_its_own_choice_is_named():
    with pytest.raises(ModelError, match="independent given what it sees, and layer 2 sees its own u"):
        DisARM()(zoo.make("chain D3 depth 2"), torch.zeros(1, 3, dtype=torch.int64))


def test_one_arm_is_refused():
    with pytest.raises(ConfigError, match="samples is at least 2; got 1"):
        ARMS(samples=1)
