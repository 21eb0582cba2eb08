"""Where the time goes, kept as text: shares of the device's and of the host's time, by kernel and by operation."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import xorflow as xf
from models import bare_steps, mnist_test, mnist_trainer, stacked_trainers
from timing import seconds, synchronise
from xorflow import evaluate
from xorflow.flows import SampleNoise
from xorflow.training import Job, Options, Trainer, jobs, lockstep, run_jobs

_ROWS = 20


def write_profile(path: Path, flow: xf.LatentFlow, device: torch.device) -> None:
    """Profile training, sampling and the bound: depth 1, width 1024."""
    on_cuda = device.type == "cuda"
    batch, samples, images = (256, 1024, 2000) if on_cuda else (128, 64, 100)
    noise = SampleNoise.draw(flow, torch.Size([samples]), torch.Generator(device).manual_seed(0))
    test = mnist_test(device).subset(images)
    trainer = mnist_trainer(device, batch_size=batch, epochs=4)
    together = {}
    if on_cuda:
        eight = stacked_trainers(device, 8, batch_size=batch, epochs=4)
        together = {f"24 training steps of eight runs at once, batch {batch}": bare_steps(eight, 24)}
    parts = {
        f"24 training steps, batch {batch}": bare_steps(trainer.machinery, 24),
        **together,
        f"{samples} samples": lambda: flow.sample_with(noise),
        f"the 1,000-sample bound of {images} images": lambda: evaluate.importance(
            flow, test, samples=1000, sum_last=False
        ),
    }
    kind = torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    title = f"Where the time goes on {kind}: depth 1, width 1024, torch {torch.__version__}"
    sections = [_section(name, act, device) for name, act in parts.items()]
    whole = [whole_runs(device, 8, epochs=100)] if on_cuda else []
    path.write_text("\n\n".join([title, *sections, *whole]) + "\n")


_PHASES: dict[str, tuple[object, str]] = {
    "looking at all jobs first": (jobs._Crew, "check"),
    "loading data": (jobs, "build_data"),
    "making flows, folders and trainers": (jobs, "begin_run"),
    "stacking them, and one gradient to see whether that works": (lockstep, "Ensemble"),
    "capturing the steps": (lockstep, "choose_engine"),
    "launching steps, and the rows of the next epoch": (lockstep.Lockstep, "train_epoch"),
    "the end of epochs: waiting for the last steps, records, validation": (Trainer, "end_epoch"),
    "of that, validation": (Trainer, "_validate"),
    "final evaluation, weights and results": (jobs, "finish_run"),
}


def whole_runs(device: torch.device, count: int, epochs: int) -> str:
    """The host's time for whole runs as one, phase by phase: what `eight-runs` measures."""
    options = Options(epochs=epochs, batch_size=256, device=str(device), validate_every=10)
    spent = dict.fromkeys(_PHASES, 0.0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as watched:
        for words, (owner, name) in _PHASES.items():
            watched.enter_context(_timed(owner, name, functools.partial(_add, spent, words)))
        made = [Job(options.replace(seed=seed), Path(folder) / str(seed)) for seed in range(count)]
        began = time.perf_counter()
        outcomes = run_jobs(made, count if device.type == "cuda" else 1)
        whole = time.perf_counter() - began
    assert all(outcome.error is None for outcome in outcomes), outcomes
    lines = [f"== {count} whole runs as one, {epochs} epochs: {whole:.2f} s =="]
    return "\n".join([*lines, *(f"{seconds:8.3f} s  {words}" for words, seconds in spent.items())])


def _add(spent: dict[str, float], words: str, seconds: float) -> None:
    spent[words] += seconds


@contextmanager
def _timed(owner: object, name: str, add: Callable[[float], None]) -> Iterator[None]:
    """Within this block calls of a function are timed."""
    act = getattr(owner, name)

    @functools.wraps(act, updated=())
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return act(*args, **kwargs)
        finally:
            add(time.perf_counter() - began)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, act)


def _section(name: str, act: Callable[[], Any], device: torch.device) -> str:
    act()
    wall = seconds(act, device)  # without the profiler, which slows the host down
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda) as found:
        act()
        synchronise(device)
    events = found.key_averages()
    host = [(e.key, e.count, e.self_cpu_time_total) for e in events if e.device_type == DeviceType.CPU]
    kernels = [
        (e.key, e.count, e.self_device_time_total)
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
    lines = [f"== {name}: {1e3 * wall:.3f} ms =="]
    if on_cuda:
        busy = sum(microseconds for *_, microseconds in kernels) / 1e6
        lines += [
            f"kernels: {1e3 * busy:.3f} ms, {100 * busy / wall:.0f} % of the time",
            *_shares(kernels),
            "",
        ]
    lines += ["share of the host's time by operation", *_shares(host)]
    return "\n".join(lines)


def _shares(entries: list[tuple[str, int, float]]) -> list[str]:
    """The largest entries (name, calls, microseconds), each with its share of all."""
    total = sum(spent for *_, spent in entries) or 1.0
    entries = sorted(entries, key=lambda entry: -entry[2])
    rows = [
        f"{100 * spent / total:5.1f} %  {spent / 1e3:10.3f} ms  {n:6d} x  {key[:90]}"
        for key, n, spent in entries
    ]
    rest = sum(spent for *_, spent in entries[_ROWS:])
    left = [f"{100 * rest / total:5.1f} %  {rest / 1e3:10.3f} ms          all others"] if rest else []
    return rows[:_ROWS] + left
