"""Measure this machine: `python benchmarks/run.py --name NAME` writes benchmarks/results/NAME.json.

Every figure is a ratio to a reference timed in the same run; NAME.profile.txt says where the time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import figures
import scaling
import xorflow as xf
from models import trained_flow
from profiles import write_profile

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=None, help="name of the results (default: by the device)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument(
        "--run", type=Path, default=None, help="a trained depth-1 run on MNIST; trained here otherwise"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=None,
        help="measure only these (functions of figures.py) and write nothing",
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    chosen = [m for m in figures.for_device(device) if m.__name__ in (arguments.only or [m.__name__])]
    if arguments.only is not None and len(chosen) < len(set(arguments.only)):
        names = ", ".join(m.__name__ for m in figures.for_device(device))
        parser.error(f"--only takes names of what is measured on {device.type}: {names}")
    print("training a flow to sample from ..." if arguments.run is None else f"reading {arguments.run} ...")
    flow = trained_flow(arguments.run, device)
    measured = []
    for measure in chosen:
        print(f"measuring {measure.__name__} ...", flush=True)
        for figure in measure(flow, device):
            measured.append(figure.to_json())
            print(f"  {figure}", flush=True)
    if arguments.only is not None:
        return
    print("measuring how cost grows ...", flush=True)
    curves = scaling.curves(device)
    for curve in curves:
        low, high = curve["fitted"]
        print(
            f"  {curve['id']}: cost ~ {curve['against']}^{curve['exponent']:.2f} for {low} to {high}",
            flush=True,
        )
    result = {"machine": machine(device), "versions": versions(), "figures": measured, "scaling": curves}
    name = arguments.name or default_name(device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    write_profile(arguments.out / f"{name}.profile.txt", flow, device)


def default_name(device: torch.device) -> str:
    """`nvidia-h200`, or `cpu-2-threads`."""
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return f"cpu-{torch.get_num_threads()}-threads"


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {"xorflow": xf.__version__, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    main()
