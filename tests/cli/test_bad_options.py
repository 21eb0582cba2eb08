"""Options that mean nothing: one line with the rule, what came and what to do, and no folder left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import SMALL, Command
from tiny_runs import images_file


@pytest.fixture(autouse=True)
def _nothing_is_made(tmp_path: Path) -> Iterator[None]:
    yield
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--estimator reinforce", "estimator is one of maximum-likelihood, straight-through, score-function"),
        ("--estimator maximum-likelihood:draws=4", "estimator 'maximum-likelihood' takes samples"),
        ("--estimator maximum-likelihood:samples=x", "whole number; got 'x'"),
        ("--bogus 3", "No such option: --bogus; the options are data, validation_data,"),
        ("--epoch 3", "No such option: --epoch; did you mean 'epochs'?"),
        ("--hidden 8", "No such option: --hidden; hidden is a setting, as in conditioner=made:hidden=VALUE"),
        ("--order random", "No such option: --order; give it as --set order=VALUE"),
        ("--set order", "--set is KEY=VALUE, as in --set order=random; got 'order'"),
        ("--set odrer=random", "there is no option 'odrer'; did you mean 'order'?"),
        ("--epochs many", "epochs is a whole number; got 'many'"),
        ("--epochs", "Option '--epochs' requires an argument"),
        ("--epochs 0", "epochs is at least 1; got 0"),
        ("--lr nan", "lr is greater than 0; got nan"),
        (
            "--conditioner made:hidden=wide",
            "hidden of conditioner 'made:hidden=wide' is whole numbers joined by +; got 'wide'",
        ),
        ("--conditioner made:hidden=0", "hidden widths are at least 1"),
        (
            "--conditioner made:hidden",
            "takes hidden, direct, dropout, input_dropout, written as made:KEY=VALUE; got 'hidden'",
        ),
        ("--set schedule=linear", "schedule is one of cosine, constant; got 'linear'"),
        ("--set label=true", "label has an effect only if data is mnist"),
        ("--set label=1", "label is true or false; got '1'"),
        ("--set order=natural,reversed", "order names 2 orderings, and there are 1 layers"),
        ("--set order=sideways", "sideways"),
        ("--conditioner coupling:mask=checkerboard", "choose mask=halves or mask=random"),
        ("--conditioner coupling:mask=stripes", "stripes"),
        ("--conditioner transformer:heads=3", "width is a multiple of heads"),
        ("--conditioner recurrent:reach=1", "the data have no two-dimensional shape; leave reach out"),
        ("--conditioner recurrent:cell=rnn", "is one of gru, lstm; got 'rnn'"),
        ("--conditioner recurrent:dropout=1", "dropout is a share of at least 0 and below 1"),
        ("--conditioner made:cell=lstm", "conditioner 'made' takes hidden, direct"),
        ("--set accumulate=0", "accumulate is at least 1; got 0"),
        ("--set mixture=1", "a mixture has 2 to 64 components; got 1"),
        ("--set mixture=-3", "a mixture has 2 to 64 components; got -3"),
        ("--set mixture=natural", "a mixture has at least two components, and got 1"),
        ("--set mixture=2 --set order=reversed", "leave order at natural, or choose mixture=none"),
        ("--set categories=1", "categories is at least 2; got 1"),
        ("--set categories=2", "re-code the value, or state more categories"),
        ("--conditioner transformer:width=99999999999999999999", "is below 2^31; got 9"),
        ("--set mixture=2 --layers 2", "a mixture is of flows of one layer"),
        ("--recipe soup", "recipe is none or one of demo, made-strong, transformer-10min"),
        ("--recipe recurrent@1", "recipe 'recurrent' is at version 4 here; got version '1'"),
        ("--recipe transformer-10min", "recipe 'transformer-10min' is for mnist, and the data are"),
        ("--device cuda:63", "device 'cuda:63' is not there: this machine has cpu"),
        ("--device nonsense", "device is auto, cpu, cuda, cuda:N or mps; got 'nonsense'"),
        ("--device meta", "device 'meta' is not there"),
        ("--set precision=16-mixed", "precision is one of auto, 32-true, tf32, bf16-mixed, 64-true; got"),
        ("--set test=500", "lower validation= and test="),
        ("--set validation=3.5", "a number of rows, got 3.5"),
        (
            "--data digits",
            "data is 'mnist', a file, .npy, .npz, .csv, .tsv, .data, .parquet, .feather, .arrow, or a folder",
        ),
        ("--data none.csv", "none.csv"),
        ("--seed 99999999999999999999", "seed is below 1,099,511,627,776"),
        ("--config none.toml", "--config none.toml cannot be read: No such file"),
        ("--config none.json", "the configuration is missing"),
        ("--resume", "there is no folder"),
    ],
)
def test_train(xorflow: Command, rows: Path, tmp_path: Path, arguments: str, words: str) -> None:
    given = ("--data", rows, *SMALL, "--out", tmp_path / "run", *arguments.split())
    assert words in xorflow("train", *given).refused()


def test_resume_needs_a_folder(xorflow: Command) -> None:
    assert "name its folder, as in --out runs/demo --resume" in xorflow("train", "--resume").refused()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "epoch = 3", "there is no option 'epoch'"),
        ("b.toml", 'epochs = "3"', "epochs is a whole number; got '3'"),
        ("c.toml", "epochs = = 3", "no readable TOML"),
        ("d.json", '{"version": 8}', "has version 8, and this xorflow reads"),
        ("e.json", '{"version": 7, "epochs": []}', "epochs is a whole number; got []"),
        ("f.json", "nothing", "no readable JSON"),
    ],
)
def test_config(xorflow: Command, tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert words in xorflow("train", "--config", tmp_path / name, "--out", tmp_path / "run").refused()


def test_labels_are_of_mnist_only(xorflow: Command, tmp_path: Path) -> None:
    data = images_file(tmp_path / "images.npy")
    said = xorflow("train", "--data", data, "--set", "label=true", "--out", tmp_path / "run")
    assert "label has an effect only if data is mnist" in said.refused()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("sample RUN --count x", "got 'x'; see xorflow sample --help"),
        ("sample RUN --seed -1", "Invalid value for '--seed'"),
        ("sample RUN --flow backwards", "'backwards' is not one of 'latent', 'deterministic', 'refitted'"),
        (
            "sample RUN --out x.txt",
            " or .parquet or .feather or .arrow file for this run; got 'x.txt'",
        ),
        ("sample RUN --out x.png", "got 'x.png'"),
        ("sample RUN --device cuda:63", "is not there"),
        ("sample RUN --quote-formulas --json", "--quote-formulas is for a .csv file, and the output is JSON"),
        ("sample RUN --quote-formulas --out x.arrow", "is for a .csv file, and the output is x.arrow"),
        ("evaluate RUN --samples 0", "Invalid value for '--samples'"),
        (f"evaluate RUN --samples {'9' * 400}", "Invalid value for '--samples'"),
        (f"sample RUN --count {2**31}", "Invalid value for '--count'"),
        (f"evaluate RUN --memory {'9' * 400}", "--memory is a number of bytes, such as 500MB or 2GB; got '9"),
        (
            "evaluate RUN --memory lots",
            "--memory is a number of bytes, such as 500MB or 2GB; got 'lots'",
        ),
        (f"evaluate RUN --memory {'9' * 400}GB", "--memory is a number of bytes, such as 500MB or 2GB"),
        ("evaluate RUN --memory 9", "a pass of one row takes about"),
        ("score RUN --data DATA --memory 9", "a pass of one row takes about"),
        ("evaluate RUN --device nonsense", "got 'nonsense'"),
        ("evaluate", "Missing argument 'RUN'"),
        ("score RUN", "Missing option '--data'"),
        ("score RUN --data DATA --samples 0", "Invalid value for '--samples'"),
        ("score RUN --data DATA --out x.txt", "--out is a .csv or .npy file for this run; got 'x.txt'"),
        ("score RUN --data DATA --flow up", "'up' is not one of 'latent', 'deterministic'"),
        ("score RUN --data none.csv", "none.csv"),
        ("dance", "No such command 'dance'; see xorflow --help"),
    ],
)
def test_reading_commands(
    xorflow: Command,
    people: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"RUN": str(people / "run"), "DATA": str(people / "people.csv")}
    assert words in xorflow(*(named.get(word, word) for word in arguments.split())).refused()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "colour,size\nred,L\n",
            "new.csv has no 'pet', 'rooms': it has 'colour', 'size'; add what is lacking",
        ),
        (
            "colour,size,pet,rooms\nred,L,ox,many\n",
            "new.csv: column 'rooms' holds numbers, and a cell is none",
        ),
        ("red,L,ox,2\n", "or say --no-header if its first line is a row of all columns in order"),
        ("colour,size,pet,rooms\nred,L,2\n", "every row has as many cells as the first"),
        ("", "new.csv"),
    ],
)
def test_data_that_do_not_fit_the_run(
    xorflow: Command, people: Path, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "new.csv").write_text(text, encoding="utf-8")
    out = tmp_path / "scores.csv"
    assert words in xorflow("score", people / "run", "--data", tmp_path / "new.csv", "--out", out).refused()
    assert not out.exists()


def test_a_message_is_shown_as_it_is(xorflow: Command, tmp_path: Path) -> None:
    """Square brackets in a name are no markup."""
    name = tmp_path / "[bold]x[/nothing].npy"
    assert str(name) in xorflow("train", "--data", name, "--out", tmp_path / "run").refused()


def test_what_is_set_for_several_runs_is_judged_beside_their_options(
    xorflow: Command, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text('conditioner = "recurrent:width=8"', encoding="utf-8")
    given = ("--config", tmp_path / "a.toml", "--data", rows, "--seeds", "0,1", "--set", "skip=0.1")
    assert (
        "--jobs is at least 1" in xorflow("train", *given, "--jobs", "0", "--out", tmp_path / "run").refused()
    )
