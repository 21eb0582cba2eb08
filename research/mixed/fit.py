"""One model of cells, in a process of its own: `python -m research.mixed.fit MODEL CELLS OUT`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from research.mixed.cells import Arrays
from research.mixed.study import CHOW_LIU, LIGHTGBM, OURS
from xorflow import FactorisedBase, LatentFlow, Layer, Mixture, auto_fit, evaluate
from xorflow.conditioners import BoostedTrees, Boosting
from xorflow.data import Dataset, Split
from xorflow.training import chow_liu

Fitted = tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor], int]
"""Log-likelihoods of rows, samples, and how many orderings are mixed."""


def fit(model: str, cells: Arrays) -> Fitted:
    """The default of the library; LightGBM, column by column, in the file's own ordering; or the best tree of columns."""
    train, validation = (torch.from_numpy(cells[part]) for part in ("train", "validation"))
    sizes, ordered = cells["sizes"].tolist(), cells["ordered"].tolist()
    if model == CHOW_LIU:
        return _tree(train, sizes)
    if model == OURS:
        dataset = Dataset("cells", Split(train), Split(validation), None, categories=tuple(sizes))
        fitted = auto_fit(dataset, ordered=ordered)
        return _exact(fitted.model, fitted.record["orderings"])
    assert model == LIGHTGBM
    trees = BoostedTrees(len(sizes), categories=sizes, ordered=ordered)
    trees.fit(train, validation, Boosting(most=max(sizes)))
    base = FactorisedBase(len(sizes), 1 - 1e-6, categories=sizes, tied=True)
    return _exact(LatentFlow([Layer(trees)], base).eval())


def _exact(model: LatentFlow | Mixture, orderings: int = 1) -> Fitted:
    return lambda x: evaluate.exact(model, x).values, lambda count: model().sample((count,)), orderings


def _tree(train: Tensor, sizes: list[int]) -> Fitted:
    tree = chow_liu(train, sizes)
    assert tree is not None
    first = tree.offsets.tolist()

    def sample(count: int) -> Tensor:
        x = torch.zeros(count, len(sizes), dtype=torch.int64)

        def draw(d: int, log_p: Tensor) -> None:
            x[:, d] = log_p[:, first[d] :][:, : sizes[d]].softmax(1).multinomial(1)[:, 0]
            for below in (tree.parents == d).nonzero()[:, 0].tolist():
                if below:  # column 0 is the root, its own parent
                    draw(below, tree.log_p[x[:, d] + first[d]])

        draw(0, tree.log_p.diagonal().expand(count, -1))
        return x

    return tree.log_prob, sample, 1


def main(model: str, cells: str, out: str) -> None:
    """Fit, score the test rows, sample."""
    torch.manual_seed(0)
    given = dict(np.load(cells))
    log_prob, sample, orderings = fit(model, given)
    used = resource.getrusage(resource.RUSAGE_SELF)
    with torch.no_grad():
        log_p, samples = log_prob(torch.from_numpy(given["test"])), sample(int(given["samples"]))
    cost = {"cpu_seconds": used[0] + used[1], "megabytes": used[2] / 1024, "orderings": orderings}
    np.savez(out, log_p=log_p, samples=samples, **cost)


if __name__ == "__main__":
    main(*sys.argv[1:])
