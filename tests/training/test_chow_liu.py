"""The best tree of columns: a distribution, and no other tree is better on the rows that it was made of."""

import itertools

import torch

from enumeration import all_states
from xorflow.training.chow_liu import ChowLiu, chow_liu

SIZES = (2, 3, 2, 4)


def rows(count: int = 500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 4, generator=generator).mul(torch.tensor(SIZES)).long()
    x[:, 3] = torch.where(torch.rand(count, generator=generator) < 0.7, x[:, 1], x[:, 3])
    x[:, 2] = torch.where(torch.rand(count, generator=generator) < 0.6, x[:, 3] % 2, x[:, 2])
    return x


def test_it_sums_to_one():
    tree = chow_liu(rows(), SIZES)
    assert abs(float(tree.log_prob(all_states(SIZES)).exp().sum()) - 1) < 1e-12


def test_no_other_tree_is_better():
    x = rows()
    tree = chow_liu(x, SIZES)
    best = tree.log_prob(x).mean()
    for parents in itertools.product(range(4), repeat=3):
        whole = torch.tensor([0, *parents])
        above = whole.clone()
        for _ in range(4):
            above = whole[above]
        if bool((above == 0).all()):  # all lead to the root
            assert ChowLiu(whole, tree.log_p, tree.offsets).log_prob(x).mean() <= best + 1e-12
    assert {int(tree.parents[3]), int(tree.parents[1]), int(tree.parents[2])} >= {1, 3} or tree.parents[
        1
    ] == 3


def test_too_many_values_have_none():
    assert chow_liu(torch.zeros(3, 2), (9000, 2)) is None
