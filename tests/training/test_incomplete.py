"""A run that was trained and cannot be evaluated: its weights are kept, what lacks is named, and evaluate completes it."""

from pathlib import Path
from typing import Any

import pytest

from tiny_runs import continue_run, read, rows_file, tiny_dataset, tiny_flow, tiny_options, train_run
from xorflow._files import write_json
from xorflow.cli import main
from xorflow.errors import CheckpointError, EvaluationError
from xorflow.training import fit, open_run, read_result, results


@pytest.fixture
def no_memory_for_test_data(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The second part that is evaluated (test comes first) is the only one for which there is room."""
    report, calls = results._report_split, iter(range(100))

    def scarce(*arguments: Any) -> dict[str, Any]:
        if next(calls) == 0:
            raise MemoryError
        return report(*arguments)

    monkeypatch.setattr(results, "_report_split", scarce)
    return monkeypatch


def test_weights_and_what_could_be_computed_are_kept(
    tmp_path: Path, no_memory_for_test_data: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, run = tiny_options(rows_file(tmp_path / "rows.npy")), tmp_path / "run"
    with pytest.raises(EvaluationError) as error:
        train_run(options, run)
    assert str(error.value) == (
        f"the run in {run} is trained, and its weights are kept, but its likelihood on test data could not be computed: out of "
        f"memory; lower --memory of xorflow evaluate, or use --device cpu; complete it with: xorflow evaluate {run}"
    )
    result = read(run / "result.json")
    assert list(result["incomplete"]) == ["test"]
    assert result["validation"]["kind"] == "exact"
    assert "test" not in result
    assert open_run(run).flow.features == 6
    with pytest.raises(SystemExit) as ended:
        main(["train", "--out", str(run), "--resume"])
    assert ended.value.code == 2
    assert f"complete it with: xorflow evaluate {run}" in " ".join(capsys.readouterr().err.split())

    no_memory_for_test_data.undo()
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(run), "--device", "cpu"])
    assert ended.value.code == 0
    assert "negative log-likelihood" in capsys.readouterr().out
    train_run(options, tmp_path / "whole")
    whole, completed = read(tmp_path / "whole/result.json"), read(run / "result.json")
    assert completed["test"] == whole["test"]
    assert completed.keys() == whole.keys()
    assert continue_run(run, {}) == completed


@pytest.mark.usefixtures("no_memory_for_test_data")
def test_without_a_folder_the_flow_is_trained_all_the_same() -> None:
    flow = tiny_flow()
    before = [p.detach().clone() for p in flow.parameters()]
    with pytest.raises(EvaluationError, match=r"the flow is trained, but .* use xorflow\.evaluate"):
        fit(flow, tiny_dataset(), epochs=1, device="cpu")
    assert any(not bool((a == b).all()) for a, b in zip(before, flow.parameters(), strict=True))


@pytest.mark.parametrize("damage", [[], "test", {"test": 3}, {"test": None}], ids=str)
def test_a_damaged_note_of_what_lacks_is_refused(tmp_path: Path, damage: Any) -> None:
    run = tmp_path / "run"
    train_run(tiny_options(rows_file(tmp_path / "rows.npy")), run)
    write_json(run / "result.json", read(run / "result.json") | {"incomplete": damage})
    with pytest.raises(CheckpointError, match="'incomplete' is not there, or not whole"):
        read_result(run)
