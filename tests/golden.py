"""The golden record: what tiny runs of every kind end with, so that a change that should change nothing is seen to.

    python tests/golden.py record FOLDER     # weights' digests, likelihoods and digests of samples, into FOLDER/golden.json
    python tests/golden.py compare FOLDER    # the same runs now, beside what was recorded there

Digests hold on one machine with one thread, and stay where they were recorded. Likelihoods are committed, in
`research/results/golden.json`; without a folder, `compare` holds today's to those, to 1e-5 nats.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xorflow
from xorflow.training import Interrupted, Options, create_run, finish_run, resume_run

COMMITTED = Path(__file__).parents[1] / "research/results/golden.json"
TOLERANCE = 1e-5
DEEP = {"layers": 2, "order": "alternating", "base": "fixed"}
POSTERIOR = DEEP | {"posterior": "mlp:hidden=16"}

RUNS: dict[str, dict[str, Any]] = {
    # conditioners
    "made": {},
    "made-direct": {"conditioner": "made:hidden=16+8,direct=true"},
    "made-chain": DEEP | {"order": "natural", "variant": "chain", "estimator": "score-function"},
    "made-own": {"own": True, "estimator": "score-function", "base": "fixed"},
    "transformer": {"conditioner": "transformer:width=16,depth=2,heads=2"},
    "transformer-muon": {
        **{"conditioner": "transformer:width=16,depth=1,heads=2,rotary=true"},
        **{"optimiser": "muon", "weight_decay": 0.1},
    },
    "recurrent": {"conditioner": "recurrent:width=16,dropout=0.1"},
    "lstm": {"conditioner": "recurrent:width=16,cell=lstm,dropout=0.2"},
    "coupling": {
        "conditioner": "coupling:hidden=16,mask=checkerboard",
        "layers": 2,
        "estimator": "score-function",
    },
    "coupling-posterior": {
        **{"conditioner": "coupling:hidden=16,mask=alternate", "layers": 4},
        **{"posterior": "mlp:hidden=16", "estimator": "score-function:objective=elbo"},
    },
    "mixture": {"mixture": "2"},
    "mixture-transformer": {
        **{"mixture": "natural,columns", "conditioner": "transformer:width=16,depth=1,heads=2"},
        **{"estimator": "maximum-likelihood:split_batch=true"},
    },
    # data
    "table": {"data": "people.csv"},
    "table-affine": {"data": "rows.npy", "transform": "affine"},
    "array": {"data": "rows.npy", "average": 0.9, "clip": 1.0},
    "label": {"data": "mnist", "label": True, "validation": 59_500, "epochs": 1},
    "resume": DEEP | {"average": 0.9, "estimator": "maximum-likelihood:samples=2"},
    # estimators
    "maximum-likelihood": DEEP | {"estimator": "maximum-likelihood:samples=2"},
    "straight-through": DEEP | {"estimator": "straight-through"},
    "straight-through-entropy": DEEP | {"estimator": "straight-through:entropy=1"},
    "score-function": DEEP | {"estimator": "score-function:standardise=feature"},
    "score-function-critic": DEEP | {"estimator": "score-function:baseline=greedy"},
    "elbo": POSTERIOR | {"estimator": "score-function:objective=elbo"},
    "elbo-gamma": POSTERIOR
    | {
        "estimator": "score-function:objective=elbo,credit=local-divergence,gamma=0.5,reach=none,of=impatient"
    },
    "proposal-prefix": DEEP | {"estimator": "proposal-prefix"},
    "analytic": {"base": "fixed", "estimator": "analytic"},
    "leave-one-out": DEEP | {"estimator": "score-function:baseline=leave-one-out,samples=3"},
    "vimco": DEEP | {"estimator": "vimco:samples=3"},
    "disarm": DEEP | {"estimator": "disarm"},
    "arms": DEEP | {"estimator": "arms:samples=3"},
    "rebar": DEEP | {"estimator": "rebar"},
    "relax": DEEP | {"estimator": "relax:hidden=8"},
    "double-cv": DEEP | {"estimator": "double-cv"},
    "concrete": DEEP | {"estimator": "concrete"},
    "st-gumbel": DEEP | {"estimator": "st-gumbel"},
    "reinmax": DEEP | {"estimator": "reinmax"},
    "local-expectation": DEEP | {"estimator": "local-expectation"},
}
"""Options by name, beside those that all share; data by default a file of binary images."""


def write_data(folder: Path) -> None:
    """Binary images with structure, rows of three values, and a table of words."""
    chance = np.random.default_rng(0)
    images = (chance.random((300, 1, 1)) < np.linspace(0.1, 0.9, 20).reshape(4, 5)).astype(np.uint8)
    images ^= (chance.random((300, 4, 5)) < 0.1).astype(np.uint8)
    np.save(folder / "images.npy", images)
    rows = chance.integers(0, 3, (300, 6), dtype=np.uint8)
    rows[:, 1] = rows[:, 0]
    np.save(folder / "rows.npy", rows)
    words = random.Random(0)
    with (folder / "people.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("colour", "size", "pet", "rooms"))
        for _ in range(300):
            colour = words.choice(("blue", "green", "red"))
            pet = "cat" if colour == "red" else words.choice(("cat", "dog", "fish", "ox"))
            writer.writerow((colour, words.choice("LS"), pet, words.randint(1, 5)))


class _StopAt:
    """Presses Ctrl-C at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, total_steps: int, progress: Any) -> None:
        pass

    def on_step(self, step: int) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGINT)

    def on_epoch(self, record: dict[str, Any]) -> None:
        pass


def _options(changes: dict[str, Any], folder: Path) -> Options:
    usual = {
        **{
            "data": "images.npy",
            "conditioner": "made:hidden=16",
            "epochs": 2,
            "batch_size": 32,
            "device": "cpu",
        },
        **{"evaluation_samples": 8, "seed": 1},
    }
    values = usual | changes
    values["data"] = values["data"] if values["data"] == "mnist" else str(folder / values["data"])
    return Options().replace(**values)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train one run, and say what it ended with."""
    out = folder / name
    options = _options(RUNS[name], folder)
    if name == "resume":
        with suppress(Interrupted):
            finish_run(create_run(options, out, _StopAt(9)))
        trainer = resume_run(out)
    else:
        trainer = create_run(options, out)
    assert trainer is not None
    result = finish_run(trainer)
    flow = xorflow.load(out)
    weights = hashlib.sha256()
    for tensor in flow.state_dict().values():
        weights.update(tensor.contiguous().numpy().tobytes())
    torch.manual_seed(0)
    context = torch.eye(10) if name == "label" else None
    distribution = flow() if context is None else flow(context)
    samples = distribution.sample((50 if context is None else 5,))
    test = result["test"]
    return {
        "kind": test["kind"],
        "nll": test["nll"],
        "greedy_nll": test["greedy_nll"],
        "refit_nll": test["refit_nll"],
        "weights": weights.hexdigest(),
        "samples": hashlib.sha256(samples.to(torch.int64).numpy().tobytes()).hexdigest(),
    }


def record() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        return {name: measure(name, Path(folder)) for name in RUNS}


def differences(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """One line for each thing that is not as it was."""
    lines = []
    for name in now.keys() | then.keys():
        if name not in now or name not in then:
            lines.append(f"{name}: only {'now' if name in now else 'then'}")
            continue
        for key, value in then[name].items():
            same = (
                abs(now[name][key] - value) <= TOLERANCE
                if isinstance(value, float)
                else now[name][key] == value
            )
            if not same:
                lines.append(f"{name}: {key} was {value}, is {now[name][key]}")
    return sorted(lines)


def main(arguments: list[str]) -> int:
    verb, *folders = arguments
    now = record()
    if verb == "record":
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        (Path(folders[0]) / "golden.json").write_text(json.dumps(now, indent=1) + "\n")
        return 0
    source = Path(folders[0]) / "golden.json" if folders else COMMITTED
    lines = differences(now, json.loads(source.read_text()))
    sys.stdout.write("\n".join(lines or [f"all {len(now)} runs as recorded"]) + "\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
