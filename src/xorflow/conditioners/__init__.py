"""Networks from what a layer may see to the logits of its choice `u`."""

from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.conditioners.boosted_trees import BoostedTrees
from xorflow.conditioners.boosting import Boosting
from xorflow.conditioners.linear import MaskedLinear
from xorflow.conditioners.made import MADE
from xorflow.conditioners.mlp import MLP, Coupling, Diagonal
from xorflow.conditioners.orderings import coupling_mask, ranks, resolve_order
from xorflow.conditioners.recurrent import Recurrent
from xorflow.conditioners.sequence import SequenceConditioner
from xorflow.conditioners.stacked import Stacked
from xorflow.conditioners.transformer import CausalTransformer

__all__ = [
    "MADE",
    "MLP",
    "BoostedTrees",
    "Boosting",
    "CausalTransformer",
    "Conditioner",
    "Coupling",
    "Dependence",
    "Diagonal",
    "MaskedLinear",
    "Recurrent",
    "SequenceConditioner",
    "Source",
    "Stacked",
    "coupling_mask",
    "ranks",
    "resolve_order",
]
