"""REBAR and RELAX: unbiased by quadrature for arbitrary parameters, each gradient where it belongs, and refusals."""

from functools import partial

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, gradient
from expectations import bound, drawn_rules, expected_over, gap, gauss, local, networks, thresholds, trainable
from xorflow import ConfigError, LatentFlow, ModelError
from xorflow.estimators import Rebar, Relax
from xorflow.estimators.control_variates import conditional

MAKERS = {
    "rebar": lambda: Rebar(eta=0.7, tau=0.5),
    "rebar, warm": lambda: Rebar(eta=-1.3, tau=1.0),
    "relax": lambda: Relax(hidden=3, eta=0.4, tau=1.0),
}


def arbitrary(estimator: Rebar, flow: LatentFlow) -> Rebar:
    """With parameters as after some training."""
    estimator.prepare(flow)
    if isinstance(estimator, Relax):
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in estimator.networks.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return estimator


def rules(flow: LatentFlow, layer: int, points: int, row: int) -> dict:
    """Quadrature in both uniforms of a layer, split where a choice changes, and the intervals of all layers' choices."""
    found = drawn_rules(flow, row, 0, range(flow.depth))
    for d in range(flow.features):
        cuts = sorted(set(thresholds(flow, row, layer, d).tolist()))
        found[0, layer, d] = gauss(cuts, points)
        found[1, layer, d] = gauss((), points)
    return found


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["D1", "D1 depth 2"])
def test_one_feature_by_quadrature(name, maker):
    flow = zoo.make(name)
    estimator = arbitrary(MAKERS[maker](), flow)
    for layer in range(flow.depth):
        own = list(flow.layers[layer].parameters())
        found = expected_over(estimator, flow, partial(rules, flow, layer, 40), own)
        assert gap(found, gradient(bound(flow), own)) < 1e-9
        assert float(found.abs().max()) > 1e-3


HIERARCHIES = {
    "running state": lambda: local(
        partial(zoo.made, 2, "reversed"), partial(zoo.made, 2, hidden=()), sharp=1.5, learned=True
    ),
    "chain": lambda: local(
        partial(zoo.made, 2, sees={"x": "before"}),
        partial(zoo.made, 2, hidden=(), sees={"previous": "up to"}),
    ),
}


@pytest.mark.parametrize(("name", "maker"), [("running state", "relax"), ("chain", "rebar")])
def test_a_hierarchy_of_two_features_by_quadrature(name, maker):
    """Four dimensions by quadrature, the choices of the other layer exactly; the last layer's network is smooth.

    From 5 to 7 to 9 points an axis the gap falls by a factor of ten and more each time: it is the quadrature's.
    """
    flow = HIERARCHIES[name]()
    estimator = arbitrary(MAKERS[maker](), flow)
    for layer in range(flow.depth):
        own = list(flow.layers[layer].parameters())
        found = expected_over(estimator, flow, partial(rules, flow, layer, 9), own)
        assert gap(found, gradient(bound(flow), own)) < 1e-5
        assert float(found.abs().max()) > 1e-3


def test_without_the_second_relaxed_choice_it_would_be_biased():
    """The power of the quadrature: the control variate alone, not put back, moves the gradient."""
    flow = zoo.make("D1")
    estimator = arbitrary(Rebar(eta=0.7, tau=0.5), flow)
    plain = estimator._controlled

    def without(*arguments):
        value, slope = plain(*arguments)
        return value, torch.zeros_like(slope)

    estimator._controlled = without  # pyright: ignore[reportAttributeAccessIssue]
    found = expected_over(estimator, flow, partial(rules, flow, 0, 30), networks(flow))
    assert gap(found, gradient(bound(flow), networks(flow))) > 1e-2


def test_the_second_choice_given_the_first():
    """z~ and its derivative: by the conditional uniform, written out, and by autograd."""
    generator = torch.Generator().manual_seed(0)
    phi = (3 * torch.randn(1000, dtype=torch.float64, generator=generator)).requires_grad_()
    v, w = torch.rand(2, 1000, dtype=torch.float64, generator=generator)
    p = torch.sigmoid(phi)
    b = (v > 1 - p).double()
    uniform = b * (1 - p + w * p) + (1 - b) * w * (1 - p)
    written_out = phi + torch.logit(uniform)
    z, slope = conditional(phi.detach(), b, w)
    (by_autograd,) = torch.autograd.grad(written_out.sum(), phi)
    torch.testing.assert_close(z, written_out.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(slope, by_autograd, rtol=0, atol=1e-9)
    assert torch.equal((z > 0).double(), b)


def test_certain_choices_stay_finite():
    phi = torch.tensor([-90.0, -20.0, 20.0, 90.0])
    for w in (torch.zeros(4), torch.ones(4), torch.full((4,), 0.5)):
        for u in (torch.zeros(4), torch.ones(4)):
            assert all(bool(t.isfinite().all()) for t in conditional(phi, u, w))


# each gradient where it belongs


def found_gradients(estimator: Rebar, flow: LatentFlow) -> dict[str, list[Tensor]]:
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    loss = arbitrary(estimator, flow)(flow, x, context, generator=torch.Generator().manual_seed(0))
    assert loss.control is not None
    pairs = {"surrogate": loss.surrogate, "control": loss.control}
    own = list(estimator.parameters())
    return {
        f"{name} {whose}": [
            torch.zeros(1) if g is None else g
            for g in torch.autograd.grad(value, them, retain_graph=True, allow_unused=True)
        ]
        for name, value in pairs.items()
        for whose, them in (("flow", trainable(flow)), ("own", own))
    }


@pytest.mark.parametrize(
    "name", ["D3 learned base", "D3 depth 2 learned base", "D2 depth 3", "D2 depth 2 context"]
)
@pytest.mark.parametrize("maker", ["rebar", "relax"])
def test_the_control_reaches_only_the_estimator_and_the_surrogate_only_the_flow(name, maker):
    found = found_gradients(MAKERS[maker](), zoo.make(name))
    assert all(float(g.abs().max()) == 0 for g in (*found["surrogate own"], *found["control flow"]))
    assert all(float(g.abs().max()) > 0 for g in found["control own"])
    assert float(found["surrogate flow"][0].abs().max()) > 0


@pytest.mark.parametrize("maker", MAKERS)
def test_the_control_is_the_mean_square_of_the_gradient_in_the_logits(maker):
    """Its slope in each parameter by differences; its value from the surrogate, one example at a time."""
    flow = local(partial(zoo.made, 2), partial(zoo.made, 2, "reversed"))
    estimator = arbitrary(MAKERS[maker](), flow)
    x = all_states((2, 2))
    draws = estimator.draw(flow, 4, torch.Generator().manual_seed(1))

    def control() -> Tensor:
        found = estimator(flow, x, draws=draws).control
        assert found is not None
        return found

    one = estimator(flow, x[:1], draws=draws[:, :1])
    outputs = [
        layer.conditioner.net.layers[-1].bias for layer in flow.layers
    ]  # their slopes are those of the logits
    slopes = torch.autograd.grad(one.surrogate, outputs)
    torch.testing.assert_close(
        one.control, sum(slope.square().mean() for slope in slopes), rtol=0, atol=1e-12
    )
    for parameter in estimator.parameters():
        (slope,) = torch.autograd.grad(control(), parameter)
        flat, slopes = parameter.data.view(-1), slope.reshape(-1)
        for index in range(min(3, len(flat))):
            middle = float(flat[index])
            sides = []
            for step in (1e-6, -1e-6):
                flat[index] = middle + step
                sides.append(float(control().detach()))
            flat[index] = middle
            assert abs((sides[0] - sides[1]) / 2e-6 - float(slopes[index])) < 1e-6


def test_it_starts_as_rebar():
    flow, x = zoo.make("D3 depth 2 reversed"), all_states((2, 2, 2))
    draws = Rebar().draw(flow, len(x), torch.Generator().manual_seed(0))
    rebar, relax = (estimator(flow, x, draws=draws) for estimator in (Rebar(), Relax()))
    assert torch.equal(rebar.surrogate, relax.surrogate)
    assert torch.equal(rebar.control, relax.control)


def test_preparing_again_changes_nothing():
    flow, estimator = zoo.make("D2 depth 3"), Relax()
    estimator.prepare(flow)
    kept = dict(estimator.named_parameters())
    estimator.prepare(flow)
    assert all(parameter is kept[name] for name, parameter in estimator.named_parameters())
    assert kept["etas"].shape == kept["log_taus"].shape == (3,)


# refusals


@pytest.mark.parametrize("estimator", [Rebar(), Relax()])
def test_bad_flows(estimator):
    with pytest.raises(
        ModelError, match="relaxes all choices of a layer at once, and layer 1 sees its own u"
    ):
        estimator(zoo.make("D4 own"), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="for choices between two values"):
        estimator(zoo.make("K3 D3"), torch.zeros(1, 3, dtype=torch.int64))


def test_a_control_variate_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="without one it has no parameters, and the estimator is rebar"):
        Relax(hidden=0)
    with pytest.raises(
        ModelError, match="leaves nothing to draw, and the control variate of Rebar without parameters"
    ):
        Rebar(sum_last=True)(zoo.make("D2"), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("kind", [Rebar, Relax])
def test_a_temperature_is_positive(kind):
    with pytest.raises(ConfigError, match="greater than 0; got 0"):
        kind(tau=0)


def test_noise():
    assert Rebar().noise_shape(zoo.make("D3 depth 3")) == (2, 3, 3)
    assert Rebar(sum_last=True).noise_shape(zoo.make("D3 depth 3")) == (2, 2, 3)
