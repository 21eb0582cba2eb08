"""Doors where run folders come in: from a disk that failed, or from somebody else."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import xorflow as xf
from attack.damage import Chance, damaged_bytes, damaged_json, damaged_place, flipped, json_bytes
from attack.rule import (
    Case,
    require,
    require_finite,
    require_finite_scores,
    require_sums_to_one,
    require_trained,
    strict_json,
)
from attack.world import FINISHED
from command_line import SMALL
from xorflow import UserError
from xorflow.data import Schema
from xorflow.training import open_run
from xorflow.training.checkpoint import load_tensors, save_tensors

# ---- damage ----


def damage(case: Case, run: Path) -> str:
    """Damage one file of a run, or put a link to a folder that is not its own; returns its name."""
    if case.chance.random() < 0.05:
        return _linked_folder(case, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    # the configuration says most, and is most easily edited
    path = case.chance.choice([*files, *(path for path in files if path.suffix == ".json")])
    name = str(path.relative_to(run))
    how = case.chance.random()
    if how < 0.15:
        what = damaged_place(path, case.chance)
    elif path.suffix == ".json" and how < 0.8:
        value, what = damaged_json(json.loads(path.read_text(encoding="utf-8")), case.chance)
        path.write_bytes(json_bytes(value, case.chance))
    elif how < 0.9:
        content, what = damaged_bytes(path.read_bytes(), case.chance)
        path.write_bytes(content)
    else:
        other = case.chance.choice(files)
        what = f"the content of {other.name}"
        path.write_bytes(other.read_bytes())
    case.note(name, "after", what)
    return name


def _linked_folder(case: Case, run: Path) -> str:
    """A folder of somebody with what a run would remove there."""
    mine = case.folder / "mine"
    (mine / "step-000000001").mkdir(parents=True)
    (mine / "step-000000001/state.safetensors").write_text("mine")
    (mine / ".mine.12345678.tmp").write_text("mine")
    name = case.chance.choice(("checkpoints", "tensorboard", "checkpoints/step-000000003"))
    (run / name).parent.mkdir(exist_ok=True)
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(mine)
    case.note(name, "is a link")
    return name


# ---- doors ----


def finished(case: Case) -> None:
    """A finished run, of any kind, with one damaged file, and what reads it."""
    kind = case.chance.choice(FINISHED)
    run = case.world.copy(kind, case.folder / "run")
    case.note("run", kind)
    name = damage(case, run)
    case.chance.choice(_READERS)(case, kind, name)


def unfinished(case: Case) -> None:
    """A run to be resumed, with one damaged file."""
    run = case.world.copy("unfinished", case.folder / "run")
    damage(case, run)
    outcome = case.command("train", "--out", "run", "--resume", writes=("run",), stop_after=20)
    if outcome.code == 0:
        require_trained(case, run)


def bit_flips(case: Case) -> None:
    """One bit of the weights: every reader refuses them."""
    kind = case.chance.choice(FINISHED)
    run = case.world.copy(kind, case.folder / "run")
    path = run / "weights.safetensors"
    path.write_bytes(flipped(path.read_bytes(), case.chance))
    case.note("run", kind)
    for command in (("evaluate", "run"), ("sample", "run"), ("score", "run", "--data", _rows_of(case, kind))):
        require(case.command(*command).code == 2, "wrong", f"{command[0]} took weights with a bit flipped")
    found = case.python(lambda: xf.load(run))
    require(isinstance(found, UserError), "wrong", "load took weights with a bit flipped")


def forged(case: Case) -> None:
    """Weights that somebody changed, with the digests that belong to them: refused, or those of a distribution."""
    chance = case.chance
    kind = chance.choice(FINISHED)
    run = case.world.copy(kind, case.folder / "run")
    tensors = load_tensors(run, "weights")
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice([*tensors])
        how = chance.choice([*_FORGERIES])
        case.note(kind, name, how)
        tensors |= {name: _FORGERIES[how](tensors[name], chance)}
    if chance.random() < 0.1:
        tensors |= {chance.choice(("magic", "", "layers.9", "x" * 300)): torch.zeros(3)}
    save_tensors(run, "weights", tensors)
    readers = (_score, _sample, _evaluate, _combine) + (() if _overflows(case) else (_load,))
    chance.choice(readers)(case, kind, "config.json")


def _overflows(case: Case) -> bool:
    """Whether some rows have no likelihood: for them every command has an error, and Python has none."""
    return any("largest" in note for note in case.notes)


def forged_schema(case: Case) -> None:
    """A schema that somebody changed, with the digest that belongs to it: refused, or rows go in and out."""
    kind = case.chance.choice(("columns", "columns", "table", "mixture"))
    run = case.world.copy(kind, case.folder / "run")
    schema, config = (
        json.loads((run / name).read_text(encoding="utf-8")) for name in ("schema.json", "config.json")
    )
    for _ in range(case.chance.choice((1, 1, 2))):
        schema, what = damaged_json(schema, case.chance)
        case.note(kind, what)
    content = json_bytes(schema, case.chance)
    (run / "schema.json").write_bytes(content)
    with suppress(ValueError, RecursionError):  # it is no schema, and has no digest
        config["data_format"]["schema"] = Schema.from_json(json.loads(content)).sha256
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _sample(case, kind, "config.json")
    _score(case, kind, "config.json")
    _begin_with(case, kind, "config.json")


def _elsewhere(tensor: torch.Tensor, chance: Chance) -> torch.Tensor:
    """Random values of the same type and shape; of integers, any that the type has."""
    generator = torch.Generator().manual_seed(chance.randrange(2**32))
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * chance.choice((1.0, 30.0))
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5
    last = torch.iinfo(tensor.dtype).max
    return torch.randint(0, chance.choice((2, 9, last)), tensor.shape, generator=generator).to(tensor.dtype)


_FORGERIES: dict[str, Callable[[torch.Tensor, Chance], torch.Tensor]] = {
    "other values": _elsewhere,
    "zeros": lambda tensor, chance: torch.zeros_like(tensor),
    "the largest": lambda tensor, chance: torch.full_like(tensor, _last(tensor)),
    "not a number": lambda tensor, chance: tensor * float("nan") if tensor.is_floating_point() else tensor,
    "another type": lambda tensor, chance: tensor.to(
        chance.choice((torch.float64, torch.float16, torch.int64, torch.uint8))
    ),
    "another shape": lambda tensor, chance: chance.choice(
        (tensor.new_empty(0), tensor[None], tensor.reshape(-1), torch.tensor(1.0))
    ),
    "repeated": lambda tensor, chance: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
}


def _last(tensor: torch.Tensor) -> float | int | bool:
    if tensor.is_floating_point():
        return torch.finfo(tensor.dtype).max
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


# ---- who reads ----


def _rows_of(case: Case, kind: str) -> Path:
    world = case.world
    return {
        "images": world.images,
        "table": world.people,
        "mixture": world.people,
        "combined": world.people,
        "columns": world.columns,
    }.get(kind, world.rows)


def _as_before(name: str) -> bool:
    """Whether a damaged file is not one that says what the model is."""
    return name != "config.json"


def _score(case: Case, kind: str, name: str) -> None:
    given = ("--data", _rows_of(case, kind), "--json", "--samples", "4")
    outcome = case.command("score", "run", *given)
    if outcome.code == 0:
        scores = outcome.json()
        require_finite_scores(scores)
        if _as_before(name):
            whole = case.command("score", case.world.run(kind), *given).json()
            require(scores == whole, "wrong", "other scores than before")
        elif not _overflows(case):
            require_sums_to_one(open_run(case.folder / "run").flow)


def _evaluate(case: Case, kind: str, name: str) -> None:
    writes = ("run/result.json",) if name == "result.json" else ()  # what is incomplete is completed
    outcome = case.command("evaluate", "run", "--json", "--samples", "4", writes=writes)
    if outcome.code == 0:
        figures = outcome.json()
        require_finite(figures)
        if _as_before(name):
            whole = case.command("evaluate", case.world.run(kind), "--json", "--samples", "4").json()
            require(figures == whole, "wrong", "other likelihoods than before")


def _sample(case: Case, kind: str, name: str) -> None:
    del kind, name
    out = case.chance.choice(("out.npy", "out.csv"))
    outcome = case.command("sample", "run", "--count", "9", "--out", out, writes=("out.npy", "out.csv"))
    require(
        (case.folder / out).exists() == (outcome.code == 0),
        "wrong",
        "a file without success, or none with it",
    )


def _load(case: Case, kind: str, name: str) -> None:
    flow = case.python(lambda: xf.load(case.folder / "run"))
    if isinstance(flow, UserError):
        return
    require_sums_to_one(flow)
    if _as_before(name):
        whole = xf.load(case.world.run(kind)).state_dict()
        same = all(torch.equal(tensor, whole[key]) for key, tensor in flow.state_dict().items())
        require(same, "wrong", "other weights than before")


def _combine(case: Case, kind: str, name: str) -> None:
    del name
    runs = [case.world.run(kind), "run"]
    case.chance.shuffle(runs)
    outcome = case.command("combine", *runs, "--out", "out", "--device", "cpu", writes=("out",))
    if outcome.code == 0:
        require_trained(case, case.folder / "out")


def _resume(case: Case, kind: str, name: str) -> None:
    del kind, name
    outcome = case.command("train", "--out", "run", "--resume", writes=("run",), stop_after=20)
    if outcome.code == 0:
        result = strict_json((case.folder / "run/result.json").read_text(encoding="utf-8"))
        require(
            all(math.isfinite(result[part]["nll"]) for part in ("test", "validation") if part in result),
            "wrong",
            "NaN",
        )


def _begin_with(case: Case, kind: str, name: str) -> None:
    """A run that begins with the weights of the damaged one."""
    del name
    given = ("--data", _rows_of(case, kind), *SMALL, "--epochs", "1", "--layers", "2", "--set", "init=./run")
    outcome = case.command("train", *given, "--out", "out", writes=("out",), stop_after=20)
    if outcome.code == 0:
        require_trained(case, case.folder / "out")


_READERS: list[Callable[[Case, str, str], Any]] = [
    _score, _score, _evaluate, _evaluate, _sample, _load, _load, _combine, _resume, _begin_with
]  # fmt: skip
