"""A loss that is no number stops the run, says where, and spoils nothing."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_runs import StopAt, continue_run, read, rows_file, tiny_dataset, tiny_flow, tiny_options, train_run
from xorflow import MADE, FactorisedBase, Layer, fit
from xorflow.data import Dataset, Split
from xorflow.errors import EvaluationError, TrainingError
from xorflow.estimators import Loss, Rebar
from xorflow.flows import LatentFlow, Mixture, Point
from xorflow.training import Interrupted, Options, create_run, finish_run, report
from xorflow.training.checkpoint import load_snapshot
from xorflow.training.failure import where_not_finite

WILD = {"optimiser": "sgd", "lr": 1e30, "schedule": "constant"}


class Poison(StopAt):
    """Puts a nan into a weight after a step, as an overflow would."""

    def __init__(self, flow: torch.nn.Module, step: int, stop: bool = False) -> None:
        super().__init__({step} if stop else ())
        self.flow = flow
        self.at = step

    def on_step(self, step: int) -> None:
        if step == self.at:
            with torch.no_grad():
                next(p for p in self.flow.parameters() if p.numel()).fill_(torch.nan)
        super().on_step(step)


def test_what_layers_do_is_finite_or_an_error() -> None:
    flow = tiny_flow(layers=2).eval()
    with torch.no_grad():
        flow.get_parameter("layers.0.conditioner.net.layers.0.bias").fill_(torch.finfo(torch.float32).max)
    with pytest.raises(
        EvaluationError, match="figures are finite numbers, and entropy of layer 1 on this split"
    ):
        report(flow, tiny_dataset(), 4, ("test",))


def test_it_names_step_epoch_and_gradient_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.npy")
    with pytest.raises(Interrupted):
        train_run(tiny_options(data, epochs=4), tmp_path / "run", StopAt({6}))
    _break(tmp_path / "run", lr=1e30)
    kept = {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(TrainingError) as error:
        continue_run(tmp_path / "run", {})
    text = str(error.value)
    assert "\n" not in text
    assert "is not finite at step 8 (epoch 2)" in text
    assert re.search(
        r"the first gradient that is not finite is that of layers\.0\.conditioner\.\S+, in layer 1; the last",
        text,
    )
    assert f"the last good checkpoint is kept in {tmp_path / 'run'}" in text
    assert "smaller lr" in text
    assert {p: p.read_bytes() for p in (tmp_path / "run/checkpoints").rglob("*") if p.is_file()} == kept
    snapshot = load_snapshot(tmp_path / "run")
    assert snapshot is not None
    assert snapshot.progress.step == 6
    assert all(bool(t.isfinite().all()) for t in snapshot.take("flow").values())
    assert not (tmp_path / "run/weights.safetensors").exists()


def _break(run: Path, lr: float) -> None:
    """Give a run, behind the back of resume, a learning rate that ruins it."""
    path = run / "config.json"
    text = path.read_text(encoding="utf-8")
    assert '"lr": 0.001' in text
    path.write_text(text.replace('"lr": 0.001', f'"lr": {lr}'), encoding="utf-8")
    assert read(path)["lr"] == lr


def test_before_the_first_checkpoint_none_is_promised(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        train_run(tiny_options(rows_file(tmp_path / "rows.npy"), **WILD), tmp_path / "run")
    assert "step 2 (epoch 1)" in str(error.value)
    assert "checkpoint" not in str(error.value)


def test_bad_weights_are_never_saved(tmp_path: Path) -> None:
    """The loss of the step was still finite, and the weights are not: the checkpoint before stays."""
    flow = tiny_flow()
    with pytest.raises(
        TrainingError,
        match=r"a weight is not finite at step 4 \(epoch 2\); the first weight .*, in layer 1; the last",
    ):
        fit(
            flow, tiny_dataset(), out=tmp_path / "run", observer=Poison(flow, 4), checkpoint_seconds=0,
            epochs=3, batch_size=64, device="cpu",
        )  # fmt: skip
    kept = load_snapshot(tmp_path / "run")
    assert kept is not None
    assert kept.progress.step == 3
    assert all(bool(t.isfinite().all()) for t in kept.take("flow").values())


def test_a_validation_that_is_no_number_is_no_best(tmp_path: Path) -> None:
    flow = tiny_flow()
    with pytest.raises(TrainingError, match=r"the validation likelihood is not finite at step 2 \(epoch 1\)"):
        fit(flow, tiny_dataset(), observer=Poison(flow, 2), epochs=3, batch_size=64, device="cpu")


def test_stopping_does_not_save_bad_weights_either(tmp_path: Path) -> None:
    flow = tiny_flow()
    watch = Poison(flow, 3, stop=True)
    with pytest.raises(TrainingError, match="a weight is not finite at step 3"):
        fit(flow, tiny_dataset(), out=tmp_path / "run", observer=watch, epochs=3, batch_size=64, device="cpu")
    assert load_snapshot(tmp_path / "run") is None


def test_clipping_tames_what_would_not_be_finite() -> None:
    options = Options(**(WILD | {"lr": 10.0, "clip": 0.01}))  # pyright: ignore[reportArgumentType]
    result = fit(
        tiny_flow(), tiny_dataset(), epochs=2, batch_size=64, device="cpu",
        optimiser=options.optimiser, lr=options.lr, clip=options.clip,
    )  # fmt: skip
    assert result["test"]["nll"] < 100


class _SpoiltControl(Rebar):
    """A second loss that is no number, in parameters of its own."""

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        found = super().loss(flow, start, draws)
        assert found.control is not None
        return dataclasses.replace(found, control=found.control * torch.nan)


def test_a_second_loss_is_named_by_its_parameters() -> None:
    rows = torch.randint(2, (40, 4), dtype=torch.uint8)
    data = Dataset("two values", Split(rows), None, None, categories=(2,) * 4)
    flow = LatentFlow([Layer(MADE(4, hidden=(8,)))], FactorisedBase(4))
    with pytest.raises(TrainingError) as error:
        fit(flow, data, _SpoiltControl(), epochs=1, batch_size=10, device="cpu")
    assert re.search(r"the first gradient that is not finite is that of estimator\.\S+:", str(error.value))


@pytest.mark.parametrize("layer", [0, 1])
def test_finite_weights_whose_layer_overflows_are_found(layer: int) -> None:
    rows = Split(torch.randint(2, (40, 4), dtype=torch.uint8))
    flow = LatentFlow([Layer(MADE(4, hidden=(8,))) for _ in range(2)], FactorisedBase(4))
    weights = dict(flow.named_parameters())
    assert where_not_finite(weights, flow, rows) == ""
    with torch.no_grad():
        for weight in flow.layers[layer].conditioner.parameters():
            weight.fill_(1e30)
    found = where_not_finite(weights, flow, rows)
    assert found == f"; all weights are finite, and the output of the network in layer {layer + 1} is not"
    assert where_not_finite(weights, Mixture([flow, flow]), rows) == found


def test_where_steps_are_not_looked_at_the_layer_is_still_found(tmp_path: Path) -> None:
    """As on a GPU, where losses are read at the end of an epoch: by then certain choices may have stopped all gradients."""
    trainer = create_run(
        tiny_options(rows_file(tmp_path / "rows.npy"), base="fixed", **WILD), tmp_path / "run"
    )
    trainer.checks_each_step = False
    with pytest.raises(
        TrainingError, match=r"is not finite at step \d+ \(epoch 1\).* in layer 1 .*not looked at one by one"
    ):
        finish_run(trainer)
