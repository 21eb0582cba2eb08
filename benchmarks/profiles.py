"""Where the time goes, kept as text: shares of the device's and of the host's time, by kernel and by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import xorflow as xf
from models import bare_steps, mnist_test, mnist_trainer
from timing import seconds, synchronise
from xorflow import evaluate

_ROWS = 20


def profiled(flow: xf.LatentFlow, device: torch.device) -> list[str]:
    """Lines about training, sampling and the bound: depth 1, width 1024."""
    on_cuda = device.type == "cuda"
    batch, samples, images = (256, 1024, 2000) if on_cuda else (128, 64, 100)
    noise = flow.draw_noise(samples, torch.Generator(device).manual_seed(0))
    test = mnist_test(device).subset(images)
    trainer = mnist_trainer(device, batch_size=batch, epochs=4)
    parts = {
        f"24 training steps, batch {batch}": bare_steps(trainer, 24),
        f"{samples} samples": lambda: flow.sample_with(noise),
        f"the 1,000-sample bound of {images} images": lambda: evaluate.importance(
            flow, test, samples=1000, sum_last=False
        ),
    }
    kind = torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    title = f"Where the time goes on {kind}: depth 1, width 1024, torch {torch.__version__}"
    sections = [_section(name, act, device) for name, act in parts.items()]
    return "\n\n".join([title, *sections]).splitlines()


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
