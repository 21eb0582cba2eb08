"""Runs of transformers, recurrent networks and mixtures: options, dropout and its noise, parts of a batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xorflow as xf
from tiny_runs import (
    StopAt,
    assert_same_run,
    call,
    continue_run,
    images_file,
    read,
    rows_file,
    tiny_dataset,
    tiny_options,
    train_run,
)
from xorflow._devices import dropout_generator, out_of_memory_as_error, seeded_dropout
from xorflow.conditioners import CausalTransformer, Recurrent, SequenceConditioner
from xorflow.data import Dataset, Split
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators import MaximumLikelihood
from xorflow.flows import LatentFlow, Mixture
from xorflow.training import Interrupted, Options, build_data, build_estimator, build_flow, load, open_run
from xorflow.training.build import mixture_orders
from xorflow.training.checkpoint import load_tensors
from xorflow.training.optimiser import make_optimiser
from xorflow.training.run import remedy_for
from xorflow.training.trainer import Trainer

TRANSFORMER = {"width": 8, "heads": 2, "depth": 1}
RECURRENT = {"width": 8, "depth": 1}


def transformer(**settings: Any) -> dict[str, Any]:
    return {"conditioner": call("transformer", **TRANSFORMER | settings)}


def recurrent(**settings: Any) -> dict[str, Any]:
    return {"conditioner": call("recurrent", **RECURRENT | settings)}


KINDS: dict[str, dict[str, Any]] = {
    "transformer": transformer(dropout=0.3),
    "muon": transformer(dropout=0.3, rotary=True) | {"optimiser": "muon", "skip": 0.4},
    "recurrent": recurrent(dropout=0.3, cell="lstm"),
    "recurrent, muon": recurrent(dropout=0.3) | {"optimiser": "muon", "skip": 0.4},
    "mixture": transformer(dropout=0.2) | {"mixture": "natural,columns,random:1"},
    "mixture of MADEs": {"mixture": "2", "conditioner": "made:hidden=8"},
    "split mixture": transformer(dropout=0.2, rotary=True)
    | {
        "mixture": "natural,columns",
        "estimator": "maximum-likelihood:split_batch=true",
        "optimiser": "muon",
    },
}


def images(folder: Path, kind: str, **changes: Any) -> Options:
    return tiny_options(images_file(folder / "images.npy"), **(KINDS[kind] | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_with_dropout_goes_on_to_the_same_weights(tmp_path: Path, kind: str) -> None:
    """The numbers that dropout draws are part of a checkpoint; the process's own generator is left as it was."""
    options = images(tmp_path, kind, epochs=3, average=0.9)
    before = torch.random.get_rng_state()
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "parts", StopAt({3}))
    torch.rand(5)  # a process that goes on draws other numbers in between
    continue_run(tmp_path / "parts", {})
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    torch.random.set_rng_state(before)
    train_run(options, tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_read_back(tmp_path: Path, kind: str) -> None:
    options = images(tmp_path, kind)
    result = train_run(options, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    test = opened.data().test
    assert test is not None
    assert result["test"]["kind"] == "exact"
    assert xf.evaluate.exact(opened.flow, test).nll == pytest.approx(result["test"]["nll"], abs=1e-9)
    greedy = xf.evaluate.greedy(opened.flow, test).nll
    assert greedy == pytest.approx(result["test"]["greedy_nll"], abs=1e-9)
    assert result["test"]["floor"] <= result["test"]["nll"]
    assert load(tmp_path / "run")().sample((3,)).shape == (3, 20)
    trained = sum(p.numel() for p in opened.flow.parameters() if p.requires_grad)
    assert result["parameters"] == trained


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_a_run_that_an_earlier_version_began_goes_on(tmp_path: Path, kind: str) -> None:
    """Whose file says nothing of settings that came later."""
    options = images(tmp_path, kind, epochs=2)
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "parts", StopAt({3}))
    config = read(tmp_path / "parts/config.json")
    network = config["model"]["layers"][0]["conditioner"]
    for name in ("skipped", "rotary"):
        network.pop(name, None)
    config.pop("skip")
    (tmp_path / "parts/config.json").write_text(json.dumps(config))
    continue_run(tmp_path / "parts", {})
    weights = [load_tensors(tmp_path / run, "weights") for run in ("whole", "parts")]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rotary", transformer(dropout=0.3, rotary=True)),
        ("skipped", {"skip": 0.45}),
        ("heads", transformer(dropout=0.3, heads=1)),
    ],
)
def test_a_run_does_not_start_from_one_whose_network_looks_otherwise(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    train_run(images(tmp_path, "transformer", skip=0.4), tmp_path / "run")
    given = {"init": str(tmp_path / "run"), "skip": 0.4} | changes
    with pytest.raises(ConfigError, match=f"another {name} of its conditioner than"):
        train_run(images(tmp_path, "transformer", **given), tmp_path / "other")


def test_dropout_has_numbers_of_its_own(tmp_path: Path) -> None:
    options = images(tmp_path, "transformer")
    dataset = build_data(options)
    trainer = Trainer(build_flow(options, dataset), MaximumLikelihood(), dataset, options)
    generator, before = dropout_generator(trainer.flow, trainer.device), torch.random.get_rng_state()
    assert generator is torch.default_generator
    with seeded_dropout(generator, options.seed, None):
        assert torch.default_generator.initial_seed() != trainer.generator.initial_seed()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (
        dropout_generator(build_flow(options.replace(**transformer(dropout=0)), dataset), trainer.device)
        is None
    )


# ---- parts of a batch ----


def _trained(flow: LatentFlow | Mixture, **options: Any) -> list[torch.Tensor]:
    usual = {"epochs": 2, "batch_size": 28, "device": "cpu", "optimiser": "sgd", "precision": "64-true"}
    estimator = build_estimator(options.pop("estimator", "maximum-likelihood"))
    Trainer(flow, estimator, tiny_dataset(context=True), Options().replace(**(usual | options))).train()
    return [p.detach() for p in flow.parameters()]


@pytest.mark.parametrize("parts", [2, 3, 28, 100])
@pytest.mark.parametrize(
    ("layers", "estimator"),
    [
        (1, "maximum-likelihood"),
        (2, "maximum-likelihood:samples=2"),
        (1, "score-function:baseline=none"),
        (2, "straight-through"),
    ],
)
def test_a_batch_in_parts_has_the_same_gradient(layers: int, estimator: str, parts: int) -> None:
    def flow() -> LatentFlow:
        torch.manual_seed(0)
        made = [xf.Layer(xf.MADE(6, (8,), categories=3, context=3)) for _ in range(layers)]
        return LatentFlow(made, xf.FactorisedBase(6, categories=3, learned=True))

    whole, cut = (_trained(flow(), estimator=estimator, accumulate=count) for count in (1, parts))
    for found, expected in zip(cut, whole, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_mixture_in_parts_too() -> None:
    def mixture() -> Mixture:
        torch.manual_seed(0)
        net = CausalTransformer(6, width=8, depth=1, heads=2, dropout=0.0, categories=3, context=3)
        nets = [net, net.reordered("reversed")]
        return Mixture(
            [LatentFlow([xf.Layer(n)], xf.FactorisedBase(6, categories=3, learned=True)) for n in nets]
        )

    for found, expected in zip(_trained(mixture(), accumulate=3), _trained(mixture()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _grey_data() -> Dataset:
    values = (torch.rand(84, 6, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    return Dataset("grey", Split(values, stochastic=True), None, None, categories=(2,) * 6)


def _trained_on_grey(flow: LatentFlow | Mixture, estimator: str, **changes: Any) -> list[torch.Tensor]:
    usual = {"epochs": 2, "batch_size": 28, "device": "cpu", "optimiser": "sgd", "precision": "64-true"}
    options = Options().replace(**(usual | changes))
    Trainer(flow, build_estimator(estimator), _grey_data(), options).train()
    return [p.detach().clone() for p in flow.parameters()]


def test_soft_targets_reach_every_part_of_a_batch() -> None:
    def flow() -> LatentFlow:
        torch.manual_seed(0)
        return LatentFlow([xf.Layer(xf.MADE(6, (8,)))], xf.FactorisedBase(6, learned=True))

    whole, cut = (
        _trained_on_grey(flow(), "maximum-likelihood:soft_targets=true", accumulate=count) for count in (1, 3)
    )
    hard = _trained_on_grey(flow(), "maximum-likelihood")
    for found, expected, other in zip(cut, whole, hard, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert not torch.equal(expected, other)


def test_data_that_are_not_drawn_have_no_soft_targets(tmp_path: Path) -> None:
    options = tiny_options(
        images_file(tmp_path / "images.npy"), estimator="maximum-likelihood:soft_targets=true"
    )
    with pytest.raises(ConfigError, match="these data are fixed; leave soft_targets out of the estimator"):
        train_run(options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_components_of_a_split_batch_keep_equal_weights(tmp_path: Path) -> None:
    train_run(images(tmp_path, "split mixture"), tmp_path / "run")
    flow = load(tmp_path / "run")
    assert isinstance(flow, Mixture)
    assert not flow.learned
    assert torch.equal(flow.log_weights().exp(), torch.full((2,), 0.5))


def test_the_record_of_an_epoch_in_parts(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    records = []
    for parts in (1, 3):
        watch = StopAt(())
        train_run(tiny_options(data, accumulate=parts, precision="64-true"), tmp_path / f"run-{parts}", watch)
        records.append([record["train_nll"] for record in watch.records])
    assert records[0] == pytest.approx(records[1], abs=1e-6)


# ---- compiled blocks ----


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the tracer's own making
@pytest.mark.parametrize(
    "kind", [{}, {"mixture": "2", "shared": False, "estimator": "maximum-likelihood:split_batch=true"}]
)
def test_compiled_blocks_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """Traced and differentiated ahead of time, as any compiler is given them; evaluation and samples stay as they are."""
    monkeypatch.setattr("xorflow.conditioners.transformer._BACKEND", "aot_eager")
    monkeypatch.setattr("xorflow._devices.COMPILED_ON", ("cpu",))
    results = []
    for compiled in (False, True):
        options = images(tmp_path, "transformer", compile=compiled, **transformer(dropout=0.0), **kind)
        results.append(train_run(options, tmp_path / f"run-{compiled}"))
    assert results[1]["test"]["nll"] == pytest.approx(results[0]["test"]["nll"], abs=1e-5)


def test_nothing_is_compiled_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xorflow.conditioners.transformer._BACKEND", "there is no such compiler")
    train_run(images(tmp_path, "transformer", compile=True), tmp_path / "run")


# ---- options ----


def test_options_reach_the_network(tmp_path: Path) -> None:
    data = images_file(tmp_path / "images.npy")
    network = transformer(depth=2, dropout=0.25, reach=1, rotary=True)
    options = tiny_options(data, order="columns", **network)
    net = build_flow(options, build_data(options)).layers[0].conditioner
    assert isinstance(net, CausalTransformer)
    assert (net.width, net.depth, net.heads, net.dropout, net.reach, net.shape) == (8, 2, 2, 0.25, 1, (4, 5))
    assert net.order[:4] == (0, 5, 10, 15)
    assert net.rotary
    assert net.skipped == ()
    options = tiny_options(data, **recurrent(cell="lstm"))
    net = build_flow(options, build_data(options)).layers[0].conditioner
    assert isinstance(net, Recurrent)
    assert (net.width, net.depth, net.cell, net.reach) == (8, 1, "lstm", 2)
    options = tiny_options(data, order="columns")
    assert build_flow(options, build_data(options)).layers[0].conditioner.order[:3] == (0, 5, 10)


@pytest.mark.parametrize("kind", [transformer(), recurrent()])
def test_skipped_features_are_those_that_hardly_vary(tmp_path: Path, kind: dict[str, Any]) -> None:
    rows = torch.zeros(200, 4, dtype=torch.int64)
    rows[:, 0] = torch.arange(200) % 3
    rows[:30, 1] = 1
    rows[0, 2] = 1
    rows[:, 3] = 1
    rows[:3, 3] = 2  # usually 1
    np.save(tmp_path / "rows.npy", rows.numpy())
    for share, expected in ((0.0, ()), (0.005, (2,)), (0.014, (2,)), (0.015, (2, 3)), (0.3, (1, 2, 3))):
        options = tiny_options(tmp_path / "rows.npy", **(kind | {"skip": share, "validation": 0, "test": 0}))
        net = build_flow(options, build_data(options)).layers[0].conditioner
        assert isinstance(net, SequenceConditioner)
        assert net.skipped == expected


def test_their_usual_sizes(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.npy")
    for conditioner, width, depth in (("transformer", 256, 8), ("recurrent", 512, 1)):
        options = tiny_options(rows, conditioner=conditioner)
        net = build_flow(options, build_data(options)).layers[0].conditioner
        assert isinstance(net, SequenceConditioner)
        assert (net.width, net.config()["depth"], net.shape) == (width, depth, None)


@pytest.mark.parametrize(
    ("text", "pictures", "expected"),
    [
        ("2", False, ["natural", "reversed"]),
        ("4", True, ["natural", "reversed", "columns", "columns-reversed"]),
        ("4", False, ["natural", "reversed", "random:0", "random:1"]),
        ("natural, random:7", True, ["natural", "random:7"]),
    ],
)
def test_orderings_of_a_mixture(text: str, pictures: bool, expected: list[str]) -> None:
    assert mixture_orders(text, pictures) == expected


def test_a_mixture_shares_its_network_or_not(tmp_path: Path) -> None:
    counts = []
    for shared in (True, False):
        options = images(tmp_path, "mixture", shared=shared)
        flow = build_flow(options, build_data(options))
        assert isinstance(flow, Mixture)
        assert [part.layers[0].conditioner.order[1] for part in flow][:2] == [1, 5]
        counts.append(sum(p.numel() for p in flow.parameters()))
    assert counts[1] > 2.5 * counts[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (transformer(reach=2), "the data have no two-dimensional shape; leave reach out"),
        (transformer() | {"skip": 0.9}, "at least one must take a step; lower skip below"),
        (transformer(width=6, rotary=True), "width=6 with heads=2 gives a head 3"),
        (transformer() | {"order": "columns"}, "needs the two-dimensional shape of 6 features"),
        (transformer(heads=3), "width is a multiple of heads, and got width=8 with heads=3"),
        ({"compile": True}, "compile has an effect only if conditioner is transformer"),
        ({"optimiser": "muon"}, "got optimiser=muon with conditioner=made"),
        ({"mixture": "1"}, "2 to 64 components; got 1"),
        ({"mixture": "0"}, "2 to 64 components; got 0"),
        ({"mixture": "natural,sideways"}, "sideways"),
        ({"mixture": "2", "layers": 2}, "leave layers at 1, or choose mixture=none"),
        ({"mixture": "2", "posterior": "mlp"}, "leave posterior at none, or choose mixture=none"),
        ({"mixture": "2", "estimator": "straight-through"}, "StraightThrough trains single flows"),
        (
            {"estimator": "maximum-likelihood:split_batch=true"},
            "split_batch is for the components of a mixture",
        ),
        (
            {"estimator": "maximum-likelihood:soft_targets=true"},
            "soft_targets is for binary features in flows of depth 1",
        ),
    ],
)
def test_what_means_nothing_is_refused_before_a_folder_is_made(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    data = rows_file(tmp_path / "rows.npy")
    with pytest.raises((ConfigError, ModelError)) as error:
        train_run(tiny_options(data, **changes), tmp_path / "run")
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_what_learns_from_a_whole_gradient_takes_no_parts(tmp_path: Path) -> None:
    options = tiny_options(images_file(tmp_path / "images.npy"), estimator="relax", accumulate=2)
    with pytest.raises(
        ConfigError, match=r"'relax' learns from the gradient of the whole batch.*leave accumulate out"
    ):
        train_run(options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_weight_decay_reaches_matrices_alone(tmp_path: Path, kind: str) -> None:
    options = images(tmp_path, kind, weight_decay=0.1)
    flow = build_flow(options, build_data(options))
    assert isinstance(flow, LatentFlow)
    optimiser = make_optimiser(flow, options, torch.device("cpu"))
    decayed = {id(p) for group in optimiser.param_groups if group["weight_decay"] for p in group["params"]}
    every = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert len(every) == len(set(every)) == len(list(flow.parameters()))
    names = {
        name.rpartition("conditioner.net.")[2] for name, p in flow.named_parameters() if id(p) in decayed
    }
    if kind == "transformer":
        layers = ("queries", "attended", "wide", "narrow")
        assert names == {f"core.blocks.0.{name}.weight" for name in layers} | {"head.weight"}
    else:
        assert names == {"core.layers.0.weight_ih_l0", "core.layers.0.weight_hh_l0", "head.weight"}


def test_a_shared_network_is_saved_once(tmp_path: Path) -> None:
    sizes = []
    for shared in (True, False):
        run = tmp_path / f"run-{shared}"
        train_run(images(tmp_path, "split mixture", shared=shared, **transformer(rotary=True, width=32)), run)
        sizes.append((run / "weights.safetensors").stat().st_size)
        weights = load_tensors(run, "weights")
        for name, tensor in load(run).state_dict().items():
            assert torch.equal(weights[name], tensor)
    assert sizes[0] < 0.6 * sizes[1]


def test_a_shared_network_is_described_once(tmp_path: Path) -> None:
    options = images(tmp_path, "mixture", epochs=1)
    train_run(options, tmp_path / "run")
    model = read(tmp_path / "run/config.json")["model"]
    parts = [part["layers"][0]["conditioner"] for part in model["components"]]
    assert [part["name"] for part in parts] == ["transformer", "reordered", "reordered"]
    assert parts[1] == {"name": "reordered", "of": 0, "order": "columns"}


def test_sizes_that_no_machine_has_are_out_of_memory() -> None:
    with pytest.raises(xf.UserError, match="out of memory; be modest"), out_of_memory_as_error("be modest"):
        torch.empty(2**31, 2**31, 2)


def test_the_reach_of_an_image_network_takes_memory_too() -> None:
    assert "width, depth or reach" in remedy_for(Options(conditioner="transformer:reach=3"))
    assert "reach" not in remedy_for(Options(conditioner="transformer"))


@pytest.mark.parametrize(
    ("kind", "words"), [("transformer", "raise accumulate"), ("mixture of MADEs", "lower batch")]
)
def test_out_of_memory_names_what_lowers_it(
    tmp_path: Path, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(MaximumLikelihood, "loss", fail)
    with pytest.raises(xf.UserError, match=f"out of memory; {words}"):
        train_run(images(tmp_path, kind), tmp_path / "run")
