"""Discrete data: what a data set is, bundled MNIST, and files of one's own.

A `Dataset` has up to three splits (`Split`), lives on one device, and hands out `Batch`es. Values are always
the integers 0..K_d - 1 of each feature d; a `Schema` knows what they stand for in a table.
"""

from xorflow.data.bundled import mnist
from xorflow.data.checks import validate
from xorflow.data.dataset import Batch, Dataset, Split, binarise
from xorflow.data.files import READABLE, load, load_rows, write_rows
from xorflow.data.schema import Schema

__all__ = [
    "READABLE",
    "Batch",
    "Dataset",
    "Schema",
    "Split",
    "binarise",
    "load",
    "load_rows",
    "mnist",
    "validate",
    "write_rows",
]
