"""One run on several processes: the weights of one process, and what becomes of it when a process is lost."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from together import BATCH, CASES, DROPOUT, streaming, train_all, trained, trees, write_rows
from xorflow.training import together
from xorflow.training.checkpoint import load_tensors


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights that each of two processes had at the end of every case."""
    folder = tmp_path_factory.mktemp("pair")
    write_rows(folder / "rows")
    with together(2, partial(train_all, folder)):
        train_all(folder)
    return folder


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(pair: Path, name: str) -> None:
    """To 1e-9 in every weight after 50 steps, in batches that they cannot share evenly; both have the same to the bit."""
    first, second = (load_tensors(pair / rank, name) for rank in ("0", "1"))
    assert_close(first, second, atol=0)
    expected = trained(CASES[name])
    assert_close(first, expected, atol=1e-9)


def test_dropout_is_the_same_again_and_another_than_of_one_process(pair: Path) -> None:
    first, again = (load_tensors(pair / "0", name) for name in ("dropout", "dropout again"))
    assert_close(first, again, atol=0)
    assert_close(first, load_tensors(pair / "1", "dropout"), atol=0)
    alone = trained(DROPOUT)
    assert any(bool((first[name] - alone[name]).abs().max() > 1e-3) for name in first)


def test_each_process_reads_row_groups_of_its_own(pair: Path) -> None:
    """Its part of each batch: together they make the steps of one process that has both parts."""
    first, second = (load_tensors(pair / rank, "streamed") for rank in ("0", "1"))
    assert_close(first, second, atol=0)
    trainer = streaming(pair / "rows")
    stream = trainer.dataset.stream
    assert stream is not None
    number = 0
    for epoch in range(3):
        parts = [stream.batches(BATCH, 0, epoch, rank=rank, world=2) for rank in range(2)]
        for _ in range(stream.steps(BATCH, 2)):
            trainer.make_step(torch.cat([next(part) for part in parts]), number)
            number += 1
    assert number > 20
    assert_close(first, dict(trainer.module.state_dict()), atol=1e-9)


def test_trees_are_shared_out_by_columns(pair: Path) -> None:
    for rank in ("0", "1"):
        assert_close(load_tensors(pair / rank, "trees"), trees(), atol=0)
