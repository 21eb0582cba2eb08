"""Flows on discrete data: the deterministic and the stochastic reading of the same layers."""

from xorflow.flows.distribution import FlowDistribution
from xorflow.flows.flow import Flow, refit_base
from xorflow.flows.latent import LatentFlow
from xorflow.flows.layer import Layer
from xorflow.flows.mixture import Mixture
from xorflow.flows.nodes import BinaryNodes, CategoricalNodes, Nodes
from xorflow.flows.reread import read_on
from xorflow.flows.sampling import SampleNoise
from xorflow.flows.stack import GREEDY, Draws, Stack
from xorflow.flows.trace import Point, Trace

__all__ = [
    "GREEDY",
    "BinaryNodes",
    "CategoricalNodes",
    "Draws",
    "Flow",
    "FlowDistribution",
    "LatentFlow",
    "Layer",
    "Mixture",
    "Nodes",
    "Point",
    "SampleNoise",
    "Stack",
    "Trace",
    "read_on",
    "refit_base",
]
