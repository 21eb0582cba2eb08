"""What an estimator says of its bias, part by part, against enumeration, on all members that it takes."""

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import gradient
from expectations import BIASED, EXACT, expected_surrogate, few, gap, rows, state, with_a_past
from research.estimators.oracles import enumerated_value
from xorflow import LatentFlow, ModelError
from xorflow.estimators import Estimator, Part
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


def of_part(flow: LatentFlow, part: Part) -> list[Tensor]:
    """The parameters of a part."""
    if part.layer is None:
        return [flow.base.logits]
    layer = flow.layers[part.layer - 1]
    return list((layer.posterior if part.role == "posterior" else layer.conditioner).parameters())


def compared(text: str, flow: LatentFlow) -> list[tuple[Estimator, Part, Tensor, Tensor]]:
    """Of each part the expected gradient and the exact one; nothing for a flow that the estimator refuses."""
    estimator = build_estimator(text)
    try:
        estimator.check(flow)
    except ModelError:
        return []
    with_a_past(estimator, flow)
    context = zoo.rows_of_context(flow, 1)
    target = estimator.target(flow)
    exact = torch.stack(
        [share * enumerated_value(target, flow, state(flow, row), context) for row, share in rows(flow)]
    ).sum()
    expected = expected_surrogate(estimator, flow, estimator.proposal)
    return [
        (estimator, part, *(gradient(value, of_part(flow, part)) for value in (expected, exact)))
        for part in parts_of(flow)
        if part.role != "posterior" or estimator.proposal == "q"
    ]


@pytest.mark.parametrize("name", zoo.names(few(1)))
def test_what_is_said_of_a_bias_is_so(name: str) -> None:
    """None: none to rounding. Rescaled: parallel, and of another length."""
    flow = zoo.make(name)
    for text in (*BOUND, *(EVIDENCE if flow.has_posterior else ())):
        for estimator, part, expected, exact in compared(text, flow):
            bias = estimator.bias_of(flow, part)
            if bias is None:
                assert gap(expected, exact) < EXACT, (text, part)
            elif bias.rescaled:
                ratio = (expected @ exact) / (exact @ exact)
                assert gap(expected, ratio * exact) < EXACT, (text, part)
                assert 0 < float(ratio) < 1
            assert bias is None or bias.reason


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
    found = compared(text, flow)
    biased = {part for estimator, part, *_ in found if estimator.bias_of(flow, part)}
    assert biased == {part for _, part, expected, exact in found if gap(expected, exact) > BIASED}
    estimator = found[0][0]
    assert estimator.bias(flow) == estimator.bias_of(flow, min(biased, key=parts_of(flow).index))


def test_of_all_parts_a_reason_is_said_before_a_scale() -> None:
    flow = zoo.make("D3 depth 2 learned base")
    bias = build_estimator("score-function:credit=impatient,standardise=one").bias(flow)
    assert bias is not None
    assert not bias.rescaled
    assert bias.reason.startswith("Impatient does not weigh the scores of layer 1")
