"""What is known in closed form, against plain sums."""

import numpy as np
import pytest
import torch

import zoo
from enumeration import (
    all_choices,
    all_states,
    base_table_lookup,
    enumerated,
    padded,
    plain_base,
    plain_probabilities,
)
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, ModularAffine
from xorflow._states import NEVER
from xorflow.flows import Choices

CLOSED = zoo.every(zoo.closed_form)
PLAIN = zoo.every(
    lambda flow: (
        flow.has_closed_form and not flow.context_features and isinstance(flow.layers[0].conditioner, MADE)
    )
)
AFFINE = [name for name in PLAIN if isinstance(zoo.make(name).layers[0].transform, ModularAffine)]
SHIFTS = [name for name in PLAIN if name not in AFFINE]


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(
        torch.as_tensor(found).detach(), torch.as_tensor(expected).detach(), rtol=0, atol=atol
    )


def at_start(flow: LatentFlow) -> tuple[Choices, list[torch.Tensor]]:
    """The only layer's choices and rewards by group, for every x."""
    x = all_states(flow.states.sizes)
    return flow.last_choices(flow.start(x, zoo.context(flow)))


def posterior_by_sums(name: str) -> torch.Tensor:
    """P(u_d = k given x), (X, D, U), from the enumerated joint of a flow of depth 1."""
    joint = enumerated(name)
    weights = (joint.log_p_u + joint.rewards.sum(-1) - joint.log_p).exp()  # (T, X)
    chosen = torch.nn.functional.one_hot(joint.u[:, 0]).double()  # (T, D, U)
    return torch.einsum("tx,tdu->xdu", weights, chosen)


@pytest.mark.parametrize("name", SHIFTS)
def test_the_marginal_is_a_circular_convolution(name):
    flow = zoo.make(name)
    x, base = all_states(flow.states.sizes), plain_base(flow)
    f = plain_probabilities(flow.layers[0].conditioner, x)
    expected = np.zeros(x.shape)
    for n, d in np.ndindex(*x.shape):
        k = flow.states.sizes[d]
        mixture = sum(f[n, d, u] * base[d, (int(x[n, d]) - u) % k] for u in range(k))
        expected[n, d] = np.log(mixture)
    close(flow.log_marginal(flow.start(x)), expected)
    close(flow().log_prob(x), expected.sum(-1))


@pytest.mark.parametrize("name", AFFINE)
def test_the_marginal_of_location_and_scale(name):
    flow = zoo.make(name)
    x, base, scales = all_states(flow.states.sizes), plain_base(flow), flow.layers[0].transform.scales
    f = plain_probabilities(flow.layers[0].conditioner, x)
    expected = np.zeros(len(x))
    for n, d in np.ndindex(*x.shape):
        k, total = flow.states.sizes[d], 0.0
        for u in range(flow.layers[0].transform.choices.sizes[d]):
            (y,) = [y for y in range(k) if (scales[d][u // k] * y + u % k) % k == int(x[n, d])]
            total += f[n, d, u] * base[d, y]
        expected[n] += np.log(total)
    close(flow().log_prob(x), expected)


@pytest.mark.parametrize("name", [name for name in CLOSED if zoo.binary(zoo.make(name))])
def test_the_posterior_adds_the_base_to_the_logit(name):
    flow = zoo.make(name)
    choices, _ = at_start(flow)
    x = all_states(flow.states.sizes)
    logit = choices.logits + (1 - 2 * x) * flow.base.logits
    close(torch.sigmoid(logit), posterior_by_sums(name)[..., 1])


@pytest.mark.parametrize("name", CLOSED)
def test_the_posterior_adds_the_rewards_to_the_logits(name):
    choices, rewards = at_start(zoo.make(name))
    table = padded(
        [p + r for p, r in zip(choices.log_probs(), rewards, strict=True)], choices.alphabet, -torch.inf
    )
    close(torch.softmax(table, -1), posterior_by_sums(name))


@pytest.mark.parametrize("name", CLOSED)
def test_the_bound_is_linear_in_the_probabilities(name):
    choices, rewards = at_start(zoo.make(name))
    close(choices.expectation(rewards).sum(-1), enumerated(name).bound)


@pytest.mark.parametrize("name", CLOSED)
def test_the_posterior_makes_the_evidence_bound_tight(name):
    flow = zoo.make(name)
    choices, rewards = at_start(flow)
    parts = [p + r for p, r in zip(choices.log_probs(), rewards, strict=True)]
    layout = flow.layers[0].layout
    packed = [part[..., 1] - part[..., 0] if part.shape[-1] == 2 else part for part in parts]
    exact = Choices(layout.packed(packed), layout)
    elbo = exact.expectation(rewards) - exact.kl(choices)
    close(elbo.sum(-1), enumerated(name).log_p)


@pytest.mark.parametrize("name", zoo.every(lambda flow: flow.last_layer_summable and flow.depth > 1))
def test_the_last_layer_is_summed_out(name):
    flow, joint = zoo.make(name), enumerated(name)
    earlier, context = all_choices(flow, flow.depth - 1), zoo.context(flow)
    trace = flow.run(flow.start(joint.x, context), draws=earlier[:, None], stop=flow.depth - 1)
    log_m = flow.log_marginal(trace.end).sum(-1).detach()  # (T', X)
    log_u = trace.log_p().sum((-1, -2)).detach().expand_as(log_m)
    whole = (joint.log_p_u + joint.rewards.sum(-1)).reshape(len(earlier), -1, len(joint.x))
    possible = log_u > NEVER / 2  # a coupling layer never moves what it sees
    close((log_u + log_m)[possible], torch.logsumexp(whole, 1)[possible])
    expected_log_m = (log_u.exp() * log_m).sum(0)
    assert bool((joint.bound <= expected_log_m + 1e-12).all())
    assert bool((expected_log_m <= joint.log_p + 1e-12).all())


@pytest.mark.parametrize("name", [name for name in CLOSED if zoo.binary(zoo.make(name))])
def test_greedy_marginal_and_bound_are_ordered_pixel_by_pixel(name):
    flow = zoo.make(name)
    choices, rewards = at_start(flow)
    bound, marginal = choices.expectation(rewards), choices.log_mixture(rewards)
    greedy = rewards[0].gather(-1, choices.mode().long()[..., None])[..., 0]
    right = greedy >= rewards[0].amax(-1)
    assert bool((marginal >= bound - 1e-12).all())
    assert bool((greedy >= marginal - 1e-12)[right].all())
    assert bool((greedy <= bound + 1e-12)[~right].all())


@pytest.mark.parametrize("name", zoo.every())
def test_no_likelihood_passes_the_floor(name):
    flow = zoo.make(name)
    highest = base_table_lookup(flow, all_states(flow.states.sizes)).sum(-1).max()
    close(-flow.base.floor(), highest, atol=1e-14)
    assert bool((enumerated(name).log_p <= highest + 1e-14).all())
    assert bool((enumerated(name).bound <= highest + 1e-14).all())


SHARED = zoo.every(lambda flow: flow.shares_one_order and flow.depth > 1 and flow.states.binary)


@pytest.mark.parametrize("name", SHARED)
def test_one_shared_ordering_keeps_conditionals_within_the_base(name):
    """P(x_d = 1 given x before d) lies between the base's two probabilities, at any depth."""
    flow, joint = zoo.make(name), enumerated(name)
    order = flow.layers[0].conditioner.order
    p = joint.log_p.exp()
    for place, d in enumerate(order):
        same = (joint.x[:, None, order[:place]] == joint.x[None, :, order[:place]]).all(-1).double()  # (X, X)
        ones = same @ (p * joint.x[:, d]) / (same @ p)
        beta = flow.base.log_probs_of(d).exp().detach()
        assert float(ones.min()) >= float(beta.min()) - 1e-12
        assert float(ones.max()) <= float(beta.max()) + 1e-12


@pytest.mark.parametrize("name", SHARED)
def test_one_shared_ordering_shifts_by_what_was_seen_before(name):
    flow = zoo.make(name)
    order, x = flow.layers[0].conditioner.order, all_states(flow.states.sizes)
    y = flow.greedy().to_base(x, zoo.rows_of_context(flow, len(x)))
    for place, d in enumerate(order):
        same = (x[:, None, order[:place]] == x[None, :, order[:place]]).all(-1)
        shift = (x ^ y)[:, d]
        assert torch.equal(same & (shift[:, None] == shift), same)


def test_numbers_of_the_paper_setting():
    """784 pixels, base .9 / .1, every choice a fair coin."""
    base = FactorisedBase(784)
    flow = LatentFlow([Layer(MADE(784, ()))], base)
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.zero_()
    x = torch.randint(2, (3, 784), generator=torch.Generator().manual_seed(0))
    choices, rewards = flow.last_choices(flow.start(x))
    assert abs(float(base.floor()) - 82.6026) < 1e-3
    assert abs(float(base.entropy()) - 254.8651) < 1e-3
    close(-flow().log_prob(x), torch.full((3,), 543.4274).double(), atol=1e-3)
    close(-choices.expectation(rewards).double().sum(-1), torch.full((3,), 943.9147).double(), atol=1e-3)
