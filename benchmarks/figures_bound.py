"""Evaluation: the 1,000-sample bound against one draw at a time, and the hardware's limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import xorflow as xf
from limits import LIMIT, bound_limit
from measures import Setup, measure
from models import mnist_test, new_flow
from references import ONE_DRAW, plain_bound
from timing import Figure, alternate, faster_than, within
from xorflow import evaluate

_SAMPLES = 1000


@dataclass(frozen=True)
class Timed:
    """Seconds of ours and of the plain loop, our gigabytes on a GPU, and what to say about it."""

    ours: float
    plain: float
    gigabytes: float
    note: str


def _bound(flow: xf.LatentFlow, device: torch.device, images: int, draws: int, rounds: int) -> Timed:
    """The 1,000-sample bound; the plain loop is timed for `draws` draws."""
    test = mnist_test(device).subset(images)
    peak = 0.0

    def ours() -> None:
        nonlocal peak
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        evaluate.importance(flow, test, samples=_SAMPLES, sum_last=False)
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated() / 1e9)

    evaluate.importance(flow, test.subset(100), samples=10, sum_last=False)
    plain_bound(flow, test.values, 1)
    actions = {"ours": ours, "plain": lambda: plain_bound(flow, test.values, draws)}
    times = alternate(actions, device, rounds=rounds, warm_up=0)
    scale = _SAMPLES // draws
    note = (
        f"{images:,} images, every layer sampled; the reference is {scale} times its time for {draws} draws"
    )
    return Timed(times["ours"], times["plain"] * scale, peak, note)


def _against_limit(id: str, ours: float, flow: xf.LatentFlow, images: int, device: torch.device) -> Figure:
    limit = bound_limit(flow, images, _SAMPLES, device)
    return faster_than(id, ours, LIMIT, limit.seconds, unit="s", note=limit.rates)


@measure("cpu", "bound-cpu-1000", "bound-cpu-1000-limit")
def bound_cpu(setup: Setup) -> list[Figure]:
    """The 1,000-sample bound, every layer sampled, of 1,000 images."""
    timed = _bound(setup.flow, setup.device, 1000, draws=5, rounds=3)
    note = f"depth 1; {timed.note}"
    return [
        within("bound-cpu-1000", timed.ours, ONE_DRAW, timed.plain, at_most=60, note=note),
        _against_limit("bound-cpu-1000-limit", timed.ours, setup.flow, 1000, setup.device),
    ]


@measure(
    "cuda",
    "bound-gpu-depth-1",
    "bound-gpu-depth-1-limit",
    "bound-gpu-depth-4",
    "bound-gpu-depth-4-limit",
)
def bound_gpu(setup: Setup) -> list[Figure]:
    """The same of all 10,000 test images at depths 1 and 4, with the memory it took."""
    figures = []
    for depth, most, rounds in ((1, 3, 3), (4, 40, 1)):
        flow = setup.flow if depth == 1 else new_flow(784, depth, setup.device)
        timed = _bound(flow, setup.device, 10_000, draws=10, rounds=rounds)
        name, note = f"bound-gpu-depth-{depth}", f"peak {timed.gigabytes:.2f} GB; {timed.note}"
        memory = (timed.gigabytes, 4)
        figures += [
            within(name, timed.ours, ONE_DRAW, timed.plain, at_most=most, note=note, gigabytes=memory),
            _against_limit(f"{name}-limit", timed.ours, flow, 10_000, setup.device),
        ]
    return figures
