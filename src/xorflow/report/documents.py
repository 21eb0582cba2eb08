"""Documents whose numbers come from result files: the blocks between two markers are written, never typed.

A block `name` of a Markdown file lies between the lines `<!-- name:begin -->` and `<!-- name:end -->`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from xorflow.errors import DataError
from xorflow.report.depth_blocks import depth_block, depth_headline_block, depth_in_short_block
from xorflow.report.paper_blocks import (
    details_block,
    essence_block,
    meaning_block,
    table_block,
    verdict_block,
)
from xorflow.report.strong import on_cores_block, strong_block, strong_headline_block
from xorflow.report.study_advice import advice_block
from xorflow.report.study_blocks import study_block
from xorflow.report.summary import reported_part, run_figures
from xorflow.training.storage import read_json, write_bytes

Block = Callable[[Path], str]
"""From the folder of results to the Markdown of a block."""


def demo_block(results: Path) -> str:
    """What `make demo` reached, what each figure is, and what it cost."""
    result = read_json(results / "demo/result.json", "the result of the demo")
    cost = read_json(results / "demo/cost.json", "the cost of the demo")
    part = reported_part(result)
    if part is None:
        raise DataError(
            f"{results / 'demo/result.json'} has no likelihood of held-out data; run make demo again"
        )
    rows = json.loads((results / "paper.json").read_text(encoding="utf-8"))
    figures = run_figures(result, part, min(row["nll"] for row in rows))
    images = f"{result['data']['sizes'][part]:,} {part} images"
    lines = [f"| negative log-likelihood of the {images} | nats |", "|---|---:|"]
    lines += [f"| {figure.name} | {figure.value} |" for figure in figures]
    lines += ["", *(f"- {figure.meaning}" for figure in figures)]
    epochs, weights = result["epochs"], f"{result['parameters']:,}"
    lines += [
        "",
        f"Measured: {epochs} epochs of a network with {weights} weights, {cost['wall_seconds']} s in all "
        f"and {cost['peak_gigabytes']} GB of memory at the peak, on {cost['cores']} cores without a GPU.",
    ]
    return "\n".join(lines)


def data_block(results: Path) -> str:
    """The sizes of bundled MNIST's parts, and SHA-256 of the draws that evaluate."""
    data = read_json(results / "demo/result.json", "the result of the demo")["data"]
    lines = ["| part | images | SHA-256 of the binarised pixels |", "|---|---:|---|"]
    for part, rows in data["sizes"].items():
        digest = data["sha256"].get(part)
        lines.append(f"| {part} | {rows:,} | {f'`{digest}`' if digest else 'drawn afresh for every batch'} |")
    return "\n".join(lines)


DOCUMENTS: dict[str, dict[str, Block]] = {
    "README.md": {
        "demo": demo_block,
        "paper": essence_block,
        "depth": depth_headline_block,
        "strong": strong_headline_block,
    },
    "docs/data.md": {"data": data_block},
    "docs/results.md": {
        "verdict": verdict_block,
        "table": table_block,
        "meaning": meaning_block,
        "depth": depth_in_short_block,
        "details": details_block,
    },
    "docs/conditioners.md": {"cores": on_cores_block, "strong": strong_block},
    "docs/depth.md": {"depth": depth_block},
    "docs/which_estimator.md": {"advice": advice_block, "study": study_block},
}
"""By file, below the root of the project: its blocks."""


def fill(text: str, name: str, content: str) -> str:
    """The text with a new content of block `name`.

    >>> fill("a\\n<!-- x:begin -->\\nold\\n<!-- x:end -->\\nb", "x", "new").splitlines()
    ['a', '<!-- x:begin -->', 'new', '<!-- x:end -->', 'b']
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise DataError(f"a document has the lines {begin.strip()} and {end} once each, in this order")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{content}\n{end}{rest.partition(end)[2]}"


def filled_document(root: Path, name: str) -> str:
    """What the document should say, given the result files below `root`."""
    text = (root / name).read_text(encoding="utf-8")
    for block, make in DOCUMENTS[name].items():
        text = fill(text, block, make(root / "results"))
    return text


def update_documents(root: Path) -> list[Path]:
    """Write every block of every document; return the files that changed."""
    changed = []
    for name in DOCUMENTS:
        path, text = root / name, filled_document(root, name)
        if text != path.read_text(encoding="utf-8"):
            write_bytes(path, text.encode(), "make the folder writable")
            changed.append(path)
    return changed
