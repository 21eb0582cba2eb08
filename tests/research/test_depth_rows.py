"""The rows of the question of depth: legal, of equal weights, and within reach."""

import itertools
from pathlib import Path

import pytest
import torch

from research.budgets import find_budget, write_digits
from research.depth.rows import DEPTH_ROWS, DepthRow
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
