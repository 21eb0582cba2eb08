"""Measure this machine: `python benchmarks/run.py --name NAME` writes benchmarks/results/NAME.json.

Every figure is a ratio to a reference timed in the same run; a profile says where the time goes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

import figures
import scaling
import xorflow
from measures import Setup, mismatch
from profiles import profiled
from xorflow._devices import resolve_device
from xorflow.errors import UserError

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=None, help="name of the results (default: by the device)")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU, if there is one)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument(
        "--run", type=Path, default=None, help="a trained depth-1 run on MNIST; trained here otherwise"
    )
    parser.add_argument("--only", nargs="+", default=None, help="measure only these, and write nothing")
    arguments = parser.parse_args()
    try:
        device = resolve_device(arguments.device)
        setup = Setup(device, arguments.run)
        if arguments.run is not None:
            print(f"reading {arguments.run}: depth {setup.flow.depth}", flush=True)
    except UserError as error:
        refuse(str(error))
    measures = figures.for_device(device.type)
    chosen = [m for m in measures if m.name in (arguments.only or [m.name])]
    if not measures or (arguments.only is not None and len(chosen) < len(set(arguments.only))):
        names = ", ".join(m.name for m in measures) or "nothing"
        refuse(f"what is measured on {device.type}, and --only takes, is {names}")
    measured = []
    for measure in chosen:
        print(f"measuring {measure.name} ...", flush=True)
        for figure in measure.act(setup):
            measured.append(figure.to_json())
            print(f"  {figure}", flush=True)
    if arguments.only is None:
        write(arguments.out, arguments.name or default_name(device), setup, measured)
    wrong = mismatch((figure["id"] for figure in measured), chosen)
    if wrong is not None:
        refuse(f"these are not the figures that were declared: they come {wrong}")


def refuse(message: str) -> NoReturn:
    """End with one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def write(folder: Path, name: str, setup: Setup, measured: list[dict[str, Any]]) -> None:
    """The results file of this device, after measuring the curves and where the time goes."""
    print("measuring how cost grows ...", flush=True)
    curves = scaling.curves(setup.device)
    for curve in curves:
        (low, high), power = curve["fitted"], f"{curve['against']}^{curve['exponent']:.2f}"
        print(f"  {curve['id']}: cost ~ {power} for {low} to {high}", flush=True)
    result = {
        "machine": machine(setup.device),
        "versions": _versions() | _references(),
        "figures": measured,
        "scaling": curves,
        "profile": profiled(setup.flow, setup.device),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def _versions() -> dict[str, str]:
    """What is measured; `source` tells two states of the code apart."""
    digest, root = hashlib.sha256(), Path(xorflow.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return {
        "xorflow": xorflow.__version__,
        "source": digest.hexdigest()[:12],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _references() -> dict[str, str]:
    """The versions of what is measured beside us, or used on a GPU alone, if it is there."""
    installed = [name for name in ("zuko", "triton") if importlib.util.find_spec(name) is not None]
    return {name: importlib.metadata.version(name) for name in installed}


def default_name(device: torch.device) -> str:
    """`h200`, or `cpu-2-cores`: the names of the committed results."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    threads = torch.get_num_threads()
    return f"cpu-{threads}-core{'s' * (threads > 1)}"


def machine(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
    return described


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
