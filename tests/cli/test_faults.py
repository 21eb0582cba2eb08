"""A fault of xorflow itself, planted in its own functions, is never told as a mistake of the user's: traceback, exit code 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import SMALL, Command, finish
from tiny_runs import images_file, people_file, rows_file
from xorflow.cli import main
from xorflow.training import jobs

FAULTS = (ValueError, KeyError, OSError, RuntimeError)

PLACES = {
    # loading data
    "xorflow.data.delimited._trimmed": "train --data people.csv",
    "xorflow.data.kinds.type_of_texts": "train --data people.csv",
    "xorflow.data.schema.kind_of": "train --data people.csv",
    "xorflow.data.parts.shuffled": "train --data people.csv",
    "xorflow.data.arrays._type": "train --data rows.npy",
    "xorflow.data.arrays.math.prod": "train --data rows.npy",
    "xorflow.data.arrays.as_rows": "train --data rows.npy",
    # loading a run
    "xorflow.training.registry.call_of": "train --data people.csv",
    "xorflow.training.spec._count": "evaluate RUN",
    "xorflow.training.checkpoint._kind": "evaluate RUN",
    "xorflow.training.folder._checked_shape": "sample RUN",
    # training
    "xorflow.training.trainer.Trainer.make_step": "train --data people.csv",
    "xorflow.training.trainer.optimiser_tensors": "train --data people.csv --set checkpoint_seconds=0",
    "xorflow.training.trainer.validation_nll": "train --data people.csv",
    # evaluation
    "xorflow.training.results.refit_base": "train --data people.csv",
    "xorflow.evaluate._log_likelihoods": "evaluate RUN",
    "xorflow.training.results.latent_components": "evaluate RUN",
    # sampling and scores
    "xorflow.flows.LatentFlow.sample_with": "sample RUN",
    "xorflow.data.Schema.decode": "sample RUN --json",
    "xorflow.cli.sample.image_grid": "train --data images.npy --set categories=2",
    "xorflow.data.schema.read_texts": "score RUN --data people.csv",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    people_file(folder / "people.csv")
    rows_file(folder / "rows.npy")
    images_file(folder / "images.npy")
    return folder


def given(command: str, run: Path) -> list[str]:
    words = [str(run) if word == "RUN" else word for word in command.split()]
    return [*words, *SMALL, "--out", "out"] if words[0] == "train" else words


def plant(monkeypatch: pytest.MonkeyPatch, place: str, fault: type[Exception]) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise fault("planted")

    monkeypatch.setattr(place, fail)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_comes_out_as_it_is(
    people: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    fault: type[Exception],
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    plant(monkeypatch, place, fault)
    with pytest.raises(fault, match="planted") as raised:
        main(given(PLACES[place], people / "run"))
    assert type(raised.value) is fault


def test_one_of_several_runs_with_a_fault_ends_in_code_1_and_the_others_are_made(
    folder: Path,
    tmp_path: Path,
    xorflow: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create, out = jobs.create_run, tmp_path / "out"
    faulty = [ValueError("planted"), None]

    def fail(*arguments: object, **named: object) -> object:
        fault = faulty.pop(0)
        if fault is not None:
            raise fault
        return create(*arguments, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(jobs, "create_run", fail)
    said = xorflow("train", "--data", folder / "people.csv", "--out", out, *SMALL, "--seeds", "0,1")
    assert said.code == 1
    assert "Traceback" in caplog.text
    assert "error: seed-0: ValueError: planted" in said.err
    assert (out / "seed-1/result.json").exists()


def test_a_process_shows_it(people: Path) -> None:
    program = (
        "import sys, xorflow.cli.sample\nfrom xorflow.cli import main\n"
        "def fail(*arguments):\n    raise BrokenPipeError(32, 'planted')\n"
        "xorflow.cli.sample.draw = fail\nmain(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program, "sample", str(people / "run"), "--json"]
    said = finish(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert said.code == 1
    assert said.err.startswith("Traceback")
    assert said.err.endswith("BrokenPipeError: [Errno 32] planted\n")
