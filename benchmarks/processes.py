"""Training by two processes beside one process with two threads: the same global batch, on two cores.

    python benchmarks/processes.py [--turns 9] [--out benchmarks/processes.json]

Three arms take turns: one process with two threads; two processes with one thread each, as `xorflow train --processes 2` begins them;
and these by torch's DistributedDataParallel instead of one sum of gradients after the backward pass. A ratio is the first one's time
over that of two processes: above 1, two processes are faster. Printed and kept are medians of the turns, and the interval that holds
the middle half of the ratios. About four minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

MODELS = ("MADE of 1024", "transformer of 4 blocks of 128")
BATCHES = {MODELS[0]: (32, 128, 512), MODELS[1]: (4, 16, 32)}
ARMS = ("one process", "two processes", "two, DistributedDataParallel")
STEPS = {MODELS[0]: 10, MODELS[1]: 4}


def trainer_of(model: str, batch: int) -> Any:
    import torch

    import xorflow as xf
    from xorflow.data import Dataset, Split
    from xorflow.estimators import MaximumLikelihood
    from xorflow.training import Options, Trainer

    torch.manual_seed(0)
    made = model == MODELS[0]
    features = 784 if made else 256
    net = (
        xf.MADE(features, (1024,))
        if made
        else xf.CausalTransformer(features, width=128, depth=4, heads=4, dropout=0.0)
    )
    flow = xf.LatentFlow([xf.Layer(net)], xf.FactorisedBase(features, learned=True))
    rows = Split(torch.randint(2, (batch, features), dtype=torch.uint8))
    data = Dataset("rows", rows, None, None, categories=(2,) * features)
    return Trainer(
        flow, MaximumLikelihood(), data, Options(data="rows", layers=None, batch_size=batch, device="cpu")
    )


def by_ddp(trainer: Any, rank: int) -> Any:
    """A step by torch's DistributedDataParallel, with the same optimiser."""
    import torch
    from torch import nn

    class Surrogate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = trainer.flow

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return trainer.estimator.loss(self.flow, self.flow.start(x), None).surrogate

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # newer versions of torch have another name for the setting of buffers
        module = nn.parallel.DistributedDataParallel(
            Surrogate(), broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def step(rows: torch.Tensor, number: int) -> None:
        x = trainer.gather(rows, number).split(2)[rank].x
        module(x).backward()
        trainer.optimiser.step()
        trainer.optimiser.zero_grad(set_to_none=True)

    return step


def work(pipe: Any, arm: str, rank: int, path: str) -> None:
    """Time steps of (model, batch) whenever asked to."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(2 if arm == ARMS[0] else 1)
    if arm != ARMS[0]:
        dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    steps: dict[tuple[str, int], Any] = {}
    rows: dict[int, torch.Tensor] = {}
    while (case := pipe.recv()) is not None:
        model, batch = case
        if case not in steps:
            steps.clear()
            trainer = trainer_of(model, batch)
            steps[case] = by_ddp(trainer, rank) if arm == ARMS[2] else trainer.make_step
            rows[batch] = torch.arange(batch)
            steps[case](rows[batch], 0)
        if arm != ARMS[0]:
            dist.barrier()
        began = time.perf_counter()
        for number in range(STEPS[model]):
            steps[case](rows[batch], number)
        pipe.send((time.perf_counter() - began) / STEPS[model])
    if arm != ARMS[0]:
        dist.destroy_process_group()


class Arm:
    """The processes of one arm, which wait until they are asked."""

    def __init__(self, name: str, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(1 if name == ARMS[0] else 2):
            ours, theirs = context.Pipe()
            place = str(Path(folder) / name.replace(" ", "-"))
            process = context.Process(target=work, args=(theirs, name, rank, place), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def milliseconds(self, case: tuple[str, int]) -> float:
        """Of a step, of the slowest process."""
        for pipe in self.pipes:
            pipe.send(case)
        return 1e3 * max(pipe.recv() for pipe in self.pipes)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def measure(arms: dict[str, Arm], case: tuple[str, int], turns: int) -> dict[str, Any]:
    for arm in arms.values():
        arm.milliseconds(case)  # what is made once
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(turns):
        for name, arm in arms.items():
            times[name].append(arm.milliseconds(case))
    figures: dict[str, Any] = {"model": case[0], "batch": case[1]}
    for name, of_arm in times.items():
        figures[f"{name}, ms"] = round(statistics.median(of_arm), 2)
    for name in ARMS[1:]:
        ratios = [one / two for one, two in zip(times[ARMS[0]], times[name], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        figures[f"{name}, ratio"] = [round(value, 2) for value in (quartiles[1], quartiles[0], quartiles[2])]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(name, folder) for name in ARMS}
        cases = []
        for model in MODELS:
            for batch in BATCHES[model]:
                cases.append(measure(arms, (model, batch), given.turns))
                print(cases[-1], flush=True)
        for arm in arms.values():
            arm.end()
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "turns": given.turns,
    }
    given.out.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
