"""All that is measured on a kind of device, in order, with the ids of its figures."""

from __future__ import annotations

import figures_bound
import figures_sampling
import figures_training
from measures import MEASURES, Measure

_ORDER = [module.__name__ for module in (figures_training, figures_sampling, figures_bound)]


def for_device(kind: str) -> list[Measure]:
    """What is measured on a `cpu` or on `cuda`."""
    declared = [measure for measure in MEASURES if measure.device == kind]
    return sorted(declared, key=lambda measure: _ORDER.index(measure.act.__module__))
