"""The objective of samples: what has a gradient of its own, and what weighs which scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SampledObjective:
    """The objective of S samples of a batch.

    Attributes:
        value: the objective itself, (S, B), without gradient.
        direct: what carries a gradient that needs no score, (S, B).
        signal: the terms of the objective by feature, (S, B, T, D), without gradient.
        log_prob: the log-probabilities of the choices, (S, B, L', D), with graph.
    """

    value: Tensor
    direct: Tensor
    signal: Tensor
    log_prob: Tensor


def centred(values: Tensor) -> Tensor:
    """Each sample's value less the mean of the others, along the first dimension; a single one has no others."""
    samples = len(values)
    return values if samples == 1 else (values - values.mean(0)) * (samples / (samples - 1))


def mean_of_others(values: Tensor) -> Tensor:
    """For each sample the mean of the other samples' values, along the first dimension."""
    return (values.sum(0) - values) / (len(values) - 1)
