"""Experiments as data: the paper's table, and what is run beside it."""

from xorflow.experiments.paper import PAPER_TABLE, PaperRow, best_of_paper

__all__ = ["PAPER_TABLE", "PaperRow", "best_of_paper"]
