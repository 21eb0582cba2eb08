"""Flows on discrete data: latent and deterministic flows on the same layers."""

from xorflow.flows.choices import BinaryChoices, CategoricalChoices, Choices
from xorflow.flows.distribution import FlowDistribution
from xorflow.flows.flow import Flow, refit_base
from xorflow.flows.latent import LatentFlow
from xorflow.flows.layer import Layer
from xorflow.flows.mixture import Mixture
from xorflow.flows.rebase import with_base
from xorflow.flows.sampling import SampleNoise
from xorflow.flows.stack import GREEDY, Draws, Stack
from xorflow.flows.trace import Point, Trace

__all__ = [
    "GREEDY",
    "BinaryChoices",
    "CategoricalChoices",
    "Choices",
    "Draws",
    "Flow",
    "FlowDistribution",
    "LatentFlow",
    "Layer",
    "Mixture",
    "Point",
    "SampleNoise",
    "Stack",
    "Trace",
    "refit_base",
    "with_base",
]
