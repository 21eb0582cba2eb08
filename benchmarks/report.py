"""Tables and plots of all results: `python benchmarks/report.py` fills docs/performance.md from benchmarks/results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

Results = dict[str, dict[str, Any]]
"""By the name of the file: what it holds."""

FIGURE_KEYS = {
    "id",
    "value",
    "unit",
    "reference",
    "reference_value",
    "ratio",
    "target",
    "met",
    "ratio_needed",
}
CURVE_KEYS = {"id", "against", "sizes", "seconds", "exponent", "fitted", "held"}

AXES = {"D": "features D", "L": "layers L", "B": "batch B", "S": "draws S"}
BLUE, ORANGE, GREY = "#3b6ea5", "#d9822b", "#666666"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    write(load(arguments.results), arguments.docs)


def load(folder: Path) -> Results:
    """All results of a folder, checked."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for name, result in results.items():
        check(name, result)
    return results


def check(name: str, result: dict[str, Any]) -> None:
    """Refuse results that lack something."""
    missing = {"machine", "versions", "figures", "scaling", "profile"} - set(result)
    for kind, keys in (("figures", FIGURE_KEYS), ("scaling", CURVE_KEYS)):
        for entry in result.get(kind, ()):
            missing |= {f"{entry.get('id', '?')}.{key}" for key in keys - set(entry)}
    if missing:
        raise ValueError(
            f"{name}.json lacks {', '.join(sorted(missing))}; measure again with benchmarks/run.py"
        )


def write(results: Results, docs: Path) -> None:
    """The marked block of performance.md, and one plot of figures and one of curves for each machine."""
    page = docs / "performance.md"
    page.write_text(filled(page.read_text(), block(results)))
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        save(plot_figures(result), images / f"performance_figures_{name}.png")
        save(plot_scaling(result), images / f"performance_scaling_{name}.png")


def filled(text: str, content: str) -> str:
    """`text` with `content` between its two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"the page needs the lines {BEGIN} and {END}, in this order, for the results to go between"
        )
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


# ---- tables ----


def block(results: Results) -> str:
    """What stands between the markers."""
    return "\n\n".join(section(name, result) for name, result in results.items()) or "No results yet."


def section(name: str, result: dict[str, Any]) -> str:
    """One machine's figures that have a target, and plots, which show all figures and how cost grows."""
    figures = result["figures"]
    aimed = [figure for figure in figures if figure["target"] is not None]
    met = sum(figure["met"] for figure in aimed)
    heading = f"### {name}\n\n{_machine(result)} {met} of {len(aimed)} targets met."
    plots = [
        f"![Ratios to the references on {name}](images/performance_figures_{name}.png)",
        f"![How cost grows on {name}](images/performance_scaling_{name}.png)",
    ]
    shown = [figure for figure in aimed if not figure["id"].endswith(("-passes", "-blocks"))]
    profile = f"Where the time goes: the profile in [benchmarks/results/{name}.json](../benchmarks/results/{name}.json)."
    parts = [
        heading,
        _figure_table(shown),
        plots[0],
        plots[1],
        profile,
    ]
    return "\n\n".join(part for part in parts if part)


def _machine(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    device = machine.get("gpu") or f"{machine['cpu']}, {_plural(machine['threads'], 'thread')}"
    known = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"{device}; {known}."


def _figure_table(figures: list[dict[str, Any]]) -> str:
    rows = (
        (
            f"`{figure['id']}`",
            f"{_short(figure['value'])} {figure['unit']}",
            figure["reference"],
            _short(figure["ratio"]),
            (figure["target"] or "") + (" **missed**" if figure["met"] is False else ""),
        )
        for figure in figures
    )
    return _table(("figure", "value", "reference", "ratio", "target"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---- plots ----


def plot_figures(result: dict[str, Any]) -> Canvas:
    """Bars from the reference (1) to the ratio, and a mark where the target would be met."""
    figures = result["figures"][::-1]
    canvas = Canvas(figsize=(8, 1.2 + 0.34 * len(figures)), layout="constrained")
    axes = canvas.add_subplot()
    for place, figure in enumerate(figures):
        missed = figure["met"] is False
        axes.barh(place, figure["ratio"] - 1, left=1, height=0.6, color=ORANGE if missed else BLUE)
        if figure["ratio_needed"] is not None:
            axes.plot([figure["ratio_needed"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
        right = max(figure["ratio"], figure["ratio_needed"] or 0, 1)
        axes.annotate(
            f"{_short(figure['ratio'])}x",
            (right, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(figures)), [figure["id"] for figure in figures], fontsize=8)
    axes.set_xlabel("ratio to the reference of the same run (right of 1: faster); black: target")
    axes.set_title(_machine(result).partition(";")[0], fontsize=10)
    _plain(axes)
    return canvas


def plot_scaling(result: dict[str, Any]) -> Canvas:
    """Seconds against each size, log-log; dashed, the power law fitted to the upper half."""
    curves = result["scaling"]
    kinds = list(dict.fromkeys(curve["against"] for curve in curves)) or ["D"]
    canvas = Canvas(figsize=(9, 3.2 * -(-len(kinds) // 2)), layout="constrained")
    for index, kind in enumerate(kinds):
        axes = canvas.add_subplot(-(-len(kinds) // 2), 2, index + 1)
        for curve, colour in zip(
            [c for c in curves if c["against"] == kind], (BLUE, ORANGE, GREY), strict=False
        ):
            _draw_curve(axes, curve, colour)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(AXES.get(kind, kind))
        axes.set_ylabel("seconds")
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)
    canvas.suptitle(f"{_machine(result).partition(';')[0]}; dashed: fitted", fontsize=10)
    return canvas


def _draw_curve(axes: Any, curve: dict[str, Any], colour: str) -> None:
    kind, power = curve["against"], curve["exponent"]
    label = f"{curve['id'].partition('-')[0]}, ~ ${kind}^{{{power:.2f}}}$"
    axes.plot(curve["sizes"], curve["seconds"], "o-", markersize=4, color=colour, label=label)
    upper = [(x, t) for x, t in zip(curve["sizes"], curve["seconds"], strict=True) if x >= curve["fitted"][0]]
    # least squares in logarithms passes through the means
    centre = [_geometric_mean(values) for values in zip(*upper, strict=True)]
    ends = [upper[0][0], upper[-1][0]]
    axes.plot(ends, [centre[1] * (x / centre[0]) ** power for x in ends], "--", linewidth=1, color="black")


def _geometric_mean(values: Iterable[float]) -> float:
    product, count = 1.0, 0
    for value in values:
        product, count = product * value, count + 1
    return product ** (1 / count)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="both", linewidth=0.3, color="#bbbbbb")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def save(canvas: Canvas, path: Path) -> None:
    canvas.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
