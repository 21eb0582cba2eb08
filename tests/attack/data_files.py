"""Doors where rows come in: a file of each format, whole and damaged, to be trained on, scored, and read back."""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attack.damage import TEXTS, Chance, damaged_bytes
from attack.rule import Case, require, require_finite_scores, require_trained
from command_line import SMALL
from xorflow import data
from xorflow.errors import DataError

TRAIN = ("train", *SMALL, "--epochs", "1", "--out", "run")

# ---- what is written, and how ----


def words_table(chance: Chance) -> list[list[str]]:
    """A table with a header, of 2 to 4 columns of 2 to 5 words each: words that CSV has to quote, and some of other scripts."""
    width, rows = chance.randrange(2, 5), chance.randrange(12, 40)
    pool = [
        "a",
        "b b",
        "c,d",
        'e"f',
        "g\nh",
        "é",
        "日本",
        "🙂",
        "-3",
        "4",
        "x;y",
        "'q'",
        "#",
        "=1+1",
        "NULL",
        "[b]",
        "nan",
        "t\tu",
    ]
    header = [f"column {n}" for n in range(width)]
    columns = [chance.sample(pool, chance.randrange(2, 6)) for _ in range(width)]
    return [header, *([chance.choice(words) for words in columns] for _ in range(rows))]


def csv_bytes(table: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue().encode()


def integers(chance: Chance, *, any_type: bool = True) -> np.ndarray:
    """Rows of integers from 0, in any type and order of memory that holds them."""
    rng = np.random.default_rng(chance.randrange(2**32))
    shape = (chance.randrange(12, 40), chance.randrange(2, 5))
    array = rng.integers(0, chance.randrange(2, 6), shape)
    kinds = ("u1", "i1", "<i2", ">i2", "<i4", ">u4", "<i8", ">i8", "<u8", "<f4", "<f8", ">f8", "?")
    array = array.astype(chance.choice(kinds) if any_type else "u1")
    return np.asfortranarray(array) if chance.random() < 0.3 else array


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=array.dtype == object)
    return buffer.getvalue()


def npz_bytes(compressed: bool, **arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def odd_array(chance: Chance) -> np.ndarray:
    """An array that is whole, and no rows of categories, or nearly."""
    makers: tuple[Callable[[], np.ndarray], ...] = (
        lambda: np.zeros((0, 3), np.int64),
        lambda: np.zeros((3, 0), np.uint8),
        lambda: np.array(3),
        lambda: np.zeros(12, np.int8),
        lambda: np.full((12, 2), np.nan),
        lambda: np.full((12, 2), np.inf),
        lambda: integers(chance) + 0.5,
        lambda: np.array([[2**63 - 1, 0]] * 12),
        lambda: np.array([[2**64 - 1, 0]] * 12, np.uint64),
        lambda: -integers(chance, any_type=False).astype(np.int64),
        lambda: np.zeros((12, 2), complex),
        lambda: np.zeros((12, 2), "M8[s]"),
        lambda: np.zeros((12, 2), [("a", "i4"), ("b", "f8")]),
        lambda: np.array([["a", "b"]] * 12),
        lambda: np.array([[{}, None]] * 12, object),
        lambda: np.zeros((12, 2, 3, 4), np.uint8),
        lambda: np.zeros((12, 2, 3), np.uint8),
        lambda: np.zeros((12, 3), np.float16),
        lambda: np.zeros((12, 3), np.longdouble),
        lambda: np.random.default_rng(0).integers(0, 2, (30, 2, 2)).astype(np.uint8),
        lambda: np.array([[1e300, 0.0]] * 12),
        lambda: np.array([[70_000, 0], [0, 1]] * 12),
    )
    return chance.choice(makers)()


# ---- doors ----


def csv_whole(case: Case) -> None:
    """A table of any words is what it was when it comes back."""
    table = words_table(case.chance)
    path = _write(case, "data.csv", csv_bytes(table))
    dataset = case.python(lambda: data.load(path, header=True))
    if isinstance(dataset, DataError):
        constant = any(len({row[d] for row in table[1:]}) < 2 for d in range(len(table[0])))
        require(constant, "wrong", f"a good table was refused: {dataset}")
        return
    _require_rows(dataset, [tuple(row) for row in table[1:]], tuple(table[0]))


def csv_damaged(case: Case) -> None:
    """A damaged table is trained on, or scored by a run on the whole one."""
    if case.chance.random() < 0.5:
        content, what = damaged_bytes(csv_bytes(words_table(case.chance)), case.chance)
        _train(case, "data.csv", content, what)
    else:
        content, what = damaged_bytes(case.world.people.read_bytes(), case.chance)
        _score(case, "table", "data.csv", content, what)


def npy_whole(case: Case) -> None:
    """An array of any type is what it was when it comes back."""
    array = integers(case.chance)
    path = _write(case, "data.npy", npy_bytes(array))
    dataset = case.python(lambda: data.load(path))
    _require_array(dataset, array)


def npy_damaged(case: Case) -> None:
    if case.chance.random() < 0.3:
        content, what = npy_bytes(odd_array(case.chance)), "odd array"
    else:
        content, what = damaged_bytes(npy_bytes(integers(case.chance)), case.chance)
        if case.chance.random() < 0.5:  # in the header, where few bytes are
            head, what = damaged_bytes(npy_bytes(integers(case.chance))[:128], case.chance)
            content = head + content[128:]
    if case.chance.random() < 0.5:
        _train(case, "data.npy", content, what)
    else:
        _score(case, "deep", "data.npy", content, what)


def npz_whole(case: Case) -> None:
    """One array, or parts that were split before, compressed or not."""
    array = integers(case.chance)
    parts = {"x": array} if case.chance.random() < 0.5 else {"train": array, "test": array[:3]}
    path = _write(case, "data.npz", npz_bytes(case.chance.random() < 0.5, **parts))
    dataset = case.python(lambda: data.load(path))
    if "x" in parts or isinstance(dataset, DataError):
        _require_array(dataset, array)
    else:
        require(np.array_equal(dataset.train.values.numpy(), array), "wrong", "other rows train")
        require(np.array_equal(dataset.test.values.numpy(), array[:3]), "wrong", "other rows test")


def npz_damaged(case: Case) -> None:
    chance = case.chance
    names = ("x", "train", "test", "validation", "y", "arr_0", "../x", "x.npy", "")
    arrays = {name: odd_array(chance) for name in chance.sample(names, chance.randrange(0, 3))}
    if chance.random() < 0.4:
        content, what = _odd_archive(chance, arrays)
    else:
        arrays |= {} if chance.random() < 0.3 else {"x": integers(chance)}
        content, what = damaged_bytes(npz_bytes(chance.random() < 0.5, **arrays), chance)
    if chance.random() < 0.5:
        _train(case, "data.npz", content, what)
    else:
        _score(case, "deep", "data.npz", content, what)


def paths(case: Case) -> None:
    """A path that leads to no file that can be read."""
    text = case.chance.choice([text for text in TEXTS if not text.startswith("-")])
    suffix = case.chance.choice(("", ".csv", ".npy", ".npz", ".CSV", ".txt"))
    name = text + suffix
    case.note("path", repr(name))
    if case.chance.random() < 0.5:
        outcome = case.command("score", case.world.run("table"), "--data", name)
    else:
        outcome = case.command(*TRAIN, "--data", name, writes=("run",))
    require(outcome.code == 2, "wrong", "there are no data, and all was well")


# ---- what is asked of them ----


def _write(case: Case, name: str, content: bytes) -> Path:
    path = case.folder / name
    path.write_bytes(content)
    return path


def _train(case: Case, name: str, content: bytes, what: str) -> None:
    case.note(what)
    _write(case, name, content)
    outcome = case.command(*TRAIN, "--data", name, writes=("run",), stop_after=20)
    if outcome.code == 0:
        require_trained(case, case.folder / "run")
    else:
        require(
            outcome.code != 2 or not (case.folder / "run").exists(),
            "made",
            "a folder of a run that never began",
        )


def _score(case: Case, kind: str, name: str, content: bytes, what: str) -> None:
    case.note(what)
    _write(case, name, content)
    outcome = case.command("score", case.world.run(kind), "--data", name, "--json", "--samples", "4")
    if outcome.code == 0:
        require_finite_scores(outcome.json())


def _odd_archive(chance: Chance, arrays: dict[str, np.ndarray]) -> tuple[bytes, str]:
    """A zip file, whole, that numpy did not write."""
    buffer = io.BytesIO()
    method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", npy_bytes(array))
        for name in chance.sample(
            ("readme.txt", "x.npy", "folder/", "é.npy", "x" * 300, "train.npy"), chance.randrange(3)
        ):
            archive.writestr(name, chance.choice((b"", b"text", bytes(100_000), chance.randbytes(50))))
    content = buffer.getvalue()
    return damaged_bytes(content, chance) if chance.random() < 0.3 else (content, "odd archive")


def _require_array(dataset: Any, array: np.ndarray) -> None:
    rows = array.astype(np.int64)
    if isinstance(dataset, DataError):
        constant = bool((rows == rows[0]).all(0).any())
        require(constant, "wrong", f"a good array was refused: {dataset}")
        return
    values = np.concatenate([split.values.numpy() for split in dataset.parts.values()])
    require(
        sorted(map(tuple, values.tolist())) == sorted(map(tuple, rows.tolist())),
        "wrong",
        "other rows came back",
    )


def _require_rows(dataset: data.Dataset, rows: list[tuple[str, ...]], names: tuple[str, ...]) -> None:
    schema = dataset.schema
    assert schema is not None
    require(schema.order == names, "wrong", f"the columns are {schema.order}")
    require(sum(map(len, dataset.parts.values())) == len(rows), "wrong", "other rows came back")
    require(math.prod(dataset.categories) > 0, "wrong", "no categories")
