"""The public edge: what `validate` takes, and what it says when it does not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xorflow.data import validate
from xorflow.errors import DataError

GOOD = [[0, 1, 2], [1, 0, 3]]
K = (2, 2, 4)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDE = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*INTEGERS, *WIDE, *FLOATS])
def test_tensors_of_every_type(dtype: torch.dtype) -> None:
    out = validate(torch.tensor(GOOD).to(dtype), K)
    assert out.dtype == torch.int64
    assert out.tolist() == GOOD


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<u2", ">u8", "f4", ">f8", "f2"])
def test_arrays_of_every_type(dtype: str) -> None:
    assert validate(np.array(GOOD, dtype=dtype), K).tolist() == GOOD


def test_bool_lists_views_and_read_only_arrays() -> None:
    assert validate(torch.tensor([[True, False]]), (2, 2)).tolist() == [[1, 0]]
    assert validate(np.array([True, False]), (2, 2)).tolist() == [1, 0]
    assert validate(GOOD, K).tolist() == GOOD
    frozen = np.array(GOOD)
    frozen.flags.writeable = False
    assert validate(frozen, K).tolist() == GOOD
    assert validate(np.array(GOOD)[::-1, ::-1], K[::-1]).tolist() == [row[::-1] for row in GOOD[::-1]]
    assert validate(torch.tensor(GOOD, dtype=torch.float32, requires_grad=True), K).tolist() == GOOD


def test_leading_shape_is_kept() -> None:
    assert validate(torch.zeros(3), K).shape == (3,)
    assert validate(torch.zeros(5, 4, 2, 3), K).shape == (5, 4, 2, 3)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_whatever_fits_comes_back(data: st.DataObject) -> None:
    categories = data.draw(st.lists(st.integers(2, 600), min_size=1, max_size=5))
    rows = data.draw(
        st.lists(st.tuples(*(st.integers(0, k - 1) for k in categories)), min_size=1, max_size=5)
    )
    dtype = data.draw(st.sampled_from([torch.int16, torch.int64, torch.float32, torch.float64]))
    assert validate(torch.tensor(rows, dtype=dtype), categories).tolist() == [list(row) for row in rows]


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.float64, (3, 2)))
def test_floats_are_taken_or_refused_never_rounded(x: np.ndarray) -> None:
    legal = bool((np.isfinite(x) & (np.floor(x) == x) & (x >= 0) & (x < 5)).all())
    if legal:
        assert (validate(x, (5, 5)).numpy() == x).all()
    else:
        with pytest.raises(DataError):
            validate(x, (5, 5))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[0, 1, 4]], r"0\.\.K-1: row 0, feature 2 \(both from 0\) holds 4 where K = 4, so 0\.\.3"),
        ([[0, 1, 2], [0, -1, 2]], "row 1, feature 1 .* holds -1 where K = 2"),
        ([[0, 1, 2.5]], r"integers.*: row 0, feature 2 .* holds 2\.5"),
        ([[0, float("nan"), 2]], "no NaN: row 0, feature 1"),
        ([[0, float("inf"), 2]], "integers.*: row 0, feature 1 .* holds inf"),
        ([[0, 1e300, 2]], r"up to 2\^53: .* holds 1e\+300"),
        ([[-float("inf"), 1, 2]], "holds -inf"),
        ([0, 1, 9], "feature 2 holds 9"),
        (torch.full((2, 2, 3), 7), r"index \(0, 0\), feature 0 holds 7"),
        ([[0, 1]], r"D = 3 features, got \(1, 2\)"),
        (np.zeros((0, 3)), "at least one row"),
        ([], "at least one row"),
        (torch.tensor(1), r"shape \(\.\.\., D\) with D = 3 features, got \(\)"),
        ([["a", "b", "c"]], "got an array of <U1"),
        ([[0, 1], [0]], "rectangular"),
        ([[None, 1, 2]], "got an array of object"),
        (np.zeros((1, 3), complex), "got an array of complex"),
        (torch.zeros(1, 3, dtype=torch.complex64), "dense tensor of integers"),
        (torch.zeros(1, 3, device="meta"), "with values, got .* on meta"),
        (np.full((1, 3), 2**63, np.uint64), "63 bits"),
        (np.full((1, 3), 256, np.int64), "holds 256 where K = 2"),
    ],
)
def test_refusals_say_what_and_where(x: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        validate(x, K)


def test_a_byte_is_not_compared_modulo_256() -> None:
    assert validate(torch.tensor([[255, 1]], dtype=torch.uint8), (256, 256)).tolist() == [[255, 1]]
    assert validate(torch.tensor([[255, 1]], dtype=torch.uint8), (300, 2)).tolist() == [[255, 1]]
