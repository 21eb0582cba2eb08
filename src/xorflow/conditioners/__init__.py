"""Networks from what a layer may see to the logits of its choice `u`."""

from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.conditioners.made import MADE
from xorflow.conditioners.masked import MaskedLinear
from xorflow.conditioners.mlp import MLP, Coupling
from xorflow.conditioners.orderings import coupling_mask, ranks, resolve_order

__all__ = [
    "MADE",
    "MLP",
    "Conditioner",
    "Coupling",
    "Dependence",
    "MaskedLinear",
    "Source",
    "coupling_mask",
    "ranks",
    "resolve_order",
]
