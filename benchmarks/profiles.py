"""Where a training step's time goes, kept as text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from figures import _trainer
from xorflow.training.engine import choose_engine


def write_profile(path: Path, device: torch.device) -> None:
    """Profile 24 steps of depth 1, width 1024."""
    trainer = _trainer(device, batch_size=256 if device.type == "cuda" else 128, epochs=4)
    engine, _ = choose_engine(trainer.machinery, 0)
    engine.begin_epoch(torch.randperm(50_000, device=device), 0)
    engine.advance(0, 0, 8)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as found:
        made = 0
        while made < 24:
            made += engine.advance(made, made, 24 - made)
        if device.type == "cuda":
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)
    path.write_text(f"24 training steps on {device.type}: depth 1, width 1024, marginal\n\n{table}\n")
