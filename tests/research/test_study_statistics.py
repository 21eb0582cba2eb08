"""Bias and variance of gradients whose bias and variance are known, and their standard errors."""

import math

import pytest
import torch
from torch import Tensor

from research.estimators.measure import _is_suspect
from research.estimators.statistics import Stream, figures, groups_of, mean_of_pairs, rounded

SIZE = 40
EXACT = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
SPREAD = torch.linspace(0.1, 1.5, SIZE, dtype=torch.float64)
WHOLE = slice(0, SIZE)


def drawn(shift: float, draws: int, seed: int, centre: Tensor = EXACT) -> tuple[Stream, Tensor]:
    """A stream of gradients with a known mean and covariance, and the gradients themselves."""
    generator = torch.Generator().manual_seed(seed)
    groups, count = groups_of(draws)
    stream = Stream([WHOLE], SIZE, groups, centre, pixels=slice(0, 5))
    kept = []
    for group in range(groups):
        for _ in range(count):
            noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
            kept.append(EXACT + shift + SPREAD * noise)
            stream.add(kept[-1])
        stream.close(group, count)
    return stream, torch.stack(kept)


def found(stream: Stream, exact: Tensor | None) -> dict:
    row = figures(stream, 0, exact)
    assert row is not None
    return row


@pytest.mark.parametrize(
    "centre", [torch.zeros_like(EXACT), EXACT], ids=["about zero", "about the exact one"]
)
def test_sums_give_what_the_gradients_themselves_would(centre: Tensor) -> None:
    stream, kept = drawn(0.3, 64, seed=0, centre=centre)
    groups = kept.reshape(16, 4, SIZE)
    norm = EXACT.square().sum()
    row = found(stream, EXACT[None])
    errors = groups.mean(1) - EXACT
    pairs = [errors[a] @ errors[b] for a in range(16) for b in range(16) if a != b]
    assert row["bias"] == pytest.approx(float(torch.stack(pairs).mean() / norm))
    assert row["variance"] == pytest.approx(float(groups.var(1).sum(-1).mean() / norm))
    cosine = torch.nn.functional.cosine_similarity(kept.mean(0), EXACT, dim=0)
    assert row["cosine_of_mean"] == pytest.approx(float(cosine))
    if centre is EXACT:
        each = torch.nn.functional.cosine_similarity(kept, EXACT[None])
        assert row["cosine"] == pytest.approx(float(each.mean()))
    torch.testing.assert_close(stream.entry_variances(), kept[:, :5].var(0))


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.5])
def test_the_estimate_of_the_bias_has_none_and_its_error_is_right(shift: float) -> None:
    """Over 120 repetitions: the mean within four standard errors, and the stated error near the actual one."""
    norm = float(EXACT.square().sum())
    rows = [found(drawn(shift, 64, seed)[0], EXACT[None]) for seed in range(120)]
    biases = torch.tensor([row["bias"] for row in rows], dtype=torch.float64)
    stated = torch.tensor([row["bias_stderr"] for row in rows], dtype=torch.float64).square().mean().sqrt()
    actual = biases.std()
    expected = SIZE * shift**2 / norm
    assert abs(float(biases.mean()) - expected) < 4 * float(actual) / math.sqrt(120)
    assert (
        0.75 * actual < stated < 1.5 * actual
    )  # a share that can't be negative is estimated a little too large
    variances = torch.tensor([row["variance"] for row in rows], dtype=torch.float64)
    assert float(variances.mean()) == pytest.approx(float(SPREAD.square().sum()) / norm, rel=0.02)
    if shift == 0:
        assert bool((biases < 0).any())


def of_one_entry(shift: float, seed: int) -> dict:
    """A gradient of one entry, 1 exactly: 16 groups of four draws, whose mean is off by so many of its standard deviations."""
    one = torch.ones(1, dtype=torch.float64)
    stream = Stream([slice(0, 1)], 1, 16, one)
    noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for group, row in enumerate(noise):
        for value in row:
            stream.add(one + value + shift / math.sqrt(64))
        stream.close(group, 4)
    return found(stream, one[None]) | {"claim": "unbiased"}


def test_a_bias_is_told_from_none() -> None:
    """Of 200 streams of each kind; the error of the bias itself grows with the bias, and would miss most of them."""
    fair = sum(_is_suspect(of_one_entry(0.0, seed)) for seed in range(200))
    assert fair <= 12  # a squared normal deviate is beyond three of its own with a chance of 2.2%
    biased = [of_one_entry(5.0, seed) for seed in range(200)]
    assert sum(map(_is_suspect, biased)) >= 195
    assert sum(abs(row["bias"]) > 3 * row["bias_stderr"] for row in biased) < 100


def test_a_gradient_of_many_entries_is_rarely_suspect() -> None:
    rows = [found(drawn(0.0, 64, seed)[0], EXACT[None]) | {"claim": "unbiased"} for seed in range(120)]
    assert sum(map(_is_suspect, rows)) <= 4
    noise = torch.tensor([row["bias_noise"] for row in rows], dtype=torch.float64).mean()
    biases = torch.tensor([row["bias"] for row in rows], dtype=torch.float64)
    assert float(noise) == pytest.approx(float(biases.std()), rel=0.25)


def test_the_error_of_a_distance_is_that_of_its_square_by_the_slope_of_the_root() -> None:
    rows = [found(drawn(0.5, 64, seed)[0], EXACT[None]) for seed in range(60)]
    stated = torch.tensor([row["distance_stderr"] for row in rows], dtype=torch.float64).mean()
    actual = torch.tensor([row["distance"] for row in rows], dtype=torch.float64).std()
    assert float(stated) == pytest.approx(float(actual), rel=0.3)
    assert (
        found(drawn(0.0, 64, 0)[0], EXACT[None])["distance_stderr"] is None
    )  # of a root of noise it says nothing


def test_an_oracle_with_noise_of_its_own_adds_error_and_no_bias() -> None:
    rows = []
    for seed in range(100):
        oracle, _ = drawn(0.0, 64, seed + 1000)
        rows.append(found(drawn(0.2, 64, seed)[0], oracle.means(WHOLE)))
    # here the norm of the exact gradient is an estimate, too
    squared = torch.tensor([row["bias"] * row["norm"] ** 2 for row in rows], dtype=torch.float64)
    assert abs(float(squared.mean()) - SIZE * 0.2**2) < 4 * float(squared.std()) / 10
    alone = found(drawn(0.2, 64, 0)[0], EXACT[None])
    assert rows[0]["bias_stderr"] > alone["bias_stderr"]


def test_what_draws_nothing_has_no_variance_and_is_compared_as_it_is() -> None:
    stream = Stream([WHOLE], SIZE, 1, EXACT)
    stream.add(EXACT * 1.5)
    stream.close(0, 1)
    row = found(stream, EXACT[None])
    assert row["bias"] == pytest.approx(0.25)
    assert row["distance"] == pytest.approx(0.5)
    assert (row["bias_stderr"], row["bias_noise"], row["variance"], row["snr"]) == (0.0, 0.0, 0.0, None)
    assert row["distance_stderr"] == 0.0
    assert row["cosine"] == pytest.approx(1.0)
    stream = Stream([WHOLE], SIZE, 1, EXACT)
    stream.add(EXACT * (1 + 1e-14))  # rounding
    stream.close(0, 1)
    assert found(stream, EXACT[None])["bias"] == 0.0


def test_without_an_oracle_there_is_variance_and_no_bias() -> None:
    row = found(drawn(0.0, 400, 0, torch.zeros_like(EXACT))[0], None)
    assert row["bias"] is row["bias_stderr"] is row["cosine"] is None
    norm = float(EXACT.square().sum())
    assert row["variance"] == pytest.approx(float(SPREAD.square().sum()) / norm, rel=0.1)
    assert row["snr"] == pytest.approx(math.sqrt(norm / float(SPREAD.square().sum())), rel=0.1)


def test_what_nothing_reaches_has_no_row() -> None:
    stream = Stream([WHOLE], SIZE, 4, torch.zeros_like(EXACT))
    for group in range(4):
        stream.add(torch.zeros_like(EXACT))
        stream.add(torch.zeros_like(EXACT))
        stream.close(group, 2)
    assert figures(stream, 0, torch.zeros(1, SIZE, dtype=torch.float64)) is None


def test_products_of_one_group_with_itself_do_not_count() -> None:
    products = torch.full((5, 5), 2.0, dtype=torch.float64)
    products.fill_diagonal_(1e9)
    estimate = mean_of_pairs(products)
    assert (estimate.value, estimate.stderr) == (2.0, 0.0)


def test_numbers_in_files_are_short() -> None:
    assert rounded({"a": 0.123456789, "b": 7, "c": None, "d": "x"}, 3) == {
        "a": 0.123,
        "b": 7,
        "c": None,
        "d": "x",
    }
