"""The figures: training, sampling and evaluation, each against its reference."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import xorflow as xf
from references import plain_training_step, sequential_sample, zuko_sampler
from timing import Figure, alternate, at_least, at_most, seconds
from xorflow import evaluate
from xorflow.conditioners import Source
from xorflow.flows import SampleNoise
from xorflow.training import (
    Options,
    Trainer,
    build_data,
    build_estimator,
    build_flow,
    start_from_data,
    train_run,
)
from xorflow.training.engine import EagerEngine, choose_engine
from xorflow.training.jobs import Job, run_jobs

Measure = Callable[[xf.LatentFlow, torch.device], list[Figure]]


def for_device(device: torch.device) -> list[Measure]:
    if device.type == "cuda":
        return [hardware_limit, training_step_gpu, hundred_epochs, eight_runs, sampling_gpu, bound_gpu]
    return [made_against_linear, training_step_cpu, sampling_cpu, bound_cpu]


def trained_flow(run: Path | None, device: torch.device, out: Path) -> xf.LatentFlow:
    """A depth-1 flow on MNIST with trained weights: sampling's cost depends on them."""
    if run is not None:
        return xf.load(run, device=str(device))
    folder = Path(tempfile.mkdtemp(dir=out)) / "run"
    epochs = 50 if device.type == "cuda" else 10
    train_run(
        Options(epochs=epochs, batch_size=256 if device.type == "cuda" else 128, device=str(device)), folder
    )
    return xf.load(folder, device=str(device))


def _trainer(device: torch.device, **options: object) -> Trainer:
    chosen = Options(device=str(device)).replace(**options)
    dataset = build_data(chosen)
    torch.manual_seed(0)
    flow = build_flow(chosen, dataset)
    start_from_data(flow, dataset.train)
    return Trainer(flow, build_estimator(chosen.estimator), dataset, chosen)


# ---- training ----


def made_against_linear(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """A MADE's forward and backward against unmasked layers of the same sizes."""
    made = xf.MADE(784, hidden=(1024,)).to(device)
    plain = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 784)).to(device)
    x = (torch.rand(128, 784, device=device) < 0.15).float()

    def passes(module: nn.Module, call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def act() -> None:
            module.zero_grad(set_to_none=True)
            call().sum().backward()

        return act

    found = alternate(
        {
            "made": passes(made, lambda: made({Source.STATE: x})),
            "linear": passes(plain, lambda: plain(x)),
        },
        device,
        rounds=60,
        warm_up=5,
    )
    ratio = found["linear"] / found["made"]
    target, met = at_least(ratio, 0.95)
    return [
        Figure(
            "made-forward-backward",
            1e3 * found["made"],
            "ms",
            "torch.nn layers of the same sizes",
            1e3 * found["linear"],
            ratio,
            target,
            met,
        )
    ]


def training_step_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """A step of the trainer against a plain eager loop's, on two batch sizes."""
    found = []
    for batch in (128, 256):
        trainer = _trainer(device, batch_size=batch, epochs=1)
        engine = EagerEngine(trainer.machinery)
        engine.begin_epoch(torch.randperm(50_000), 0)
        reference = plain_training_step(xf.MADE(784, hidden=(1024,)), trainer.dataset.train.values, batch)
        times = alternate(
            {"ours": lambda e=engine: e.advance(0, 0, 1), "plain": reference}, device, rounds=60, warm_up=5
        )
        ratio = times["plain"] / times["ours"]
        target, met = at_least(ratio, 1.3)
        found.append(
            Figure(
                f"training-step-cpu-{batch}",
                1e3 * times["ours"],
                "ms",
                "plain eager PyTorch loop",
                1e3 * times["plain"],
                ratio,
                target,
                met,
            )
        )
    return found


def training_step_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The real trainer's step, the bare captured loop's, and the plain eager loop's; depth 1, width 1024, batch 256."""
    trainer = _trainer(device, batch_size=256, epochs=40)
    began = time.perf_counter()
    trainer.train()
    whole = trainer.progress.seconds / trainer.total_steps
    del began
    bare = _trainer(device, batch_size=256, epochs=40)
    engine, _ = choose_engine(bare.machinery, 0)
    steps = bare.steps_per_epoch
    order = torch.randperm(50_000, device=device)

    def epoch() -> None:
        engine.begin_epoch(order, 0)
        made = 0
        while made < steps:
            made += engine.advance(made, 0, steps - made)

    reference = plain_training_step(xf.MADE(784, hidden=(1024,)), bare.dataset.train.values, 256)

    def plain() -> None:
        for _ in range(20):
            reference()

    times = alternate({"captured": epoch, "plain": plain}, device, rounds=5)
    captured, eager = times["captured"] / steps, times["plain"] / 20
    in_epochs = _time_in_epochs(device)
    target, met = at_most(1e3 * in_epochs, 0.12, "ms")
    overhead = in_epochs / captured - 1
    return [
        Figure(
            "training-step-gpu",
            1e3 * in_epochs,
            "ms",
            "plain eager PyTorch loop",
            1e3 * eager,
            eager / in_epochs,
            target,
            met,
            "the trainer's loop over one epoch, validation and files apart",
        ),
        Figure(
            "bare-captured-step-gpu",
            1e3 * captured,
            "ms",
            "plain eager PyTorch loop",
            1e3 * eager,
            eager / captured,
            None,
            None,
        ),
        Figure(
            "trainer-overhead-gpu",
            100 * overhead,
            "%",
            "bare captured loop",
            1e3 * captured,
            None,
            "<= 10 %",
            overhead <= 0.10,
        ),
        Figure(
            "training-step-gpu-all-in",
            1e3 * whole,
            "ms",
            "plain eager PyTorch loop",
            1e3 * eager,
            eager / whole,
            None,
            None,
            "40 epochs with capture and a validation after each",
        ),
    ]


def _time_in_epochs(device: torch.device) -> float:
    """Seconds a step of the trainer's own epoch loop, capture, validation and files apart."""
    trainer = _trainer(device, batch_size=256, epochs=4)
    engine, _ = choose_engine(trainer.machinery, 0)
    spent = []
    for epoch in range(4):
        trainer.progress.batch, trainer.progress.epoch = 0, epoch
        spent.append(seconds(lambda: trainer._train_epoch(engine), device))
    return sorted(spent)[1] / trainer.steps_per_epoch


def hundred_epochs(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """100 epochs of MNIST with validation and checkpoints, from nothing to result.json."""
    folder = Path(tempfile.mkdtemp()) / "run"
    spent = seconds(
        lambda: train_run(Options(epochs=100, batch_size=256, device=str(device)), folder), device
    )
    target, met = at_most(spent, 10, "s")
    return [
        Figure(
            "hundred-epochs",
            spent,
            "s",
            "none",
            None,
            None,
            target,
            met,
            "loading, capture, validations and final evaluation included",
        )
    ]


def eight_runs(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """Eight seeds at once against the same eight one after the other."""

    def train(workers: int) -> Callable[[], None]:
        def act() -> None:
            root = Path(tempfile.mkdtemp())
            options = Options(epochs=40, batch_size=256, device=str(device), validate_every=10)
            jobs = [Job(options.replace(seed=seed), root / f"seed-{seed}") for seed in range(8)]
            outcomes = run_jobs(jobs, workers)
            assert all(outcome.error is None for outcome in outcomes), outcomes

        return act

    together, apart = seconds(train(8), device), seconds(train(1), device)
    target, met = at_least(apart / together, 3)
    return [
        Figure(
            "eight-runs",
            together,
            "s",
            "one after the other",
            apart,
            apart / together,
            target,
            met,
            "40 epochs each, from nothing to result.json",
        )
    ]


def hardware_limit(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The two ceilings, and what a step must at least take: its operations and its bytes."""
    big = torch.randn(2**28, device=device)
    copy = torch.empty_like(big)
    spent = alternate({"copy": lambda: copy.copy_(big)}, device, rounds=10)["copy"]
    bandwidth = 2 * big.numel() * 4 / spent
    a, b = (torch.randn(8192, 8192, device=device) for _ in range(2))
    torch.set_float32_matmul_precision("high")
    spent = alternate({"product": lambda: a @ b}, device, rounds=10)["product"]
    torch.set_float32_matmul_precision("highest")
    rate = 2 * 8192**3 / spent
    weights = 2 * 784 * 1024
    operations = 2 * 256 * weights * 2.5  # forward twice, gradients of both weights and of the hidden layer
    bytes_moved = 4 * weights * (2 + 7) + 256 * 784 * (1 + 4 * 6) + 256 * 1024 * 4 * 6
    floor = operations / rate + bytes_moved / bandwidth
    return [
        Figure("copy-bandwidth", bandwidth / 1e12, "TB/s", "none", None, None, None, None),
        Figure("tf32-rate", rate / 1e12, "TFLOP/s", "none", None, None, None, None),
        Figure(
            "step-floor",
            1e3 * floor,
            "ms",
            "operations and bytes counted, both ceilings measured",
            None,
            None,
            None,
            None,
        ),
    ]


# ---- sampling ----


def _sampling(flow: xf.LatentFlow, device: torch.device, batch: int, bound: float, rounds: int) -> Figure:
    noise = SampleNoise.draw(flow, torch.Size([batch]), torch.Generator(device).manual_seed(0))
    times = alternate(
        {"ours": lambda: flow.sample_with(noise), "sequential": lambda: sequential_sample(flow, noise)},
        device,
        rounds=rounds,
        warm_up=1,
    )
    different = int((flow.sample_with(noise) != sequential_sample(flow, noise)).sum())
    ratio = times["sequential"] / times["ours"]
    target, met = at_least(ratio, bound)
    return Figure(
        f"sampling-{device.type}-{batch}",
        1e3 * times["ours"],
        "ms",
        "one pass for each feature",
        1e3 * times["sequential"],
        ratio,
        target,
        met,
        f"{different} of {batch * flow.features} pixels differ from the reference",
    )


def sampling_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """64 and 100 images against one pass for each feature, and against zuko."""
    found = [_sampling(flow, device, 64, 50, 5), _sampling(flow, device, 100, 10, 3)]
    theirs = zuko_sampler(784, 1024, 64, device)
    if theirs is not None:
        spent = seconds(theirs, device)
        ours = found[0].value / 1e3
        found.append(
            Figure(
                "sampling-cpu-64-zuko",
                1e3 * ours,
                "ms",
                "zuko's MAF of the same size",
                1e3 * spent,
                spent / ours,
                None,
                None,
            )
        )
    return found


def sampling_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """1,024 images against one pass for each feature; 10,000 images."""
    noise = SampleNoise.draw(flow, torch.Size([10_000]), torch.Generator(device).manual_seed(0))
    spent = alternate({"ours": lambda: flow.sample_with(noise)}, device, rounds=5)["ours"]
    target, met = at_most(spent, 0.1, "s")
    many = Figure("sampling-cuda-10000", spent, "s", "none", None, None, target, met)
    return [_sampling(flow, device, 1024, 40, 3), many]


# ---- evaluation ----


def bound_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The 1,000-sample bound, every layer sampled, of 1,000 images."""
    test = xf.data.mnist().test
    assert test is not None
    spent = seconds(
        lambda: evaluate.importance(flow, test.subset(1000), samples=1000, sum_last=False), device
    )
    target, met = at_most(spent, 60, "s")
    return [Figure("bound-cpu-1000", spent, "s", "none", None, None, target, met, "depth 1")]


def bound_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The same of all 10,000 test images at depths 1 and 4, with the memory it took."""
    test = xf.data.mnist().test
    assert test is not None
    test = test.to(device)
    orders = ("natural", "reversed", "natural", "reversed")
    deep = xf.LatentFlow([xf.Layer(xf.MADE(784, order=o)) for o in orders], xf.FactorisedBase(784)).to(device)
    found = []
    for depth, model, bound in ((1, flow, 3), (4, deep, 40)):
        evaluate.importance(model, test.subset(100), samples=10, sum_last=False)
        torch.cuda.reset_peak_memory_stats()
        spent = seconds(lambda m=model: evaluate.importance(m, test, samples=1000, sum_last=False), device)
        gigabytes = torch.cuda.max_memory_allocated() / 1e9
        target, met = at_most(spent, bound, "s")
        found.append(
            Figure(
                f"bound-gpu-depth-{depth}",
                spent,
                "s",
                "none",
                None,
                None,
                target + ", <= 4 GB",
                met and gigabytes <= 4,
                f"peak {gigabytes:.2f} GB",
            )
        )
    return found
