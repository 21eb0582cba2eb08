"""Exact gradients: closed forms against enumeration, enumeration against the estimators' own expectations, claims as proved."""

from typing import Literal

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import gradient
from expectations import (
    BIASED,
    EXACT,
    bound,
    evidence,
    expected_surrogate,
    gap,
    networks,
    rows,
    state,
    trainable,
    with_a_past,
)
from research.estimators import oracles as study_oracles
from research.estimators.measure import Bench
from research.estimators.oracles import PlainBound, closed_form, description, enumerated_value, require_oracle
from research.estimators.statistics import mean_of_pairs
from xorflow import LatentFlow
from xorflow.data import Batch
from xorflow.errors import Intractable
from xorflow.estimators import Part, Target
from xorflow.training.build import build_estimator


def value(objective: Target, flow: LatentFlow) -> Tensor:
    """The objective of the two states that expectations are taken over, each with its share."""
    context = zoo.rows_of_context(flow, 1)
    parts = [
        share * enumerated_value(objective, flow, state(flow, row), context) for row, share in rows(flow)
    ]
    return torch.stack(parts).sum()


def same(found: Tensor, expected: Tensor) -> bool:
    return gap(found.detach(), expected.detach()) < EXACT


@pytest.mark.parametrize(
    "name", ["D3 learned base", "D3 posterior", "K3 posterior", "D3 context", "K 2, 3, 4"]
)
@pytest.mark.parametrize("kind", ["bound", "elbo"])
def test_closed_forms_are_what_enumeration_gives(name: str, kind) -> None:
    flow = zoo.make(name)
    if kind == "elbo" and not flow.has_posterior:
        return
    exact = closed_form(Target(kind))
    assert exact is not None
    loss = sum(
        share * -exact.loss(flow, flow.start(state(flow, row), zoo.rows_of_context(flow, 1)), None).surrogate
        for row, share in rows(flow)
    )
    assert isinstance(loss, Tensor)
    found = gradient(value(Target(kind), flow), trainable(flow))
    assert gap(found, gradient(loss, trainable(flow))) < EXACT


@pytest.mark.parametrize("name", ["D3 depth 2 posterior", "D3 depth 2 own", "chain D2 depth 3", "K3 depth 2"])
def test_bounds_of_deep_models_are_plain_sums(name: str) -> None:
    flow = zoo.make(name)
    assert same(value(Target("bound"), flow), bound(flow))
    bonus = Target("bound", entropy=0.3, earlier=0.5)
    assert same(value(bonus, flow), bound(flow, 0.3, 0.5))
    if flow.has_posterior:
        assert same(value(Target("elbo"), flow), evidence(flow))


UNBIASED = {
    "D3 depth 2 reversed": [
        "maximum-likelihood:samples=2",
        "vimco:samples=2,sum_last=true",
        "score-function:baseline=leave-one-out,samples=2",
    ],
    "D1 depth 2": ["vimco:samples=2", "vimco:samples=3"],
    "D2 depth 2 context": ["vimco:samples=2"],
    "D3 posterior": [
        "vimco:samples=2,proposal=q",
        "score-function:objective=elbo,baseline=leave-one-out,samples=2",
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in UNBIASED.items() for text in texts]
)
def test_an_estimators_expectation_is_the_gradient_of_its_objective(name: str, text: str) -> None:
    flow, estimator = zoo.make(name), build_estimator(text)
    expected = gradient(expected_surrogate(estimator, flow, estimator.proposal), trainable(flow))
    assert gap(gradient(value(estimator.target(flow), flow), trainable(flow)), expected) < EXACT


CLAIMED = [
    ("D3 reversed", "score-function:credit=impatient"),
    ("D3 reversed", "score-function:credit=printed-rewards,baseline=none"),
    ("D3 reversed", "score-function:standardise=feature"),
    ("D3 reversed", "straight-through"),
    ("D3 depth 2 reversed", "score-function:credit=impatient"),
    ("D3 depth 2 reversed", "score-function:objective=bound,entropy=0.5,credit=all"),
    ("D3 depth 2 reversed", "straight-through"),
    ("D3 depth 2 reversed", "reinmax"),
    ("D3 depth 2 one order", "score-function:credit=two-term,second=0.5"),
    ("D3 depth 2 one order", "score-function:credit=two-term"),
    ("D3 depth 2 posterior", "score-function:objective=elbo,credit=impatient"),
    ("D2 depth 3 posterior sees state", "score-function:objective=elbo,credit=local-divergence"),
    (
        "D2 depth 3 posterior sees state",
        "score-function:objective=elbo,divergence=cross-entropy,credit=printed-divergence",
    ),
    ("D2 depth 3 posterior sees state", "score-function:objective=elbo,divergence=cross-entropy"),
    (
        "D2 depth 3 posterior sees state",
        "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none",
    ),
]


@pytest.mark.parametrize(("name", "text"), CLAIMED)
def test_a_claim_of_no_bias_is_true_and_one_of_bias_is_true_somewhere(name: str, text: str) -> None:
    flow = zoo.make(name)
    estimator = with_a_past(build_estimator(text), flow)
    objective = estimator.target(flow)
    drawn = "q" if objective.kind == "elbo" else "p"
    differences = {}
    for number, layer in enumerate(flow.layers, 1):
        for part, network in (("generator", layer.conditioner), ("posterior", layer.posterior)):
            if network is None:
                continue
            parameters = list(network.parameters())
            found = gradient(expected_surrogate(estimator, flow, drawn), parameters)
            exact = gradient(value(objective, flow), parameters)
            differences[
                "biased" if estimator.bias_of(flow, Part(part, number)) else "unbiased", part, number
            ] = gap(found, exact)
    for (claim, *_), difference in differences.items():
        assert claim == "biased" or difference < EXACT
    biased = [difference for (claim, *_), difference in differences.items() if claim == "biased"]
    assert not biased or max(biased) > BIASED


def bench(name: str, draws: int, rows_of_batch: int = 4, warm_up: int = 3) -> Bench:
    flow = zoo.make(name)
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        sizes = torch.tensor(flow.states.sizes)
        uniforms = torch.rand((rows_of_batch, flow.features), generator=generator)
        return Batch((uniforms * sizes).long(), zoo.rows_of_context(flow, rows_of_batch))

    return Bench(flow, batch(), [batch() for _ in range(warm_up)], draws)


def test_an_averaged_oracle_agrees_with_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within four standard errors, layer by layer, for all objectives that have one."""
    exact, averaged = bench("D3 depth 2 posterior", 256), bench("D3 depth 2 posterior", 256)
    for kind in ("bound", "elbo", "summed"):
        plain = exact.oracle(Target(kind), 256)
        with monkeypatch.context() as context:
            context.setattr(study_oracles, "ENUMERATION_LIMIT", 1)
            noisy = averaged.oracle(Target(kind), 256)
        assert plain is not None
        assert noisy is not None
        assert (plain.last, len(plain.means)) == ("enumeration", 1)
        assert noisy.last.startswith(
            "closed form of the last layer given the layers before, averaged over 4,096"
        )
        assert noisy.earlier.startswith("mean of 256 draws of ")
        assert len(noisy.means) == 16
        for part in averaged._slices:
            errors = (noisy.means - plain.means)[:, part]
            distance = mean_of_pairs(errors @ errors.T)
            assert abs(distance.value) < 4 * distance.stderr + 1e-20
        descriptions = {noisy.description(Part("generator", layer), 2) for layer in (1, 2)}
        assert descriptions == {noisy.last, noisy.earlier}


DEEP = "chain depth 2 relative posterior"


@pytest.mark.parametrize(
    ("name", "proposal", "sum_last"),
    [
        ("D2", "p", False),
        (DEEP, "p", False),
        (DEEP, "p", True),
        (DEEP, "q", False),
        (DEEP, "q", True),
    ],
)
def test_a_plain_score_function_is_unbiased_for_bounds_of_several_samples(
    name: str, proposal: Literal["p", "q"], sum_last: bool
) -> None:
    """Over all choices of two sets of two samples, of two features."""
    flow = zoo.make(name)
    objective = Target("importance", samples=2, sum_last=sum_last, proposal=proposal)
    expected = gradient(
        expected_surrogate(PlainBound(2, 2, proposal, sum_last), flow, proposal), trainable(flow)
    )
    assert gap(gradient(value(objective, flow), trainable(flow)), expected) < EXACT


@pytest.mark.parametrize("proposal", ["p", "q"])
@pytest.mark.parametrize("sum_last", [False, True])
def test_bounds_of_several_samples_of_large_models_are_averaged(
    proposal: Literal["p", "q"], sum_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within four standard errors of enumeration, as all averaged oracles."""
    objective = Target("importance", samples=2, sum_last=sum_last, proposal=proposal)
    exact, averaged = bench("D3 depth 2 posterior", 64), bench("D3 depth 2 posterior", 64)
    plain = exact.oracle(objective, 64)
    with monkeypatch.context() as context:
        context.setattr(study_oracles, "ENUMERATION_LIMIT", 1)
        noisy = averaged.oracle(objective, 64)
    assert plain is not None
    assert noisy is not None
    words = "mean of 64 draws of a plain score function with 16 sets of samples, which is unbiased"
    assert (plain.last, noisy.last, noisy.earlier) == ("enumeration", words, words)
    for part in averaged._slices:
        errors = (noisy.means - plain.means)[:, part]
        distance = mean_of_pairs(errors @ errors.T)
        assert abs(distance.value) < 4 * distance.noise + 1e-20
    source = "the posterior" if proposal == "q" else "the generator"
    assert description(objective).startswith(f"bound of 2 samples from {source}")


def test_a_model_without_any_oracle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = zoo.make("D3 depth 2 own")
    require_oracle(flow)
    monkeypatch.setattr(study_oracles, "ENUMERATION_LIMIT", 32)
    require_oracle(zoo.make("D3 depth 2 own first"))  # its last layer is summed out
    with pytest.raises(
        Intractable, match=r"its last layer sees its own u.* 2\^6 choices exceed the limit of 2\^5"
    ):
        require_oracle(flow)


# ---- an estimator at the bench ----


PASSES = {
    "straight-through": 2, "score-function": 2, "score-function:baseline=greedy": 4, "maximum-likelihood:samples=4": 5,
    "score-function:baseline=leave-one-out,samples=4": 5, "double-cv:samples=2": 6, "vimco:samples=3": 4, "disarm": 3,
    "arms:samples=4": 5, "rebar": 4, "relax": 4, "concrete": 3, "st-gumbel": 2, "reinmax": 2, "local-expectation": 5,
    "proposal-prefix": 2,
}  # fmt: skip
"""At depth 2 with 3 features, as docstrings and the page on estimators say."""
PASSES_IN_ONE_ORDER = {
    "score-function:credit=two-term,two_samples=true": 4,
    "score-function:credit=two-term,two_samples=true,baseline=greedy": 8,
}
PASSES_WITH_POSTERIORS = {
    "score-function:objective=elbo": 4, "score-function:objective=elbo,baseline=greedy": 8,
    "score-function:objective=elbo,baseline=leave-one-out,samples=4": 10,
    "vimco:samples=3,proposal=q": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("D3 depth 2 reversed", PASSES),
        ("D3 depth 2 one order", PASSES_IN_ONE_ORDER),
        ("D3 depth 2 posterior", PASSES_WITH_POSTERIORS),
    ],
)
def test_passes_are_those_of_the_documentation(name: str, known: dict[str, int]) -> None:
    study = bench(name, 8)
    for text, passes in known.items():
        cost = study.cost(text)
        assert cost["passes"] == passes, text
        assert cost["milliseconds"] > 0
        assert cost["step"] == "eager"


def test_straight_through_is_exact_at_depth_1_and_not_beyond() -> None:
    (row,) = bench("D4 random", 8).measure("straight-through")["rows"]
    assert (row["bias"], row["bias_stderr"], row["variance"], row["draws"]) == (0.0, 0.0, 0.0, 1)
    assert (row["claim"], row["oracle"], row["objective"]) == (
        "unbiased",
        "closed form",
        "special-case bound",
    )
    deep = bench("D3 depth 2 reversed", 8).measure("straight-through")["rows"]
    assert [row["layer"] for row in deep] == [1, 2]
    assert all(
        row["bias"] > 0.01 and row["claim"] == "biased" and row["oracle"] == "enumeration" for row in deep
    )


@pytest.mark.parametrize(
    "text",
    [
        "score-function",
        "score-function:baseline=leave-one-out,samples=2",
        "disarm",
        "arms:samples=3",
        "rebar",
    ],
)
def test_unbiased_estimators_are_found_unbiased(text: str) -> None:
    for row in bench("D3 depth 2 learned base", 200).measure(text)["rows"]:
        assert abs(row["bias"]) < 4 * row["bias_stderr"]
        assert row["variance"] > 0


def test_the_parts_that_learn_have_rows_of_their_own() -> None:
    learned = bench("D3 depth 2 learned base", 8).measure("score-function:baseline=leave-one-out,samples=2")[
        "rows"
    ]
    assert [(row["part"], row["layer"]) for row in learned] == [
        ("generator", 1),
        ("generator", 2),
        ("base", None),
    ]
    both = bench("D3 depth 2 posterior", 8)
    parts = [(row["part"], row["layer"]) for row in both.measure("score-function:objective=elbo")["rows"]]
    assert parts == [("generator", 1), ("posterior", 1), ("generator", 2), ("posterior", 2)]
    without = [row["part"] for row in both.measure("disarm")["rows"]]
    assert without == ["generator", "generator"]  # it never looks at the posterior


def test_the_map_has_the_variance_of_every_feature() -> None:
    """V r*^2 of each row for the plain score function, r* the optimal baseline, in all other respects a known constant."""
    study = bench("D4 random", 1600)
    found = torch.tensor(
        study.measure("score-function:baseline=none")["variance_by_feature"], dtype=torch.float64
    )
    with torch.no_grad():
        x, _ = study._batch
        choices, outcomes = study.flow.last_choices(study.flow.start(x))
        f = choices.mean
        best = (1 - f) * outcomes[0][..., 1] + f * outcomes[0][..., 0]
        expected = (f * (1 - f) * best.square()).sum(0) / len(x) ** 2
    torch.testing.assert_close(
        found, expected, rtol=0.2, atol=0
    )  # four standard errors of 1,600 draws, and their tails


def test_a_suspected_bias_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from research.estimators import measure as study_measure

    plain = bench("D4 random", 16).measure("disarm")["rows"][0]
    assert "earlier" not in plain
    monkeypatch.setattr(study_measure, "CHANCE", 0.0)
    row = bench("D4 random", 16).measure("disarm")["rows"][0]
    assert row["draws"] == 256
    assert [found["draws"] for found in row["earlier"]] == [16, 64]
    assert row["earlier"][0] == {key: plain[key] for key in ("bias", "bias_stderr", "bias_noise", "draws")}


def test_what_learns_has_warmed_up_before_it_is_measured() -> None:
    study = bench("D4 random", 8, warm_up=4)
    for text, steps in {
        "score-function": 4,
        "rebar": 4,
        "disarm": 0,
        "score-function:baseline=leave-one-out,samples=2": 0,
    }.items():
        assert study.measure(text)["rows"][0]["warm_up"] == steps, text


def test_measuring_changes_neither_the_flow_nor_what_comes_after() -> None:
    first, second = bench("D3 depth 2 reversed", 8), bench("D3 depth 2 reversed", 8)
    before = [p.clone() for p in networks(first.plain)]
    first.measure("rebar")
    assert all(torch.equal(a, b) for a, b in zip(before, networks(first.plain), strict=True))
    keep = lambda found: {k: v for k, v in found["rows"][0].items() if k != "milliseconds"}  # noqa: E731
    assert keep(first.measure("disarm")) == keep(second.measure("disarm"))
