"""Flows on discrete data: latent and deterministic flows, and their mixtures."""

from xorflow.flows.choices import GREEDY, Choices, Draws
from xorflow.flows.conditionals import Conditionals, Steps
from xorflow.flows.flow import Flow, LatentFlow, Stack
from xorflow.flows.layer import Layer, Point, Trace
from xorflow.flows.mixture import Mixture
from xorflow.flows.model import Model, ModelDistribution, SampleNoise
from xorflow.flows.rebase import refit_base, with_base

__all__ = [
    "GREEDY",
    "Choices",
    "Conditionals",
    "Draws",
    "Flow",
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
