"""Run folders that are missing, damaged, foreign, newer or in use; disks that are full; memory that is not there."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import SMALL, Command, Outcome, finish, start
from tiny_runs import DEEP, StopAt, assert_same_run, people_file, tiny_options, train_run
from xorflow.training import Interrupted


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(run: Path, **changes: object) -> None:
    path = run / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8")


def truncate(path: Path, keep: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def other_weights(run: Path) -> None:
    """Weights of another width than the configuration's."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["model"]["layers"][0]["conditioner"]["hidden"] = [17]
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "RUN is the folder of a run, and there is no folder"),
    "foreign": (lambda run: (run / "config.json").unlink(), "the run's configuration is missing"),
    "not JSON": (lambda run: truncate(run / "config.json"), "the run's configuration is damaged"),
    "newer": (
        lambda run: edit(run, version=8, model=None),
        "has version 8, and this xorflow reads",
    ),
    "older": (
        lambda run: edit(run, version=3, hidden=[16]),
        "and this xorflow reads",
    ),
    "oldest": (
        lambda run: edit(run, version=1, model=None),
        "and this xorflow reads",
    ),
    "no version": (lambda run: edit(run, version=None), "has version None, and this xorflow reads"),
    "no model": (lambda run: edit(run, model=None), "lacks 'model'"),
    "a key of the future": (lambda run: edit(run, magic=True), "there is no option 'magic'"),
    "strange model": (lambda run: edit(run, model={"layers": 1}), "is not one that this version can build"),
    "truncated weights": (lambda run: truncate(run / "weights.safetensors"), "weights are damaged"),
    "empty weights": (lambda run: truncate(run / "weights.safetensors", 0), "weights are damaged"),
    "no weights": (lambda run: (run / "weights.safetensors").unlink(), "weights are missing"),
    "weights of another model": (other_weights, "are not those of its configuration"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_run_is_refused_by_every_command(
    people: Path, tmp_path: Path, xorflow: Command, case: str
) -> None:
    run, (damage, words) = tmp_path / "run", BROKEN[case]
    shutil.copytree(people / "run", run)
    damage(run)
    before = contents(run)
    for name, extra in (("evaluate", ()), ("sample", ()), ("score", ("--data", people / "people.csv"))):
        assert words in xorflow(name, run, *extra).refused()
    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["run"] if run.exists() else [])


@pytest.mark.parametrize(
    "damage",
    [
        {"test": {"kind": "a guess"}},
        {"test": {"kind": "lower bound"}},  # of no number of samples
        {"test": {"refit_stderr": []}},
        {"independent_nll": None},
        {"data": {"shape": 4}},
        {"warning": ["none"]},
    ],
    ids=str,
)
def test_a_result_is_whole_or_refused(
    people: Path, tmp_path: Path, xorflow: Command, damage: dict[str, object]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(people / "run", run)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    for key, value in damage.items():
        result[key] = result[key] | value if isinstance(value, dict) else value
    (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
    for command in (("train", "--resume"), ("combine", run, run)):
        said = xorflow(*command, "--out", run if command[0] == "train" else tmp_path / "both").refused()
        assert "result.json is damaged: " in said


@pytest.mark.parametrize("where", ["names", "values"])
def test_names_that_no_file_can_have_are_refused(
    people: Path, tmp_path: Path, xorflow: Command, where: str
) -> None:
    """JSON knows halves of letters; UTF-8 does not."""
    run = tmp_path / "run"
    shutil.copytree(people / "run", run)
    kept = json.loads((run / "schema.json").read_text(encoding="utf-8"))
    if where == "names":
        kept["order"][0] = kept["columns"][0]["name"] = "\ud800"
    else:
        kept["columns"][0]["values"][-1] = "\ud800"
    (run / "schema.json").write_text(json.dumps(kept), encoding="utf-8")
    assert "restore" in xorflow("sample", run, "--out", tmp_path / "new.csv").refused()


LONG = {"long": "n" * 300, "deep": "a/" * 3000}
NO_NAMES = LONG | {"zero": "\0", "no text": "\ud800"}  # these two no command line can have


@pytest.mark.parametrize("case", LONG)
def test_names_that_no_file_has(people: Path, tmp_path: Path, xorflow: Command, case: str) -> None:
    run, data, out, name = people / "run", people / "people.csv", tmp_path / "out", LONG[case]
    for command in (
        ("evaluate", name),
        ("combine", name, run, "--out", out),
        ("sample", run, "--out", f"{name}.csv"),
        ("score", run, "--data", f"{name}.csv"),
        ("train", "--data", name, "--out", out),
        ("train", "--config", f"{name}.toml", "--out", out),
        ("train", "--data", data, "--out", f"{name}/{name}"),
        ("train", "--resume", "--out", name),
        ("train", "--resume", "--seeds", "0", "--data", data, "--out", name),
        ("train", "--set", f"init=./{name}", "--data", data, "--out", out),
    ):
        xorflow(*command).refused()


@pytest.mark.parametrize("case", NO_NAMES)
def test_names_in_a_configuration_that_no_file_has(
    people: Path, tmp_path: Path, xorflow: Command, case: str
) -> None:
    shutil.copytree(people / "run", tmp_path / "run")
    edit(tmp_path / "run", data=NO_NAMES[case])
    xorflow("evaluate", tmp_path / "run").refused()


def test_a_file_is_no_run(people: Path, xorflow: Command) -> None:
    assert "RUN is the folder of a run" in xorflow("evaluate", people / "people.csv").refused()


def test_an_unfinished_run_says_how_to_finish_it(tmp_path: Path, rows: Path, xorflow: Command) -> None:
    with pytest.raises(Interrupted):
        train_run(tiny_options(rows), tmp_path / "run", StopAt({3}))
    before = contents(tmp_path / "run")
    for name in ("evaluate", "sample"):
        said = xorflow(name, tmp_path / "run").refused()
        assert f"not finished; continue it with: xorflow train --out {tmp_path / 'run'} --resume" in said
    changed = xorflow("train", "--out", tmp_path / "run", "--resume", "--lr", "0.5").refused()
    assert "lr is 0.001" in changed
    assert "0.5 here" in changed
    assert contents(tmp_path / "run") == before
    assert xorflow("train", "--out", tmp_path / "run", "--resume", "--device", "cpu").code == 0
    assert xorflow("evaluate", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step-000000002", "tensorboard", "metrics.jsonl"]
)
def test_a_run_that_goes_on_touches_nothing_elsewhere(
    tmp_path: Path, rows: Path, xorflow: Command, name: str
) -> None:
    """Checkpoints that are not the last are removed, and half-written files: behind a link they would be another's."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    with pytest.raises(Interrupted):
        train_run(tiny_options(rows, epochs=2, checkpoint_seconds=0, tensorboard=True), run, StopAt({3}))
    if (run / name).is_file():
        mine.write_text('{"epoch": 1}\n', encoding="utf-8")
        (run / name).unlink()
    else:
        (mine / "step-000000001").mkdir(parents=True)
        (mine / "step-000000001/precious").write_text("mine")
        (mine / ".half.12345678.tmp").write_text("mine")
        shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(mine)
    before = contents(tmp_path)
    said = xorflow("train", "--out", run, "--resume")
    assert said.code == 2
    assert "is a link to another place; copy the file there" in said.err
    assert contents(tmp_path) == before


def test_evaluation_needs_the_data_of_the_training(tmp_path: Path, xorflow: Command) -> None:
    data = people_file(tmp_path / "people.csv")
    assert xorflow("train", "--data", data, "--out", tmp_path / "run", *SMALL).code == 0
    text = data.read_text(encoding="utf-8")
    data.write_text(text.replace("ox", "yak"), encoding="utf-8")
    assert "the set of columns or values of" in xorflow("evaluate", tmp_path / "run").refused()
    data.unlink()
    assert "people.csv" in xorflow("evaluate", tmp_path / "run").refused()


@pytest.mark.parametrize("case", ["a run", "other files", "a file", "below a file"])
def test_an_output_that_cannot_be_used_is_left_alone(
    people: Path, rows: Path, tmp_path: Path, xorflow: Command, case: str
) -> None:
    out = tmp_path / "out"
    if case == "a run":
        shutil.copytree(people / "run", out)
    elif case == "other files":
        out.mkdir()
        (out / "thesis.tex").write_text("mine", encoding="utf-8")
    elif case == "a file":
        out.write_text("mine", encoding="utf-8")
    else:
        out = rows / "run"
    words = {
        "a run": "is not empty: continue that run with --resume, or choose another --out",
        "other files": "is not empty: choose another --out",
        "a file": "is a file: choose another --out",
        "below a file": "cannot be written: Not a directory; choose another folder",
    }
    before = contents(tmp_path)
    assert words[case] in xorflow("train", "--data", rows, "--out", out, *SMALL).refused()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["new.csv", "new.npy"])
def test_samples_and_scores_that_cannot_be_written(
    people: Path, rows: Path, xorflow: Command, name: str
) -> None:
    for said in (
        xorflow("sample", people / "run", "--out", rows / Path(name).with_suffix(".csv")),
        xorflow("score", people / "run", "--data", people / "people.csv", "--out", rows / name),
    ):
        assert "Not a directory" in said.refused()


def test_a_full_disk_keeps_the_checkpoint_and_the_run_goes_on(
    tmp_path: Path, rows: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tiny_options(rows, checkpoint_seconds=0, **DEEP)
    train_run(options, tmp_path / "whole")
    train = ("train", "--config", tmp_path / "whole/config.json", "--out", tmp_path / "run")
    original, writes = os.replace, iter(range(10_000))

    def full(source: object, target: object) -> None:
        if next(writes) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "replace", full)
    said = xorflow(*train).refused()
    assert "No space left on device; what was saved before is untouched" in said
    assert "continue with --resume" in said
    monkeypatch.setattr(os, "replace", original)
    assert (tmp_path / "run/checkpoints/latest.json").exists()
    assert xorflow(*train, "--resume").code == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
from xorflow.cli import main
main(sys.argv[3:])
"""


def limited(resource: str, limit: int, *arguments: str | Path) -> Outcome:
    """The command line in a process that may use only so much."""
    command = [sys.executable, "-c", LIMITED, resource, str(limit), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return finish(process)


def test_files_that_may_not_grow(tmp_path: Path, rows: Path) -> None:
    """A real write that fails half way: a checkpoint of this network is larger than 20 kB."""
    said = limited(
        "RLIMIT_FSIZE", 20_000, "train", "--data", rows, "--out", tmp_path / "run", *SMALL,
        "--conditioner", "made:hidden=256", "--set", "checkpoint_seconds=0",
    ).refused()  # fmt: skip
    assert "File too large; what was saved before is untouched" in said
    assert not list((tmp_path / "run").rglob("*.tmp"))


@pytest.mark.parametrize(
    ("network", "remedy"),
    [
        ("made:hidden=2000000000", "lower batch_size, or hidden of the conditioner"),
        (
            "recurrent:width=2000000000",
            "raise accumulate, or lower batch_size, or width or depth of the conditioner",
        ),
    ],
)
def test_memory_that_is_not_there(tmp_path: Path, rows: Path, network: str, remedy: str) -> None:
    """The limit on addresses keeps the test itself from allocating what a generous system might promise."""
    given = ("--data", rows, "--out", tmp_path / "run", *SMALL)
    said = limited("RLIMIT_AS", 8 * 2**30, "train", *given, "--conditioner", network).refused()
    assert f"out of memory; {remedy}" in said
    assert not (tmp_path / "run").exists()


def test_a_mistake_end_to_end(tmp_path: Path) -> None:
    """The installed command itself: exit code 2, one line, no traceback."""
    said = finish(start("evaluate", tmp_path / "none")).refused()
    assert "RUN is the folder of a run, and there is no folder" in said
