"""The block of a document that speaks about depth, from committed result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xorflow.report.depth import depth_markdown
from xorflow.report.depth_words import headline_words, short_words, verdict_words
from xorflow.training.storage import read_json

NOT_RUN = (
    "The full budget has not been run yet, so there are no figures here. `xorflow depth` makes them, and `make docs` writes "
    "them into this page."
)


def depth_block(results: Path) -> str:
    """What depth does, in words, then the picture and the tables."""
    table = _full_table(results)
    if table is None:
        return NOT_RUN
    parts = ["\n".join(f"- {line}" for line in verdict_words(table))]
    if table["missing"]:
        parts.append(f"Not run yet: {', '.join(f'`{name}`' for name in table['missing'])}.")
    if (results / "depth/depth.png").exists():
        parts.append("![Negative log-likelihood against depth](../results/depth/depth.png)")
    return "\n\n".join([*parts, depth_markdown(table, "###")])


def depth_in_short_block(results: Path) -> str:
    """What depth does, where the paper saw no use in it."""
    table = _full_table(results)
    return NOT_RUN if table is None else "\n".join(f"- {line}" for line in short_words(table))


def depth_headline_block(results: Path) -> str:
    """Whether depth pays where the paper says it does not."""
    table = _full_table(results)
    return NOT_RUN if table is None else " ".join(headline_words(table))


def _full_table(results: Path) -> dict[str, Any] | None:
    """The committed table; None if there is none, or it is of a smaller budget."""
    path = results / "depth/table.json"
    if not path.exists():
        return None
    table = read_json(path, "the table of depths")
    return table if table["budget"] == "full" and table["rows"] else None
