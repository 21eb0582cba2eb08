"""Runs that are trained as one, on a CUDA device: captured against eager, together against alone, kernels against plain."""

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from xorflow import _kernels
from xorflow.data import Dataset
from xorflow.flows.nodes import BinaryNodes
from xorflow.training import Interrupted, Job, Options, Trainer, run_jobs
from xorflow.training.build import build_data, build_estimator, build_flow
from xorflow.training.captured import CapturedEngine
from xorflow.training.engine import EagerEngine, choose_engine
from xorflow.training.ensemble import Ensemble
from xorflow.training.lockstep import train_together
from xorflow.training.run import begin_run, finish_run, reopen_run
from xorflow.training.storage import load_tensors

CUDA = torch.device("cuda")
RUNS = 3
STEPS = 11
SMALL = {"hidden": [64], "epochs": 2, "batch_size": 250, "validation": 54_000, "device": "cuda"}
KINDS: dict[str, dict[str, Any]] = {
    "marginal": {},
    "fixed base": {"base": "fixed"},
    "average and clip": {"average": 0.9, "clip": 1.0, "warmup": 3},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.01},
    "sgd": {"optimiser": "sgd", "lr": 1e-4},
    "labels": {"label": True},
    "straight-through, depth 2": {"layers": 2, "order": "alternating", "estimator": "straight-through"},
    "marginal, depth 2": {"layers": 2, "order": "alternating", "estimator": "marginal:samples=2"},
    "coupling": {"layers": 2, "conditioner": "coupling", "estimator": "marginal:samples=2"},
}


@functools.cache
def _data(label: bool) -> Dataset:
    return build_data(Options().replace(**(SMALL | {"label": label}))).to(CUDA)


def _trainers(**changes: Any) -> list[Trainer]:
    found = []
    for seed in range(RUNS):
        options = Options(seed=seed).replace(**(SMALL | changes))
        data = _data(options.label)
        torch.manual_seed(seed)
        found.append(Trainer(build_flow(options, data), build_estimator(options.estimator), data, options))
    return found


def _make_steps(engine: Any, order: Tensor) -> None:
    engine.begin_epoch(order, 0)
    made = 0
    while made < STEPS:
        made += engine.advance(made, made, STEPS - made)


def _together(trainers: list[Trainer], *, captured: bool) -> None:
    ensemble = Ensemble([trainer.machinery for trainer in trainers])
    engine = CapturedEngine(ensemble, 0) if captured else EagerEngine(ensemble)
    _make_steps(engine, torch.stack([trainer.row_order(0) for trainer in trainers]))


def _alone(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        _make_steps(CapturedEngine(trainer.machinery, 0), trainer.row_order(0))


def _weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in trainer.flow.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_the_eager_ones(kind: str) -> None:
    eager, captured = _trainers(**KINDS[kind]), _trainers(**KINDS[kind])
    _together(eager, captured=False)
    _together(captured, captured=True)
    for one, other in zip(eager, captured, strict=True):
        for a, b in zip(one.flow.parameters(), other.flow.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other._bound_sum, one._bound_sum, rtol=1e-5, atol=1e-6)
        for name, average in (one.average or {}).items():
            assert other.average is not None
            torch.testing.assert_close(other.average[name], average, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_together_is_alone_in_float64(kind: str) -> None:
    together, alone = (_trainers(precision="64-true", **KINDS[kind]) for _ in range(2))
    _together(together, captured=True)
    _alone(alone)
    for one, other in zip(alone, together, strict=True):
        # Fabric rounds an estimator's outputs to float32, by which the sums of bounds differ
        torch.testing.assert_close(_weights(other), _weights(one), rtol=0, atol=1e-8)
        torch.testing.assert_close(other._bound_sum, one._bound_sum, rtol=1e-6, atol=0)
        assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.parametrize("kind", ["marginal", "fixed base", "average and clip", "adamw"])
def test_together_is_alone_in_float32(kind: str) -> None:
    """As vectors: where a gradient is almost zero, Adam makes a whole step of its rounding error."""
    start = [_weights(trainer) for trainer in _trainers(**KINDS[kind])]
    together, alone = (_trainers(precision="32-true", **KINDS[kind]) for _ in range(2))
    _together(together, captured=True)
    _alone(alone)
    for before, one, other in zip(start, alone, together, strict=True):
        moved = (_weights(one) - before).norm()
        assert float((_weights(other) - _weights(one)).norm() / moved) < 0.01
        torch.testing.assert_close(other._bound_sum, one._bound_sum, rtol=1e-5, atol=0)
        net = other.flow.layers[0].conditioner.net
        assert not bool((net[0].weight * (1 - net[0].mask)).any())


def test_the_captured_engine_is_chosen_and_never_waits(synchronisations) -> None:
    trainers = _trainers()
    engine, reason = choose_engine(Ensemble([trainer.machinery for trainer in trainers]), 0)
    assert isinstance(engine, CapturedEngine)
    assert reason is None
    engine.begin_epoch(torch.stack([trainer.row_order(0) for trainer in trainers]).pin_memory(), 0)
    torch.cuda.synchronize()
    assert synchronisations(lambda: [engine.advance(0, 0, 8), engine.advance(8, 8, 1)]) == 0


class _StopAfter:
    def __init__(self, steps: int, stop: threading.Event) -> None:
        self.steps, self.stop = steps, stop

    def on_start(self, total_steps: int, progress: object) -> None: ...
    def on_epoch(self, record: dict) -> None: ...
    def on_step(self, step: int) -> None:
        if step >= self.steps:
            self.stop.set()


@pytest.mark.parametrize("kind", ["average and clip", "marginal, depth 2"])
def test_an_interrupted_group_goes_on_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    options = Options().replace(**(SMALL | KINDS[kind]))
    data = _data(False)

    def begin(name: str, stop: threading.Event | None = None) -> list[Trainer]:
        watch = None if stop is None else _StopAfter(9, stop)
        return [
            begin_run(options.replace(seed=k), tmp_path / name / str(k), watch, dataset=data, stop=stop)
            for k in range(RUNS)
        ]

    whole = begin("whole")
    assert train_together(whole) == [None] * RUNS
    stopped = train_together(begin("parts", threading.Event()))
    assert [type(error) for error in stopped] == [Interrupted] * RUNS
    parts = [reopen_run(tmp_path / "parts" / str(k), {}, dataset=data) for k in range(RUNS)]
    assert train_together(parts) == [None] * RUNS
    for k in range(RUNS):
        assert torch.equal(_weights(whole[k]), _weights(parts[k]))
        finish_run(parts[k])
        assert load_tensors(tmp_path / "parts" / str(k), "weights")


def test_jobs_with_several_seeds_of_two_kinds_are_two_groups(tmp_path: Path) -> None:
    options = Options().replace(**(SMALL | {"epochs": 1}))
    kinds = {"a": options, "b": options.replace(lr=1e-2)}
    listed = [Job(o.replace(seed=k), tmp_path / f"{name}-{k}") for k in range(2) for name, o in kinds.items()]
    outcomes = run_jobs(listed, 4)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.result["together"] for outcome in outcomes if outcome.result] == [2] * 4


# ---- kernels ----


@pytest.mark.parametrize(("runs", "rows", "features"), [(1, 1, 1), (3, 7, 33), (8, 256, 784), (2, 300, 1000)])
def test_the_marginal_of_several_runs_is_the_plain_one(runs: int, rows: int, features: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(runs, rows, features, generator=generator)).to(CUDA)
    x = torch.randint(2, (runs, rows, features), generator=generator).float().to(CUDA)
    base = (3 * torch.randn(runs, features, generator=generator)).to(CUDA)
    weights = torch.randn(runs, rows, generator=generator).to(CUDA)

    def plain(phi: Tensor, state: Tensor, b: Tensor) -> Tensor:
        at_one, at_zero = torch.nn.functional.logsigmoid(b), torch.nn.functional.logsigmoid(-b)
        low = state * at_one + (1 - state) * at_zero
        return BinaryNodes(phi).log_mixture(torch.stack((low, at_one + at_zero - low), -1)).sum(-1)

    found, expected = [], []
    for store, function, dtype in (
        (found, _kernels.marginal_total, torch.float32),
        (expected, plain, torch.float64),
    ):
        phi, b = (t.detach().clone().to(dtype).requires_grad_() for t in (logits, base))
        value = torch.vmap(function)(phi, x.to(dtype), b)
        (value * weights.to(dtype)).sum().backward()
        store += [value.detach().double(), phi.grad.double(), b.grad.double()]
    for ours, reference in zip(found, expected, strict=True):
        assert float((ours - reference).norm() / reference.norm()) < 1e-5


@pytest.mark.parametrize(("runs", "rows", "width"), [(1, 1, 1), (8, 256, 784), (3, 1000, 33)])
def test_column_sums_of_several_runs(runs: int, rows: int, width: int) -> None:
    values = torch.randn(runs, rows, width, device=CUDA)
    torch.testing.assert_close(_kernels.column_sums(values), values.sum(1), rtol=1e-5, atol=1e-4)


SHAPES = [(1, 1, 1), (2, 5, 33), (3, 64, 16), (8, 1024, 784), (2, 3, 2500)]


def _prefixes(rows: int, width: int) -> tuple[Tensor, Tensor]:
    seen = torch.randint(0, width + 1, (rows,), dtype=torch.int32, device=CUDA)
    seen[-1] = width
    return seen, (torch.arange(width, device=CUDA) < seen[:, None]).float()


@pytest.mark.parametrize(("runs", "rows", "width"), SHAPES)
def test_what_lies_beyond_is_zero_and_the_rest_untouched(runs: int, rows: int, width: int) -> None:
    seen, mask = _prefixes(rows, width)
    values = torch.randn(runs, rows, width, device=CUDA)
    assert torch.equal(_kernels.zero_beyond(values.clone(), seen), values * mask)


@pytest.mark.parametrize(("runs", "rows", "width"), SHAPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_passes_over_masked_weights(runs: int, rows: int, width: int, decoupled: bool) -> None:
    seen, mask = _prefixes(rows, width)
    start = [torch.randn(runs, rows, width, device=CUDA) * mask for _ in range(3)]
    square = torch.rand(runs, rows, width, device=CUDA) * mask
    results = []
    for known in (None, seen):
        p, g, m = (t.clone() for t in start)
        v = square.clone()
        rate, step = torch.tensor(1e-2, device=CUDA), torch.tensor(3.0, device=CUDA)
        settings: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        _kernels.adam(p, g, (m, v), rate, step, decoupled=decoupled, seen=known, **settings)
        results.append((p, m, v))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
        assert not bool((ours * (1 - mask)).any())
