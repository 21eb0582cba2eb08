"""Experiments as data: the paper's table, and what is run beside it."""

from xorflow.experiments.budgets import BUDGETS, Budget, find_budget
from xorflow.experiments.depth import DEPTH
from xorflow.experiments.depth_rows import DEPTH_ROWS, DepthRow, chosen_depths
from xorflow.experiments.paper import PAPER_TABLE, PaperRow, best_of_paper
from xorflow.experiments.reproduction import Planned, Reproduction, Request
from xorflow.experiments.rows import REFERENCES, ROWS, Reference, Row, chosen
from xorflow.experiments.scores import posterior_argmax
from xorflow.experiments.study import Study, StudyObserver, StudyRequest
from xorflow.experiments.study_estimators import parse_estimators
from xorflow.experiments.study_models import STUDY_BUDGETS, StudyBudget, find_study_budget
from xorflow.experiments.study_training import TrainingComparison

__all__ = [
    "BUDGETS",
    "DEPTH",
    "DEPTH_ROWS",
    "PAPER_TABLE",
    "REFERENCES",
    "ROWS",
    "STUDY_BUDGETS",
    "Budget",
    "DepthRow",
    "PaperRow",
    "Planned",
    "Reference",
    "Reproduction",
    "Request",
    "Row",
    "Study",
    "StudyBudget",
    "StudyObserver",
    "StudyRequest",
    "TrainingComparison",
    "best_of_paper",
    "chosen",
    "chosen_depths",
    "find_budget",
    "find_study_budget",
    "parse_estimators",
    "posterior_argmax",
]
