"""Objectives and estimates of their gradients; any of them trains any flow that it is defined for."""

from xorflow.estimators.analytic import Analytic
from xorflow.estimators.arms import ARMS
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.baselines import (
    Baseline,
    GreedyCritic,
    NoBaseline,
    RunningMean,
    SampledCritic,
    Standardiser,
)
from xorflow.estimators.concrete import Concrete, StraightThroughGumbel
from xorflow.estimators.disarm import DisARM
from xorflow.estimators.double_cv import DoubleCV
from xorflow.estimators.full_posterior import FullPosterior
from xorflow.estimators.leave_one_out import LeaveOneOut
from xorflow.estimators.local_expectation import LocalExpectation
from xorflow.estimators.maximum_likelihood import MaximumLikelihood
from xorflow.estimators.proposal import ProposalPrefix
from xorflow.estimators.rebar import Rebar
from xorflow.estimators.reinmax import ReinMax
from xorflow.estimators.relax import Relax
from xorflow.estimators.special_case import SpecialCase
from xorflow.estimators.straight_through import StraightThrough
from xorflow.estimators.vimco import VIMCO

__all__ = [
    "ARMS",
    "VIMCO",
    "Analytic",
    "Baseline",
    "Concrete",
    "DisARM",
    "DoubleCV",
    "Estimator",
    "FullPosterior",
    "GreedyCritic",
    "LeaveOneOut",
    "LocalExpectation",
    "Loss",
    "MaximumLikelihood",
    "NoBaseline",
    "ProposalPrefix",
    "Rebar",
    "ReinMax",
    "Relax",
    "RunningMean",
    "SampledCritic",
    "SpecialCase",
    "Standardiser",
    "StraightThrough",
    "StraightThroughGumbel",
]
