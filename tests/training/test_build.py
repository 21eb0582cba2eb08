"""From options to data, flow and estimator."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_runs import images_file, rows_array, rows_file, tiny_dataset, tiny_flow, tiny_options
from xorflow import FactorisedBase, LatentFlow, Layer, evaluate
from xorflow.conditioners import MADE, CausalTransformer, Conditioner, Coupling, Recurrent
from xorflow.data import Dataset, Split
from xorflow.errors import CheckpointError, ConfigError, DataError, ModelError
from xorflow.estimators import MaximumLikelihood, StraightThrough
from xorflow.training import (
    ESTIMATORS,
    Options,
    build_data,
    build_estimator,
    build_flow,
    flow_from_spec,
    flow_to_spec,
    independent_nll,
    init_from_data,
)
from xorflow.training.build import category_frequencies, layer_orders
from xorflow.training.spec import model_for


@pytest.mark.parametrize(
    ("order", "layers", "expected"),
    [
        ("natural", 2, ["natural", "natural"]),
        ("alternating", 3, ["natural", "reversed", "natural"]),
        ("random", 2, ["random:0", "random:1"]),
        ("random:7", 2, ["random:7", "random:7"]),
        ("natural, random:3", 2, ["natural", "random:3"]),
    ],
)
def test_orders(order: str, layers: int, expected: list[str]) -> None:
    assert layer_orders(order, layers) == expected


def test_as_many_orders_as_layers() -> None:
    with pytest.raises(ConfigError, match="names 3 orderings, and there are 2 layers"):
        layer_orders("natural,reversed,natural", 2)


@pytest.mark.parametrize(
    "text",
    [
        "maximum-likelihood",
        "maximum-likelihood:samples=8",
        "straight-through",
        "straight-through:entropy=1.0,anneal=0.5",
        "score-function:credit=impatient,baseline=greedy,standardise=feature",
        "score-function:credit=two-term,second=0.5,two_samples=true",
        "score-function:objective=elbo,divergence=cross-entropy,credit=local-divergence,gamma=0.5,baseline=sampled",
        "proposal-prefix:mix=0.25",
        "analytic:objective=elbo",
        "score-function:objective=elbo,baseline=leave-one-out,samples=8,sum_last=true",
        "vimco:samples=16,sum_last=true",
        "disarm:common=true",
        "arms:samples=3",
        "rebar:eta=0.5,tau=0.2",
        "relax:hidden=16",
        "double-cv:samples=2,alpha=0.5",
        "concrete:tau=0.3",
        "st-gumbel",
        "reinmax:tau=2.0",
        "local-expectation:sum_last=true,limit=8",
        "score-function:objective=bound,entropy=0.7,anneal=0.5,baseline=running-mean,decay=0.5",
        "score-function:baseline=running-mean,decay=0.5,standardise=feature,decay=0.8,floor=1.0",
        "score-function:standardise=one,decay=0.8",
        "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none,of=impatient",
    ],
)
def test_estimators_by_name_and_back(text: str) -> None:
    assert ESTIMATORS.text(build_estimator(text)) == text


@pytest.mark.parametrize(
    ("short", "text"),
    [
        (
            "score-function:objective=bound,credit=descendants,baseline=running-mean,standardise=none",
            "score-function",
        ),
        ("score-function:entropy=0.7", "score-function:objective=bound,entropy=0.7"),
        ("score-function:decay=0.5", "score-function:baseline=running-mean,decay=0.5"),
        (
            "score-function:standardise=one,decay=0.8,baseline=running-mean,decay=0.5",
            "score-function:baseline=running-mean,decay=0.5,standardise=one,decay=0.8",
        ),
        (
            "score-function:entropy=0.3,baseline=leave-one-out,samples=2",
            "score-function:objective=bound,entropy=0.3,baseline=leave-one-out,samples=2",
        ),
    ],
)
def test_the_settings_of_parts_may_stand_without_their_names(short: str, text: str) -> None:
    """They are those of the part that is named before them, or else of the first that has them."""
    assert ESTIMATORS.text(build_estimator(short)) == text


def test_estimators_are_what_their_names_say() -> None:
    assert isinstance(build_estimator("maximum-likelihood"), MaximumLikelihood)
    assert isinstance(build_estimator("straight-through"), StraightThrough)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "reinforce",
            "estimator is one of maximum-likelihood, straight-through, score-function, analytic, proposal-prefix, vimco, "
            "disarm, arms, rebar, relax, double-cv, concrete, st-gumbel, reinmax, local-expectation; got",
        ),
        ("score-function:objective=bound,entropy=much", "is a number; got 'much'"),
        ("score-function:credit=two-term,two_samples=1", "is true or false; got '1'"),
        (
            "score-function:baseline=2",
            "baseline is one of running-mean, none, sampled, greedy, leave-one-out; got '2'",
        ),
        (
            "score-function:baseline=mine",
            "baseline is one of running-mean, none, sampled, greedy, leave-one-out; got 'mine'",
        ),
        (
            "score-function:second=2",
            "written as score-function:KEY=VALUE; got 'second=2'",
        ),
        ("score-function:objective=elbo,baseline=running-mean,decay=1", "at least 0 and below 1; got 1"),
        ("straight-through:anneal=2", "from 0 to 1; got 2"),
        ("score-function:earlier=0.5", "whose weight entropy is 0: leave them out"),
        (
            "score-function:credit=local-divergence",
            "LocalDivergence is about the terms of a divergence, and Bound has none",
        ),
        ("score-function:credit=printed-divergence", "choose another credit, or objective=elbo"),
        (
            "maximum-likelihood:draws=3",
            "takes samples, split_batch, soft_targets, written as maximum-likelihood:KEY=VALUE; got 'draws=3'",
        ),
        ("maximum-likelihood:samples", "got 'samples'"),
        ("maximum-likelihood:samples=0", "at least one sample"),
        ("score-function:baseline=leave-one-out,samples=1", "needs samples=2 or more"),
        ("arms:samples=1", "at least 2; got 1"),
        ("relax:hidden=0", "it has no parameters"),
        ("disarm:samples=2", "takes sum_last, common, written as disarm:KEY=VALUE"),
        ("concrete:tau=0", "greater than 0; got 0"),
        ("maximum-likelihood:samples=two", "maximum-likelihood:samples=two"),
        ("maximum-likelihood:samples=2.5", "maximum-likelihood:samples=2.5"),
        (
            "straight-through:samples=2",
            "takes entropy, anneal, earlier, written as straight-through:KEY=VALUE",
        ),
    ],
)
def test_bad_estimators_are_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_estimator(text)
    assert words in str(error.value)


@pytest.mark.parametrize("conditioner", ["made:hidden=16", "coupling:hidden=16"])
@pytest.mark.parametrize("transform", ["shift", "affine"])
def test_flows_survive_their_description(tmp_path: Path, conditioner: str, transform: str) -> None:
    options = tiny_options(
        rows_file(tmp_path / "rows.npy"),
        layers=2,
        conditioner=conditioner,
        transform=transform,
    )
    flow = build_flow(options, build_data(options))
    again = flow_from_spec(flow_to_spec(flow))
    again.load_state_dict(flow.state_dict())
    x = torch.from_numpy(rows_array(10))
    assert torch.equal(evaluate.greedy(again, x).values, evaluate.greedy(flow, x).values)


def test_options_reach_the_model(tmp_path: Path) -> None:
    options = tiny_options(
        rows_file(tmp_path / "rows.npy"),
        layers=2,
        order="reversed,random:1",
        conditioner="made:hidden=8+4",
        base="fixed:p0=0.7",
    )
    flow = build_flow(options, build_data(options))
    assert flow.depth == 2
    assert [type(layer.conditioner) for layer in flow.layers] == [MADE, MADE]
    assert not flow.base.logits.requires_grad
    assert flow.base.log_table()[0].exp()[:, 0].tolist() == pytest.approx([0.7] * 6)


CHAIN = [{"x": "before"}, {"previous": "up to"}, {"previous": "up to"}]


@pytest.mark.parametrize(
    ("changes", "sees", "posterior"),
    [
        ({}, [{"state": "before"}] * 3, [None] * 3),
        ({"variant": "chain"}, CHAIN, [None] * 3),
        ({"variant": "chain", "own": True}, [s | {"own": "before"} for s in CHAIN], [None] * 3),
        (
            {"posterior": "mlp:hidden=16"},
            [{"state": "before"}] * 3,
            [{"x": "all"}, *[{"x": "all", "state": "all"}] * 2],
        ),
        (
            {"posterior": "made:hidden=16", "variant": "chain"},
            CHAIN,
            [{"x": "up to"}, *[{"x": "up to", "previous": "up to"}] * 2],
        ),
    ],
)
def test_variants_and_posteriors(tmp_path: Path, changes: dict, sees: list, posterior: list) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), layers=3, **changes)
    flow = build_flow(options, build_data(options))
    assert [layer.conditioner.sees for layer in flow.layers] == sees
    assert [None if layer.posterior is None else layer.posterior.sees for layer in flow.layers] == posterior
    again = flow_from_spec(flow_to_spec(flow))
    assert [layer.conditioner.sees for layer in again.layers] == sees


def test_couplings_have_no_variants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sees the running state alone"):
        tiny_options(rows_file(tmp_path / "rows.npy"), conditioner="coupling", own=True)


def test_a_checkerboard_needs_images(tmp_path: Path) -> None:
    network = "coupling:hidden=16,mask=checkerboard"
    options = tiny_options(rows_file(tmp_path / "rows.npy"), conditioner=network)
    with pytest.raises(ConfigError, match="two-dimensional shape; choose mask=halves"):
        build_flow(options, build_data(options))
    pictures = tiny_options(images_file(tmp_path / "images.npy"), conditioner=network)
    flow = build_flow(pictures, build_data(pictures))
    assert isinstance(flow.layers[0].conditioner, Coupling)


def test_files_are_split_as_told(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    sizes = {
        name: len(p) for name, p in build_data(tiny_options(data, validation=30, test=0.25)).parts.items()
    }
    assert sizes == {"train": 120, "validation": 30, "test": 50}
    assert list(build_data(tiny_options(data, validation=0, test=0)).parts) == ["train"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "cifar"}, "data is 'mnist', a file, .npy, .npz, .csv,"),
        ({"data": "none.npy"}, "none.npy"),
        ({"label": True}, "label has an effect only if data is mnist"),
        ({"validation": 2.5}, "a number of rows, got 2.5"),
        ({"validation": 500}, "lower validation="),
        ({"data": "mnist", "validation": 0.5}, "whole number of training images"),
        ({"data": "mnist", "validation": 70_000}, "59999"),
    ],
)
def test_data_that_cannot_be_had(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    changes = {"data": str(rows_file(tmp_path / "rows.npy"))} | changes
    with pytest.raises((ConfigError, DataError)) as error:
        build_data(Options().replace(**changes))
    assert words in str(error.value)


def test_an_ordering_that_does_not_exist(tmp_path: Path) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), order="sideways")
    with pytest.raises((ConfigError, ModelError), match="sideways"):
        build_flow(options, build_data(options))


def test_frequencies_are_smoothed_and_know_intensities() -> None:
    fixed = Split(torch.tensor([[0, 2], [0, 1]], dtype=torch.uint8))
    table = category_frequencies(fixed, (2, 3))
    assert [row.tolist() for row in table] == [
        pytest.approx([2.5 / 3, 0.5 / 3]),
        pytest.approx([0.5 / 3.5, 1.5 / 3.5, 1.5 / 3.5]),
    ]
    grey = Split(torch.tensor([[255, 51]], dtype=torch.uint8), stochastic=True)
    assert [row[1].item() for row in category_frequencies(grey, (2, 2))] == pytest.approx([1.5 / 2, 0.7 / 2])


def test_independent_features_by_hand() -> None:
    data = tiny_dataset()
    assert data.test is not None
    table = torch.stack(category_frequencies(data.train, data.categories)).numpy()
    rows = data.test.values.numpy()
    expected = -np.log(table[np.arange(6), rows]).sum(1).mean()
    assert independent_nll(data, data.test) == pytest.approx(expected)


def test_starting_from_data_begins_near_independent_features() -> None:
    data, flow = tiny_dataset(), tiny_flow(layers=2)
    assert data.test is not None
    init_from_data(flow, data.train)
    found = evaluate.importance(flow, data.test, samples=50).nll
    assert found < independent_nll(data, data.test) + 1.0


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 3), (2, 4, 3)])
@pytest.mark.parametrize("base", ["fixed", "learned"])
def test_a_linear_posterior_begins_as_the_exact_one(sizes: tuple[int, ...], base: str) -> None:
    values = torch.stack([torch.arange(48) * 7 // (d + 2) % k for d, k in enumerate(sizes)], 1).to(
        torch.uint8
    )
    data = Dataset("rows", Split(values), None, None, sizes)
    options = Options(conditioner="made:hidden=8", posterior="linear", base=f"{base}:p0=0.8")
    flow = build_flow(options, data).double()
    init_from_data(flow, data.train)
    # under the exact posterior every weight is the likelihood itself
    for proposal, equal in (("q", True), ("p", False)):
        bound = evaluate.elbo(flow, data.train, samples=1, proposal=proposal).values
        assert torch.allclose(bound, evaluate.exact(flow, data.train).values, atol=1e-5) is equal


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"layers": [], "base": {}},
        {"layers": [{"conditioner": 3}], "base": {"features": 2}},
        {"layers": 3},
    ],
)
def test_damaged_descriptions_are_refused(spec: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="configuration"):
        flow_from_spec(spec)


def _with_network(**changes: Any) -> dict[str, Any]:
    spec = flow_to_spec(tiny_flow())
    spec["layers"][0]["conditioner"] |= changes
    return spec


def _nested() -> dict[str, Any]:
    call = {"name": "layer"}
    for _ in range(20_000):
        call = {"name": "layer", "conditioner": call}
    return call


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_with_network(hidden=[60_000, 60_000]), "larger than its weights"),
        (_with_network(hidden=[10**30]), "larger than its weights"),
        (_with_network(categories=10**9), "larger than its weights"),
        (_nested(), "illegal"),
    ],
)  # fmt: skip
def test_a_model_larger_than_its_weights_is_refused_before_it_is_built(spec: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        model_for(spec, tiny_flow().state_dict())


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (partial(MADE, hidden=(4,)), (5, 5, 16_385)),
        (partial(MADE, hidden=(4,)), (2,) * 10_000),
        (partial(Coupling, hidden=(4,)), (2,) * 10_000),
        (partial(Recurrent, width=4), (2,) * 10_000),
        (partial(CausalTransformer, width=4, depth=1, heads=2), (2,) * 10_000),
    ],
)
def test_a_model_of_many_features_or_values_is_not_larger_than_its_weights(
    kind: Callable[..., Conditioner], sizes: tuple[int, ...]
) -> None:
    conditioner = kind(len(sizes), categories=sizes)
    flow = LatentFlow([Layer(conditioner)], FactorisedBase(len(sizes), categories=sizes))
    again = model_for(flow_to_spec(flow), flow.state_dict())
    assert again.state_dict().keys() == flow.state_dict().keys()


@pytest.mark.parametrize("value", [2**63, 10**30])
def test_a_model_without_weights_has_no_numbers_that_none_has(value: int) -> None:
    with pytest.raises(CheckpointError, match="it has a number above 2,147,483,648"):
        flow_from_spec(_with_network(categories=[3, 3, 3, value, 3, 3]))


def test_a_network_on_many_categories_is_no_larger_than_its_weights() -> None:
    """Nor while it is built: nothing is of the square of the categories."""
    base = FactorisedBase(20, categories=1000, tied=True)
    flow = LatentFlow([Layer(MADE(20, (64,), categories=1000))], base)
    again = model_for(flow_to_spec(flow), flow.state_dict())
    assert again.categories == (1000,) * 20


def test_many_small_parts_are_as_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xorflow.training.spec._ALWAYS", 2**20)
    spec = flow_to_spec(tiny_flow())
    assert isinstance(model_for(spec, tiny_flow().state_dict()), LatentFlow)
    with pytest.raises(CheckpointError, match="larger than its weights"):
        model_for(spec | {"layers": spec["layers"] * 1000}, tiny_flow().state_dict())
    assert torch.is_grad_enabled()  # refused within torch.no_grad(), which ends all the same


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": "16"}, "hidden of made is '16'"),
        ({"direct": 1}, "direct of made is 1"),
        ({"sees": {"state": 3}}, "sees of made is"),
        ({"magic": 1}, "made: got an unexpected keyword argument 'magic'"),
        ({"name": "layer"}, "layer: missing a required argument"),
        ({"name": "diagonal"}, "diagonal: got an unexpected"),
        ({"name": ["made"]}, "a part named ['made']"),
        ({"name": "cnn"}, "a part named 'cnn', which xorflow does not have; open it with xorflow.load"),
        ({"name": "reordered"}, "reordered: missing a required argument"),
    ],
)
def test_a_description_says_what_is_wrong_with_it(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        flow_from_spec(_with_network(**changes))


def test_a_part_of_another_kind_is_refused() -> None:
    spec = flow_to_spec(tiny_flow())
    spec["layers"][0]["posterior"] = spec["base"]
    with pytest.raises(CheckpointError, match="posterior of layer is FactorisedBase"):
        flow_from_spec(spec)
    with pytest.raises(CheckpointError, match="it is FactorisedBase"):
        flow_from_spec(spec["base"])


def test_a_layer_whose_weights_stay_is_kept_as_such() -> None:
    flow = LatentFlow([Layer(MADE(3, (4,)), frozen=True), Layer(MADE(3, (4,)))], FactorisedBase(3))
    again = flow_from_spec(flow_to_spec(flow))
    assert [layer.frozen for layer in again.layers] == [True, False]
    assert not any(weight.requires_grad for weight in again.layers[0].parameters())


def test_mnist_by_default() -> None:
    data = build_data(Options(label=True))
    assert data.context_features == 10
    assert {name: len(part) for name, part in data.parts.items()} == {
        "train": 50_000, "validation": 10_000, "test": 10_000
    }  # fmt: skip


def test_generators_begin_the_same_with_posteriors_and_without() -> None:
    data = tiny_dataset()
    with_, without = (
        (
            torch.manual_seed(0),
            build_flow(Options(layers=2, conditioner="made:hidden=4", posterior=kind), data),
        )[1]
        for kind in ("mlp", "none")
    )
    for one, other in zip(with_.layers, without.layers, strict=True):
        assert torch.equal(one.conditioner.net.layers[0].weight, other.conditioner.net.layers[0].weight)
