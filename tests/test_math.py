"""Numerical helpers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xorflow import Intractable
from xorflow._math import (
    ENUMERATION_LIMIT,
    enumerate_states,
    philox_uniforms,
    philox_words,
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_enumeration_meets_every_state_once(sizes):
    states = enumerate_states(sizes)
    assert states.shape == (math.prod(sizes), len(sizes))
    assert states.dtype == torch.int64
    assert len(torch.unique(states, dim=0)) == math.prod(sizes)
    assert bool((states < torch.tensor(sizes)).all())


def test_no_features_have_one_state():
    assert enumerate_states([]).shape == (1, 0)


def test_enumeration_has_a_limit():
    assert len(enumerate_states([2] * 10, limit=1024)) == 1024
    with pytest.raises(Intractable, match=r"limited to 1023 terms.*2\^10; use evaluate.importance\(\)"):
        enumerate_states([2] * 10, limit=1023)
    with pytest.raises(Intractable, match=r"about 2\^784"):
        enumerate_states([2] * 784)
    assert ENUMERATION_LIMIT == 2**18


@given(st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 100), st.integers(1, 50))
def test_any_part_of_a_sequence_can_be_had(seed, stream, start, count):
    whole = philox_words(seed, stream, 0, start + count)
    assert np.array_equal(philox_words(seed, stream, start, count), whole[start:])


def test_sequences_are_those_of_numpy():
    """Pinned: results of earlier versions must stay reproducible."""
    raw = np.random.Philox(key=np.array([5, 2], dtype=np.uint64)).random_raw(4)
    expected = [half for word in raw.tolist() for half in (word & 0xFFFFFFFF, word >> 32)]
    assert philox_words(5, 2, 0, 8).tolist() == expected
    assert philox_words(0, 0, 0, 2).tolist() != philox_words(0, 1, 0, 2).tolist()


def test_uniforms_are_uniform_and_never_zero_or_one():
    u = philox_uniforms(0, 0, 0, 200_000)
    assert u.dtype == np.float32
    assert 0 < u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(u))
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    assert np.abs(counts / len(u) - 0.05).max() < 5 * math.sqrt(0.05 / len(u))


def test_extreme_words_stay_inside_the_interval(monkeypatch):
    ends = np.array([0, 2**32 - 1], dtype=np.uint32)
    monkeypatch.setattr("xorflow._math.philox_words", lambda *_: ends)
    low, high = philox_uniforms(0, 0, 0, 2)
    assert 0 < low < 1e-6
    assert 1 - 1e-6 < high < 1
