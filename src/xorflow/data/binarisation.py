"""Stochastic binarisation and the order of a split: draws that are the same everywhere, from raw Philox words."""

import numpy as np

from xorflow._math import philox_raw, philox_words
from xorflow.errors import DataError

TRAIN, VALIDATION, TEST, ORDER = 0, 1, 2, 3
"""Streams of one seed: the three splits of a data set, and the order in which rows are split."""


def binarise(intensities: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Binarise grey values v in 0..255 once: x = 1 with probability v / 255, to within 2^-32.

    Pixels in row-major order take 32-bit halves of the raw words, the low half first, so that the first rows
    do not depend on how many follow. The streams in use are train = 0, validation = 1, test = 2.

    >>> binarise(np.array([0, 64, 128, 192, 255], dtype=np.uint8), seed=0, stream=2)
    array([0, 0, 0, 1, 1], dtype=uint8)
    """
    if intensities.dtype != np.uint8:
        raise DataError(
            f"binarisation takes uint8 intensities 0..255, got {intensities.dtype}; convert first"
        )
    halves = philox_words(seed, stream, 0, intensities.size).reshape(intensities.shape)
    # The byte v repeated four times is v (2^32 - 1) / 255 exactly, so r <= limit has (limit + 1) / 2^32 for
    # its probability: v / 255 + (1 - v / 255) / 2^32. Zero is excluded by hand, and 255 admits every r.
    limits = intensities.astype(np.uint32) * np.uint32(0x01010101)
    return ((halves <= limits) & (intensities > 0)).astype(np.uint8)


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0..count - 1 from the seed: the order of `count` raw words."""
    return np.argsort(philox_raw(seed, ORDER, count), kind="stable")
