"""log p(x_d given what is before d), against sums over all states: of a row's own values, and of all values step by step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, visiting_order
from xorflow import MADE, Coupling, FactorisedBase, Flow, Intractable, LatentFlow, Layer, Mixture, ModelError
from xorflow._math import philox_uniforms
from xorflow.flows import Conditionals, Model


def conditional(p: Tensor, sizes: tuple[int, ...], order: tuple[int, ...], x: Tensor, rank: int) -> Tensor:
    """p(x_d = k given x before d) for the feature of a rank, (N, K), from the probabilities of all states."""
    before, feature, later = list(order[:rank]), order[rank], list(order[rank + 1 :])
    table = p.reshape(sizes).permute(*before, feature, *later)
    table = table.reshape(*(sizes[d] for d in before), sizes[feature], -1).sum(-1)
    rows = table[tuple(x[:, before].T)] if before else table.expand(len(x), -1)
    return rows / rows.sum(-1, keepdim=True)


def mixture(*flows: Flow | LatentFlow) -> Mixture:
    weights = torch.arange(1, len(flows) + 1, dtype=torch.float64)
    return Mixture(flows, weights / weights.sum()).double()


def made_of(
    *options: dict, base: Callable[..., LatentFlow] = zoo.flow, order: str = "reversed"
) -> list[LatentFlow]:
    return [zoo.sharpen(base(zoo.made(3, order, **given), learned=True)).double() for given in options]


def coupled(tied: bool, *, context: int = 0) -> LatentFlow:
    base = zoo.tied if tied else zoo.flow
    return zoo.sharpen(base(zoo.coupling(3, "random:1", categories=(3, 2, 4), context=context))).double()


SIZES = {"categories": (3, 2, 4)}
MIXTURES: dict[str, Callable[[], Mixture]] = {
    "bits": lambda: mixture(*made_of({}, {"direct": True}, {})),
    "categories": lambda: mixture(*made_of(SIZES, SIZES | {"direct": True})),
    "tied": lambda: mixture(*made_of(SIZES, SIZES, base=zoo.tied)),
    "tied and not": lambda: mixture(*made_of(SIZES), *made_of(SIZES, base=zoo.tied)),
    "context": lambda: mixture(*made_of(SIZES | {"context": 2}, SIZES | {"context": 2})),
    "networks": lambda: mixture(
        *made_of(SIZES),
        *(
            zoo.sharpen(zoo.flow(make(3, "reversed", **SIZES))).double()
            for make in (zoo.recurrent, zoo.transformer)
        ),
    ),
    "couplings": lambda: mixture(coupled(False), coupled(True)),
    "latent and deterministic": lambda: mixture(*made_of(SIZES), made_of(SIZES)[0].greedy()),
    "deterministic": lambda: mixture(
        *(flow.greedy() for flow in made_of(SIZES, SIZES, {**SIZES, "sees": zoo.OWN}))
    ),
}

CLOSED = zoo.every(zoo.closed_form)
IN_ORDER = zoo.every(lambda flow: flow.shares_one_order or (flow.depth == 1))
CASES = [
    *(("latent", name) for name in CLOSED),
    *(("deterministic", name) for name in IN_ORDER),
    *(("mixture", name) for name in MIXTURES),
]
MODELS = pytest.mark.parametrize(("kind", "name"), CASES)


def make(kind: str, name: str) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mixture":
            return MIXTURES[name]()
    return zoo.make(name) if kind == "latent" else zoo.make(name).greedy()


def enumerated(model: Model) -> tuple[Tensor, Tensor, Tensor | None]:
    """All states, their probabilities, and the context of each."""
    x = all_states(model.categories)
    context = zoo.rows_of_context(model, len(x))
    with torch.no_grad():
        return x, model.log_likelihood(x, context).exp(), context


def prefixes(order: tuple[int, ...]) -> list[Tensor]:
    """Every mask whose known features are a prefix of the ordering."""
    masks = [torch.zeros(len(order), dtype=torch.bool) for _ in range(len(order) + 1)]
    for count, mask in enumerate(masks):
        mask[list(order[:count])] = True
    return masks


@MODELS
def test_of_a_row_they_are_those_of_enumeration_and_sum_to_its_likelihood(kind, name):
    model = make(kind, name)
    x, p, context = enumerated(model)
    conditionals = model.conditionals(context)
    of_rows = conditionals.of(model.states.integers(x)).detach()
    assert of_rows.dtype == torch.float64
    torch.testing.assert_close(of_rows.sum(-1), p.log(), rtol=0, atol=1e-12)
    for rank, d in enumerate(conditionals.order):
        expected = conditional(p, model.categories, conditionals.order, x, rank)
        own = expected.gather(-1, x[:, d, None])[:, 0]
        torch.testing.assert_close(of_rows[:, d].exp(), own, rtol=0, atol=1e-12)


@MODELS
def test_step_by_step_they_are_those_of_all_values(kind, name):
    model = make(kind, name)
    x, p, context = enumerated(model)
    steps = model.conditionals(context).steps(len(x))
    for rank, d in enumerate(steps.order):
        assert steps.feature == d
        expected = conditional(p, model.categories, steps.order, x, rank)
        for _ in range(rank % 2 + 1):  # to ask twice changes nothing
            torch.testing.assert_close(steps.log_probs().exp(), expected, rtol=0, atol=1e-12)
        steps.append(x[:, d])
    assert steps.done == model.features


@MODELS
def test_values_can_be_told_without_asking(kind, name):
    """As for what is given: only the last conditional is asked for."""
    model = make(kind, name)
    x, p, context = enumerated(model)
    steps = model.conditionals(context).steps(len(x))
    for d in steps.order[:-1]:
        steps.append(x[:, d])
    expected = conditional(p, model.categories, steps.order, x, model.features - 1)
    torch.testing.assert_close(steps.log_probs().exp(), expected, rtol=0, atol=1e-12)


@MODELS
def test_completions_invert_the_enumerated_conditionals(kind, name):
    """For every state and every prefix of it that may be given: the very integers that brute force draws by these uniforms."""
    model = make(kind, name)
    states, p, _ = enumerated(model)
    x = states.repeat(-(-200 // len(states)), 1)
    context = zoo.rows_of_context(model, len(x))
    conditionals = model.conditionals(context)
    for known in prefixes(conditionals.order):
        noise = philox_uniforms(0, int(known.sum()), 0, x.numel())
        uniforms = torch.from_numpy(noise).reshape(x.shape).double()
        expected = x.clone()
        for rank, d in enumerate(conditionals.order):
            if not known[d]:
                below = conditional(p, model.categories, conditionals.order, expected, rank).cumsum(-1)
                expected[:, d] = (uniforms[:, d, None] > below[:, :-1]).sum(-1)
        assert torch.equal(conditionals.complete(x, known, uniforms), expected)
        assert torch.equal(expected[:, known], x[:, known])


@MODELS
def test_a_grid_of_uniforms_has_the_conditional_law(kind, name):
    """The first feature after what is given, to one step of the grid."""
    model, count = make(kind, name), 500
    x, p, _ = enumerated(model)
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    context = zoo.rows_of_context(model, count)
    conditionals = model.conditionals(context)
    for rank, known in enumerate(prefixes(conditionals.order)[:-1]):
        feature, row = conditionals.order[rank], x[len(x) // 2]
        done = conditionals.complete(row.expand(count, -1), known, grid[:, None].expand(-1, model.features))
        share = torch.bincount(done[:, feature], minlength=model.categories[feature]) / count
        expected = conditional(p, model.categories, conditionals.order, row[None], rank)[0]
        assert float((share - expected).abs().max()) < 1 / count + 1e-12


@MODELS
def test_the_distribution_has_them_by_feature(kind, name):
    model = make(kind, name)
    x, p, context = enumerated(model)
    one = None if context is None else context[0]
    by_feature = model(one).log_prob_by_feature(x.reshape(1, *x.shape))
    assert by_feature.shape == (1, len(x), model.features)
    torch.testing.assert_close(by_feature.sum(-1)[0].detach(), p.log(), rtol=0, atol=1e-12)
    expected = model.conditionals(context).of(model.states.integers(x))
    torch.testing.assert_close(by_feature[0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in CLOSED if len(zoo.make(name).categories) > 1])
def test_they_carry_gradients(name):
    flow = zoo.make(name)
    x, _, context = enumerated(flow)
    parameters = [p for p in flow.parameters() if p.requires_grad]
    totals = [flow.conditionals(context).of(x).sum(), flow.log_likelihood(x, context).sum()]
    ours, whole = (
        torch.autograd.grad(t, parameters, allow_unused=True, materialize_grads=True) for t in totals
    )
    for one, other in zip(ours, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


COUPLINGS = [(kind, name) for kind, name in CASES if "coupling" in name]


@pytest.mark.parametrize(("kind", "name"), COUPLINGS)
def test_a_coupling_begins_with_any_features_that_it_sees(kind, name):
    model = make(kind, name)
    first = model.flows[0].layers[0]
    mask = first.conditioner.mask
    assert mask is not None
    x, p, context = enumerated(model)
    seen = mask.nonzero()[:, 0].tolist()
    moved = (~mask).nonzero()[:, 0].tolist()
    for given in ([seen[-1]], [*seen, moved[-1]], seen):
        known = torch.zeros(model.features, dtype=torch.bool)
        known[given] = True
        steps = model.conditionals(context).steps(len(x), known)
        assert set(steps.order[: len(given)]) == set(given)
        for rank, d in enumerate(steps.order):
            expected = conditional(p, model.categories, steps.order, x, rank)
            torch.testing.assert_close(steps.log_probs().exp(), expected, rtol=0, atol=1e-12)
            steps.append(x[:, d])


@pytest.mark.parametrize("deterministic", [False, True])
def test_how_many_passes_steps_take(deterministic):
    """A network that can be evaluated along its ordering makes none; a coupling two, whatever D is."""
    for layer, most in (
        (zoo.made(9), 0),
        (zoo.transformer(9), 0),
        (zoo.coupling(9), 2),
        (zoo.made(9, sees=zoo.OWN), 18),
    ):
        if layer.autoregressive_in_u and not deterministic:
            continue
        passes: list[int] = []
        layer.conditioner.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        flow = zoo.flow(layer).double()
        model = flow.greedy() if deterministic else flow
        model().complete(torch.zeros(4, 9, dtype=torch.int64), torch.zeros(9, dtype=torch.bool))
        assert len(passes) <= most or deterministic is layer.autoregressive_in_u is True


def test_a_wide_feature_is_closed_on_a_tied_base_alone():
    sizes = (3000, 2)
    layer = Layer(MADE(2, (4,), categories=sizes))
    tied = LatentFlow([layer], FactorisedBase(2, 0.6, categories=sizes, tied=True)).double()
    free = LatentFlow([layer], FactorisedBase(2, 0.6, categories=sizes).double())
    steps, untied = (flow.conditionals().steps(2) for flow in (tied, free))
    torch.testing.assert_close(steps.log_probs().exp().sum(-1), torch.ones(2).double(), rtol=0, atol=1e-12)
    with pytest.raises(Intractable, match=r"feature 0 take 3000 x 3000 sums for each row; use a tied base"):
        untied.log_probs()
    x = torch.tensor([[2999, 1], [17, 0]])
    by_value = steps.log_probs().gather(-1, x[:, :1])[:, 0]
    for flow in (tied, free):
        own = flow.conditionals().of(x)[:, 0].detach()
        torch.testing.assert_close(own, by_value, rtol=0, atol=1e-6)


# ---- where there are none ----


def refused(model: Model, words: str) -> None:
    x = torch.zeros(1, model.features, dtype=torch.int64)
    known = torch.zeros(model.features, dtype=torch.bool)
    context = zoo.context(model)
    dist = model(None if context is None else context[0])
    for act in (
        lambda: model.conditionals(context),
        lambda: dist.log_prob_by_feature(x),
        lambda: dist.complete(x, known),
    ):
        with pytest.raises(Intractable, match=words):
            act()


@pytest.mark.parametrize("name", zoo.every(lambda flow: not flow.has_closed_form))
def test_a_latent_flow_that_is_deep_or_sees_its_own_u_has_none(name):
    flow = zoo.make(name)
    refused(
        flow,
        rf"depth 1 and choices that do not see their own u.* has depth {flow.depth}: try flow.greedy\(\)",
    )


ELSEWHERE = zoo.every(lambda flow: not flow.shares_one_order and flow.depth > 1)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_deterministic_flow_of_several_orderings_has_none(name):
    refused(zoo.make(name).greedy(), "needs layers in one ordering, and these differ")


def test_a_mixture_of_several_orderings_has_none():
    flows = [made_of({}, order=order)[0] for order in ("natural", "reversed")]
    refused(mixture(*flows), r"components of this mixture have several.* mixture.components\[0\]\(\)")
    refused(mixture(flows[0], zoo.make("D3 depth 3")), "depth 1")


def test_couplings_of_different_masks_in_one_ordering_begin_alike():
    """For whatever may be given to all of them."""
    masks = [torch.arange(4) < count for count in (1, 3)]
    flows = [LatentFlow([Layer(Coupling(4, (4,), mask=mask))], FactorisedBase(4)) for mask in masks]
    given, begun = all_states((2,) * 4).bool(), 0
    for known in given:
        try:
            orders = {flow.conditionals().steps(1, known).order for flow in flows}
        except ModelError:
            with pytest.raises(ModelError, match="together with all features that it sees"):
                Mixture(flows).conditionals().steps(1, known)
            continue
        assert len(orders) == 1
        begun += 1
        assert Mixture(flows).conditionals().steps(1, known).order == orders.pop()
    assert begun == 6


def test_orderings_are_those_of_networks():
    assert make("latent", "D4 random").conditionals().order == tuple(
        visiting_order(zoo.make("D4 random").layers[0].conditioner)
    )
    coupling = make("latent", "coupling D4 checkerboard").conditionals()
    assert isinstance(coupling, Conditionals)
    assert coupling.order == (0, 3, 1, 2)
