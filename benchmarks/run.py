"""Measure this machine: `python benchmarks/run.py --name NAME` writes benchmarks/results/NAME.json.

Every figure is a ratio to a reference timed in the same run, or a time beside the hardware's limit.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

import figures
import scaling
import xorflow as xf
from profiles import write_profile
from timing import Figure

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=None, help="name of the machine in the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument(
        "--run", type=Path, default=None, help="a trained depth-1 run on MNIST; trained here otherwise"
    )
    parser.add_argument("--only", nargs="*", default=None, help="names of figures to measure")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = arguments.name or ("gpu" if device.type == "cuda" else f"cpu-{torch.get_num_threads()}-threads")
    arguments.out.mkdir(parents=True, exist_ok=True)
    flow = figures.trained_flow(arguments.run, device, arguments.out)
    measured: list[Figure] = []
    for measure in figures.for_device(device):
        if arguments.only is None or measure.__name__ in arguments.only:
            print(f"measuring {measure.__name__} ...", flush=True)
            for figure in measure(flow, device):
                measured.append(figure)
                print(
                    f"  {figure.id}: {figure.value:.4g} {figure.unit}, ratio {figure.ratio}, target {figure.target}: {figure.met}"
                )
    curves = [] if arguments.only is not None else scaling.curves(device)
    for curve in curves:
        print(f"  {curve['id']}: cost ~ {curve['against']}^{curve['exponent']:.2f}")
    result: dict[str, Any] = {
        "machine": machine(device),
        "versions": {
            "xorflow": xf.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "figures": [figure.to_json() for figure in measured],
        "scaling": curves,
    }
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if arguments.only is None:
        write_profile(arguments.out / f"{name}.profile.txt", device)


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
    return found


if __name__ == "__main__":
    main()
