"""Splits and data sets: batches, fresh and frozen draws, devices."""

import json
import math

import pyarrow as pa
import pytest
import torch

from xorflow.data import Dataset, Schema, Split, binarise
from xorflow.errors import DataError


def hard(n: int = 7, d: int = 3, context: bool = False) -> Split:
    values = torch.arange(n * d).reshape(n, d).to(torch.uint8)
    return Split(values, torch.arange(n * 2.0).reshape(n, 2) if context else None)


def grey(n: int = 6, d: int = 4) -> Split:
    return Split((torch.arange(n * d) * 11 % 256).reshape(n, d).to(torch.uint8), stochastic=True)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_batches_go_through_all_rows_in_order(size: int, context: bool) -> None:
    split = hard(context=context)
    batches = list(split.batches(size))
    assert torch.equal(torch.cat([b.x for b in batches]), split.values)
    assert all(len(b.x) == size for b in batches[:-1])
    if split.context is not None:
        assert torch.equal(torch.cat([b.context for b in batches if b.context is not None]), split.context)
    else:
        assert all(b.context is None for b in batches)


def test_batch_has_distinct_rows_with_their_context() -> None:
    split = hard(50, context=True)
    batch = split.batch(50, torch.Generator().manual_seed(0))
    order = (batch.x[:, 0].to(torch.int64) // 3).tolist()
    assert sorted(order) == list(range(50))
    assert order != list(range(50))
    assert batch.context is not None
    assert batch.context[:, 0].tolist() == [2.0 * row for row in order]
    again = split.batch(50, torch.Generator().manual_seed(0))
    assert torch.equal(batch.x, again.x)


def test_gather_of_fixed_values_ignores_noise() -> None:
    rows = torch.tensor([4, 0, 4])
    batch = hard().gather(rows, noise=torch.rand(3, 3))
    assert torch.equal(batch.x, hard().values[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_compares_noise_with_intensity(dtype: torch.dtype) -> None:
    split = Split(torch.tensor([[0, 1, 128, 254, 255]], dtype=torch.uint8), stochastic=True)
    row = torch.tensor([0])
    largest = torch.nextafter(torch.tensor(1, dtype=dtype), torch.tensor(0, dtype=dtype))
    assert split.gather(row, largest.expand(1, 5)).x.tolist() == [[0, 0, 0, 0, 1]]
    assert split.gather(row, torch.zeros(1, 5, dtype=dtype)).x.tolist() == [[0, 1, 1, 1, 1]]
    assert split.gather(row, torch.full((1, 5), 128 / 255, dtype=dtype)).x.tolist() == [[0, 0, 0, 1, 1]]
    assert split.gather(row, torch.zeros(1, 5, dtype=dtype)).x.dtype == torch.uint8


def test_fresh_draws_differ_and_follow_the_intensity() -> None:
    n = 200_000
    split = Split(torch.full((n, 1), 77, dtype=torch.uint8), stochastic=True)
    generator = torch.Generator().manual_seed(0)
    first, second = (split.gather(torch.arange(n), generator=generator).x for _ in range(2))
    p = 77 / 255
    for draw in (first, second):
        assert abs(draw.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / n)
    agree = p**2 + (1 - p) ** 2
    assert abs((first == second).double().mean().item() - agree) < 4 * math.sqrt(agree * (1 - agree) / n)


def test_a_generator_makes_draws_repeatable() -> None:
    first, second = (grey().batch(5, torch.Generator().manual_seed(1)).x for _ in range(2))
    assert torch.equal(first, second)


def test_frozen_is_binarise_once() -> None:
    split = grey()
    frozen = split.frozen(3)
    assert not frozen.stochastic
    assert (frozen.values.numpy() == binarise(split.values.numpy(), 3, 0)).all()
    assert frozen.frozen(9) is frozen
    assert torch.equal(split.subset(2).frozen(3).values, frozen.subset(2).values)
    assert split.frozen(3, stream=1).sha256 != frozen.sha256


def test_sha256_is_that_of_the_values() -> None:
    split = Split(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
    assert (
        split.sha256 == "9f64a747e1b97f131fabb6b447296c9b6f0201e79fb3c5356e6c77e89b6a806a"
    )  # of 01 02 03 04
    assert Split(split.values.t().contiguous().t()).sha256 == split.sha256
    assert Split(split.values.to(torch.int64)).sha256 != split.sha256
    assert grey().sha256 is None


def test_subset_and_to_keep_the_rest() -> None:
    split = hard(context=True).subset(2).to("cpu")
    assert len(split) == 2
    assert split.features == 3
    assert split.context is not None
    assert split.context.shape == (2, 2)
    assert grey().subset(3).to("cpu").stochastic


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: grey().batches(2), r"frozen\(seed\)"),
        (lambda: hard().batches(0), "at least one row"),
        (lambda: hard().batch(8), "1 to 7 rows"),
        (lambda: hard().subset(0), "1 to 7 rows"),
        (lambda: grey().gather(torch.tensor([0]), torch.rand(2, 4)), r"shape \(1, 4\)"),
        (lambda: grey().gather(torch.tensor([0]), torch.rand(1, 4).half()), "float32 or float64"),
        (lambda: Split(torch.zeros(2, 2)), r"uint8 or torch\.int64, got \(2, 2\) of torch\.float32"),
        (
            lambda: Split(torch.zeros(2, 2, dtype=torch.int64), stochastic=True),
            r"values of torch\.uint8, got",
        ),
        (lambda: Split(torch.zeros(0, 2, dtype=torch.uint8)), "at least one row"),
        (lambda: Split(hard().values, torch.zeros(6, 2)), "one row for each row"),
    ],
)
def test_misuse_is_explained(act, message: str) -> None:
    with pytest.raises(DataError, match=message):
        act()


def test_dataset_describes_itself_in_json() -> None:
    schema = Schema.fit(pa.table({"a": ["x", "y"]}))
    rows = torch.tensor([[0, 2], [1, 0]], dtype=torch.uint8)
    data = Dataset("mine", Split(rows), None, Split(rows), (2, 3), schema=schema, seed=4)
    told = json.loads(json.dumps(data.describe()))
    assert told["sizes"] == {"train": 2, "test": 2}
    assert told["categories"] == [2, 3]
    assert told["sha256"] == {"test": Split(rows).sha256}
    assert told["seed"] == 4
    assert told["context"] is None
    assert told["binarisation"].startswith("none")
    assert data.features == 2
    assert data.context_features == 0
    assert data.to("cpu").schema is schema


def test_dataset_parts_must_agree() -> None:
    two, three = hard(d=2), hard(d=3)
    with pytest.raises(DataError, match="D = 2 features, but test has 3"):
        Dataset("x", two, None, three, (2, 2))
    with pytest.raises(DataError, match="same context, but train has 0 context features and test has 2"):
        Dataset("x", three, None, hard(context=True), (2, 2, 2))
    with pytest.raises(DataError, match="at least two categories"):
        Dataset("x", two, None, None, (2, 1))


def test_what_is_added_to_log_p_goes_with_its_rows():
    rows = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    split = Split(rows, log_density=torch.arange(4.0, dtype=torch.float64))
    for part in (split[1:3], split.subset(3)[1:], split.to("cpu")[1:3]):
        assert part.log_density is not None
        assert part.log_density.tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match="log_density must be float64"):
        Split(rows, log_density=torch.zeros(4))
