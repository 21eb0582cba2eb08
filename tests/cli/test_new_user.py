"""What a new user types: train, evaluate, sample, score, on a table of words."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import xorflow as xf
from command_line import SMALL, Command
from tiny_runs import COLUMNS, assert_same_run, images_file, people_file, read, rows_file
from xorflow.data import load_rows, write_rows
from xorflow.errors import ConfigError, ModelError
from xorflow.training import open_run
from xorflow.training.checkpoint import load_tensors, save_tensors


def table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def test_three_commands_from_a_table_to_scores(tmp_path: Path, xorflow: Command) -> None:
    data, run = people_file(tmp_path / "people.csv"), tmp_path / "run"
    trained = xorflow("train", "--data", data, "--out", run, *SMALL)
    assert (trained.code, trained.err) == (0, "")
    assert "Negative log-likelihood of the test data" in trained.out
    sampled = xorflow("sample", run, "--count", 30, "--out", tmp_path / "new.csv")
    assert (sampled.code, sampled.err) == (0, "")
    scored = xorflow("score", run, "--data", tmp_path / "new.csv", "--out", tmp_path / "scores.csv")
    assert (scored.code, scored.err) == (0, "")
    scores = table(tmp_path / "scores.csv")
    assert scores[0] == ["log_prob"]
    assert len(scores) == 31
    assert all(float(cell) < 0 for (cell,) in scores[1:])


def test_rows_with_what_was_never_seen_are_scored_and_counted(
    tmp_path: Path, people: Path, xorflow: Command
) -> None:
    cells = [COLUMNS, ("red", "L", "cat", 3), ("violet", "L", "unicorn", 3), ("red", "", "unicorn", 99)]
    rows = tmp_path / "rows.csv"
    rows.write_text("".join(",".join(map(str, row)) + "\n" for row in cells), encoding="utf-8")
    scored = xorflow("score", people / "run", "--data", rows, "--json")
    told = json.loads(scored.out)
    assert told["unseen"] == dict(zip(COLUMNS, (1, 1, 2, 1), strict=True))
    assert told["measures"] == dict.fromkeys(COLUMNS, "mass")
    assert all(math.isfinite(value) for value in told["log_prob"])
    written = xorflow("score", people / "run", "--data", rows, "--out", tmp_path / "scores.csv")
    assert f"no training row has: {COLUMNS[0]!r} in 1 row, " in written.out
    printed = xorflow("score", people / "run", "--data", rows)
    assert printed.out.count("\n") == 3
    assert "'pet' in 2 rows" in printed.err


def test_scores_say_of_which_measure_they_are(tmp_path: Path, xorflow: Command) -> None:
    rows = pa.table({"height": np.random.default_rng(0).normal(size=60), "town": ["Rome", "Oslo"] * 30})
    schema = xf.data.Schema.fit(rows)
    flow = xf.LatentFlow(
        [xf.Layer(xf.MADE(2, (4,), categories=schema.categories))],
        xf.FactorisedBase(2, categories=schema.categories),
    )
    xf.save(flow, tmp_path / "run", schema)
    parquet.write_table(rows, tmp_path / "rows.parquet")
    scored = xorflow(
        "score", tmp_path / "run", "--data", tmp_path / "rows.parquet", "--out", tmp_path / "scores.npy"
    )
    assert scored.out.splitlines()[1:] == ["density per unit: 'height'", "mass: 'town'"]
    expected = xf.TableModel(schema, flow).log_prob(rows)
    assert np.load(tmp_path / "scores.npy") == pytest.approx(expected, abs=1e-5)


def test_samples_have_all_columns_and_those_that_are_left_out_are_gaps(
    tmp_path: Path, xorflow: Command
) -> None:
    """Of a table without a header, too, whose columns are told by their places."""
    rows = "\n".join(f"key {n},{'ab'[n % 2]},{n % 3}" for n in range(60))
    (tmp_path / "rows.csv").write_text(f"{rows}\n")
    trained = xorflow(
        "train", "--data", tmp_path / "rows.csv", "--no-header", "--out", tmp_path / "run", *SMALL
    )
    assert "left out" in trained.out
    for name in ("new.csv", "new.parquet", "new.data"):
        out = tmp_path / name
        assert xorflow("sample", tmp_path / "run", "--count", 2, "--out", out).code == 0
        given = ("--data", out, "--json", *(() if name == "new.parquet" else ("--no-header",)))
        assert json.loads(xorflow("score", tmp_path / "run", *given).out)["rows"] == 2
    assert parquet.read_table(tmp_path / "new.parquet")["column 1"].null_count == 2
    printed = json.loads(
        xorflow("sample", tmp_path / "run", "--count", 2, "--json", "--out", tmp_path / "x.csv").out
    )
    assert [row[0] for row in printed] == [None, None]


def test_a_model_of_a_loop_of_ones_own_is_evaluated_on_the_data_that_it_names(
    tmp_path: Path, xorflow: Command
) -> None:
    data = people_file(tmp_path / "people.csv")
    dataset = xf.data.load(data)
    assert dataset.validation is not None
    network = xf.MADE(dataset.features, (4,), categories=dataset.categories)
    flow = xf.LatentFlow(
        [xf.Layer(network)], xf.FactorisedBase(dataset.features, categories=dataset.categories)
    )
    xf.save(flow, tmp_path / "run", data=data)
    found = json.loads(xorflow("evaluate", tmp_path / "run", "--json").out)["validation"]
    assert found["nll"] == pytest.approx(xf.evaluate.exact(flow, dataset.validation).nll, abs=1e-5)
    assert "refit_nll" in found
    assert xorflow("sample", tmp_path / "run", "--count", "3", "--flow", "refitted").code == 0


def test_a_model_is_saved_with_the_schema_and_the_states_of_its_data(tmp_path: Path) -> None:
    data = people_file(tmp_path / "people.csv")
    dataset, other = xf.data.load(data), xf.data.Schema.fit(pa.table({"town": ["Rome", "Oslo"] * 30}))

    def flow(sizes: tuple[int, ...]) -> xf.LatentFlow:
        base = xf.FactorisedBase(len(sizes), categories=sizes)
        return xf.LatentFlow([xf.Layer(xf.MADE(len(sizes), (4,), categories=sizes))], base)

    with pytest.raises(ConfigError, match="leave schema out"):
        xf.save(flow(other.categories), tmp_path / "run", other, data=data)
    with pytest.raises(ModelError, match="has the states of its data"):
        xf.save(flow((2, 2)), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()
    xf.save(flow(dataset.categories), tmp_path / "run", dataset.schema, data=data)


def test_the_folder_of_a_run_on_words(people: Path) -> None:
    names = {path.name for path in (people / "run").iterdir()}
    assert names == {
        "config.json", "weights.index.json", "weights.safetensors", "metrics.jsonl", "result.json", "samples.csv",
        "schema.json",
    }  # fmt: skip
    samples = table(people / "run/samples.csv")
    assert tuple(samples[0]) == COLUMNS
    seen = [set(column) for column in zip(*table(people / "people.csv")[1:], strict=True)]
    assert all(
        cell in (*seen[d], "") for row in samples[1:] for d, cell in enumerate(row)
    )  # "": what was never seen
    assert len(samples) == 101


@pytest.mark.parametrize("layers", ["1", "2"])
def test_a_part_of_one_row_has_a_likelihood_and_no_standard_error(
    tmp_path: Path, xorflow: Command, layers: str
) -> None:
    data, run = people_file(tmp_path / "people.csv"), tmp_path / "run"
    given = ("--validation", "1", "--set", "test=1", "--layers", layers, *SMALL)
    assert xorflow("train", "--data", data, "--out", run, *given).code == 0
    for part in ("test", "validation"):
        figures = read(run / "result.json")[part]
        assert {figures[name] for name in ("stderr", "greedy_stderr", "refit_stderr")} == {None}
    assert xorflow("evaluate", run).code == 0


def test_a_score_that_is_no_finite_number_is_an_error(people: Path, tmp_path: Path, xorflow: Command) -> None:
    run = tmp_path / "run"
    shutil.copytree(people / "run", run)
    largest = torch.finfo(torch.float32).max
    weights = {name: weight.sign() * largest for name, weight in load_tensors(run, "weights").items()}
    save_tensors(run, "weights", weights)
    out = tmp_path / "scores.csv"
    for extra in ((), ("--json",), ("--out", out)):
        said = xorflow("score", run, "--data", people / "people.csv", *extra).refused()
        assert "log p is a finite number, and that of" in said
    assert not out.exists()


def test_samples_for_a_spreadsheet(tmp_path: Path, xorflow: Command) -> None:
    data, run, out = people_file(tmp_path / "people.csv"), tmp_path / "run", tmp_path / "new.csv"
    data.write_text(data.read_text(encoding="utf-8").replace("cat", "=1+1"), encoding="utf-8")
    assert xorflow("train", "--data", data, "--out", run, *SMALL).code == 0
    assert xorflow("sample", run, "--out", out, "--quote-formulas").code == 0
    assert {row[2] for row in table(out)[1:]} >= {"'=1+1", "dog"}


def test_samples_suit_the_data(tmp_path: Path, xorflow: Command, deep: Path) -> None:
    assert np.load(deep / "run/samples.npy").shape == (100, 6)
    data = images_file(tmp_path / "images.npy")
    assert xorflow("train", "--data", data, "--out", tmp_path / "run", *SMALL).code == 0
    assert (tmp_path / "run/samples.png").read_bytes().startswith(b"\x89PNG")
    assert xorflow("sample", tmp_path / "run", "--out", tmp_path / "x.png").code == 0
    assert (tmp_path / "x.png").exists()


def test_score_is_the_log_likelihood_of_the_flow(people: Path, xorflow: Command) -> None:
    run, data = people / "run", people / "people.csv"
    found = json.loads(xorflow("score", run, "--data", data, "--json").out)
    opened = open_run(run)
    x = load_rows(data, categories=opened.flow.states.sizes, schema=opened.schema)
    expected = opened.flow().log_prob(x.long()).double()
    assert found["kind"] == "exact"
    assert found["rows"] == 200
    assert found["log_prob"] == pytest.approx(expected.tolist(), abs=1e-5)
    printed = [float(line) for line in xorflow("score", run, "--data", data).out.split()]
    assert printed == pytest.approx(found["log_prob"], abs=1e-6)


def test_deterministic_scores_are_those_of_the_greedy_flow(people: Path, xorflow: Command) -> None:
    run, data = people / "run", people / "people.csv"
    found = json.loads(xorflow("score", run, "--data", data, "--json", "--flow", "deterministic").out)
    opened = open_run(run)
    x = load_rows(data, categories=opened.flow.states.sizes, schema=opened.schema)
    assert found["log_prob"] == pytest.approx(xf.evaluate.greedy(opened.flow, x).values.tolist(), abs=1e-9)


def test_scores_as_an_array(deep: Path, tmp_path: Path, xorflow: Command) -> None:
    said = xorflow(
        "score", deep / "run", "--data", deep / "rows.npy", "--samples", 4, "--out", tmp_path / "s.npy"
    )
    assert "200 rows (lower bound)" in said.out
    assert np.load(tmp_path / "s.npy").shape == (200,)


def test_two_layers_have_a_bound_and_say_so(deep: Path, xorflow: Command) -> None:
    result = read(deep / "run/result.json")
    assert result["test"]["kind"] == "lower bound"
    assert result["test"]["samples"] == 8
    found = json.loads(xorflow("evaluate", deep / "run", "--samples", 4, "--json").out)
    assert found["test"]["kind"] == "lower bound"
    assert found["test"]["samples"] == 4
    assert 1 <= found["test"]["ess"] <= 4
    assert "bound, 4 samples" in xorflow("evaluate", deep / "run", "--samples", 4).out
    exact = json.loads(xorflow("score", deep / "run", "--data", deep / "rows.npy", "--json", "--flow",
                               "deterministic").out)  # fmt: skip
    assert exact["kind"] == "exact"


def test_the_refitted_flow_scores_as_reports_say(people: Path, xorflow: Command, tmp_path: Path) -> None:
    held_out = tmp_path / "test.parquet"
    run = open_run(people / "run")
    dataset = run.data()
    assert dataset.test is not None
    write_rows(held_out, dataset.test.values, run.schema)
    found = json.loads(
        xorflow("score", people / "run", "--data", held_out, "--json", "--flow", "refitted").out
    )
    assert found["kind"] == "exact"
    assert found["nll"] == pytest.approx(read(people / "run/result.json")["test"]["refit_nll"])


def test_images_with_a_border_that_never_varies(tmp_path: Path, xorflow: Command) -> None:
    images = np.zeros((60, 4, 4), dtype=np.uint8)
    images[:, 1:3, 1:3] = np.random.default_rng(0).integers(2, size=(60, 2, 2))
    np.save(tmp_path / "framed.npy", images)
    given = ("--data", tmp_path / "framed.npy", "--epochs", 2, "--out", tmp_path / "run", "--device", "cpu")
    assert "12 of 16 are constant" in xorflow("train", *given).refused()
    network = ("--conditioner", "transformer:width=8,depth=1,heads=2", "--set", "skip=0.01")
    xorflow("train", *given, "--set", "categories=2", *network)
    found = json.loads(xorflow("evaluate", tmp_path / "run", "--json").out)
    assert found["test"] == read(tmp_path / "run/result.json")["test"]
    assert found["test"]["nll"] < 16 * math.log(2)


def test_evaluate_repeats_what_the_result_says(people: Path, xorflow: Command) -> None:
    found = json.loads(xorflow("evaluate", people / "run", "--json").out)
    result = read(people / "run/result.json")
    assert found["test"] == result["test"]
    assert found["validation"] == result["validation"]
    assert found["data"] == result["data"]
    shown = xorflow("evaluate", people / "run")
    assert f"{result['test']['nll']:.3f}" in shown.out
    assert "exact" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("model", ["latent", "deterministic", "refitted"])
def test_a_seed_names_samples(people: Path, xorflow: Command, model: str) -> None:
    def draw(seed: int) -> list[list[str]]:
        said = xorflow("sample", people / "run", "--count", 20, "--seed", seed, "--json", "--flow", model)
        return json.loads(said.out)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(draw(1)) == 20


def test_samples_without_a_name_replace_nothing(
    people: Path, tmp_path: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples.csv").write_text("mine", encoding="utf-8")
    assert xorflow("sample", people / "run").out == "wrote samples-2.csv\n"
    assert (tmp_path / "samples.csv").read_text(encoding="utf-8") == "mine"


def test_a_run_without_a_name_gets_a_new_folder(
    tmp_path: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.npy")
    (tmp_path / "run.toml").write_text('data = "rows.npy"\n', encoding="utf-8")
    assert xorflow("train", "--data", "rows.npy", *SMALL).code == 0
    assert xorflow("train", "--config", "run.toml", *SMALL).code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["rows-1", "rows-2"]
    assert_same_run(tmp_path / "runs/rows-2", tmp_path / "runs/rows-1")


def test_the_configuration_of_a_run_repeats_it_and_flags_override(
    people: Path, tmp_path: Path, xorflow: Command
) -> None:
    config = people / "run/config.json"
    assert xorflow("train", "--config", config, "--out", tmp_path / "same").code == 0
    assert_same_run(tmp_path / "same", people / "run")
    assert (
        xorflow(
            "train",
            "--config",
            config,
            "--out",
            tmp_path / "other",
            "--seed",
            5,
            "--conditioner",
            "made:hidden=8+8",
        ).code
        == 0
    )
    other = read(tmp_path / "other/config.json")
    assert (other["seed"], other["conditioner"], other["epochs"]) == (5, "made:hidden=8+8", 2)


def test_flags_switch_off_what_a_file_switched_on(tmp_path: Path, rows: Path, xorflow: Command) -> None:
    (tmp_path / "run.toml").write_text(
        "own = true\nestimator = 'score-function'\ntensorboard = true\n", encoding="utf-8"
    )
    said = xorflow("train", "--config", tmp_path / "run.toml", "--data", rows, "--out", tmp_path / "run",
                   "--set", "tensorboard=false", *SMALL)  # fmt: skip
    assert said.code == 0
    config = read(tmp_path / "run/config.json")
    assert (config["own"], config["tensorboard"]) == (True, False)


def test_a_finished_run_is_resumed_to_its_result(people: Path, tmp_path: Path, xorflow: Command) -> None:
    shutil.copytree(people / "run", tmp_path / "run")
    said = xorflow("train", "--out", tmp_path / "run", "--resume")
    assert said.code == 0
    assert "exact" in said.out
    assert_same_run(tmp_path / "run", people / "run")


def test_no_held_out_data_no_likelihood(tmp_path: Path, rows: Path, xorflow: Command) -> None:
    said = xorflow(
        "train", "--data", rows, "--set", "validation=0", "--set", "test=0", "--out", tmp_path / "run", *SMALL
    )
    assert said.code == 0
    assert "No data were held out" in said.out
    assert xorflow("evaluate", tmp_path / "run", "--json").code == 0


def test_a_run_from_python_is_read_by_the_command_line(tmp_path: Path, xorflow: Command) -> None:
    data = rows_file(tmp_path / "rows.npy")
    flow = xf.LatentFlow([xf.Layer(xf.MADE(6, (8,), categories=3))], xf.FactorisedBase(6, categories=3))
    xf.fit(flow, xf.data.load(data), out=tmp_path / "run", epochs=1, device="cpu")
    found = json.loads(xorflow("score", tmp_path / "run", "--data", data, "--json").out)
    expected = flow().log_prob(torch.from_numpy(np.load(data)).long())
    assert found["log_prob"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert "is of data named 'rows.npy', which are no file" in xorflow("evaluate", tmp_path / "run").refused()
    clash = xorflow(
        "train",
        "--config",
        tmp_path / "run/config.json",
        "--conditioner",
        "coupling",
        "--out",
        tmp_path / "b",
    )
    assert "conditioner has an effect only if layers is not none (a model that was built" in clash.refused()


def test_digits_given_their_labels(tmp_path: Path, xorflow: Command) -> None:
    run = tmp_path / "run"
    network = ("--set", "label=true", "--set", "validation=59000", "--conditioner", "made:hidden=8")
    said = xorflow("train", *network, "--epochs", 1, "--out", run)
    assert said.code == 0
    assert "the paper's best" in said.out
    assert (run / "samples.png").exists()
    digits = json.loads(xorflow("sample", run, "--count", 3, "--json").out)
    assert np.array(digits).shape == (3, 784)
    refused = xorflow("score", run, "--data", rows_file(tmp_path / "rows.npy")).refused()
    assert "this run is conditioned on it" in refused


def test_a_run_that_is_worse_than_independent_columns_says_so(xorflow: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "bits.npy", np.random.default_rng(0).integers(0, 2, (80, 12), dtype=np.uint8))
    shared = ("train", "--data", tmp_path / "bits.npy", *SMALL)
    worse = xorflow(*shared, "--set", "init=random", "--lr", "1", "--out", tmp_path / "worse")
    words = json.loads((tmp_path / "worse" / "result.json").read_text(encoding="utf-8"))["warning"]
    assert "independent columns have" in words
    assert "init=data" in words
    assert words in " ".join(worse.out.split())
    xorflow(*shared, "--lr", "1e-9", "--out", tmp_path / "same")
    assert "warning" not in json.loads((tmp_path / "same" / "result.json").read_text(encoding="utf-8"))


def test_one_row_that_tests_has_no_standard_error(tmp_path: Path, xorflow: Command) -> None:
    data, run = rows_file(tmp_path / "rows.npy", rows=12), tmp_path / "run"
    assert xorflow("train", "--data", data, *SMALL, "--out", run).code == 0
    figures = read(run / "result.json")["test"]
    assert (figures["rows"], figures["stderr"], figures["greedy_stderr"], figures["refit_stderr"]) == (
        1, None, None, None
    )  # fmt: skip
    assert math.isfinite(figures["nll"])


def test_an_error_is_one_line_even_where_columns_are_ignored(
    people: Path, tmp_path: Path, xorflow: Command
) -> None:
    rows = table(people / "people.csv")
    extra = [[*row, str(n)] for n, row in enumerate(rows)]
    for name, last, said in (("good", "3", 0), ("bad", "three", 2)):
        path = tmp_path / f"{name}.csv"
        extra[-1][COLUMNS.index("rooms")] = last
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(extra)
        outcome = xorflow("score", people / "run", "--data", path)
        assert (outcome.code, outcome.err.count("\n")) == (said, 1)
        assert ("has columns that are ignored: '0'" in outcome.err) == (said == 0)
