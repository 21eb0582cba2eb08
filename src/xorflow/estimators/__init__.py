"""Objectives and estimates of their gradients; any of them trains any flow that it is defined for."""

from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.marginal import Marginal
from xorflow.estimators.straight_through import StraightThrough

__all__ = ["Estimator", "Loss", "Marginal", "StraightThrough"]
