"""Discrete data: what a data set is, bundled MNIST, and files of one's own.

A `Dataset` has up to three splits (`Split`), lives on one device, and hands out `Batch`es. Values are always
the integers 0..K_d - 1 of each feature d; a `Codec` remembers what they stood for in a CSV file.
"""

from xorflow.data.binarisation import binarise
from xorflow.data.bundled import mnist
from xorflow.data.checks import validate
from xorflow.data.codec import Codec
from xorflow.data.datasets import Dataset
from xorflow.data.loading import load
from xorflow.data.rows import load_rows, write_rows
from xorflow.data.splits import Batch, Split

__all__ = [
    "Batch",
    "Codec",
    "Dataset",
    "Split",
    "binarise",
    "load",
    "load_rows",
    "mnist",
    "validate",
    "write_rows",
]
