"""Training: steps, whole runs and several runs at once, each against its reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import xorflow as xf
from limits import LIMIT, training_limit
from measures import Setup, measure
from models import bare_steps, mnist_intensities, mnist_trainer
from references import PLAIN, ZUKO, plain_training_step, zuko_flow, zuko_training_step
from timing import Figure, alternate, faster_than, seconds, within
from xorflow.conditioners import Source
from xorflow.training import Options, create_run, finish_run


@measure("cpu", "made-forward-backward")
def made_against_linear(setup: Setup) -> list[Figure]:
    """A MADE's forward and backward against unmasked layers of the same sizes."""
    device = setup.device
    made = xf.MADE(784, hidden=(1024,)).to(device)
    plain = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 784)).to(device)
    x = (torch.rand(128, 784, device=device) < 0.15).float()

    def passes(module: nn.Module, call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def act() -> None:
            module.zero_grad(set_to_none=True)
            call().sum().backward()

        return act

    actions = {
        "made": passes(made, lambda: made({Source.STATE: x})),
        "linear": passes(plain, lambda: plain(x)),
    }
    times = alternate(actions, device, rounds=60, warm_up=5)
    reference = "unmasked torch.nn layers of the same sizes"
    return [faster_than("made-forward-backward", times["made"], reference, times["linear"], at_least=0.95)]


@measure(
    "cpu",
    "training-step-cpu-128",
    "training-step-cpu-128-limit",
    "training-step-cpu-128-zuko",
    "training-step-cpu-256",
    "training-step-cpu-128-bf16",
    "training-step-cpu-small",
    optional=("training-step-cpu-128-zuko",),
)
def training_step_cpu(setup: Setup) -> list[Figure]:
    """A step of the trainer against a plain eager loop's, on two batch sizes; against zuko's and the limit on one."""
    device = setup.device
    figures = []
    for batch in (128, 256):
        trainer = mnist_trainer(device, batch_size=batch, epochs=1)
        grey = trainer.dataset.train.values
        actions: dict[str, Callable[[], object]] = {
            "ours": bare_steps(trainer, 1),
            "plain": plain_training_step(xf.MADE(784, hidden=(1024,)), grey, batch),
        }
        theirs = zuko_flow(784, 1024, device) if batch == 128 else None
        if theirs is not None:
            actions["zuko"] = zuko_training_step(theirs, grey, batch)
        times = _step_times(actions, device, count=10)
        name = f"training-step-cpu-{batch}"
        figures.append(faster_than(name, times["ours"], PLAIN, times["plain"], at_least=1.3))
        if batch == 128:
            figures.append(_against_limit(f"{name}-limit", times["ours"], batch, device))
        if theirs is not None:
            figures.append(_against_zuko(f"{name}-zuko", times["ours"], times["zuko"]))
    return [*figures, _rounded_step_cpu(device), _small_step_cpu(device)]


def _rounded_step_cpu(device: torch.device) -> Figure:
    """`--precision bf16-mixed`, which a run must ask for: its likelihood would otherwise depend on the machine."""
    actions = {}
    for precision in ("auto", "bf16-mixed"):
        trainer = mnist_trainer(device, batch_size=128, epochs=1, precision=precision)
        actions[precision] = bare_steps(trainer, 1)
    times = _step_times(actions, device, count=10)
    note = "an option; where a CPU has no instructions for bfloat16 it is slower"
    ours, theirs = times["bf16-mixed"], times["auto"]
    return faster_than("training-step-cpu-128-bf16", ours, "the same step in float32", theirs, note=note)


def _small_step_cpu(device: torch.device) -> Figure:
    """A network so small that there is nothing to gain: what the trainer itself costs."""
    trainer = mnist_trainer(device, batch_size=32, epochs=1, conditioner="made:hidden=64")
    plain = plain_training_step(xf.MADE(784, hidden=(64,)), trainer.dataset.train.values, 32)
    actions = {"ours": bare_steps(trainer, 1), "plain": plain}
    times = _step_times(actions, device, count=50)
    return faster_than(
        "training-step-cpu-small", times["ours"], PLAIN, times["plain"], note="64 units, batch 32"
    )


def _step_times(
    steps: Mapping[str, Callable[[], object]], device: torch.device, count: int
) -> dict[str, float]:
    """Seconds of a step, `count` of one kind after the other as in training, so that each finds its weights in the caches."""

    times = alternate({name: _repeated(step, count) for name, step in steps.items()}, device, rounds=15)
    return {name: spent / count for name, spent in times.items()}


def _repeated(step: Callable[[], object], count: int) -> Callable[[], None]:
    def act() -> None:
        for _ in range(count):
            step()

    return act


@measure(
    "cuda",
    "training-step-gpu",
    "training-step-gpu-bare",
    "trainer-overhead-gpu",
    "training-step-gpu-all-in",
    "training-step-gpu-limit",
    "training-step-gpu-zuko",
    optional=("training-step-gpu-zuko",),
)
def training_step_gpu(setup: Setup) -> list[Figure]:
    """The trainer's own loop, the bare captured loop and the plain eager loop, turn by turn; batch 256."""
    device = setup.device
    trainer, bare = (mnist_trainer(device, batch_size=256, epochs=40, validate_every=40) for _ in range(2))
    captured = trainer.captured_steps()
    steps = bare.steps_per_epoch

    def trainer_epoch() -> None:
        trainer.train_epoch(captured)
        trainer.end_epoch()

    step = plain_training_step(xf.MADE(784, hidden=(1024,)), bare.dataset.train.values, 256)
    actions = {"trainer": trainer_epoch, "bare": bare_steps(bare), "plain": _repeated(step, 20)}
    theirs = zuko_flow(784, 1024, device)
    if theirs is not None:
        actions["zuko"] = _repeated(zuko_training_step(theirs, bare.dataset.train.values, 256), 20)
    times = alternate(actions, device, rounds=9)
    ours, captured, eager = times["trainer"] / steps, times["bare"] / steps, times["plain"] / 20
    whole = mnist_trainer(device, batch_size=256, epochs=40)
    whole.train()
    all_in = whole.progress.seconds / whole.total_steps
    note = "the trainer's loop over an epoch: order of rows, steps, checks and record; validation and files apart"
    over = f"overhead {100 * (ours / captured - 1):.1f} %, of at most 10 %"
    validated = "40 epochs with a validation after each"
    return [
        within("training-step-gpu", ours, PLAIN, eager, at_most=0.12, unit="ms", note=note),
        faster_than("training-step-gpu-bare", captured, PLAIN, eager, note="the captured steps alone"),
        faster_than(
            "trainer-overhead-gpu", ours, "bare captured loop", captured, at_least=1 / 1.1, note=over
        ),
        faster_than("training-step-gpu-all-in", all_in, PLAIN, eager, note=validated),
        _against_limit("training-step-gpu-limit", ours, 256, device),
        *([] if theirs is None else [_against_zuko("training-step-gpu-zuko", ours, times["zuko"] / 20)]),
    ]


class _SavedSteps:
    """Watches a run for the checkpoints that it leaves."""

    def __init__(self, run: Path) -> None:
        self.run, self.saved = run, set[int]()

    def on_start(self, total_steps: int, progress: object) -> None: ...
    def on_step(self, step: int) -> None: ...
    def on_epoch(self, record: dict[str, object]) -> None:
        del record
        latest = self.run / "checkpoints" / "latest.json"
        if latest.exists():
            self.saved.add(latest.stat().st_mtime_ns)


@measure("cuda", "hundred-epochs")
def hundred_epochs(setup: Setup) -> list[Figure]:
    """100 epochs of MNIST with validation and checkpoints, from nothing to result.json."""
    device = setup.device
    step = plain_training_step(xf.MADE(784, hidden=(1024,)), mnist_intensities(device), 256)

    eager = alternate({"plain": _repeated(step, 50)}, device, rounds=5)["plain"] / 50
    with tempfile.TemporaryDirectory() as folder:
        options = Options(epochs=100, batch_size=256, device=str(device), checkpoint_seconds=0.5)
        watch = _SavedSteps(Path(folder) / "run")
        spent = seconds(lambda: finish_run(create_run(options, watch.run, watch)), device)
    assert watch.saved, "a run without checkpoints"
    steps = 100 * (50_000 // 256)
    note = (
        f"loading, capture, validations, checkpoints (at least {len(watch.saved)}) and final evaluation included; the reference is "
        f"{steps:,} times the median step of the plain loop, and nothing else"
    )
    return [within("hundred-epochs", spent, PLAIN, steps * eager, at_most=10, note=note)]


def _against_zuko(id: str, ours: float, theirs: float) -> Figure:
    return faster_than(id, ours, ZUKO, theirs, note="a continuous flow on dequantised grey values")


def _against_limit(id: str, step: float, batch: int, device: torch.device) -> Figure:
    limit = training_limit(xf.MADE(784, hidden=(1024,)), batch, device)
    return faster_than(id, step, LIMIT, limit.seconds, note=limit.rates)
