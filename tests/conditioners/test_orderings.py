"""Orderings and coupling masks from short names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xorflow import Coupling, ModelError
from xorflow.conditioners import coupling_mask, ranks, resolve_order


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_random_orderings_are_permutations(features, seed):
    order = resolve_order(f"random:{seed}", features)
    assert sorted(order) == list(range(features))
    assert order == resolve_order(f"random:{seed}", features)


@given(st.permutations(range(9)))
def test_ranks_invert_an_ordering(order):
    assert [int(ranks(order)[d]) for d in order] == list(range(9))


def test_named_orderings():
    assert resolve_order("natural", 3) == (0, 1, 2)
    assert resolve_order("reversed", 3) == (2, 1, 0)
    assert resolve_order("random", 20) == resolve_order("random:0", 20) != resolve_order("random:1", 20)
    assert resolve_order(torch.tensor([1, 0]), 2) == (1, 0)
    assert resolve_order("columns", 6, (3, 2)) == (0, 2, 4, 1, 3, 5)
    assert resolve_order("columns-reversed", 6, (3, 2)) == (5, 3, 1, 4, 2, 0)


@pytest.mark.parametrize("shape", [None, (2, 2), (6,), 6, (-2, -3)])
def test_columns_are_of_images(shape):
    with pytest.raises(ModelError, match="'columns' needs the two-dimensional shape of 6 features"):
        resolve_order("columns", 6, shape)


def test_random_orderings_never_change():
    """A checkpoint names its ordering by the seed: the permutation must be the same in every version."""
    assert resolve_order("random:7", 10) == (8, 4, 1, 6, 3, 2, 7, 5, 9, 0)


def test_named_masks():
    assert coupling_mask("halves", 5).tolist() == [True, True, False, False, False]
    assert coupling_mask("halves", 5, flip=True).tolist() == [False, False, True, True, True]
    assert coupling_mask("alternate", 4).tolist() == [False, True, False, True]
    board = coupling_mask("checkerboard", 6, shape=(2, 3)).reshape(2, 3)
    assert board.tolist() == [[True, False, True], [False, True, False]]
    assert coupling_mask([1, 0, 0], 3).tolist() == [True, False, False]


@given(st.integers(2, 30), st.integers(0, 100))
def test_random_masks_are_halves(features, seed):
    mask = coupling_mask(f"random:{seed}", features)
    assert int(mask.sum()) == features // 2
    assert torch.equal(mask, coupling_mask(f"random:{seed}", features))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "thirds"}, "'halves', 'alternate', 'checkerboard'.*'thirds'"),
        ({"mask": [True, False]}, r"one entry for each of 4 features, got \(2,\)"),
        ({"mask": [True] * 4}, "some features seen and some transformed"),
        ({"mask": [False] * 4}, "some features seen and some transformed"),
        ({"mask": "checkerboard"}, "shape of 4 features, and got shape=None"),
        ({"mask": "checkerboard", "shape": (2, 3)}, "shape of 4 features"),
        ({"mask": "random:-1"}, "whole number"),
        ({"features": 1}, "use MADE for a single feature"),
    ],
)
def test_what_a_mask_refuses(options, words):
    with pytest.raises(ModelError, match=words):
        Coupling(**({"features": 4, "hidden": (3,)} | options))
