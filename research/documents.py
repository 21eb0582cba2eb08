"""Documents whose tables come from records: the blocks between two markers are written, never typed.

A block `name` of a Markdown file lies between the lines `<!-- name:begin -->` and `<!-- name:end -->`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from research.depth import table as depth
from research.estimators import page as estimators
from research.paper import page as paper
from research.results import line, write_bytes
from research.strong import table as strong
from xorflow import DataError

Block = Callable[[Path], str]
"""From the folder of results to the Markdown of a block."""


def demo_block(folder: Path) -> str:
    """What `make demo` reached."""
    result = json.loads((folder / "demo/result.json").read_text("utf-8"))
    test, images = result["test"], result["data"]["sizes"]["test"]
    best = min(row.nll for row in paper.PAPER_TABLE)
    rows = {
        f"negative log-likelihood of the {images:,} test images": "nats",
        "---": "---:",
        "this flow, latent": f"{test['nll']:.2f} ± {test['stderr']:.2f}",
        "this flow, deterministic": f"{test['refit_nll']:.2f} ± {test['refit_stderr']:.2f}",
        "independent pixels": f"{result['independent_nll']:.2f}",
        "the paper's best": f"{best:.2f}",
    }
    return "\n".join(line([*cells]) for cells in rows.items()).replace("| --- | ---: |", "|---|---:|")


def data_block(folder: Path) -> str:
    """The sizes of bundled MNIST's parts, and SHA-256 of the draws that evaluate."""
    data = json.loads((folder / "demo/result.json").read_text("utf-8"))["data"]
    lines = ["| part | images | SHA-256 of the binarised pixels |", "|---|---:|---|"]
    for part, rows in data["sizes"].items():
        digest = data["sha256"].get(part)
        lines.append(line([part, f"{rows:,}", f"`{digest}`" if digest else "drawn afresh for every batch"]))
    return "\n".join(lines)


def _depths(base: str) -> Block:
    return functools.partial(depth.part_block, family="autoregressive", base=base)


DOCUMENTS: dict[str, dict[str, Block]] = {
    "README.md": {"demo": demo_block, "paper": paper.essence_block, "strong": strong.headline_block},
    "docs/data.md": {"data": data_block},
    "docs/results.md": {
        "table": paper.table_block,
        "meaning": paper.meaning_block,
        "spread": paper.spread_block,
        "posterior": paper.posterior_block,
    },
    "docs/conditioners.md": {"strong": strong.strong_block},
    "docs/depth.md": {
        "fixed": _depths("fixed"),
        "learned": _depths("learned"),
    },
    "docs/which_estimator.md": {
        "best": estimators.best_block,
        "objectives": estimators.objectives_block,
        "training": estimators.training_block,
    },
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
    """What the document should say, given the results below `root`."""
    text = (root / name).read_text(encoding="utf-8")
    for block, make in DOCUMENTS[name].items():
        text = fill(text, block, make(root / "research/results"))
    return text


def update_documents(root: Path) -> list[Path]:
    """Write every block of every document; return the files that changed."""
    changed = []
    for name in DOCUMENTS:
        path, text = root / name, filled_document(root, name)
        if text != path.read_text(encoding="utf-8"):
            write_bytes(path, text.encode())
            changed.append(path)
    return changed
