"""Objectives and estimates of their gradients; any of them trains any flow that it is defined for."""

from xorflow.estimators.antithetic import ARMS, DisARM
from xorflow.estimators.base import Bias, Estimator, Loss, Part, Target
from xorflow.estimators.baselines import (
    Baseline,
    FeatureScale,
    GreedyCritic,
    LeaveOneOut,
    NoBaseline,
    OneScale,
    RunningMean,
    SampledCritic,
    Standardiser,
)
from xorflow.estimators.control_variates import DoubleCV, Rebar, Relax
from xorflow.estimators.credit import (
    All,
    Credit,
    Descendants,
    Impatient,
    LocalDivergence,
    PrintedDivergence,
    PrintedRewards,
    TwoTerm,
)
from xorflow.estimators.importance import VIMCO, ProposalPrefix
from xorflow.estimators.local_expectation import LocalExpectation
from xorflow.estimators.maximum_likelihood import MaximumLikelihood
from xorflow.estimators.objectives import ELBO, Bound, Objective
from xorflow.estimators.relaxed import Concrete, ReinMax, StraightThrough, StraightThroughGumbel
from xorflow.estimators.score_function import Analytic, ScoreFunction

__all__ = [
    "ARMS",
    "ELBO",
    "VIMCO",
    "All",
    "Analytic",
    "Baseline",
    "Bias",
    "Bound",
    "Concrete",
    "Credit",
    "Descendants",
    "DisARM",
    "DoubleCV",
    "Estimator",
    "FeatureScale",
    "GreedyCritic",
    "Impatient",
    "LeaveOneOut",
    "LocalDivergence",
    "LocalExpectation",
    "Loss",
    "MaximumLikelihood",
    "NoBaseline",
    "Objective",
    "OneScale",
    "Part",
    "PrintedDivergence",
    "PrintedRewards",
    "ProposalPrefix",
    "Rebar",
    "ReinMax",
    "Relax",
    "RunningMean",
    "SampledCritic",
    "ScoreFunction",
    "Standardiser",
    "StraightThrough",
    "StraightThroughGumbel",
    "Target",
    "TwoTerm",
]
