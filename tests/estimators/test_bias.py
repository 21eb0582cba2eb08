"""What an estimator says of its bias, part by part, against enumeration, on all members that it takes."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import gradient
from expectations import BIASED, EXACT, expected_surrogate, few, gap, rows, state, with_a_past
from research.estimators.oracles import enumerated_value
from xorflow import LatentFlow, ModelError, estimators
from xorflow.estimators import Estimator, Part, ProposalPrefix, Target
from xorflow.estimators.base import parts_of
from xorflow.training import build_estimator

BOUND = (
    "score-function",
    "score-function:credit=all,entropy=0.3",
    "score-function:credit=impatient",
    "score-function:credit=two-term,second=0.5,entropy=0.3",
    "score-function:credit=printed-rewards",
    "score-function:sum_last=true,credit=impatient,standardise=feature",
    "score-function:standardise=one",
    "straight-through",
    "reinmax",
    "analytic:entropy=0.3",
)
EVIDENCE = (
    "score-function:objective=elbo",
    "score-function:objective=elbo,divergence=sampled",
    "score-function:objective=elbo,credit=all",
    "score-function:objective=elbo,credit=impatient",
    "score-function:objective=elbo,credit=local-divergence",
    "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none,of=impatient",
    "score-function:objective=elbo,divergence=cross-entropy,credit=printed-divergence",
    "score-function:objective=elbo,divergence=cross-entropy,sum_last=true,standardise=feature",
    "score-function:objective=elbo,standardise=one",
    "analytic:objective=elbo",
)


PAIRED = (
    "score-function:baseline=leave-one-out,samples=2",
    "score-function:baseline=sampled",
    "score-function:credit=two-term,two_samples=true",
    "maximum-likelihood:samples=2",
    "vimco:samples=2",
    "vimco:samples=2,proposal=q",
    "vimco:samples=2,sum_last=true",
    "double-cv:samples=2",
)


def of_part(flow: LatentFlow, part: Part) -> list[Tensor]:
    """The parameters of a part."""
    if part.layer is None:
        return [flow.base.logits]
    layer = flow.layers[part.layer - 1]
    return list((layer.posterior if part.role == "posterior" else layer.conditioner).parameters())


def exact_value(target: Target, flow: LatentFlow, x: Tensor, context: Tensor | None) -> Tensor:
    if target.kind == "log-likelihood":
        return flow.log_likelihood(x, context).mean()
    return enumerated_value(target, flow, x, context)


def compared(estimator: Estimator, flow: LatentFlow) -> list[tuple[Part, Tensor, Tensor]]:
    """Of each part the expected gradient and the exact one; nothing for a flow that the estimator refuses."""
    try:
        estimator.check(flow)
    except ModelError:
        return []
    with_a_past(estimator, flow)
    context = zoo.rows_of_context(flow, 1)
    target = estimator.target(flow)
    exact = torch.stack(
        [share * exact_value(target, flow, state(flow, row), context) for row, share in rows(flow)]
    ).sum()
    expected = expected_surrogate(estimator, flow, estimator.proposal)
    return [
        (part, *(gradient(value, of_part(flow, part)) for value in (expected, exact)))
        for part in parts_of(flow)
        if part.role != "posterior" or estimator.proposal == "q"
    ]


def assert_said(estimator: Estimator, flow: LatentFlow) -> None:
    """What it says of its bias is so. None: none to rounding. Rescaled: parallel, and of another length."""
    for part, expected, exact in compared(estimator, flow):
        bias = estimator.bias_of(flow, part)
        if bias is None:
            assert gap(expected, exact) < EXACT, (estimator, part)
        elif bias.rescaled:
            ratio = (expected @ exact) / (exact @ exact)
            assert gap(expected, ratio * exact) < EXACT, (estimator, part)
            assert 0 < float(ratio) < 1
        assert bias is None or bias.reason


@pytest.mark.parametrize("name", zoo.names(few(1)))
def test_what_is_said_of_a_bias_is_so(name: str) -> None:
    flow = zoo.make(name)
    for text in (*BOUND, *(EVIDENCE if flow.has_posterior else ())):
        assert_said(build_estimator(text), flow)


@pytest.mark.parametrize("name", zoo.names(few(2)))
def test_what_is_said_of_the_bias_of_several_samples_is_so(name: str) -> None:
    flow = zoo.make(name)
    for text in PAIRED:
        if "=q" not in text or flow.has_posterior:
            assert_said(build_estimator(text), flow)


BIASES = {
    "score-function:credit=impatient": "D3 depth 2 reversed",
    "score-function:credit=two-term,second=0.5,entropy=0.3": "D3 depth 2 one order",
    "score-function:credit=printed-rewards": "D3 x",
    "score-function:standardise=feature": "D3 x",
    "straight-through": "D3 depth 2 reversed",
    "reinmax": "D3 depth 2 reversed",
    "score-function:objective=elbo,credit=impatient": "D3 depth 2 posterior",
    "score-function:objective=elbo,credit=local-divergence": "D2 depth 3 posterior sees state",
    "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none": "D3 depth 2 posterior",
    "score-function:objective=elbo,divergence=cross-entropy,credit=printed-divergence": "D3 posterior",
    "score-function:objective=elbo,standardise=feature": "D3 relative posterior",
}


@pytest.mark.parametrize("text", BIASES)
def test_a_reason_stands_for_a_bias(text: str) -> None:
    """Where a reason is given, the gradient of that part is another; everywhere else it is exact."""
    flow = zoo.make(BIASES[text])
    estimator = build_estimator(text)
    found = compared(estimator, flow)
    biased = {part for part, *_ in found if estimator.bias_of(flow, part)}
    assert biased == {part for part, expected, exact in found if gap(expected, exact) > BIASED}
    assert estimator.bias(flow) == estimator.bias_of(flow, min(biased, key=parts_of(flow).index))


def test_of_all_parts_a_reason_is_said_before_a_scale() -> None:
    flow = zoo.make("D3 depth 2 learned base")
    bias = build_estimator("score-function:credit=impatient,standardise=one").bias(flow)
    assert bias is not None
    assert not bias.rescaled
    assert bias.reason.startswith("Impatient does not weigh the scores of layer 1")


# the paper's estimators, by the names in the table of docs/derivations.md

TABLE = Path(__file__).parents[2] / "docs/derivations.md"
OF_THE_PAPER = {
    "section 3, note on STE": ["xorflow.estimators.StraightThrough"],
    "section 5, gradients of β, θ, λ": ["ScoreFunction(ELBO())"],
    "section 5, self-critic": ["ScoreFunction(baseline=SampledCritic())"],
    "section 6, greedy self-critic": ["ScoreFunction(baseline=GreedyCritic())"],
    "section 5, moving estimates": ["ScoreFunction(baseline=RunningMean())"],
    "section 5, moving estimates and deviations": [
        "ScoreFunction(standardise=FeatureScale())",
        "ScoreFunction(standardise=OneScale())",
    ],
    "section 5, local KL": ["ScoreFunction(ELBO(), LocalDivergence())"],
    "section 5, footnote on γ": ["ScoreFunction(ELBO(), LocalDivergence(gamma=0.5, reach=None))"],
    "section 5, better KL": ['ScoreFunction(ELBO("cross-entropy"))'],
    "section 5, special case": ["ScoreFunction(Bound())"],
    "section 5, two terms": ["ScoreFunction(Bound(), TwoTerm())"],
    "section 5, another constant": ["ScoreFunction(Bound(), TwoTerm(second=0.5, discount=0.9))"],
    "section 5, a sample for each term": ["ScoreFunction(Bound(), TwoTerm(two_samples=True))"],
    "section 5, impatience": [
        "ScoreFunction(Bound(), Impatient())",
        "ScoreFunction(ELBO(), Impatient())",
    ],
    "appendix B": ['ScoreFunction(ELBO("sampled"), All())'],
    "appendix B as printed": ['ScoreFunction(ELBO("cross-entropy"), PrintedDivergence())'],
    "appendix C, proposal": ["xorflow.estimators.ProposalPrefix"],
    "appendix C as printed": ["ScoreFunction(Bound(), PrintedRewards())"],
}


def test_the_table_of_the_paper_has_every_variant() -> None:
    rows = re.findall(r"^\| (?:section|appendix).*\|$", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    estimator = r"`(ScoreFunction\(.*?\)|xorflow\.estimators\.\w+)`"
    listed = [(row.split("|")[1].strip(), re.findall(estimator, row)) for row in rows]
    codes = [code for _, found in listed for code in found]
    assert sorted(codes) == sorted(code for found in OF_THE_PAPER.values() for code in found)
    assert {name for name, found in listed if found} == {
        name.removesuffix(" and deviations") for name in OF_THE_PAPER
    }


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_what_is_said_of_the_bias_of_the_papers_estimators_is_so(name: str) -> None:
    """At depth 1, 2 and 3, in one ordering and in two; that of a proposal is in test_proposal."""
    for code in OF_THE_PAPER[name]:
        made = eval(code.removeprefix("xorflow.estimators."), vars(estimators))
        estimator = made() if isinstance(made, type) else made
        for member in (
            "D3 posterior",
            "D3 depth 2 posterior",
            "D2 depth 3 posterior sees state",
            "D3 depth 2 one order",
        ):
            flow = zoo.make(member)
            drawn = estimator.noise_shape(flow)
            if few(drawn[0] if drawn else 1)(flow) and not isinstance(estimator, ProposalPrefix):
                assert_said(estimator, flow)
