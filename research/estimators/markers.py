"""Markers of estimators in the pictures of the study: one colour for a family, one marker for each of its variants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_COLOURS = {
    "score-function": "tab:blue",
    "leave-one-out": "tab:orange",
    "vimco": "tab:green",
    "disarm": "tab:red",
    "arms": "tab:purple",
    "double-cv": "tab:brown",
    "rebar": "tab:pink",
    "relax": "tab:olive",
    "elbo": "tab:cyan",
    "maximum-likelihood": "black",
    "analytic": "dimgrey",
    "local-expectation": "goldenrod",
    "proposal-prefix": "navy",
    "straight-through": "lime",
    "reinmax": "teal",
    "st-gumbel": "darkviolet",
    "concrete": "saddlebrown",
}
PRINTED = 200
"""Dots per inch: enough for a paper."""
_MARKERS = "osD^vP*X<>"
_COLUMNS = 3


def _family(text: str) -> str:
    """Whose colour an estimator has: score functions are three families, several samples one of them.

    >>> _family("score-function:objective=elbo,baseline=greedy"), _family("vimco:samples=2")
    ('elbo', 'vimco')
    """
    name, _, settings = text.partition(":")
    if name != "score-function":
        return name
    if "baseline=leave-one-out" in settings:
        return "leave-one-out"
    return "elbo" if "objective=elbo" in settings else name


class Markers:
    """The marker of each estimator of a picture."""

    def __init__(self, estimators: Iterable[str]) -> None:
        self.names = sorted(set(estimators))
        self._variants: dict[str, list[str]] = {}
        for text in self.names:
            self._variants.setdefault(_family(text), []).append(text)

    def _of(self, text: str) -> dict[str, Any]:
        family = _family(text)
        marker = _MARKERS[self._variants[family].index(text) % len(_MARKERS)]
        return {"color": _COLOURS.get(family, "grey"), "marker": marker, "linestyle": ""}

    def put(self, axes: Axes, at: Sequence[float], text: str, *, filled: bool = True) -> None:
        """Draw an estimator; a white edge tells markers apart that lie on each other."""
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.4} if filled else {"markerfacecolor": "none"}
        look: dict[str, Any] = self._of(text) | edge
        axes.plot([at[0]], [at[1]], markersize=6.5, **look)

    def add_legend(self, figure: Figure) -> None:
        """Below the panels, so that they have the width of a page."""
        handles: list[Artist] = [Line2D([], [], label=text, **self._of(text)) for text in self.names]
        figure.legend(handles=handles, loc="outside lower center", ncols=_COLUMNS, frameon=False, fontsize=8)


def legend_height(count: int) -> float:
    """Inches of a legend with so many entries."""
    return 0.3 + 0.165 * -(-count // _COLUMNS)
