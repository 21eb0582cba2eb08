"""Documents whose tables come from records: the blocks between two markers are written, never typed.

A block `name` of a Markdown file lies between the lines `<!-- name:begin -->` and `<!-- name:end -->`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from research import option_tables
from research.depth import table as depth
from research.estimators import page as estimators
from research.paper import page as paper
from research.results import full_table, line, write_bytes
from research.strong import table as strong
from xorflow import DataError

Block = Callable[[Path], str]
"""From the folder of results to the Markdown of a block."""


_BESIDE = ("MADE", "PixelCNN", "PixelSNAIL", "LMConv, eight orderings", "CR-NVAE")
"""What was published, beside which ours stand on the front page."""


def reached_block(folder: Path) -> str:
    """What the library reaches beside others: exact figures from worst to best, then bounds."""
    demo = json.loads((folder / "demo/result.json").read_text("utf-8"))
    published = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    test, best = demo["test"], min(row.nll for row in paper.PAPER_TABLE)
    rows = [
        (demo["independent_nll"], None, "exact", "independent pixels", "frequencies of the training images"),
        (best, None, "bound", "the paper's best, on its fixed base", "Hesselink and Aziz, 2020"),
        (
            test["nll"],
            test["stderr"],
            test["kind"],
            "MADE, one hidden layer of 1,024",
            "**xorflow**, `make demo`",
        ),
    ]
    for row in full_table(folder, "strong")["rows"]:
        if row["id"] != "made":  # the demo's network
            source = f"**xorflow**, `{row['recipe']}`"
            rows.append((row["nll"], row["stderr"], row["kind"], row["title"], source))
    for row in published:
        if row["model"] in _BESIDE:
            rows.append((row["nll"], None, row["kind"], row["model"], row["source"]))
    rows.sort(key=lambda row: (row[2] != "exact", -row[0]))
    lines = ["| model | NLL, nats | kind | from |", "|---|---:|---|---|"]
    for nll, error, kind, model, source in rows:
        value = f"{nll:.2f}" if error is None else f"{nll:.2f} ± {error:.2f}"
        lines.append(line([model, value, kind, source]))
    return "\n".join(lines)


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
    "README.md": {"reached": reached_block},
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
    "docs/options.md": option_tables.BLOCKS,
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
