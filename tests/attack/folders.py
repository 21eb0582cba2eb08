"""Doors of folders: many files scored, whole, damaged and odd ones; samples without end; and the same command again."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from attack.damage import damaged_bytes, damaged_json, json_bytes
from attack.rule import (
    Case,
    Outcome,
    contents,
    require,
    require_finite_scores,
    require_trained,
    strict_json,
)
from attack.tables import frame
from tiny_runs import people_file, rows_file
from xorflow.data.tables import open_table, write_table

_NAMES = ("a", "b", "c d", "é🙂", "x.y", "[z]", "_x", ".x", "a*", "-", "below/a", "below/b", "a.csv")
_OPTIONS = (
    (), (), (), ("--flow", "deterministic"), ("--samples", "2"), ("--memory", "50MB"), ("--json",), ("--json",),
    ("--flow", "refitted"), ("--memory", "1"), ("--header",), ("--no-header",), ("--force",), ("--jobs", "0"),
    ("--engine", "none"), ("--device", "cuda:7"),
)  # fmt: skip


def score(case: Case) -> None:
    """Score what a folder or a pattern names, again, and with what may not go on there."""
    chance, kind = case.chance, case.chance.choice(("table", "mixture", "deep"))
    run = case.world.copy(kind, case.folder / "run")
    for name in chance.sample(_NAMES, chance.choice((0, 1, 2, 2, 3, 4))):
        _write(case, case.folder / f"rows/{name}", kind)
    data = chance.choice(
        ("rows", "rows/*", "rows/**/*", "rows/*.parquet", "rows/[ab]*", "*/*.csv", "none*", ".", "run")
    )
    out = chance.choice((*["out"] * 9, "a/b", "rows", "run", "mine", "."))
    (case.folder / "mine").write_text("mine", encoding="utf-8")
    words = ("score", "run", "--data", data, "--out", out, "--jobs", "1", *chance.choice(_OPTIONS))
    first = case.command(*words, writes=("out", "a"))
    if first.code == 0:
        _require_scores(case, first, case.folder / out, "--json" in words)
        _again(case, words, case.folder / out)
    require((run / "config.json").exists(), "changed", "the run")


def sample(case: Case) -> None:
    """Samples in a folder, of a few rows; again, and with what may not go on there."""
    chance = case.chance
    case.world.copy(chance.choice(("table", "columns", "mixture", "deep", "images")), case.folder / "run")
    count = chance.choice(("1", "7", "2001", "0", "-3", "1e9"))
    out = chance.choice(("out", "out", "run", "a/b", "é🙂"))
    more = chance.choice(
        ((), (), ("--quote-formulas",), ("--seed", "9223372036854775807"), ("--seed", "-1"), *_OPTIONS[3:9])
    )
    words = ("sample", "run", "--count", count, "--out", out, "--jobs", "1", *more)
    if case.command(*words, writes=("out", "a", "é🙂")).code == 0:
        _again(case, words, case.folder / out)


def stream(case: Case) -> None:
    """Train on rows that stay in their files, whole, damaged and of other tables; then score some of them."""
    chance = case.chance
    table = frame(chance)
    (case.folder / "rows").mkdir()
    for name in chance.sample(("a", "b", "c d", "é🙂", "[z]"), chance.choice((1, 1, 2, 3))):
        path = case.folder / f"rows/{name}.parquet"
        rows = table if chance.random() < 0.9 else frame(chance)
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):  # what Parquet does not have
            pq.write_table(rows, path, row_group_size=chance.choice((1, 7, 1000)))
        if path.exists() and chance.random() < 0.15:
            content, what = damaged_bytes(path.read_bytes(), chance)
            case.note(name, what)
            path.write_bytes(content)
    part = chance.choice(table.column_names)
    more = chance.choice(
        (
            (),
            (),
            (),
            ("--set", "test=0"),
            ("--validation", "0"),
            ("--set", f"part={part}"),
            ("--set", "rare=3"),
        )
    )
    words = ("train", "--data", chance.choice(("rows", "rows/*.parquet", "rows/*")), *more, *_STREAMED)
    if case.command(*words, writes=("run",), stop_after=20).code == 0:
        require_trained(case, case.folder / "run")
        scored = case.command(
            "score", "run", "--data", chance.choice([*case.folder.glob("rows/*")]), "--json"
        )
        if scored.code == 0:
            require_finite_scores(scored.json())


_STREAMED = (
    *("--set", "stream=always", "--recipe", "none", "--conditioner", "made:hidden=4", "--epochs", "1"),
    *("--batch-size", "8", "--device", "cpu", "--out", "run"),
)


def _again(case: Case, words: tuple[str, ...], out: Path) -> None:
    """The same command changes nothing; another, or what it finds damaged, goes on or is refused."""
    chance, before = case.chance, contents(out)
    require(case.command(*words).code == 0, "wrong", "the same command once more is refused")
    require(contents(out) == before, "changed", "by the same command")
    other = ("--samples", "3") if words[0] == "score" else ("--seed", "3")
    require(case.command(*words, *other).code == 2, "wrong", f"goes on with {other}")
    lost = chance.choice([path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"])
    lost.unlink()
    require(
        case.command(*words, writes=(str(out.relative_to(case.folder)),)).code == 0, "wrong", "does not go on"
    )
    require(contents(out) == before, "wrong", f"{lost.name} is another one now")
    manifest = out / "manifest.json"
    value, what = damaged_json(json.loads(manifest.read_text(encoding="utf-8")), chance)
    case.note(what)
    manifest.write_bytes(json_bytes(value, chance))
    case.command(*words, writes=(str(manifest.relative_to(case.folder)),))


def _write(case: Case, path: Path, kind: str) -> None:
    """Rows of the run, seldom others, in any format, seldom damaged."""
    chance, count = case.chance, case.chance.randrange(1, 40)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "deep":
        path = rows_file(path.with_name(f"{path.name}.npy"), rows=count, seed=count)
    else:
        suffix = chance.choice((".csv", ".csv", ".parquet", ".parquet", ".feather", ".txt"))
        source = people_file(path.with_name("people.csv"), rows=count, seed=count)
        table = frame(chance) if chance.random() < 0.05 else open_table(source, header=True).read()
        source.unlink()
        path = path.with_name(path.name + suffix)
        try:
            write_table(path, table, {}) if suffix != ".txt" else path.touch()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # what this format does not have
            path.touch()
    if chance.random() < 0.1:
        content, what = damaged_bytes(path.read_bytes(), chance)
        case.note(path.name, what)
        path.write_bytes(content)


def _require_scores(case: Case, outcome: Outcome, out: Path, as_json: bool) -> None:
    """A finite number for each row of each file."""
    kept = strict_json((out / "manifest.json").read_text(encoding="utf-8"))
    tables = [pq.read_table(path) for path in out.rglob("*.parquet")]
    require(len(tables) == len(kept["data"]), "wrong", f"{len(tables)} files of scores")
    values = [value for table in tables for value in table[0].to_pylist()]
    require(all(map(math.isfinite, values)), "wrong", f"scores {values[:5]}")
    if as_json:
        require(strict_json(outcome.out)["rows"] == len(values), "wrong", "not a number for each row")
