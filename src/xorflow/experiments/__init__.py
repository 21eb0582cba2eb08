"""Experiments as data: the paper's table, and what is run beside it."""

from xorflow.experiments.budgets import BUDGETS, Budget, find_budget
from xorflow.experiments.paper import PAPER_TABLE, PaperRow, best_of_paper
from xorflow.experiments.reproduction import Planned, Reproduction, Request
from xorflow.experiments.rows import REFERENCES, ROWS, Reference, Row, chosen
from xorflow.experiments.scores import posterior_argmax

__all__ = [
    "BUDGETS",
    "PAPER_TABLE",
    "REFERENCES",
    "ROWS",
    "Budget",
    "PaperRow",
    "Planned",
    "Reference",
    "Reproduction",
    "Request",
    "Row",
    "best_of_paper",
    "chosen",
    "find_budget",
    "posterior_argmax",
]
