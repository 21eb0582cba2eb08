"""The question of depth: its rows, legal, of equal weights and within reach; the command; and the table."""

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import Command
from research.__main__ import main
from research.budgets import find_budget, write_digits
from research.depth.figure import draw_depths
from research.depth.rows import DEPTH_ROWS, DepthRow
from research.depth.score import packed
from research.depth.table import _headline_pair, _paired, depth_markdown
from research.results import Results
from research.rows import chosen
from tiny_runs import read
from xorflow.data import Dataset
from xorflow.errors import ConfigError
from xorflow.training import CONDITIONERS, Options, build_data, build_flow
from xorflow.training.run import check_run, create_run

BY_ID = {row.id: row for row in DEPTH_ROWS}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.npy"
    write_digits(path)
    return path


@pytest.fixture(scope="module")
def dataset(digits: Path) -> Dataset:
    return build_data(find_budget("smoke").options(Options(), "select", digits))


@pytest.mark.parametrize("row", DEPTH_ROWS, ids=lambda row: row.id)
def test_every_row_is_a_legal_model_for_its_estimator(row: DepthRow, dataset: Dataset, digits: Path) -> None:
    options = find_budget("smoke").options(row.options("ours"), "select", digits).replace(device="cpu")
    check_run(options, dataset)
    assert row.depth == options.layers
    assert row.init is None or BY_ID[row.init].init is None
    assert row.depth == 1 or row.id.startswith(("ar-", "made-", "coupling-"))


def test_names_are_their_own() -> None:
    assert len(BY_ID) == len(DEPTH_ROWS)
    assert {row.depth for row in DEPTH_ROWS if row.family == "autoregressive"} == {1, 2, 4, 8}
    assert {row.depth for row in DEPTH_ROWS if row.family == "coupling"} == {2, 4, 8, 16}


def test_the_rows_that_are_compared_have_equal_weights() -> None:
    """But for the one of half the weights, from which another starts, within a hundredth."""
    counts = {}
    for row in DEPTH_ROWS:
        if row.id.startswith("ar-") and row.id != "ar-1-half":
            network = CONDITIONERS.read(row.options().conditioner)
            last = network["hidden"]
            earlier = () if row.code is not None else last
            widths = [earlier] * (row.depth - 1) + [last]
            counts[row.id] = (
                sum((a + 1) * b for hidden in widths for a, b in itertools.pairwise([784, *hidden, 784]))
                + 784**2 * network["direct"]
            )
    middle = counts["ar-1-marginal"]
    assert all(abs(count / middle - 1) < 0.01 for count in counts.values()), counts


def test_three_seeds_where_it_is_decided() -> None:
    decided = [row.id for row in DEPTH_ROWS if row.seeds == 3]
    assert decided == [
        "ar-1-marginal", "ar-1-plain", "ar-1-plain-two", "ar-1-plain-long", "ar-1-long", "ar-1-plain-inward",
        "ar-1-plain-inward-long", "ar-2-code",
    ]  # fmt: skip
    assert all(row.seeds == 1 for row in DEPTH_ROWS if row.id not in decided)


def test_one_layer_has_as_much_time_as_two() -> None:
    table = read(Path(__file__).parents[2] / "research/results/depth/table.json")
    seconds = {row["id"]: row["seconds"] for row in table["rows"]}
    assert seconds["ar-1-plain-inward-long"] > 2 * seconds["ar-2-code"]


def test_straight_through_has_a_rival_in_every_coupling() -> None:
    of_mask: dict[str, dict[int, dict[str, DepthRow]]] = {}
    for row in (row for row in DEPTH_ROWS if row.family == "coupling"):
        mask, name = row.series.split(", ")
        of_mask.setdefault(mask, {}).setdefault(row.depth, {})[name] = row
    assert of_mask.keys() == {"nested", "random", "checkerboard"}
    for depths in of_mask.values():
        assert list(depths) == [2, 4, 8, 16]
        for rows in depths.values():
            assert rows.keys() >= {"ste", "posterior"}
            effort = {
                (options.epochs, options.batch_size) for options in (row.options() for row in rows.values())
            }
            assert len(effort) == 1


def test_random_masks_differ_between_pairs_and_complete_each_other(dataset: Dataset) -> None:
    options = Options().replace(conditioner="coupling:hidden=4,mask=random", layers=8)
    flow = build_flow(options, dataset)
    masks = [layer.conditioner.mask for layer in flow.layers]
    for first, second in zip(masks[::2], masks[1::2], strict=True):
        assert torch.equal(first, ~second)
    assert len({tuple(mask.tolist()) for mask in masks}) == 8


def test_nested_masks_move_every_pixel_but_one_once(dataset: Dataset) -> None:
    options = Options().replace(conditioner="coupling:hidden=4,mask=nested", layers=6)
    moved = torch.stack([~layer.conditioner.mask for layer in build_flow(options, dataset).layers])
    assert moved.sum(0).max() == 1
    assert moved.sum() == 63
    assert moved.sum(1).tolist() == [32, 16, 8, 4, 2, 1]


def test_rows_by_name_star_and_what_they_start_from() -> None:
    assert [row.id for row in chosen("ar-2-onto", DEPTH_ROWS)] == ["ar-1-half", "ar-2-onto"]
    rows = chosen("coupling-*-nested-posterior, ar-1-marginal", DEPTH_ROWS)
    assert [row.depth for row in rows] == [1, 2, 4, 8, 16]
    assert tuple(chosen(None, DEPTH_ROWS)) == DEPTH_ROWS
    for names in ("ar-9", "ar-1-marginal,x*", " , "):
        with pytest.raises(ConfigError, match="--rows names rows of ar-1-marginal, "):
            chosen(names, DEPTH_ROWS)


@pytest.mark.parametrize(
    "name",
    ["ar-2-alternating", "ar-2-entropy", "ar-2-special", "coupling-4-nested-posterior", "coupling-2-random-ste",
     "coupling-4-nested-disarm"],
)  # fmt: skip
def test_the_steps_of_a_row_can_be_captured(
    name: str, dataset: Dataset, digits: Path, tmp_path: Path
) -> None:
    options = find_budget("smoke").options(BY_ID[name].options("ours"), "select", digits)
    options = options.replace(device="cpu", epochs=1)
    run = create_run(options, tmp_path / "run", dataset=dataset)
    assert run.estimator.not_capturable(run.flow) is None
    run.train()


# ---- `python -m research depth` as a person types it ----


SMOKE = ("depth", "--budget", "smoke", "--device", "cpu")
ROWS = "ar-1-marginal,ar-1-plain,ar-2-code,ar-2-onto,made-1-mixture,coupling-4-nested-posterior,coupling-2-random-ste"
KEYS = {
    "id", "family", "base", "depth", "estimator", "greedy", "bound", "kind", "stderr", "refit", "flip_rates", "parameters",
    "seconds", "seeds", "effective_depth", "entropy", "ordering", "sampling_passes", "spread", "config",
}  # fmt: skip


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("depth")
    with pytest.raises(SystemExit) as stop:
        main([*SMOKE, "--rows", ROWS, "--out", str(folder / "out"), "--work", str(folder / "work")])
    assert stop.value.code == 0
    return folder


def test_the_table(smoke: Path) -> None:
    table = read(smoke / "out/table.json")
    rows = {row["id"]: row for row in table["rows"]}
    assert list(rows) == [
        "ar-1-marginal", "ar-1-plain", "ar-1-plain-own", "ar-1-half", "ar-2-code", "ar-2-code-own", "ar-2-onto",
        "made-1-mixture", "coupling-4-nested-posterior", "coupling-2-random-ste",
    ]  # fmt: skip
    for row in rows.values():
        assert row.keys() >= KEYS
        assert len(row["flip_rates"]) == len(row["entropy"]) >= row["depth"]
        assert row["kind"] == ("exact" if row["depth"] == 1 else "lower bound")
        assert 0 <= row["effective_depth"] <= row["depth"]
        assert row["seeds"] == [0]
        assert 6 < row["bound"] < 200
    assert rows["ar-1-plain"]["base"] == "fixed" != rows["ar-1-plain-own"]["base"]
    # on the base 0.9 / 0.1 nothing is below the cost of 64 zeros
    assert min(rows[name]["bound"] for name in ("ar-1-marginal", "ar-1-plain", "ar-2-code")) > 64 * 0.1053
    assert rows["ar-2-onto"]["config"]["init"] == "rows/ar-1-half"
    seconds = [rows[name]["seconds"] for name in ("ar-1-half", "ar-2-onto")]
    assert seconds == sorted(seconds)  # with those of the runs that they started from
    assert rows["coupling-4-nested-posterior"]["sampling_passes"] == 4
    assert rows["ar-1-marginal"]["sampling_passes"] == 64
    values = read(smoke / "out/runs/ar-1-marginal.ours.seed0.final.json")["evaluation"]["values"]
    images = np.frombuffer(base64.b64decode(values), "<f4")
    assert -images.mean() == pytest.approx(rows["ar-1-marginal"]["bound"], abs=1e-4)
    assert [point["nll"] for point in table["paper"]] == [222.1, 211.2, 205.6, 209.1]
    assert table["independent"] == read(smoke / "out/runs/independent-pixels.json")["evaluation"]["nll"]
    assert {path.name for path in (smoke / "out").iterdir()} == {
        "plan.json", "runs", "table.json", "table.md", "depth.png"
    }  # fmt: skip


def test_a_second_time_there_is_nothing_to_do(smoke: Path, research: Command) -> None:
    before = files(smoke / "out/runs")
    said = research(*SMOKE, "--rows", ROWS, "--out", smoke / "out", "--work", smoke / "elsewhere")
    assert (said.code, said.err) == (0, "")
    assert files(smoke / "out/runs") == before
    assert "coupling-4-nested-posterior" in said.out
    assert said.out.endswith(f"pictures {smoke / 'out/depth.png'}\n")


def test_what_is_missing_is_made_from_what_is_there(smoke: Path, research: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(smoke / "out", out)
    given = (*SMOKE, "--rows", "ar-2-onto", "--out", out)
    lost = [out / f"runs/ar-2-onto.ours.seed0.{phase}.json" for phase in ("select", "final")]
    figures = [read(path)["evaluation"]["nll"] for path in lost]
    for path in lost:
        path.unlink()
    # without the weights that the row starts from, it says so
    said = research(*given, "--work", tmp_path / "empty")
    assert said.code == 2
    assert "row ar-2-onto starts from row ar-1-half, whose weights are not in" in said.err
    shutil.copytree(smoke / "work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work/smoke/ar-2-onto.ours")
    kept = files(out / "runs")
    assert research(*given, "--work", tmp_path / "work").code == 0
    assert [read(path)["evaluation"]["nll"] for path in lost] == figures
    assert kept.items() <= files(out / "runs").items()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it holds no JSON object; remove it"),
        (lambda text: text.replace('"version": 1', '"version": "x"', 1), "research depth did not write it"),
        (lambda text: text.replace('"evaluation": {', '"nothing": {'), "is damaged: it lacks 'evaluation'"),
    ],
)
def test_damaged_results_are_named(
    research: Command, smoke: Path, tmp_path: Path, damage, words: str
) -> None:
    shutil.copytree(smoke / "out", tmp_path / "out")
    path = tmp_path / "out/runs/ar-1-marginal.ours.seed0.final.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    given = (*SMOKE, "--rows", "ar-1-marginal", "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert words in research(*given).refused()


def test_results_of_another_command(research: Command, smoke: Path, tmp_path: Path) -> None:
    work = ("--work", tmp_path / "work")
    said = research("paper", "--budget", "smoke", "--rows", "floor", "--out", smoke / "out", *work).refused()
    assert "holds results of research depth, and this is research paper: choose another --out" in said
    plan = json.loads((smoke / "out/plan.json").read_text(encoding="utf-8"))
    assert plan["experiment"] == "depth"


# ---- the table: what it holds, its Markdown, its picture ----


def row(name: str, depth: int, bound: float, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": name, "title": name, "family": "autoregressive", "series": name, "base": "fixed", "depth": depth,
        "estimator": "maximum-likelihood", "bound": bound, "validation": bound + 1,
        "kind": "exact" if depth == 1 else "lower bound", "stderr": 0.1,
        "samples": None if depth == 1 else 1000, "greedy": bound + 17, "refit": bound - 25,
        "validation_greedy": bound + 18, "validation_refit": bound - 24,
        "flip_rates": [0.1] * depth, "greedy_flip_rates": [0.02] * depth, "entropy": [40.0] * depth,
        "effective_depth": depth, "parameters": 12_000_000, "seconds": 20.0, "seeds": [0],
        "spread": {"nll": {"std": None}}, "sampling_passes": 784 * depth, "sampling_seconds": 0.1, "flow": "latent",
    }  # fmt: skip
    return usual | changes


def coupling(depth: int, bound: float, estimator: str = "score-function:objective=elbo") -> dict[str, Any]:
    return row(
        f"c-{depth}-{estimator}",
        depth,
        bound,
        family="coupling",
        base="learned",
        estimator=estimator,
        series=estimator,
        sampling_passes=depth,
        refit=bound + 30,
        validation_refit=bound + 31,
    )


def table(*rows: dict[str, Any], paired: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "paired": paired,
        "version": 1, "budget": "full", "description": "Full.", "rows": list(rows), "missing": ["x"], "independent": 205.8,
        "paper": [{"depth": 1, "nll": 222.1}, {"depth": 2, "nll": 211.2}],
    }  # fmt: skip


def pair(*rows: dict[str, Any]) -> list[str] | None:
    found = _headline_pair(rows)
    return None if found is None else [row["id"] for row in found]


def test_what_is_compared_is_best_on_validation_data() -> None:
    one = row("one", 1, 145.0)
    assert pair(one, row("two", 2, 143.0)) == ["one", "two"]
    lucky = row("lucky", 2, 140.0, validation=150.0)
    assert pair(one, row("two", 2, 143.0), lucky) == ["one", "two"]
    idle = row("idle", 2, 140.0, effective_depth=1)  # a layer that does nothing is no depth
    assert pair(one, idle, row("two", 2, 144.0)) == ["one", "two"]
    assert pair(one, idle) is None
    assert pair(row("two", 2, 144.0), coupling(2, 120.0)) is None


def test_rows_of_fewer_seeds_do_not_decide_for_depth() -> None:
    seeds = {"seeds": [0, 1, 2]}
    assert pair(row("one", 1, 145.0, **seeds), row("two", 2, 143.0, **seeds), row("four", 4, 142.0)) == [
        "one",
        "two",
    ]


def test_the_picture(tmp_path: Path) -> None:
    for name, rows in {
        "some": [row("one", 1, 145.0), row("two", 2, 143.0), coupling(2, 120.0)],
        "none": [],
    }.items():
        draw_depths(table(*rows), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_three_parts() -> None:
    text = depth_markdown(table(row("a", 1, 1.0), row("b", 1, 1.0, base="learned"), coupling(2, 1.0)))
    assert text.count("| row | depth |") == 3
    assert "| `c-2-score-function:objective=elbo` | 10.00, 10.00 | 2.00, 2.00 | 40.0, 40.0 |" in text


def test_rows_are_compared_image_by_image() -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(140, 20, 500)  # what all models find hard or easy
    nlls = {"one": [hard, hard + 0.2], "two": [hard - 2 + generator.normal(0, 1, 500)] * 2}
    runs = tuple(
        {
            "row": name, "variant": "ours", "phase": "final", "seed": seed,
            "evaluation": {"values": packed(torch.from_numpy(-values))},
        }
        for name, seeds in nlls.items()
        for seed, values in enumerate(seeds)
    )  # fmt: skip
    found = _paired(Results({}, runs), [row("one", 1, 145.0), row("two", 2, 143.0)])
    assert found is not None
    gain = nlls["one"][0] + 0.1 - nlls["two"][0]
    assert found["rows"] == ["one", "two"]
    assert found["gain"] == pytest.approx(gain.mean(), abs=1e-3)
    assert found["stderr"] == pytest.approx(gain.std(ddof=1) / 500**0.5, abs=1e-4)
    assert found["stderr"] < 0.1 * hard.std() / 500**0.5
