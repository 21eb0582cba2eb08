r"""Boosted trees of every conditional, fitted column by column.

.. math:: \text{logits}_d(x) = b_d + \sum_t v_t[\text{leaf}_t(x_{<d})]

A tree has at most eight leaves, numbered from left to right, and a byte for those that a row can still reach. A node where the
row goes right clears the leaves on its left, in whatever sequence nodes are looked at, and the leaf is the lowest bit that
remains. So all trees of many rows are evaluated by operations on bytes, without a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event

import numpy as np
import torch
from torch import Tensor

from xorflow._states import Layout, add_buffers
from xorflow.conditioners.base import BySource, Conditioner, Incremental, Sizes
from xorflow.conditioners.boosting import LEAVES, Boosting, Column, Splits, boosted
from xorflow.conditioners.orderings import Order, ranks
from xorflow.errors import CheckpointError, DataError, ModelError

_NODES = LEAVES - 1
_ALL = 2**LEAVES - 1
"""The byte of all leaves."""

_AT_A_TIME = 2**19
"""Leaves that are found together: their bytes stay in the caches."""


class BoostedTrees(Conditioner):
    """Trees on what is visited before a feature, for the logits of each feature; `fit` makes them, and nothing trains them.

    They are buffers, which a checkpoint keeps like weights: what is loaded needs no library of trees, and trees that would see
    too much are refused. They are constant between states, so the gradient by relaxed ones is zero.

    Args:
        features: D.
        categories: K, or K_d for each feature.
        order: `"natural"`, `"reversed"`, `"random:SEED"` or a permutation.
        ordered: the features whose values have an order, where trees split at a threshold; others are split into sets.
        trees: how many each logit has, in the packed layout (flat,); none before `fit`.
        splits: how many different ones of each feature the trees use, (D,); none before `fit`.

    >>> from xorflow.conditioners import Source
    >>> x = torch.tensor([[0, 0], [1, 1]]).repeat(50, 1)
    >>> net = BoostedTrees(2).fit(x, x)
    >>> (net({Source.STATE: x[:2]})[:, 1] > 0).tolist()
    [False, True]
    """

    levels: Tensor  # (flat,)
    goes_left: Tensor  # of each split, whether each value of its feature does, one split after the other
    nodes: Tensor  # the split of each node, (T, 7)
    kept: Tensor  # the leaves that are left where a row goes right, (T, 7)
    values: Tensor  # (T, 8)
    split_features: Tensor
    first_values: Tensor  # where those of each split begin
    owners: Tensor  # the logit of each tree, (T,)
    lowest: Tensor  # the lowest bit of each byte but zero

    def __init__(
        self,
        features: int,
        *,
        categories: Sizes = 2,
        order: Order = "natural",
        ordered: Sequence[int] = (),
        trees: Sequence[int] = (),
        splits: Sequence[int] = (),
    ) -> None:
        super().__init__(features, categories=categories, order=order)
        self.ordered = tuple(ordered)
        if not all(0 <= d < features for d in self.ordered):
            raise ModelError(f"ordered names some of the features 0..{features - 1}, and got {self.ordered}")
        count, sizes = sum(trees), torch.tensor(self.states.sizes)
        self._shape(trees, splits)
        entries = int((torch.tensor(self.splits) * sizes).sum())
        self.register_buffer("levels", torch.zeros(self.states.flat))
        self.register_buffer("goes_left", torch.zeros(entries, dtype=torch.bool))
        self.register_buffer("nodes", torch.zeros(count, _NODES, dtype=torch.int32))
        self.register_buffer("kept", torch.full((count, _NODES), _ALL, dtype=torch.uint8))
        self.register_buffer("values", torch.zeros(count, LEAVES))
        lowest = [(byte & -byte).bit_length() - 1 for byte in range(1, _ALL + 1)]
        add_buffers(self, lowest=torch.tensor([0, *lowest], dtype=torch.int32))

    def _shape(self, trees: Sequence[int], splits: Sequence[int]) -> None:
        """How many of each there are, and whose."""
        self.trees = tuple(trees) or (0,) * self.states.flat
        self.splits = tuple(splits) or (0,) * self.features
        shapes = (len(self.trees), len(self.splits)) == (self.states.flat, self.features)
        if not shapes or min(self.trees) < 0 or min(self.splits) < 0 or (sum(trees) and not sum(splits)):
            raise ModelError(
                f"trees are counted for each of {self.states.flat} logits, and the splits that they use for each of "
                f"{self.features} features; got {len(self.trees)} and {len(self.splits)} counts"
            )
        owners = torch.arange(self.features).repeat_interleave(torch.tensor(self.splits))
        sizes = torch.tensor(self.states.sizes)[owners]
        of_logits = torch.arange(self.states.flat).repeat_interleave(torch.tensor(self.trees))
        firsts = (sizes.cumsum(0) - sizes).int()
        add_buffers(self, split_features=owners.int(), first_values=firsts, owners=of_logits.int())
        self._first_trees = [0, *np.cumsum(self.trees).tolist()]
        self._first_splits = [0, *np.cumsum(self.splits).tolist()]

    @torch.no_grad()
    def fit(
        self,
        x: Tensor,
        validation: Tensor,
        settings: Boosting | None = None,
        *,
        threads: int | None = None,
        stopping: Event | None = None,
    ) -> BoostedTrees:
        """Trees for these rows, integers (N, D); each feature gets as many as are best for its `validation` rows.

        Deterministic: neither the number of threads nor the clock changes anything.

        Raises:
            CancelledError: if another thread sets `stopping`, once the columns under way are done.
            ConfigError: without LightGBM, which the extra `trees` installs.
        """
        for rows in (x, validation):
            if rows.dim() != 2 or rows.shape[1] != self.features or not len(rows):
                raise DataError(
                    f"trees are fitted to rows of {self.features} features, and got shape {tuple(rows.shape)}"
                )
        columns, splits = boosted(
            x.cpu().numpy(),
            validation.cpu().numpy(),
            self.states.sizes,
            self.visited,
            self.ordered,
            settings or Boosting(),
            threads or torch.get_num_threads(),
            stopping or Event(),
        )
        self._take(columns, splits)
        return self

    def _take(self, columns: Mapping[int, Column], splits: Splits) -> None:
        """Trees of each column, arranged as logits are."""
        in_order = [columns[d] for group in self.states.groups for d in group.features]
        by_logit = [of_logit for column in in_order for of_logit in column.trees]
        self._shape([len(of_logit) for of_logit in by_logit], [len(of_feature) for of_feature in splits])
        trees = [tree for of_logit in by_logit for tree in of_logit]
        like, size = self.levels, (len(trees), _NODES)
        nodes = torch.tensor([tree.nodes for tree in trees], dtype=torch.int64).reshape(*size, 2)
        places = torch.tensor(self._first_splits)[nodes[..., 0]] + nodes[..., 1]
        goes_left = np.frombuffer(b"".join(key for of_feature in splits for key in of_feature), np.bool_)
        values = torch.tensor([tree.values for tree in trees], dtype=torch.float64)
        self.levels = torch.from_numpy(np.concatenate([column.levels for column in in_order])).to(like)
        self.goes_left = torch.from_numpy(goes_left.copy())
        self.nodes = places.int()
        self.kept = torch.tensor([tree.kept for tree in trees], dtype=torch.uint8).reshape(size)
        self.values = values.reshape(len(trees), LEAVES).to(like)
        self.to(like.device)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._check()

    def _check(self) -> None:
        """Raise `CheckpointError` unless every tree sees no more than it may."""
        if not len(self.nodes):
            return
        legal = bool(((self.nodes >= 0) & (self.nodes < len(self.split_features))).all())
        if legal:
            rank = ranks(self.visited).to(self.nodes.device)
            seen = rank[self.split_features[self.nodes.long()].long()]
            visited = rank[self.states.logit_features.to(rank.device)[self.owners.long()]]
            legal = bool(((seen < visited[:, None]) | (self.kept == _ALL)).all())
        if not legal:
            raise CheckpointError(
                "trees see what is visited before their feature, and these see more, so they would give no likelihood; "
                "restore the file of weights, or train again"
            )

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        (state,), _ = self.states_of(inputs, context)
        if state.is_floating_point():
            state = self._nearest(state)
        rows = state.reshape(-1, self.features)
        logits = torch.empty(len(rows), self.states.flat, dtype=self.levels.dtype, device=rows.device)
        each = max(1, _AT_A_TIME // 256)
        for first in range(0, len(rows), each):
            part = slice(first, first + each)
            left = self.left(rows[part].T, slice(0, len(self.split_features)))
            logits[part] = self.logits(left, slice(0, self.states.flat))
        return logits.reshape(*state.shape[:-1], self.states.flat)

    def _nearest(self, relaxed: Tensor) -> Tensor:
        layout = Layout(self.states).to(relaxed.device)
        weights = self.states.grouped(layout.logits(relaxed))
        return layout.joined([(each > 0.5).long() if g.binary else each.argmax(-1) for g, each in weights])

    def left(self, x: Tensor, splits: slice) -> Tensor:
        """All bits set where a row goes left at some splits, and none where it goes right, (splits, N), of columns x (D, N)."""
        values = x.int().index_select(0, self.split_features[splits])
        places = (values + self.first_values[splits, None]).flatten()
        return self.goes_left.to(torch.uint8).neg().index_select(0, places).view(values.shape)

    def logits(self, left: Tensor, of: slice) -> Tensor:
        """Some of the packed logits, (N, n), by what `left` gives for all splits."""
        trees = range(self._first_trees[of.start], self._first_trees[of.stop])
        out = self.levels[of, None].repeat(1, left.shape[1])
        each = min(len(trees), max(1, _AT_A_TIME // max(left.shape[1], 1)))
        kinds = (torch.uint8, torch.uint8, torch.int32, torch.int32, out.dtype)
        room = [torch.empty(each, left.shape[1], dtype=kind, device=out.device) for kind in kinds]
        for first in range(trees.start, trees.stop, max(1, each)):
            part = slice(first, min(first + each, trees.stop))
            of_part = [tensor[: part.stop - first] for tensor in room]
            out.index_add_(0, self.owners[part] - of.start, self._at_leaves(left, part, of_part))
        return out.T

    def _at_leaves(self, left: Tensor, trees: slice, room: Sequence[Tensor]) -> Tensor:
        """What some trees add for each row, (t, N).

        All within tensors of that shape: memory that is asked for and given back each time may take longer than the work.
        """
        reached, kept, bytes_reached, leaves, added = room
        reached.fill_(_ALL)
        for node in range(_NODES):
            torch.index_select(left, 0, self.nodes[trees, node], out=kept)
            reached &= kept.bitwise_or_(self.kept[trees, node, None])
        torch.index_select(self.lowest, 0, bytes_reached.copy_(reached).flatten(), out=leaves.view(-1))
        leaves += LEAVES * torch.arange(len(leaves), dtype=torch.int32, device=leaves.device)[:, None]
        torch.index_select(self.values[trees].flatten(), 0, leaves.flatten(), out=added.view(-1))
        return added

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalTrees:
        del context, block_size
        return IncrementalTrees(self, batch)

    def splits_of(self, feature: int) -> slice:
        """Those of one feature, among all."""
        return slice(self._first_splits[feature], self._first_splits[feature + 1])


class IncrementalTrees(Incremental):
    """One evaluation of trees for a batch, feature by feature.

    Args:
        net: the trees.
        batch: B.
    """

    def __init__(self, net: BoostedTrees, batch: int) -> None:
        super().__init__(net)
        self._net = net
        count = len(net.split_features)
        self._left = torch.zeros(count, batch, dtype=torch.uint8, device=net.levels.device)

    def logits(self, block: slice, x: Tensor) -> Tensor:
        del x  # a feature alone in its block
        states, feature = self._net.states, self.order[block.start]
        first = states.first_logits[feature]
        each = 1 if states.sizes[feature] == 2 else states.sizes[feature]
        return self._net.logits(self._left, slice(first, first + each))

    def update(self, block: slice, x: Tensor) -> None:
        feature = self.order[block.start]
        splits = self._net.splits_of(feature)
        column = x.T.expand(self._net.features, -1)
        self._left[splits] = self._net.left(column, splits)
