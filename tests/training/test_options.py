"""Options: one table, every way into it, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import assert_same_run, read, rows_file, tiny_dataset, tiny_flow, tiny_options, train_run
from xorflow import fit
from xorflow.errors import CheckpointError, ConfigError
from xorflow.training import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    OPTIONS,
    POSTERIORS,
    TRANSFORMS,
    Options,
    Registry,
    from_mapping,
    read_config,
    value_text,
)
from xorflow.training.config import from_json, read_texts

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
    changed = Options().replace(conditioner="made:hidden=8+4", lr=1)
    assert changed == dataclasses.replace(Options(), conditioner="made:hidden=8+4", lr=1.0)
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
        ("lr", float("inf"), "lr is finite; got inf"),
        ("clip", float("nan"), "at least 0"),
        ("average", 1.0, "below 1"),
        ("epochs", 2**31, "below 2,147,483,648"),
        ("conditioner", f"made:hidden={2**31}", "below 2^31"),
        ("conditioner", "made:hidden=wide", "whole numbers joined by +; got 'wide'"),
        (
            "conditioner",
            "made:hiden=8",
            "takes hidden, direct, dropout, input_dropout, written as made:KEY=VALUE; got 'hiden=8'; did you mean 'hidden'?",
        ),
        (
            "conditioner",
            "recurrent:cell=rnn",
            "cell of conditioner 'recurrent:cell=rnn' is one of gru, lstm; got 'rnn'",
        ),
        ("posterior", "linear:hidden=8", "takes no settings"),
        ("base", "learned:p0=much", "p0 of base 'learned:p0=much' is a number; got 'much'"),
        ("base", "learned:learned=false", "takes p0"),
        ("seed", -1, "at least 0"),
        ("seed", 2**50, "below 1,099,511,627,776"),
        ("schedule", "linear", "cosine, constant"),
        ("optimiser", "lion", "adam, adamw, muon, sgd"),
        ("precision", "8", "32-true"),
        ("transform", "multiply", "shift, affine"),
        ("conditioner", "cnn", "made, coupling"),
        ("base", "free", "learned, fixed; got"),
        ("init", "zero", "data, biases, random"),
        ("skip", 1.0, "skip is below 1; got 1.0"),
    ],
)
def test_a_value_outside_its_rule_is_refused_with_the_rule(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Options().replace(**{name: value})
    assert name in one_line(error)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"skip": 0.1}, "if conditioner is transformer or recurrent; got skip=0.1 with conditioner=made: leave skip at 0.0"),
        ({"categories": 2}, "categories has an effect only if data is not mnist"),
        ({"test": 0.2}, "test has an effect only if data is not mnist"),
        ({"data": "x.csv", "label": True}, "label has an effect only if data is mnist; got label=true with data=x.csv"),
        ({"shared": False}, "shared has an effect only if mixture is not none"),
        ({"shared": False, "mixture": "2"}, "shared has an effect only if conditioner is transformer or recurrent"),
        ({"own": True, "conditioner": "coupling"}, "conditioner is not coupling (a coupling sees the running state alone)"),
        ({"variant": "chain", "conditioner": "coupling:mask=random"}, "variant=chain with conditioner=coupling:mask=random"),
        ({"order": "reversed", "mixture": "2"}, "leave order at natural, or choose mixture=none"),
        ({"order": "reversed", "conditioner": "coupling"}, "is not coupling (a coupling has a mask and no ordering)"),
        ({"mixture": "2", "conditioner": "coupling"}, "leave mixture at none, or choose another value of conditioner"),
        ({"variant": "chain"}, "if layers is not 1 (the first layer is the same in both)"),
        ({"compile": True}, "compile has an effect only if conditioner is transformer"),
        ({"optimiser": "muon"}, "got optimiser=muon with conditioner=made: leave optimiser at adam, or choose"),
        ({"patience": 3, "validation": 0}, "is not 0; got patience=3 with validation=0.0: leave patience at none"),
        ({"layers": 2, "mixture": "2"}, "a mixture is of flows of one layer"),
        ({"posterior": "mlp", "mixture": "2"}, "a mixture is of flows of one layer"),
    ],
)  # fmt: skip
def test_an_option_without_an_effect_is_refused_by_one_rule(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Options().replace(**given)
    assert words in one_line(error)


def test_what_an_option_needs_is_an_option_and_its_values() -> None:
    for option in OPTIONS.values():
        for need in option.needs:
            about = OPTIONS[need.option]
            assert about.registry is None or set(need.names) <= set(about.registry)
            assert option.accept(option.default) == option.default


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", 2.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("lr", "fast", "a number"),
        ("lr", None, "a number"),
        ("label", 1, "true or false"),
        ("data", 3, "a text"),
        ("conditioner", ["made"], "a text"),
        ("select", 3, "one of likelihood, greedy"),
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("epoch", "did you mean 'epochs'?"),
        ("batchsize", "did you mean 'batch_size'?"),
        ("hidden", "hidden is a setting, as in conditioner=made:hidden=VALUE"),
        ("hiden", "hidden is a setting, as in conditioner=made:hidden=VALUE"),
        ("blocks", "the options are data, validation_data"),
        ("p0", "p0 is a setting, as in base=learned:p0=VALUE"),
        ("sum_last", "as in estimator=score-function:sum_last=VALUE"),
    ],
)
def test_a_slip_of_a_name_says_what_may_be_meant(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_texts({name: "3"})


def test_every_value_is_read_from_the_text_that_is_written() -> None:
    options = Options().replace(recipe="transformer-pair", data_seed=3, tensorboard=True)
    texts = {name: value_text(value) for name, value in options.to_json().items()}
    assert from_json(read_texts(texts)) == options


@pytest.mark.parametrize("registry", [CONDITIONERS, POSTERIORS, TRANSFORMS, BASES, ESTIMATORS])
def test_every_setting_is_read_from_the_text_that_is_written(registry: Registry) -> None:
    for name in registry:
        defaults = {key: registry.default(name, key) for key in registry.settings(name)}
        written = f"{name}:" + ",".join(f"{key}={text}" for key, text in defaults.items())
        assert registry.read(written) == registry.read(name)
        assert registry.text(registry.read(written)) == name


def test_a_toml_file_sets_options(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'data = "x.npy"\nconditioner = "made:hidden=8+8"\nlr = 1\ntensorboard = true\n', encoding="utf-8"
    )
    options, model = read_config(path)
    assert options == Options(data="x.npy", conditioner="made:hidden=8+8", lr=1.0, tensorboard=True)
    assert model is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.toml", None, "cannot be read: No such file"),
        ("bad.toml", "epochs = ", "no readable TOML"),
        ("key.toml", "epoch = 3", "no option 'epoch'"),
        ("none.json", None, "missing"),
        ("bad.json", "{", "no readable JSON"),
        ("list.json", "[]", "no JSON object"),
        ("old.json", "{}", "has version None"),
        (
            "past.json",
            '{"version": 4, "epochs": 8}',
            "has version 4, and this xorflow reads",
        ),
        ("new.json", '{"version": 99}', "has version 99, and this xorflow reads"),
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


class _Mean:
    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay

    def config(self) -> dict[str, Any]:
        return {"decay": self.decay}


class _Score:
    def __init__(self, baseline: _Mean, samples: int = 1) -> None:
        self.baseline, self.samples = baseline, samples

    def config(self) -> dict[str, Any]:
        return {"baseline": self.baseline, "samples": self.samples}


def test_an_argument_that_is_named_has_its_settings_beside_the_others() -> None:
    registry = Registry(
        "estimator", {"score": _Score}, inner={"baseline": Registry("baseline", {"mean": _Mean})}
    )
    text = "score:baseline=mean,decay=0.5,samples=3"
    made = registry.make(text)
    assert (made.baseline.decay, made.samples) == (0.5, 3)
    assert registry.text(made) == text
    with pytest.raises(ConfigError, match=r"baseline is one of mean; got 'median'"):
        registry.read("score:baseline=median")
    with pytest.raises(
        ConfigError,
        match=r"takes baseline, samples, decay, written as .*; got 'deacy=1'; did you mean 'decay'",
    ):
        registry.read("score:baseline=mean,deacy=1")
