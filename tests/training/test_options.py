"""Options: one table, every way into it, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest

from tiny_runs import assert_same_run, read, rows_file, tiny_dataset, tiny_flow, tiny_options, train_run
from xorflow import fit
from xorflow.errors import CheckpointError, ConfigError
from xorflow.training import Options, from_mapping, read_config

FIELDS = {field.name for field in dataclasses.fields(Options)}


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_the_defaults_are_legal_and_survive_json() -> None:
    options = Options()
    assert from_mapping(json.loads(json.dumps(options.to_json())), "here") == options
    assert set(options.to_json()) == FIELDS


def test_replace_changes_only_what_it_is_told() -> None:
    changed = Options().replace(hidden=[8, 4], lr=1)
    assert changed == dataclasses.replace(Options(), hidden=(8, 4), lr=1.0)
    assert isinstance(changed.lr, float)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("layers", 0, "at least 1"),
        ("warmup", -1, "at least 0"),
        ("lr", 0.0, "greater than 0"),
        ("lr", float("nan"), "greater than 0"),
        ("lr", float("inf"), "greater than 0"),
        ("clip", float("nan"), "at least 0"),
        ("average", 1.0, "below 1"),
        ("p0", 1.0, "strictly between 0 and 1"),
        ("hidden", [0], "at least 1"),
        ("hidden", [2**70], "below 2^63"),
        ("seed", -1, "at least 0"),
        ("seed", 2**50, "below 2^40"),
        ("schedule", "linear", "cosine, constant"),
        ("optimiser", "lion", "adam, adamw, muon, sgd"),
        ("precision", "8", "32-true"),
        ("transform", "multiply", "shift, affine"),
        ("conditioner", "cnn", "made, coupling"),
        ("base", "free", "learned, fixed"),
        ("init", "zero", "data, biases, random"),
        ("skip", 1.0, "at least 0 and below 1; got 1.0"),
        ("skip", 0.1, "--skip is of transformers and recurrent networks; leave it out"),
        ("rotary", True, "--rotary is of transformers; leave it out"),
    ],
)
def test_a_value_outside_its_rule_is_refused_with_the_rule(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Options().replace(**{name: value})
    assert name in one_line(error)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", 2.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("lr", "fast", "a number"),
        ("lr", None, "a number"),
        ("label", 1, "true or false"),
        ("data", 3, "a text"),
        ("hidden", 16, "a list of whole numbers"),
        ("hidden", [16, "x"], "a list of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping({name: value}, "file.toml")
    assert one_line(error) == f"file.toml: {name} is {words}; got {value!r}"


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping({"learning_rate": 1e-3}, "file.toml")
    assert "file.toml: there is no option 'learning_rate'" in one_line(error)
    assert "batch_size" in str(error.value)


def test_a_toml_file_sets_options(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = "x.npy"\nhidden = [8, 8]\nlr = 1\ntensorboard = true\n', encoding="utf-8")
    options, model = read_config(path)
    assert options == Options(data="x.npy", hidden=(8, 8), lr=1.0, tensorboard=True)
    assert model is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.toml", None, "not there"),
        ("bad.toml", "epochs = ", "no readable TOML"),
        ("key.toml", "epoch = 3", "no option 'epoch'"),
        ("none.json", None, "missing"),
        ("bad.json", "{", "no readable JSON"),
        ("list.json", "[]", "no JSON object"),
        ("old.json", "{}", "has version None"),
        ("new.json", '{"version": 99}', "newer xorflow"),
    ],
)
def test_a_bad_configuration_file_is_one_line(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises((ConfigError, CheckpointError)) as error:
        read_config(tmp_path / name)
    assert words in one_line(error)
    assert name in str(error.value)


def test_config_json_holds_every_option_and_repeats_the_run(tmp_path: Path) -> None:
    options = tiny_options(rows_file(tmp_path / "rows.npy"), lr=0.01, clip=0.5, seed=3)
    train_run(options, tmp_path / "first")
    assert set(read(tmp_path / "first/config.json")) >= FIELDS | {"version", "model", "data_format"}
    again, model = read_config(tmp_path / "first/config.json")
    assert again == options
    train_run(again, tmp_path / "second", model=model)
    assert_same_run(tmp_path / "second", tmp_path / "first")


def test_the_configuration_of_a_fit_run_holds_its_model(tmp_path: Path) -> None:
    fit(tiny_flow(), tiny_dataset(), out=tmp_path / "run", epochs=1, batch_size=64, device="cpu")
    options, model = read_config(tmp_path / "run/config.json")
    assert options.layers is None
    assert options.estimator == "maximum-likelihood"
    assert model is not None
    assert [layer["conditioner"]["name"] for layer in model["layers"]] == ["made"]
