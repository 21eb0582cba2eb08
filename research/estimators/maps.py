"""Which estimators have their variance drawn pixel by pixel, and which have not, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Part = dict[str, Any]

MOST_MAPS = 15


def choose_maps(parts: Sequence[Part], points: Sequence[str]) -> tuple[list[Part], dict[str, list[str]]]:
    """The files of one model of depth 1 at its last point, the most noisy first; and the names of all others, by reason."""
    images = [part for part in parts if part["shape"] is not None and part["depth"] == 1]
    own = [part for part in images if part["model"] == images[0]["model"]]
    last = max((part["point"] for part in own), key=points.index, default=None)
    own = [part for part in own if part["point"] == last]
    noisy = [part for part in own if any(part["variance_by_feature"])]
    near = [part for part in noisy if not _is_far_off(part["estimator"])] or noisy
    near.sort(key=lambda part: -sum(part["variance_by_feature"]))
    left_out = {
        "they have no variance": [part for part in own if part not in noisy],
        "their variance is of another order, and would leave one colour to all others": [
            part for part in noisy if part not in near
        ],
        f"{MOST_MAPS} are shown, and these have the least variance": near[MOST_MAPS:],
    }
    names = {why: sorted(part["estimator"] for part in of) for why, of in left_out.items() if of}
    return near[:MOST_MAPS], names


def _is_far_off(estimator: str) -> bool:
    """Whether its variance is of another order, so that it would leave one colour to all the others."""
    return estimator.startswith(("proposal-prefix", "special-case:rewards=all"))
