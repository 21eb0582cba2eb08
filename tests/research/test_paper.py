"""The paper's table, number by number."""

from research.paper.rows import PAPER_TABLE
from xorflow.cli.train import PAPER_NLL


def test_the_numbers_are_the_papers() -> None:
    straight = {row.depth: row.nll for row in PAPER_TABLE if row.title == "straight-through"}
    assert straight == {1: 222.1, 2: 211.2, 4: 205.6, 8: 209.1}
    latent = {row.id: (row.nll, row.greedy) for row in PAPER_TABLE if row.title != "straight-through"}
    assert latent == {
        "sfe-posterior-greedy": (293.7, 205.3),
        "sfe-posterior-running": (242.4, 207.3),
        "sfe-special-greedy": (267.9, 267.7),
        "sfe-special-running": (190.1, 189.6),
    }
    assert all(row.greedy is None for row in PAPER_TABLE if row.title == "straight-through")


def test_the_best_is_what_the_command_line_shows() -> None:
    assert min(row.nll for row in PAPER_TABLE) == PAPER_NLL


def test_ids_are_unique() -> None:
    assert len({row.id for row in PAPER_TABLE}) == len(PAPER_TABLE) == 8
