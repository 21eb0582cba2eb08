"""Doors of tables through the commands: train on a file of any format, score it, sample into another, and score that."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa

from attack.damage import Chance, damaged_bytes
from attack.rule import Case, require, require_finite_scores, require_trained
from attack.tables import BINARY, TEXT, frame
from xorflow.data.tables import open_table, write_table

_TRAIN = (
    "--conditioner",
    "made:hidden=4",
    "--epochs",
    "1",
    "--batch-size",
    "32",
    "--device",
    "cpu",
    "--out",
    "run",
)


def commands(case: Case) -> None:
    """Train on a table, with options that tables have; score it and its samples; then score other tables, and damaged ones."""
    chance = case.chance
    table = frame(chance)
    data = _written(case, table, f"data{chance.choice((*BINARY, *TEXT))}")
    damaged = chance.random() < 0.3
    if damaged:
        content, what = damaged_bytes(data.read_bytes(), chance)
        case.note(what)
        data.write_bytes(content)
    trained = case.command(
        "train", "--data", data.name, *_TRAIN, *_options(table, chance), writes=("run",), stop_after=20
    )
    if trained.code != 0:
        return
    require_trained(case, case.folder / "run")
    scores = case.command("score", "run", "--data", data.name, "--json")
    header = any("header" in note for note in case.notes)  # the rows are others than the rule takes them for
    require(scores.code == 0 or damaged or header, "wrong", f"the training rows are not scored: {scores.err}")
    out = f"new{chance.choice((*BINARY, *TEXT, '.npy'))}"
    count = chance.choice((1, 2, 20))
    drawn = case.command("sample", "run", "--count", count, "--out", out, writes=(out,))
    if drawn.code == 0 and out != "new.npy":
        no_header = ("--no-header",) if out == "new.data" and data.suffix in BINARY else ()
        again = case.command("score", "run", "--data", out, "--json", *no_header)
        if again.code == 0:
            require_finite_scores(again.json())
            require(header or again.json()["rows"] == count, "wrong", "not all samples are scored")
        else:
            require(
                header or damaged or not _fits_text(table), "wrong", f"samples are not scored: {again.err}"
            )
    other = _written(case, frame(chance), f"other{chance.choice((*BINARY, *TEXT))}")
    outcome = case.command("score", "run", "--data", other.name, "--json")
    if outcome.code == 0:
        require_finite_scores(outcome.json())


def _written(case: Case, table: pa.Table, name: str) -> Path:
    path = case.folder / name
    case.note(name, table.schema.to_string().replace("\n", "; "))
    try:
        write_table(path, table, {})
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # what this format does not have
        write_table(path, pa.table({"a": ["x", "y"] * 9, "b": [*range(18)]}), {})
    return path


def _options(table: pa.Table, chance: Chance) -> tuple[str, ...]:
    name = chance.choice(table.column_names)
    return chance.choice(
        (
            (), (), (), (), ("--set", "rare=2"), ("--set", "header=true"), ("--set", "header=false"), ("--set", f"part={name}"),
            ("--validation", "0", "--set", "test=0"), ("--set", "test=0.5"), ("--set", "layers=2"),
        )
    )  # fmt: skip


def _fits_text(table: pa.Table) -> bool:
    """Whether text can hold all of it: no column is left out, and no times of day or durations, which text is not read as."""
    odd = (pa.types.is_nested, pa.types.is_binary, pa.types.is_time, pa.types.is_duration, pa.types.is_null)
    return not any(test(one.type) for one in table.schema for test in odd)


def words(case: Case) -> None:
    """A table of any words comes back in these words, where columns are of words."""
    chance = case.chance
    pool = ["a", "b b", "c,d", 'e"f', "é", "日本", "🙂", "x;y", "'q'", "#", "=1+1", "[b]", "t-u"]
    columns = {
        f"column {n}": chance.sample(pool, chance.randrange(2, 6)) for n in range(chance.randrange(2, 5))
    }
    rows = [[chance.choice(words) for words in columns.values()] for _ in range(chance.randrange(20, 60))]
    path = case.folder / "data.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows([[*columns], *rows])
    read = case.python(lambda: open_table(path, header=True).read())
    require(isinstance(read, pa.Table), "wrong", f"a good table was refused: {read}")
    found = [[*row.values()] for row in read.to_pylist()]
    require(
        found == rows and read.column_names == [*columns],
        "wrong",
        f"other words came back: {found[:3]} of {rows[:3]}",
    )
