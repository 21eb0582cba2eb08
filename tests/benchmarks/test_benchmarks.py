"""The benchmarks' own parts: what a figure says, what the references compute, what the report writes."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import xorflow as xf
from xorflow.conditioners import Source

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
REQUIRED = ["id", "value", "unit", "reference", "ratio", "target", "met"]


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of benchmarks/, which is a folder of scripts and no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = (
        "categories",
        "timing",
        "references",
        "models",
        "measures",
        "limits",
        "figures",
        "scaling",
        "report",
        "run",
    )
    before = set(sys.modules)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def results(bench: SimpleNamespace) -> dict[str, Any]:
    """A made-up machine: a ratio reached, a time missed, and no target."""
    figures = [
        bench.timing.faster_than("quick", 0.002, "a loop", 0.1, at_least=40),
        bench.timing.within("late", 4.0, "a loop", 8.0, at_most=2, note="slow on purpose"),
        bench.timing.faster_than("beside-the-limit", 0.004, "hardware's limit", 0.001),
    ]
    curve = {
        "id": "training-features",
        "against": "D",
        "sizes": [2, 4, 8],
        "seconds": [0.1, 0.2, 0.4],
        "exponent": 1.0,
        "fitted": [4, 8],
        "held": {"B": 16, "width": 1024},
    }
    return {
        "machine": {"device": "cpu", "cpu": "abacus", "cores": 2, "threads": 1},
        "versions": {"xorflow": "0.0", "torch": "0.0", "python": "3.0"},
        "figures": [figure.to_json() for figure in figures],
        "scaling": [curve],
        "profile": ["== steps: 1.000 ms =="],
    }


# ---- figures ----


def test_a_ratio_is_the_reference_over_ours(bench: SimpleNamespace) -> None:
    figure = bench.timing.faster_than("f", 0.002, "a loop", 0.1, at_least=40)
    assert (figure.value, figure.reference_value, figure.unit) == (2.0, 100.0, "ms")
    assert figure.ratio == pytest.approx(50)
    assert (figure.target, figure.met, figure.ratio_needed) == ("ratio >= 40", True, 40)
    assert bench.timing.faster_than("f", 0.1, "a loop", 0.1, at_least=1.3).met is False
    assert bench.timing.faster_than("f", 0.1, "a loop", 0.1).met is None


def test_a_bound_on_time_is_also_a_ratio(bench: SimpleNamespace) -> None:
    figure = bench.timing.within("f", 4.0, "a loop", 8.0, at_most=2)
    assert (figure.target, figure.met, figure.ratio, figure.ratio_needed) == ("<= 2 s", False, 2, 4)
    step = bench.timing.within("f", 1e-4, "a loop", 1e-3, at_most=0.12, unit="ms")
    assert (step.target, step.met) == ("<= 0.12 ms", True)


def test_memory_belongs_to_the_target(bench: SimpleNamespace) -> None:
    met = {
        used: bench.timing.within("f", 1.0, "a loop", 2.0, at_most=2, gigabytes=(used, 4)).met
        for used in (3.0, 5.0)
    }
    assert met == {3.0: True, 5.0: False}


def test_figures_have_the_schema(results: dict[str, Any]) -> None:
    for figure in results["figures"]:
        assert set(REQUIRED) <= set(figure)


def test_alternation_gives_medians_of_all(bench: SimpleNamespace) -> None:
    calls: list[str] = []
    actions = {name: lambda n=name: calls.append(n) for name in "ab"}
    times = bench.timing.alternate(actions, torch.device("cpu"), rounds=3, warm_up=1)
    assert calls == ["a", "b", *"ab" * 3]
    assert set(times) == {"a", "b"}
    assert min(times.values()) >= 0


def test_the_limit_is_the_longer_of_two_times(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, device = bench.limits, torch.device("cpu")
    monkeypatch.setattr(limits, "_bandwidth", lambda device: 10.0)
    made = xf.MADE(
        2, hidden=(4,)
    )  # units of degree 1: each sees the first feature, and the second output sees each
    for rate, seconds in ((1e9, (4 * 16 + 3 * 2 * 16) / 10), (0.5, 2 * 3 * 8 / 0.5)):
        monkeypatch.setattr(limits, "_rate", lambda device, rounded, rate=rate: rate)
        assert limits.sampling_limit(made, 3, device).seconds == pytest.approx(seconds)
    flow = xf.LatentFlow([xf.Layer(made), xf.Layer(xf.MADE(2, hidden=(4,)))], xf.FactorisedBase(2))
    # the first network once for each of 5 images, the second for each of 7 draws of each
    assert bench.limits.bound_limit(flow, 5, 7, device).seconds == pytest.approx(2 * 5 * 8 * (1 + 7) / 0.5)


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "/nonexistent"], "there is no folder /nonexistent"),
        (["--device", "cuda:63"], "device 'cuda:63' is not there"),
        (["--device", "abacus"], "device is auto, cpu, cuda, cuda:N or mps; got 'abacus'"),
        (["--device", "cpu", "--only", "nothing"], "--only takes, is made_against_linear, training_step_cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    bench: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.run.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert words in said.err


@pytest.mark.parametrize("what", ["depth", "width", "features"])
def test_a_run_of_another_kind_is_refused(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    features, width = (5 if what == "features" else 784), (8 if what == "width" else 1024)
    layers = [xf.Layer(xf.MADE(features, hidden=(width,))) for _ in range(1 + (what == "depth"))]
    flow = xf.LatentFlow(layers, xf.FactorisedBase(features))
    monkeypatch.setattr(xf, "load", lambda run, device: flow)
    with pytest.raises(
        xf.ConfigError, match=f"has depth {len(layers)}, {features} features and MADE.*{width}"
    ):
        bench.models.read_flow(Path("there"), torch.device("cpu"))


def test_nothing_is_trained_that_is_not_asked_for(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*given: object, **named: object) -> None:
        raise AssertionError

    monkeypatch.setattr(bench.measures, "train_flow", forbidden)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--only", "made_against_linear"])
    bench.run.main()
    assert "made-forward-backward" in capsys.readouterr().out


def test_names_are_those_of_the_committed_results(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    names = {bench.run.default_name(torch.device(kind)) for kind in ("cpu", "cuda")}
    assert names <= {path.stem for path in RESULTS.glob("*.json")}  # others may have been measured here


def test_ids_are_told_apart(bench: SimpleNamespace) -> None:
    declared = [
        bench.measures.Measure(lambda setup: [], "cpu", ("a", "b"), optional=("b",)),
        bench.measures.Measure(lambda setup: [], "cpu", ("c",)),
    ]
    cases = {"abc": None, "ac": None, "ab": "without c", "acd": "with d", "ca": "in another order"}
    assert {ids: bench.measures.mismatch(ids, declared) for ids in cases} == cases


def test_ids_name_the_device_in_one_way(bench: SimpleNamespace) -> None:
    for kind, word in (("cpu", "gpu"), ("cuda", "cpu")):
        ids = [id for measure in bench.figures.for_device(kind) for id in measure.ids]
        assert len(ids) == len(set(ids))
        assert not any(part in (word, "cuda") for id in ids for part in id.split("-"))


# ---- references ----


@pytest.mark.parametrize("order", ["natural", "reversed", "random:1"])
def test_the_plain_network_is_the_same_network(bench: SimpleNamespace, order: str) -> None:
    made = xf.MADE(5, hidden=(16,), order=order)
    x = torch.randint(2, (8, 5)).float()
    torch.testing.assert_close(bench.references.PlainMADE(made)(x), made({Source.STATE: x}))


def test_the_sequential_sampler_gives_the_same_samples(bench: SimpleNamespace) -> None:
    flow = bench.models.new_flow(6, 1, torch.device("cpu"))
    noise = flow.draw_noise(64, torch.Generator().manual_seed(0))
    assert torch.equal(bench.references.sequential_sample(flow, noise), flow.sample_with(noise))


@pytest.mark.parametrize("network", [xf.CausalTransformer, xf.Recurrent])
def test_one_pass_tells_every_sample(bench: SimpleNamespace, network: type) -> None:
    torch.manual_seed(0)
    flow = xf.LatentFlow(
        [xf.Layer(network(6, width=8, order="random:1"))], xf.FactorisedBase(6, p0=0.8)
    ).double()
    noise = flow.draw_noise(64, torch.Generator().manual_seed(0))
    x = flow.sample_with(noise)
    assert torch.equal(bench.references.recomputed(flow, noise, x), x)
    assert torch.equal(bench.references.sequential_sample(flow, noise), x)
    x[:, flow.layers[0].conditioner.order[-1]] += 1  # on which nothing depends
    x %= 2
    assert (bench.references.recomputed(flow, noise, x) != x).sum() == 64


def test_a_shaken_recipe_is_on_its_device_and_sampled(bench: SimpleNamespace) -> None:
    flow = bench.models.recipe_flow("recurrent-cpu", torch.device("cpu"))
    assert not flow.training
    assert flow().sample((1,), generator=torch.Generator().manual_seed(0)).shape == (1, 784)


def test_the_plain_bound_nears_the_likelihood(bench: SimpleNamespace) -> None:
    layers = [xf.Layer(xf.MADE(3, hidden=(8,), order=order)) for order in ("natural", "reversed")]
    flow = xf.LatentFlow(layers, xf.FactorisedBase(3, p0=0.9))
    x, draws = torch.tensor([[0, 0, 0], [0, 1, 1]]), 4000
    torch.manual_seed(0)
    found = bench.references.plain_bound(flow, x, draws).exp()
    # Hoeffding: the weights lie between 0 and 0.9^3, and either row misses with a probability of 1e-9
    margin = 0.9**3 * math.sqrt(math.log(2e9) / (2 * draws))
    assert (found - flow().log_prob(x).exp()).abs().max() < margin


# ---- curves ----


def test_curves_record_what_they_measured(bench: SimpleNamespace) -> None:
    small = bench.scaling.Sizes(
        features=(2, 4, 8),
        depths=(1, 2, 3),
        training_batches=(1, 2, 4),
        sampling_batches=(1, 2, 4),
        samples=(1, 2, 4),
        training_batch=2,
        sampling_batch=2,
        images=2,
    )
    curves = bench.scaling.curves(torch.device("cpu"), small)
    assert {curve["against"] for curve in curves} == {"D", "L", "B", "S"}
    for curve in curves:
        assert set(curve) == bench.report.CURVE_KEYS
        assert len(curve["seconds"]) == len(curve["sizes"])
        assert math.isfinite(curve["exponent"])
    assert curves[0]["fitted"] == [4, 8]
    for result in bench.report.load(RESULTS).values():
        assert [curve["id"] for curve in result["scaling"]] == [curve["id"] for curve in curves]


# ---- the report ----


def test_the_report_fills_the_page_and_draws(
    bench: SimpleNamespace, results: dict[str, Any], tmp_path: Path
) -> None:
    report = bench.report
    (tmp_path / "abacus.json").write_text(json.dumps(results))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(report.load(tmp_path), tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "1 of 2 targets met" in text
    assert "| `quick` | 2 ms | a loop | 50 | ratio >= 40 |" in text
    assert "| `late` | 4 s | a loop | 2 | <= 2 s **missed** |" in text
    assert report.filled(text, report.block(report.load(tmp_path))) == text
    for kind in ("figures", "scaling"):
        image = (tmp_path / "images" / f"performance_{kind}_abacus.png").read_bytes()
        assert image.startswith(b"\x89PNG")


def test_the_report_refuses_what_lacks_a_reference(bench: SimpleNamespace, results: dict[str, Any]) -> None:
    del results["figures"][0]["ratio"]
    with pytest.raises(ValueError, match=r"abacus\.json lacks quick\.ratio"):
        bench.report.check("abacus", results)


def test_a_page_without_markers_is_left_alone(bench: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        bench.report.filled("no markers", "content")


# ---- what is committed ----


def test_committed_results_are_whole(bench: SimpleNamespace) -> None:
    for name, result in bench.report.load(RESULTS).items():
        assert result["figures"], name
        for figure in result["figures"]:
            assert figure["ratio"] == pytest.approx(figure["reference_value"] / figure["value"])
            assert (figure["met"] is None) == (figure["target"] is None)
        assert max(max(c["sizes"]) for c in result["scaling"] if c["against"] == "D") == 12288
        assert sum(line.startswith("== ") for line in result["profile"]) >= 3


def test_committed_results_are_of_what_is_measured(bench: SimpleNamespace) -> None:
    for name, result in bench.report.load(RESULTS).items():
        measures = bench.figures.for_device(result["machine"]["device"])
        ids = [figure["id"] for figure in result["figures"]]
        assert bench.measures.mismatch(ids, measures) is None, name
        assert result["versions"]["source"], name


def test_the_performance_page_is_up_to_date(bench: SimpleNamespace) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    results = bench.report.load(RESULTS)
    assert bench.report.filled(page, bench.report.block(results)) == page
    for name in results:
        for kind in ("figures", "scaling"):
            assert (ROOT / "docs" / "images" / f"performance_{kind}_{name}.png").is_file()


def test_growth_with_categories_is_measured(bench: SimpleNamespace) -> None:
    figures = bench.categories.measure(3, 4, 8)
    assert figures["weights"] == 3 * 4 * 64 * 2 + 64 + 3 * 4 + 4
    assert min(figures.values()) >= 0
