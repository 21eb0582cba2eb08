"""The public names of xorflow, and where they are."""

from xorflow import data, estimators, evaluate
from xorflow.bases import FactorisedBase
from xorflow.conditioners import MADE, MLP, CausalTransformer, Conditioner, Coupling, Recurrent
from xorflow.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Intractable,
    ModelError,
    UserError,
)
from xorflow.evaluate import LogLikelihood
from xorflow.flows import Flow, LatentFlow, Layer, Mixture, Trace, refit_base
from xorflow.table_model import TableModel
from xorflow.training import auto_fit, fit, load, save
from xorflow.transforms import ModularAffine, ModularShift, Transform, Xor

__all__ = [
    "MADE",
    "MLP",
    "CausalTransformer",
    "CheckpointError",
    "Conditioner",
    "ConfigError",
    "Coupling",
    "DataError",
    "FactorisedBase",
    "Flow",
    "Intractable",
    "LatentFlow",
    "Layer",
    "LogLikelihood",
    "Mixture",
    "ModelError",
    "ModularAffine",
    "ModularShift",
    "Recurrent",
    "TableModel",
    "Trace",
    "Transform",
    "UserError",
    "Xor",
    "auto_fit",
    "data",
    "estimators",
    "evaluate",
    "fit",
    "load",
    "refit_base",
    "save",
]
