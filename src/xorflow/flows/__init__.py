"""Flows on discrete data: latent and deterministic flows, and their mixtures."""

from xorflow.flows.choices import Choices
from xorflow.flows.conditionals import Conditionals, Steps
from xorflow.flows.distribution import ModelDistribution
from xorflow.flows.flow import Flow, LatentFlow, refit_base
from xorflow.flows.layer import Layer
from xorflow.flows.mixture import Mixture
from xorflow.flows.model import Model
from xorflow.flows.rebase import with_base
from xorflow.flows.sampling import SampleNoise
from xorflow.flows.stack import Stack
from xorflow.flows.trace import GREEDY, Draws, Known, Point, Trace

__all__ = [
    "GREEDY",
    "Choices",
    "Conditionals",
    "Draws",
    "Flow",
    "Known",
    "LatentFlow",
    "Layer",
    "Mixture",
    "Model",
    "ModelDistribution",
    "Point",
    "SampleNoise",
    "Stack",
    "Steps",
    "Trace",
    "refit_base",
    "with_base",
]
