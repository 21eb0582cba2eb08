"""How integers become floats and come back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xorflow import ModelError
from xorflow._states import NEVER, Alphabet, per_feature


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([torch.uint8, torch.int64]))
def test_states_come_back(sizes, dtype):
    alphabet = Alphabet(sizes)
    x = torch.stack([torch.arange(6) % k for k in sizes], -1).to(dtype)
    coded = alphabet.encode(x, torch.float32)
    assert alphabet.flatten(coded).shape == (6, alphabet.flat)
    assert alphabet.batch_shape(coded) == (6,)
    assert alphabet.batch_shape(alphabet.expand(coded[:1], (3, 6))) == (3, 6)
    assert torch.equal(alphabet.decode(coded), x.long())
    assert bool(alphabet.valid().sum(-1).eq(torch.tensor(sizes)).all())


def test_alphabets_are_equal_by_their_sizes():
    assert Alphabet([2, 3]) == Alphabet((2, 3)) != Alphabet([3, 2])
    assert len({Alphabet([2, 2]), Alphabet((2, 2))}) == 1
    assert Alphabet([2, 2]).binary
    assert not Alphabet([2, 1]).binary


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_never_is_zero_and_no_nan(dtype):
    never = torch.tensor(NEVER, dtype=dtype)
    assert float(never.exp()) == 0
    assert float(never * 0) == 0


def test_what_is_refused():
    with pytest.raises(ModelError, match="at least one feature"):
        Alphabet([])
    with pytest.raises(ModelError, match="at least one category, and got 0"):
        Alphabet([2, 0])
    with pytest.raises(ModelError, match="at least one feature, and got features=0"):
        per_feature(2, 0, "categories")
    assert per_feature(3, 2, "categories") == (3, 3)
