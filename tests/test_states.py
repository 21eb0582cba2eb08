"""Product spaces of integers, and the layouts of the numbers that belong to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xorflow import ModelError
from xorflow._states import NEVER, Alphabet, Layout, by_inversion, per_feature

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=7)
LEADS = st.sampled_from([(), (3,), (2, 1, 3)])


def numbers(*shape: int) -> Tensor:
    """All different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@given(SIZES)
def test_groups_hold_every_feature_once_bits_first(sizes):
    alphabet = Alphabet(sizes)
    groups = alphabet.groups
    assert sorted(d for group in groups for d in group.features) == list(range(len(sizes)))
    assert all({sizes[d] for d in group.features} == {group.size} for group in groups)
    assert all(list(group.features) == sorted(group.features) for group in groups)
    assert [group.size for group in groups] == sorted(set(sizes), key=lambda size: (size != 2, size))
    assert alphabet.flat == sum(1 if size == 2 else size for size in sizes) == len(alphabet.logit_features)
    places = torch.arange(alphabet.flat)
    assert torch.equal(torch.cat([places[group.logits] for group in groups]), places)


@given(SIZES)
def test_where_the_logits_of_a_feature_lie(sizes):
    alphabet = Alphabet(sizes)
    for d, size in enumerate(sizes):
        mine = (alphabet.logit_features == d).nonzero()[:, 0]
        assert mine.tolist() == [alphabet.first_logits[d] + k for k in range(1 if size == 2 else size)]


@given(SIZES, st.data())
def test_where_the_logits_of_some_features_lie(sizes, data):
    """Taken from there, they are packed as those of the space of these features."""
    some = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    alphabet, part = Alphabet(sizes), Alphabet([sizes[d] for d in some])
    assert alphabet.of(some) == part
    positions = alphabet.positions(some)
    assert torch.equal(alphabet.logit_features[positions], torch.tensor(some)[part.logit_features])
    layout = Layout(alphabet).of(some)
    assert layout.alphabet == part
    for group, logits in zip(part.groups, layout.logits(positions), strict=True):
        firsts = [alphabet.first_logits[some[n]] for n in group.features]
        assert (logits if group.binary else logits[..., 0]).tolist() == firsts


@given(SIZES, LEADS)
def test_packed_numbers_come_apart_by_group_and_together_again(sizes, lead):
    layout = Layout(Alphabet(sizes))
    packed = numbers(*lead, layout.alphabet.flat)
    parts = layout.logits(packed)
    for group, part in zip(layout.alphabet.groups, parts, strict=True):
        n = len(group.features)
        assert part.shape == ((*lead, n) if group.binary else (*lead, n, group.size))
        first = [layout.alphabet.first_logits[d] for d in group.features]
        assert torch.equal(part if group.binary else part[..., 0], packed[..., first])
    assert torch.equal(layout.packed(parts), packed)


@given(SIZES, LEADS)
def test_numbers_of_features_come_apart_by_group_and_together_again(sizes, lead):
    layout = Layout(Alphabet(sizes))
    by_feature = numbers(*lead, len(sizes))
    parts = layout.split(by_feature)
    for number, (group, part) in enumerate(zip(layout.alphabet.groups, parts, strict=True)):
        assert torch.equal(part, by_feature[..., list(group.features)])
        assert layout.features()[number].tolist() == list(group.features)
    assert torch.equal(layout.joined(parts), by_feature)


@given(SIZES, LEADS)
def test_spread_and_summed(sizes, lead):
    layout = Layout(Alphabet(sizes))
    by_feature, owner = numbers(*lead, len(sizes)), layout.alphabet.logit_features
    spread = layout.spread(by_feature)
    assert torch.equal(spread, by_feature[..., owner])
    packed = numbers(*lead, layout.alphabet.flat)
    expected = torch.stack([packed[..., owner == d].sum(-1) for d in range(len(sizes))], -1)
    assert torch.equal(layout.summed(packed), expected)
    counts = torch.tensor([1 if size == 2 else size for size in sizes])
    assert torch.equal(layout.summed(spread), by_feature * counts)


def test_bits_alone_are_views():
    layout = Layout(Alphabet([2, 2, 2]))
    packed = numbers(4, 3)
    assert layout.logits(packed)[0].data_ptr() == layout.split(packed)[0].data_ptr() == packed.data_ptr()
    assert layout.packed([packed]) is layout.joined([packed]) is layout.spread(packed) is packed


def test_a_layout_is_no_weight():
    assert not Layout(Alphabet([2, 3])).state_dict()


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
    ],
)
def test_the_smallest_type_that_holds_all_values(width, dtype):
    alphabet = Alphabet([2, width])
    highest = alphabet.integers(torch.tensor([1, width - 1]))
    assert highest.dtype == dtype
    assert highest.tolist() == [1, width - 1]


def test_alphabets_are_equal_by_their_sizes():
    assert Alphabet([2, 3]) == Alphabet((2, 3)) != Alphabet([3, 2])
    assert len({Alphabet([2, 2]), Alphabet((2, 2))}) == 1
    assert Alphabet([2, 2]).binary
    assert not Alphabet([2, 1]).binary
    assert (Alphabet([3, 3]).short(), Alphabet([3, 2]).short()) == (3, [3, 2])


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


def test_draws_by_inversion_have_their_probabilities():
    probabilities, middles = torch.tensor([0.2, 0.0, 0.5, 0.3]), (torch.arange(1000) + 0.5) / 1000
    assert by_inversion(probabilities, middles).bincount(minlength=4).tolist() == [200, 0, 500, 300]
