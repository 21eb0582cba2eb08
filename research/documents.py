"""Documents whose tables come from records: the blocks between two markers are written, never typed.

A block `name` of a Markdown file lies between the lines `<!-- name:begin -->` and `<!-- name:end -->`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from research.debd.study import debd_table
from research.depth.table import part_table
from research.estimators.training_table import objective_table
from research.mixed.study import mixed_table
from research.paper import table as paper
from research.paper.rows import PAPER_TABLE
from research.results import Record, parsed, write_bytes
from research.strong.table import strong_tables
from research.tables import markdown_table
from xorflow import DataError

Block = Callable[[Path], str]
"""From the folder of results to the Markdown of a block."""


def _of(file: str, make: Callable[[Record], str]) -> Block:
    """A block that is made from one file of the results."""
    return lambda folder: make(parsed(folder / file))


_BESIDE = ("MADE", "PixelCNN", "PixelSNAIL", "LMConv, eight orderings", "CR-NVAE")
"""What was published, beside which ours stand on the front page."""


def reached_block(folder: Path) -> str:
    """What the library reaches beside others: exact figures from worst to best, then bounds."""
    demo = parsed(folder / "demo/result.json")
    published = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    best = min(row.nll for row in PAPER_TABLE)
    source = "frequencies of the training images"
    rows = [
        {"nll": demo["independent_nll"], "kind": "exact", "model": "independent pixels", "source": source},
        {
            "nll": best,
            "kind": "bound",
            "model": "the paper's best, on its fixed base",
            "source": "Hesselink and Aziz, 2020",
        },
        demo["test"] | {"model": "MADE, one hidden layer of 1,024", "source": "**xorflow**, `make demo`"},
        *(row for row in published if row["model"] in _BESIDE),
    ]
    for row in parsed(folder / "strong/table.json")["rows"]:
        if row["id"] != "made":  # the demo's network
            rows.append(row | {"model": row["title"], "source": f"**xorflow**, `{row['recipe']}`"})
    rows.sort(key=lambda row: (row["kind"] != "exact", -row["nll"]))
    return markdown_table("model | >NLL, nats | kind | from", map(_reached, rows))


def _reached(row: Record) -> list[str]:
    error = f" ± {row['stderr']:.2f}" if row.get("stderr") is not None else ""
    return [row["model"], f"{row['nll']:.2f}{error}", row["kind"], row["source"]]


def data_table(demo: Record) -> str:
    """The sizes of bundled MNIST's parts, and SHA-256 of the draws that evaluate."""
    digests = {part: f"`{digest}`" for part, digest in demo["data"]["sha256"].items()}
    return markdown_table(
        "part | >images | SHA-256 of the binarised pixels",
        (
            [part, f"{rows:,}", digests.get(part, "drawn afresh for every batch")]
            for part, rows in demo["data"]["sizes"].items()
        ),
    )


_MINOR = ".*(long|two|half|[48]-(natural|entropy|code)|1-(inward|entropy|wide|mixture)|4-alternating)"
"""Rows of the study of depth that its page leaves to the whole table."""

DOCUMENTS: dict[str, dict[str, Block]] = {
    "README.md": {"reached": reached_block},
    "docs/data.md": {"data": _of("demo/result.json", data_table)},
    "docs/results.md": {
        "table": _of("paper/table.json", paper.main_table),
        "posterior": _of("paper/table.json", paper.posterior_table),
    },
    "docs/conditioners.md": {"strong": _of("strong/table.json", strong_tables)},
    "docs/depth.md": {
        base: _of(
            "depth/table.json", partial(part_table, family="autoregressive", base=base, columns=7, but=_MINOR)
        )
        for base in ("fixed", "learned")
    },
    "docs/tables.md": {
        "debd": _of("debd/table.json", debd_table),
        "mixed": _of("mixed/table.json", mixed_table),
    },
    "docs/which_estimator.md": {
        "objectives": _of("estimators/table.json", objective_table),
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
