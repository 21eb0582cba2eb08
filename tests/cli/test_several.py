"""Several runs by one command: seeds, tables, --jobs and --resume, as a person types them."""

import io
import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command_line import SMALL, Command, finish, start
from tiny_runs import DEEP, StopAt, assert_same_run, images_file, read, rows_file, tiny_options, train_run
from xorflow.cli.several import parse_seeds, show_runs
from xorflow.errors import ConfigError
from xorflow.training import Interrupted, Options

FILES = {"config.json", "weights.index.json", "weights.safetensors", "metrics.jsonl", "result.json"}


def table(folder: Path, text: str) -> Path:
    path = folder / "table.toml"
    path.write_text(text, encoding="utf-8")
    return path


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_each_seed_is_the_run_that_it_would_be_alone(xorflow: Command, tmp_path: Path) -> None:
    data, out = images_file(tmp_path / "images.npy"), tmp_path / "out"
    said = xorflow("train", "--data", data, "--seeds", "0,2-3", "--out", out, *SMALL)
    assert (said.code, said.err) == (0, "")
    assert "\x1b" not in said.out
    assert sorted(path.name for path in out.iterdir()) == ["seed-0", "seed-2", "seed-3", "summary.json"]
    assert xorflow("train", "--data", data, "--seed", "2", "--out", tmp_path / "alone", *SMALL).code == 0
    assert_same_run(out / "seed-2", tmp_path / "alone")
    assert {path.name for path in (out / "seed-2").iterdir()} == FILES | {"samples.png"}
    assert (out / "seed-2/samples.png").read_bytes() == (tmp_path / "alone/samples.png").read_bytes()
    summary = read(out / "summary.json")
    rows = summary["runs"]
    assert [(row["name"], row["seed"], row["folder"], row["error"]) for row in rows] == [
        ("out", seed, f"seed-{seed}", None) for seed in (0, 2, 3)
    ]
    result = read(out / "seed-3/result.json")
    kept = ("nll", "kind", "stderr", "refit_nll")
    assert {key: rows[2][key] for key in kept} == {key: result["test"][key] for key in kept}
    assert summary["groups"][0]["n"] == 3
    for number in (rows[1]["nll"], rows[1]["refit_nll"], *summary["groups"][0]["nll"].values()):
        assert f"{number:.2f}" in said.out
    assert said.out.endswith(f"summary  {out / 'summary.json'}\n")


def test_a_table_with_seeds_is_resumed_where_it_stands(xorflow: Command, rows: Path, tmp_path: Path) -> None:
    config = table(
        tmp_path,
        'epochs = 9\nconditioner = "made:hidden=16"\nbatch_size = 32\n'
        '[[runs]]\nname = "wide"\nconditioner = "made:hidden=32"\nepochs = 3\n[[runs]]\nname = "deep"\nlayers = 2\n',
    )  # fmt: skip
    out = tmp_path / "out"
    command = ("train", "--config", config, "--data", rows, "--epochs", "2", "--seeds", "0,1", "--out", out)
    first = xorflow(*command)
    assert (first.code, first.err) == (0, "")
    configs = {path.parent.relative_to(out).as_posix(): read(path) for path in out.rglob("config.json")}
    assert {name: (c["conditioner"].partition("=")[2], c["layers"], c["epochs"], c["seed"]) for name, c in configs.items()} == {
        "wide/seed-0": ("32", 1, 2, 0), "wide/seed-1": ("32", 1, 2, 1),
        "deep/seed-0": ("16", 2, 2, 0), "deep/seed-1": ("16", 2, 2, 1),
    }  # fmt: skip

    shutil.copytree(out / "deep/seed-1", tmp_path / "whole")
    shutil.rmtree(out / "wide/seed-1")  # missing
    shutil.rmtree(out / "deep/seed-1")  # interrupted
    with pytest.raises(Interrupted):
        train_run(Options().replace(**_options(configs["deep/seed-1"])), out / "deep/seed-1", StopAt({3}))
    before = files(out / "wide/seed-0")
    assert "continue its runs with the command that began them and --resume" in xorflow(*command).refused()
    again = xorflow(*command, "--resume")
    assert (again.code, again.err) == (0, "")
    assert _without_seconds(again.out) == _without_seconds(first.out)
    assert_same_run(out / "deep/seed-1", tmp_path / "whole")
    assert {path.name for path in (out / "deep/seed-1").iterdir()} == FILES | {"samples.npy"}
    assert files(out / "wide/seed-0") == before

    state = files(out)
    changed = xorflow(*command, "--resume", "--lr", "0.5").refused()
    assert f"run 'wide': --resume continues a run as it was configured: lr is 0.001 in {out}" in changed
    assert "and 0.5 here" in changed
    config.write_text(config.read_text(encoding="utf-8").replace("=32", "=33"), encoding="utf-8")
    assert "run 'wide': " in (edited := xorflow(*command, "--resume").refused())
    assert "conditioner is 'made:hidden=32' in" in edited
    assert "holds several: repeat the command" in xorflow("train", "--out", out, "--resume").refused()
    assert files(out) == state


def _options(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("version", "model", "data_format")}


def _without_seconds(text: str) -> list[str]:
    return [re.sub(r" +\d+\.\d$", "", line) for line in text.splitlines()]


def test_a_run_that_fails_harms_no_other(xorflow: Command, rows: Path, tmp_path: Path) -> None:
    text = '[[runs]]\nname = "bad"\nlr = 1e30\noptimiser = "sgd"\n[[runs]]\nname = "good"\n'
    out = tmp_path / "out"
    said = xorflow("train", "--config", table(tmp_path, text), "--data", rows, "--out", out, *SMALL)
    assert said.code == 2
    assert said.err.startswith("error: bad: the ")
    assert "not finite at step" in said.err
    assert said.err.count("\n") == 1
    assert re.search(r"^bad +0 +failed *$", said.out, re.MULTILINE)
    assert re.search(r"^good +0 +\d", said.out, re.MULTILINE)
    assert [row["error"] is None for row in read(out / "summary.json")["runs"]] == [False, True]
    assert xorflow("evaluate", out / "good").code == 0


@pytest.fixture
def _nothing_is_made(tmp_path: Path) -> Iterator[None]:
    yield
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_nothing_is_made")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--seeds 0,1 --seed 3", "--seeds names the seed of every run, and --seed came too; leave one"),
        ("--seeds 0,x", "--seeds is whole numbers and ranges upwards, as in 0,1,2 or 0-7; got '0,x'"),
        ("--seeds 3-1", "got '3-1'"),
        ("--seeds 1,,2", "got '1,,2'"),
        ("--seeds=-1", "got '-1'"),
        ("--seeds 0,0-2", "--seeds names each seed once; got '0,0-2'"),
        ("--seeds 0-99999999999", "--seeds names at most 10,000 seeds"),
        ("--seeds 0,99999999999999", "seed is below 1,099,511,627,776"),
        ("--seeds 0,1 --jobs 0", "--jobs is at least 1; got 0"),
        ("--jobs 2", "--jobs is how many of several runs train at once, and this is one run; got 2: add --seeds"),
        ("--seeds 0,1 --epochs 0", "error: epochs is at least 1; got 0"),
        ("--seeds 0,1 --estimator magic", "error: estimator is one of"),
        ("--seeds 0,1 --device cuda:63", "device 'cuda:63' is not there"),
        ("--seeds 0,1 --set order=natural,reversed", "order names 2 orderings"),
        ("--seeds 0,1 --resume", "--resume continues the runs in --out, and there is no folder"),
        ("--config TABLE --epochs 0", "error: epochs is at least 1; got 0"),
        ("--config TABLE --layers 3", "run 'fine': order names 2 orderings, and there are 3 layers"),
        ("--config TABLE --set order=natural", "run 'wrong': estimator 'double-cv' learns"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_before_any_work(
    xorflow: Command, rows: Path, tmp_path: Path, arguments: str, words: str
) -> None:
    text = '[[runs]]\nname = "fine"\norder = "natural,reversed"\nlayers = 2\n'
    path = table(tmp_path, text + '[[runs]]\nname = "wrong"\nestimator = "double-cv"\naccumulate = 2\n')
    given = [str(path) if word == "TABLE" else word for word in arguments.split()]
    assert words in xorflow("train", "--data", rows, *SMALL, "--out", tmp_path / "run", *given).refused()


def test_folders_that_are_something_else(xorflow: Command, people: Path, rows: Path, tmp_path: Path) -> None:
    run, given = tmp_path / "run", ("--data", rows, "--seeds", "0,1", *SMALL)
    shutil.copytree(people / "run", run)
    before = files(tmp_path)
    assert "is not empty: continue that run with --resume" in xorflow("train", *given, "--out", run).refused()
    refused = xorflow("train", *given, "--out", run, "--resume").refused()
    assert "--out is a folder of several runs here, and" in refused
    below = xorflow("train", *given, "--out", rows / "run").refused()
    assert "cannot be written: Not a directory; choose another folder" in below
    assert files(tmp_path) == before


def test_a_range_of_seeds() -> None:
    assert parse_seeds("0-2, 7 ,5 - 6", {}) == [0, 1, 2, 7, 5, 6]
    assert parse_seeds("0-9999", {}) == list(range(10_000))
    with pytest.raises(ConfigError, match="at most"):
        parse_seeds("0-9999,10000", {})


# ---- real processes ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_end_with_the_command_and_go_on_with_it(
    xorflow: Command, tmp_path: Path, number: signal.Signals
) -> None:
    """After Ctrl-C, and also when the command itself is killed and can tell its processes nothing."""
    options = tiny_options(rows_file(tmp_path / "rows.npy"), epochs=100, checkpoint_seconds=1000, **DEEP)
    source = tmp_path / "options.toml"
    own = {name: value for name, value in options.to_json().items() if value is not None and name != "seed"}
    source.write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in own.items()), encoding="utf-8"
    )
    out = tmp_path / "two runs"  # the command to type must quote this
    given = (
        "--config",
        source,
        "--set",
        "checkpoint_seconds=0",
        "--seeds",
        "3,4",
        "--jobs",
        "2",
        "--out",
        out,
    )
    process = start("train", *given)
    pointers = [out / f"seed-{seed}/checkpoints/latest.json" for seed in (3, 4)]
    limit = time.monotonic() + 60
    while process.poll() is None and not all(p.exists() for p in pointers) and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(number)
    said = finish(process)
    if number == signal.SIGKILL:
        seen = None
        while seen != (seen := [pointer.stat().st_mtime_ns for pointer in pointers]):
            time.sleep(0.5)
        assert not list(out.glob("*/result.json"))
        return
    assert (said.code, said.out) == (130, "")
    stopped, again = said.err.strip().split(": ", 1)
    assert stopped == "stopped and saved; continue with"
    assert shlex.split(again) == [
        "xorflow", "train", "--set", "checkpoint_seconds=0", *map(str, given[:2]), "--seeds", "3,4", "--jobs", "2",
        "--out", str(out), "--resume",
    ]  # fmt: skip
    assert [row["error"] for row in read(out / "summary.json")["runs"]] == ["interrupted"] * 2
    more = [*shlex.split(again)[1:], "--jobs", "1", "--set", "checkpoint_seconds=1000"]  # here, to save time
    assert xorflow(*more).code == 0
    train_run(options.replace(seed=4), tmp_path / "whole")
    assert_same_run(out / "seed-4", tmp_path / "whole")


# ---- what a person sees ----


def test_the_tables_fit_80_columns(tmp_path: Path) -> None:
    name = "[bold]" + "x" * 94
    run = {
        "name": name, "seed": 1099511627775, "folder": "f", "part": "test", "nll": 12345.678, "kind": "lower bound",
        "stderr": 12.345, "refit_nll": 12345.678, "seconds": 36000.0, "error": None,
    }  # fmt: skip
    spread = {"mean": 12345.678, "std": 12.345, "min": 12345.678, "max": 12346.678}
    group = {"name": name, "n": 10_000, "failed": 0, "kind": "exact", "nll": spread, "refit_nll": spread}
    failed = run | {"nll": None, "error": "a long story", "part": None}
    nothing = run | {"nll": None, "kind": None, "refit_nll": None, "part": None}
    text = io.StringIO()
    summary = {"runs": [run, failed, nothing], "groups": [group]}
    show_runs(Console(file=text, width=80), Path("runs/x"), summary)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "12345.68 ± 12.35  upper bound  12345.68  36000.0" in lines[2]
    assert any("failed" in line for line in lines)
    ends = [line.split()[-3:] for line in lines if line.rstrip().endswith("36000.0")]
    assert ends[1:] == [["-", "-", "36000.0"]]
    assert any("12345.68 to 12346.68" in line for line in lines)
