"""The figures: training, sampling and evaluation, each against its reference."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import xorflow as xf
from models import bare_steps, mnist_intensities, mnist_test, mnist_trainer, new_flow, stacked_trainers
from references import (
    plain_bound,
    plain_training_step,
    sample_by,
    sequential_sample,
    zuko_flow,
    zuko_sampler,
    zuko_training_step,
)
from timing import Figure, alternate, faster_than, seconds, within
from xorflow import evaluate
from xorflow.conditioners import MaskedLinear, Source
from xorflow.flows import SampleNoise
from xorflow.training import Job, Options, run_jobs, train_run
from xorflow.training.engine import Work, choose_engine
from xorflow.training.lockstep import Lockstep

Measure = Callable[[xf.LatentFlow, torch.device], list[Figure]]

PLAIN = "plain eager PyTorch loop"
D_PASSES = "D-pass sampler"
ALL_PASSES = "passes of all features until nothing changes"
BLOCKS = "blocks of features"
ZUKO = "zuko's MAF of the same size"
LIMIT = "hardware's limit"


def for_device(device: torch.device) -> list[Measure]:
    if device.type == "cuda":
        return [training_step_gpu, hundred_epochs, eight_runs, sampling_gpu, bound_gpu]
    return [made_against_linear, training_step_cpu, sampling_cpu, bound_cpu]


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

    actions = {
        "made": passes(made, lambda: made({Source.STATE: x})),
        "linear": passes(plain, lambda: plain(x)),
    }
    times = alternate(actions, device, rounds=60, warm_up=5)
    reference = "unmasked torch.nn layers of the same sizes"
    return [faster_than("made-forward-backward", times["made"], reference, times["linear"], at_least=0.95)]


def training_step_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """A step of the trainer against a plain eager loop's, on two batch sizes; against zuko's and the limit on one."""
    found = []
    for batch in (128, 256):
        trainer = mnist_trainer(device, batch_size=batch, epochs=1)
        engine, _ = choose_engine(trainer.machinery, 0)
        engine.begin_epoch(torch.randperm(len(trainer.dataset.train)), 0)
        grey = trainer.dataset.train.values
        actions: dict[str, Callable[[], object]] = {
            "ours": lambda e=engine: e.advance(0, 0, 1),
            "plain": plain_training_step(xf.MADE(784, hidden=(1024,)), grey, batch),
        }
        theirs = zuko_flow(784, 1024, device) if batch == 128 else None
        if theirs is not None:
            actions["zuko"] = zuko_training_step(theirs, grey, batch)
        times = _step_times(actions, device, count=10)
        name = f"training-step-cpu-{batch}"
        found.append(faster_than(name, times["ours"], PLAIN, times["plain"], at_least=1.3))
        if batch == 128:
            found.append(_against_limit(f"{name}-limit", times["ours"], batch, device))
        if theirs is not None:
            note = "a continuous flow on dequantised grey values"
            found.append(faster_than(f"{name}-zuko", times["ours"], ZUKO, times["zuko"], note=note))
    return [*found, _small_step_cpu(device)]


def _small_step_cpu(device: torch.device) -> Figure:
    """A network so small that there is nothing to gain: what the trainer itself costs."""
    trainer = mnist_trainer(device, batch_size=32, epochs=1, hidden=[64])
    engine, _ = choose_engine(trainer.machinery, 0)
    engine.begin_epoch(torch.randperm(len(trainer.dataset.train)), 0)
    plain = plain_training_step(xf.MADE(784, hidden=(64,)), trainer.dataset.train.values, 32)
    actions = {"ours": lambda: engine.advance(0, 0, 1), "plain": plain}
    times = _step_times(actions, device, count=50)
    return faster_than(
        "training-step-cpu-small", times["ours"], PLAIN, times["plain"], note="64 units, batch 32"
    )


def _step_times(
    steps: Mapping[str, Callable[[], object]], device: torch.device, count: int
) -> dict[str, float]:
    """Seconds of a step, `count` of one kind after the other as in training, so that each finds its weights in the caches."""

    def several(step: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            for _ in range(count):
                step()

        return act

    times = alternate({name: several(step) for name, step in steps.items()}, device, rounds=15)
    return {name: spent / count for name, spent in times.items()}


def training_step_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The trainer's own loop, the bare captured loop and the plain eager loop, turn by turn; batch 256."""
    trainer, bare = (mnist_trainer(device, batch_size=256, epochs=40) for _ in range(2))
    engine, _ = choose_engine(trainer.machinery, 0)
    steps = bare.steps_per_epoch
    loop = Lockstep([trainer], engine)

    def trainer_epoch() -> None:
        loop.train_epoch()
        trainer.progress.batch, trainer.progress.epoch = 0, trainer.progress.epoch + 1

    step = plain_training_step(xf.MADE(784, hidden=(1024,)), bare.dataset.train.values, 256)

    def plain() -> None:
        for _ in range(20):
            step()

    times = alternate(
        {"trainer": trainer_epoch, "bare": bare_steps(bare.machinery), "plain": plain}, device, rounds=9
    )
    ours, captured, eager = times["trainer"] / steps, times["bare"] / steps, times["plain"] / 20
    whole = mnist_trainer(device, batch_size=256, epochs=40)
    whole.train()
    all_in = whole.progress.seconds / whole.total_steps
    words = "the trainer's loop over an epoch, order of rows included, validation and files apart"
    over = f"overhead {100 * (ours / captured - 1):.1f} %, of at most 10 %"
    validated = "40 epochs with a validation after each"
    return [
        within("training-step-gpu", ours, PLAIN, eager, at_most=0.12, unit="ms", note=words),
        faster_than("training-step-gpu-bare", captured, PLAIN, eager, note="the captured steps alone"),
        faster_than(
            "trainer-overhead-gpu", ours, "bare captured loop", captured, at_least=1 / 1.1, note=over
        ),
        faster_than("training-step-gpu-all-in", all_in, PLAIN, eager, note=validated),
        _against_limit("training-step-gpu-limit", ours, 256, device),
    ]


@functools.cache
def _ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes a second by copying, and operations a second by products as training does them (TF32 on CUDA)."""
    on_cuda = device.type == "cuda"
    numbers, side = (2**28, 8192) if on_cuda else (2**26, 2048)
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on_cuda else before)
    actions = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = alternate(actions, device, rounds=10)
    torch.set_float32_matmul_precision(before)
    return 2 * 4 * numbers / times["copy"], 2 * side**3 / times["product"]


def _against_limit(id: str, step: float, batch: int, device: torch.device) -> Figure:
    """A training step beside the longer of two times: that of its operations and that of its bytes."""
    bandwidth, rate = _ceilings(device)
    layers = [layer for layer in xf.MADE(784, hidden=(1024,)).net if isinstance(layer, MaskedLinear)]
    used = sum(int(layer.mask.sum()) for layer in layers)
    stored = sum(layer.weight.numel() for layer in layers)
    # forward, gradients of all weights, and that of the hidden layer, which needs half of the weights
    operations = 2 * batch * used * 2.5
    # forward 1, backward 0.5, gradients written 1, Adam reads 4 and writes 3; activations, six times each
    moved = 4 * stored * 9.5 + batch * 784 * (1 + 4 * 6) + batch * 1024 * 4 * 6
    limit = max(operations / rate, moved / bandwidth)
    note = (
        f"{operations / 1e9:.2f} GFLOP of weights not masked at {rate / 1e12:.3g} TFLOP/s, {moved / 1e6:.0f} MB at "
        f"{bandwidth / 1e12:.3g} TB/s, both rates measured; the longer of the two, caches not considered"
    )
    return faster_than(id, step, LIMIT, limit, note=note)


def hundred_epochs(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """100 epochs of MNIST with validation and checkpoints, from nothing to result.json."""
    step = plain_training_step(xf.MADE(784, hidden=(1024,)), mnist_intensities(device), 256)

    def plain() -> None:
        for _ in range(50):
            step()

    eager = alternate({"plain": plain}, device, rounds=5)["plain"] / 50
    with tempfile.TemporaryDirectory() as folder:
        options = Options(epochs=100, batch_size=256, device=str(device))
        spent = seconds(lambda: train_run(options, Path(folder) / "run"), device)
    steps = 100 * (50_000 // 256)
    note = (
        "loading, capture, validations, checkpoints and final evaluation included; the reference is "
        f"{steps:,} times the median step of the plain loop, and nothing else"
    )
    return [within("hundred-epochs", spent, PLAIN, steps * eager, at_most=10, note=note)]


def eight_runs(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """Eight seeds at once against the same eight one after the other."""

    def train(workers: int, epochs: int = 100) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = Options(epochs=epochs, batch_size=256, device=str(device), validate_every=10)
            jobs = [Job(options.replace(seed=seed), Path(folder) / f"seed-{seed}") for seed in range(8)]
            outcomes = run_jobs(jobs, workers)
        assert all(outcome.error is None for outcome in outcomes), outcomes

    for workers in (8, 1):  # kernels are compiled when they are first used
        train(workers, epochs=1)
    together, apart = seconds(lambda: train(8), device), seconds(lambda: train(1), device)
    note = "100 epochs each, from nothing to result.json"
    return [
        faster_than("eight-runs", together, "one after the other", apart, at_least=3, unit="s", note=note),
        *_stacked_steps(device),
    ]


def _stacked_steps(device: torch.device) -> list[Figure]:
    """What is left of several runs without loading, validation and files: captured steps alone."""
    options = {"batch_size": 256, "epochs": 40}
    counts = {"eight": 8, "sixteen": 16}
    works: dict[str, Work] = {
        name: stacked_trainers(device, count, **options) for name, count in counts.items()
    }
    works["one"] = mnist_trainer(device, **options).machinery
    times = alternate({name: bare_steps(work) for name, work in works.items()}, device, rounds=9)
    alone, steps = times["one"], 50_000 // 256
    return [
        faster_than(
            f"{name}-runs-step", times[name] / steps / count, "a captured step of one run", alone / steps,
            note=f"a run's share of a captured step of {name} runs; no target of its own",
        )
        for name, count in counts.items()
    ]  # fmt: skip


# ---- sampling ----


def _sampling(flow: xf.LatentFlow, device: torch.device, batch: int, rounds: int) -> tuple[float, float, str]:
    """Our seconds, those of the D-pass sampler on the same noise, and how far the samples agree."""
    noise = SampleNoise.draw(flow, torch.Size([batch]), torch.Generator(device).manual_seed(0))
    actions = {"ours": lambda: flow.sample_with(noise), "theirs": lambda: sequential_sample(flow, noise)}
    times = alternate(actions, device, rounds=rounds, warm_up=1)
    different = int((flow.sample_with(noise) != sequential_sample(flow, noise)).sum())
    note = f"trained weights; {different} of {batch * flow.features:,} pixels differ from the reference's"
    return times["ours"], times["theirs"], note


def _against_other_ways(flow: xf.LatentFlow, device: torch.device, batches: tuple[int, ...]) -> list[Figure]:
    """The way that sampling takes by itself against those that it leaves aside, on the same noise."""
    found = []
    for batch in batches:
        noise = SampleNoise.draw(flow, torch.Size([batch]), torch.Generator(device).manual_seed(0))
        ways = {"passes": ALL_PASSES} | ({"blocks": BLOCKS} if device.type == "cuda" else {})
        actions = {way: functools.partial(sample_by, way, flow, noise) for way in ways}
        actions["ours"] = functools.partial(flow.sample_with, noise)
        times = alternate(actions, device, rounds=9, warm_up=2)
        chosen = flow.sample_with(noise)
        for way, words in ways.items():
            different = int((chosen != sample_by(way, flow, noise)).sum())
            name, note = f"sampling-{device.type}-{batch}-{way}", f"{different} pixels differ"
            found.append(faster_than(name, times["ours"], words, times[way], at_least=1, note=note))
    return found


def _against_zuko(id: str, ours: float, batch: int, device: torch.device) -> list[Figure]:
    flow = zuko_flow(784, 1024, device)
    if flow is None:
        return []
    spent = alternate({"zuko": zuko_sampler(flow, batch)}, device, rounds=3, warm_up=1)["zuko"]
    return [faster_than(id, ours, ZUKO, spent, note="a continuous flow, untrained")]


def sampling_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """64 and 100 images against one pass for each feature, and against zuko."""
    ours, theirs, note = _sampling(flow, device, 64, rounds=5)
    more, theirs_more, note_more = _sampling(flow, device, 100, rounds=3)
    return [
        faster_than("sampling-cpu-64", ours, D_PASSES, theirs, at_least=50, note=note),
        faster_than("sampling-cpu-100", more, D_PASSES, theirs_more, at_least=10, note=note_more),
        *_against_other_ways(flow, device, (1, 64, 1024)),
        *_against_zuko("sampling-cpu-64-zuko", ours, 64, device),
    ]


def sampling_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """1,024 and 10,000 images against one pass for each feature, and against zuko where it is installed."""
    ours, theirs, note = _sampling(flow, device, 1024, rounds=5)
    many, theirs_many, note_many = _sampling(flow, device, 10_000, rounds=3)
    return [
        faster_than("sampling-gpu-1024", ours, D_PASSES, theirs, at_least=40, note=note),
        within("sampling-gpu-10000", many, D_PASSES, theirs_many, at_most=0.1, note=note_many),
        *_against_other_ways(flow, device, (1, 64, 1024)),
        *_against_zuko("sampling-gpu-1024-zuko", ours, 1024, device),
    ]


# ---- evaluation ----


def _bound(
    flow: xf.LatentFlow, device: torch.device, images: int, draws: int, rounds: int
) -> tuple[float, float, float, str]:
    """Seconds of the 1,000-sample bound, of the plain loop (from `draws` draws), our gigabytes, and a note."""
    test = mnist_test(device).subset(images)
    peak = 0.0

    def ours() -> None:
        nonlocal peak
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        evaluate.importance(flow, test, samples=1000, sum_last=False)
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated() / 1e9)

    evaluate.importance(flow, test.subset(100), samples=10, sum_last=False)
    plain_bound(flow, test.values, 1)
    actions = {"ours": ours, "plain": lambda: plain_bound(flow, test.values, draws)}
    times = alternate(actions, device, rounds=rounds, warm_up=0)
    note = f"{images:,} images, every layer sampled; the reference is {1000 // draws} times its time for {draws} draws"
    return times["ours"], times["plain"] * 1000 / draws, peak, note


ONE_DRAW = "plain eager PyTorch, one draw at a time"


def bound_cpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The 1,000-sample bound, every layer sampled, of 1,000 images."""
    ours, plain, _, note = _bound(flow, device, 1000, draws=5, rounds=3)
    return [within("bound-cpu-1000", ours, ONE_DRAW, plain, at_most=60, note=f"depth 1; {note}")]


def bound_gpu(flow: xf.LatentFlow, device: torch.device) -> list[Figure]:
    """The same of all 10,000 test images at depths 1 and 4, with the memory it took."""
    found = []
    for depth, most, rounds in ((1, 3, 3), (4, 40, 1)):
        model = flow if depth == 1 else new_flow(784, depth, device)
        ours, plain, peak, note = _bound(model, device, 10_000, draws=10, rounds=rounds)
        name, note = f"bound-gpu-depth-{depth}", f"peak {peak:.2f} GB; {note}"
        found.append(within(name, ours, ONE_DRAW, plain, at_most=most, note=note, gigabytes=(peak, 4)))
    return found
