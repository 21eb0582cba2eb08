"""Objectives and estimates of their gradients; any of them trains any flow that it is defined for."""

from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.baselines import (
    Baseline,
    GreedyCritic,
    NoBaseline,
    RunningMean,
    SampledCritic,
    Standardiser,
)
from xorflow.estimators.full_posterior import FullPosterior
from xorflow.estimators.marginal import Marginal
from xorflow.estimators.proposal import ProposalPrefix
from xorflow.estimators.special_case import SpecialCase
from xorflow.estimators.straight_through import StraightThrough

__all__ = [
    "Baseline",
    "Estimator",
    "FullPosterior",
    "GreedyCritic",
    "Loss",
    "Marginal",
    "NoBaseline",
    "ProposalPrefix",
    "RunningMean",
    "SampledCritic",
    "SpecialCase",
    "Standardiser",
    "StraightThrough",
]
