"""Mixtures of flows: exact by enumeration, sampled by choosing a component, trained by their likelihood."""

import math

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, gradient, joint
from expectations import score_function
from xorflow import (
    MADE,
    CausalTransformer,
    FactorisedBase,
    Flow,
    Intractable,
    LatentFlow,
    Layer,
    Mixture,
    ModelError,
    evaluate,
)
from xorflow.estimators import MaximumLikelihood, StraightThrough
from xorflow.flows import SampleNoise
from xorflow.training import flow_from_spec, flow_to_spec

WEIGHTS = (0.5, 0.2, 0.3)


def small(*layers: Layer) -> LatentFlow:
    return zoo.sharpen(zoo.flow(*layers)).double()


def orderings(*, context: int = 0) -> Mixture:
    """One transformer in three orderings, each with a base of its own."""
    torch.manual_seed(0)
    net = zoo.transformer(4, "natural", shape=(2, 2), context=context).conditioner
    nets = [net, net.reordered("reversed"), net.reordered("columns")]
    return Mixture([zoo.flow(Layer(n), learned=True) for n in nets], WEIGHTS).double()


def several() -> Mixture:
    """Three different networks on features of 2, 3 and 2 categories."""
    torch.manual_seed(1)
    sizes = (2, 3, 2)
    parts = [
        small(zoo.made(3, "random:1", categories=sizes)),
        small(zoo.recurrent(3, categories=sizes)),
        small(zoo.transformer(3, "reversed", categories=sizes)),
    ]
    return Mixture(parts, WEIGHTS).double()


def deep() -> Mixture:
    """Components of different depth, of which only small spaces have a likelihood."""
    torch.manual_seed(2)
    return Mixture(
        [small(zoo.made(3), zoo.made(3, "reversed")), small(zoo.made(3)), small(zoo.coupling(3))]
    ).double()


MIXTURES = {"orderings": orderings, "several": several, "deep": deep, "context": lambda: orderings(context=2)}
CLOSED = ("orderings", "several", "context")


def distribution(mixture: Mixture):
    context = zoo.context(mixture)
    return mixture(None if context is None else context[0])


def by_sums(mixture: Mixture) -> Tensor:
    """log p of every state: each component by enumeration of all its choices, then a plain sum."""
    weights = mixture.logits.softmax(0)
    return sum(w * joint(part).log_p.exp() for w, part in zip(weights, mixture, strict=True)).log()


@pytest.mark.parametrize("name", MIXTURES)
def test_the_likelihood_is_the_weighted_sum_and_sums_to_one(name):
    mixture = MIXTURES[name]()
    found = distribution(mixture).log_prob(all_states(mixture.states.sizes)).detach()
    assert abs(float(found.exp().sum()) - 1) < 1e-10
    torch.testing.assert_close(found, by_sums(mixture).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_deterministic_flows_mixed_sum_to_one(name):
    mixture = MIXTURES[name]().greedy()
    assert all(isinstance(part, Flow) for part in mixture)
    p = distribution(mixture).log_prob(all_states(mixture.states.sizes)).detach().exp()
    assert abs(float(p.sum()) - 1) < 1e-10


@pytest.mark.parametrize("name", MIXTURES)
def test_samples_have_the_exact_law(name):
    """40,000 draws; every frequency within five standard errors, at most sqrt(p / N), of its probability."""
    mixture, count = MIXTURES[name](), 40_000
    x = distribution(mixture).sample((count,), generator=torch.Generator().manual_seed(0))
    states = all_states(mixture.states.sizes)
    p = distribution(mixture).log_prob(states).exp()
    place = torch.tensor([math.prod(mixture.states.sizes[d + 1 :]) for d in range(mixture.features)])
    frequency = torch.bincount((x * place).sum(-1), minlength=len(states)).double() / count
    assert bool(((frequency - p).abs() < 5 * (p / count).sqrt()).all())


@pytest.mark.parametrize("name", MIXTURES)
def test_more_samples_begin_with_those_of_fewer(name):
    model = distribution(MIXTURES[name]())
    few, more = (model.sample((count,), generator=torch.Generator().manual_seed(3)) for count in (10, 20))
    assert torch.equal(few, more[:10])


def test_each_row_is_made_by_the_component_that_its_noise_names():
    mixture = several()
    noise = mixture.draw_noise(200, torch.Generator().manual_seed(0))
    x = mixture.sample_with(noise)
    edges = torch.tensor([0.0, 0.5, 0.7, 1.0])
    for index, part in enumerate(mixture):
        rows = (noise.component > edges[index]) & (noise.component <= edges[index + 1])
        assert bool(rows.any())
        assert torch.equal(x[rows], part.sample_with(SampleNoise(noise.base, noise.layers))[rows])
    assert torch.equal(mixture.sample_with(noise), x)


@pytest.mark.parametrize("name", CLOSED)
def test_the_gradient_is_that_of_the_enumerated_likelihood(name):
    mixture = MIXTURES[name]()
    x = all_states(mixture.states.sizes)
    context = zoo.rows_of_context(mixture, len(x))
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    loss = MaximumLikelihood()(mixture, x, context)
    expected = by_sums(mixture).mean()
    torch.testing.assert_close(loss.bound, expected.detach(), rtol=0, atol=1e-12)
    found = gradient(loss.surrogate, parameters)
    torch.testing.assert_close(found, -gradient(expected, parameters), rtol=0, atol=1e-12)
    assert bool((gradient(loss.surrogate, [mixture.logits]) != 0).any())


@pytest.mark.parametrize("name", CLOSED)
def test_of_a_split_batch_it_is_the_mean_of_the_components_gradients(name):
    """Every component gets every state here: what is left is the plain mean, which is a bound."""
    mixture = MIXTURES[name]()
    x = all_states(mixture.states.sizes)
    context = zoo.rows_of_context(mixture, len(x))
    parameters = [p for part in mixture for p in part.parameters() if p.requires_grad]
    loss = MaximumLikelihood(split_batch=True)(
        mixture, x.repeat(len(mixture), 1), None if context is None else context.repeat(len(mixture), 1)
    )
    expected = torch.stack([joint(part).log_p.mean() for part in mixture]).mean()
    torch.testing.assert_close(loss.bound, expected.detach(), rtol=0, atol=1e-12)
    found = gradient(loss.surrogate, parameters)
    torch.testing.assert_close(found, -gradient(expected, parameters), rtol=0, atol=1e-12)
    equal = torch.stack([joint(part).log_p for part in mixture]).logsumexp(0) - math.log(len(mixture))
    assert loss.bound < equal.mean()


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_each_row_of_a_split_batch_is_one_component_s(rows):
    mixture = orderings()
    x = all_states(mixture.states.sizes)[:rows]
    shares = torch.arange(rows).tensor_split(3)
    parts = [part().log_prob(x[share]).mean() for part, share in zip(mixture, shares, strict=True)]
    found = MaximumLikelihood(split_batch=True)(mixture, x).bound
    torch.testing.assert_close(found, torch.stack(parts).mean(), rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="2 rows came for 3 components; choose larger batches"):
        MaximumLikelihood(split_batch=True)(mixture, x[:2])


def test_soft_targets_of_a_split_batch():
    mixture = orderings()
    x = all_states(mixture.states.sizes)
    probabilities = torch.rand(1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.where(x == 1, probabilities, 1 - probabilities).prod(-1)
    soft, hard = (
        sum(
            p
            * MaximumLikelihood(split_batch=True, soft_targets=soft)(
                mixture, row.repeat(3, 1), **given
            ).surrogate
            for row, p in zip(x, weights, strict=True)
        )
        for soft, given in ((True, {"probabilities": probabilities.repeat(3, 1)}), (False, {}))
    )
    parameters = [p for part in mixture for p in part.parameters()]
    torch.testing.assert_close(gradient(soft, parameters), gradient(hard, parameters), rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="give split_batch too, or leave soft_targets out"):
        MaximumLikelihood(soft_targets=True)(mixture, x, probabilities=probabilities.expand(16, -1))


def test_evaluation_knows_mixtures():
    mixture = orderings()
    x = all_states(mixture.states.sizes)
    found = evaluate.exact(mixture, x)
    assert found.kind == "exact"
    torch.testing.assert_close(found.values, mixture().log_prob(x), rtol=0, atol=1e-12)
    assert bool((found.values <= -mixture.floor() + 1e-12).all())
    torch.testing.assert_close(
        evaluate.greedy(mixture, x).values, mixture.greedy()().log_prob(x), rtol=0, atol=0
    )
    rounded = evaluate.exact(mixture.float(), x, autocast=torch.bfloat16)
    assert rounded.nll == pytest.approx(found.nll, abs=0.05)
    assert rounded.values.dtype == torch.float64


def test_it_loses_at_most_the_weight_of_its_best_component():
    mixture = several()
    x = all_states(mixture.states.sizes)
    best = torch.stack(
        [part().log_prob(x) + math.log(w) for part, w in zip(mixture, WEIGHTS, strict=True)]
    ).amax(0)
    assert bool((mixture().log_prob(x) >= best).all())


def test_shapes_and_context():
    mixture = orderings(context=2)
    assert mixture(torch.zeros(5, 2)).sample((3,)).shape == (3, 5, 4)
    assert mixture(torch.zeros(5, 2)).log_prob(torch.zeros(7, 5, 4, dtype=torch.int64)).shape == (7, 5)
    with pytest.raises(ModelError, match="takes 2 context features, and got 0"):
        mixture()


def test_weights_that_are_not_learned_stay():
    parts = [small(zoo.made(2)), small(zoo.made(2, "reversed"))]
    mixture = Mixture(parts, [0.25, 0.75], learned=False).double()
    assert not mixture.logits.requires_grad
    assert mixture.log_weights().exp().tolist() == pytest.approx([0.25, 0.75])
    assert Mixture(parts).log_weights().exp().tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("name", CLOSED)
def test_descriptions_survive_and_keep_what_is_shared(name):
    mixture = MIXTURES[name]()
    again = flow_from_spec(flow_to_spec(mixture))
    assert isinstance(again, Mixture)
    again.double().load_state_dict(mixture.state_dict())
    x = all_states(mixture.states.sizes)
    assert torch.equal(distribution(again).log_prob(x), distribution(mixture).log_prob(x))
    assert len(list(again.parameters())) == len(list(mixture.parameters()))


# ---- what is refused ----


def flow(features: int = 3, **options) -> LatentFlow:
    base = FactorisedBase(features, categories=options.get("categories", 2))
    return LatentFlow([Layer(MADE(features, (4,), **options))], base)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Mixture([]), "at least two components, and got 0"),
        (lambda: Mixture([flow()]), "at least two components, and got 1; a single flow needs no mixture"),
        (lambda: Mixture([flow(3), flow(4)]), "component 1 has 3, and component 2 has 4"),
        (
            lambda: Mixture([flow(), flow(categories=3)]),
            "same categories: component 1 has 2, and component 2 has 3",
        ),
        (
            lambda: Mixture([flow(), flow(context=1)]),
            "component 1 takes 0 features of it, and component 2 takes 1",
        ),
        (
            lambda: Mixture([flow().float(), flow().double()]),
            "one type and one device: component 1 is torch.float32 on cpu, and component 2 is torch.float64 on cpu",
        ),
        (lambda: Mixture([flow(), MADE(3, (4,))]), "Flow or LatentFlow, and component 2 is a MADE"),
        (lambda: Mixture([flow(), flow()], [0.5, 0.6]), r"positive and sum to 1, and got \[0.5, 0.6\]"),
        (lambda: Mixture([flow(), flow()], [1.5, -0.5]), "positive and sum to 1"),
        (lambda: Mixture([flow(), flow()], [1.0, 0.0]), "positive and sum to 1"),
        (lambda: Mixture([flow(), flow()], [math.nan, 0.5]), "positive and sum to 1"),
        (lambda: Mixture([flow(), flow()], [1.0]), r"each of its 2 components, and got shape \(1,\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(build, words):
    with pytest.raises(ModelError, match=words):
        build()


def test_a_component_without_a_likelihood_is_named():
    layers = [Layer(MADE(20, (4,))), Layer(MADE(20, (4,), order="reversed"))]
    mixture = Mixture([flow(20), LatentFlow(layers, FactorisedBase(20))])
    x = torch.zeros(1, 20, dtype=torch.int64)
    with pytest.raises(Intractable, match=r"component 2 has none: log p\(x\) of a latent flow of depth 2"):
        mixture().log_prob(x)
    assert mixture.greedy()().log_prob(x).shape == (1,)


def test_what_trains_a_mixture():
    x = torch.zeros(1, 3, dtype=torch.int64)
    for estimator in (StraightThrough(), score_function()):
        with pytest.raises(
            ModelError, match=f"{type(estimator).__name__} trains single flows.*MaximumLikelihood"
        ):
            estimator(several(), x)
    with pytest.raises(ModelError, match="depth 1 that do not see their own u, and component 1 is none"):
        MaximumLikelihood()(deep(), x)
    with pytest.raises(ModelError, match="component 1 is none"):
        MaximumLikelihood()(several().greedy(), x)


def test_completion_is_left_to_components():
    with pytest.raises(Intractable, match=r"mixture.components\[0\]"):
        orderings()().complete(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool))


def test_one_network_in_several_orderings_has_one_set_of_weights():
    mixture = orderings()
    nets = {id(part.layers[0].conditioner.net) for part in mixture}
    assert len(nets) == 1
    single = CausalTransformer(4, width=8, depth=1, heads=2, shape=(2, 2))
    count = sum(p.numel() for p in mixture.parameters())
    assert (
        count == sum(p.numel() for p in single.parameters()) + 2 * 8 + 3 * 4 + 3
    )  # orderings, bases, weights
