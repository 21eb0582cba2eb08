"""Captured training steps and decoding on a stand-in for CUDA graphs: those of the plain path, whatever the streams' order."""

import inspect
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from standin import Graph, Order, graph, record_launches
from tiny_runs import make_steps
from xorflow import _devices as devices
from xorflow._cuda import decoding, proof, steps
from xorflow._cuda.steps import CapturedSteps
from xorflow.conditioners import CausalTransformer
from xorflow.data import Dataset, Split
from xorflow.estimators import Loss, MaximumLikelihood
from xorflow.flows import LatentFlow, Point
from xorflow.flows.layer import by_passes
from xorflow.training import Options, Trainer
from xorflow.training.build import build_estimator, build_flow

pytestmark = pytest.mark.usefixtures("stand_in")

SMALL = {"conditioner": "made:hidden=12", "epochs": 2, "batch_size": 8, "device": "cpu"}
SEQUENCE = {"conditioner": "transformer:width=8,depth=1,heads=2,dropout=0"}
KINDS: dict[str, dict[str, Any]] = {
    "marginal": {},
    "fixed base": {"base": "fixed"},
    "average and clip": {"average": 0.9, "clip": 1.0, "warmup": 3},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.01},
    "sgd": {"optimiser": "sgd", "lr": 1e-3},
    "bf16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
    "labels": {"label": True},
    "in parts": {"accumulate": 3},
    "straight-through, depth 2": {"layers": 2, "order": "alternating", "estimator": "straight-through"},
    "marginal, depth 2": {"layers": 2, "order": "alternating", "estimator": "maximum-likelihood:samples=2"},
    "coupling": {
        "layers": 2,
        "conditioner": "coupling:hidden=12,mask=checkerboard",
        "estimator": "maximum-likelihood:samples=2",
    },
    "running mean": {"layers": 2, "order": "alternating", "estimator": "score-function:standardise=feature"},
    "transformer": SEQUENCE,
    "transformer, dropout": {"conditioner": "transformer:width=8,depth=1,heads=2,dropout=0.3"},
    "recurrent": {"conditioner": "recurrent:width=8"},
    "muon": SEQUENCE | {"optimiser": "muon", "weight_decay": 0.01, "clip": 1.0},
    "mixture": SEQUENCE | {"mixture": "2"},
    "soft targets": SEQUENCE | {"estimator": "maximum-likelihood:soft_targets=true"},
}
ESTIMATORS = [
    "score-function:baseline=leave-one-out,samples=3",
    "score-function:objective=elbo,baseline=leave-one-out,samples=2,sum_last=true", "vimco:samples=3",
    "vimco:samples=2,proposal=q,sum_last=true", "disarm", "disarm:sum_last=true,common=true", "arms:samples=3",
    "rebar", "rebar:sum_last=true", "relax", "relax:sum_last=true", "double-cv:samples=2",
    "double-cv:samples=2,sum_last=true", "concrete", "st-gumbel", "reinmax", "proposal-prefix",
    "proposal-prefix:mix=0.1,sum_last=true", "score-function", "score-function:baseline=greedy",
    "score-function:standardise=one",
    "score-function:credit=impatient,baseline=none,standardise=feature", "score-function:objective=elbo",
    "score-function:objective=elbo,baseline=greedy",
    "score-function:objective=elbo,sum_last=true",
]  # fmt: skip
STEPS = 11  # a launch of eight, and three of one


def _data(labels: bool = False, features: int = 12) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    grey = torch.randint(0, 256, (120, features), dtype=torch.uint8, generator=generator)
    context = torch.eye(3)[torch.arange(120) % 3] if labels else None
    train = Split(grey, context, stochastic=True)
    return Dataset("grey", train, None, None, categories=(2,) * features, shape=(3, features // 3))


def _trainer(custom: Any = None, /, **changes: Any) -> Trainer:
    options = Options().replace(**(SMALL | changes))
    data = _data(options.label)
    torch.manual_seed(0)
    chosen = custom or build_estimator(options.estimator)
    return Trainer(build_flow(options, data), chosen, data, options)


def _tensors(trainer: Trainer) -> list[Tensor]:
    tensors = [*trainer.module.parameters(), *trainer.module.buffers(), trainer.bound_sum]
    return [t.detach().clone() for t in (*tensors, *(trainer.average or {}).values())]


def _steps(trainer: Trainer, captured: CapturedSteps | None) -> list[Tensor]:
    torch.manual_seed(7)  # dropout
    make_steps(trainer, captured, STEPS, batch=2)  # as a run that goes on within an epoch
    return _tensors(trainer)


def _plain(**changes: Any) -> list[Tensor]:
    return _steps(_trainer(**changes), None)


def _captured(order_of_streams: Order, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Tensor]:
    monkeypatch.setattr(Graph, "order", order_of_streams)
    trainer = _trainer(**changes)
    tensors = _steps(trainer, CapturedSteps(trainer, 0))
    assert Graph.replays > 0
    return tensors


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_the_plain_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _plain(**KINDS[kind])
    assert all(bool(t.isfinite().all()) for t in expected)
    assert _same(_captured("early", monkeypatch, **KINDS[kind]), expected)
    assert _same(_captured("late", monkeypatch, **KINDS[kind]), expected)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "analytic", "local-expectation"])
def test_captured_steps_of_every_estimator(
    estimator: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep_only = "sum_last" in estimator and estimator.startswith(("rebar", "relax", "double-cv"))
    if (layers == 1 and deep_only) or (layers == 2 and estimator in ("analytic", "local-expectation")):
        return  # refused
    changes = {"layers": layers, "order": "alternating", "posterior": "mlp:hidden=12", "estimator": estimator}
    assert _same(_captured("late", monkeypatch, **changes), _plain(**changes))


@pytest.mark.parametrize("order", ["early", "late"])
def test_captured_steps_with_kernels_are_the_plain_ones(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    record_launches(monkeypatch)
    assert _same(_captured(order, monkeypatch), _plain())


# ---- what the stand-in catches ----

EVERYTHING = {
    "layers": 2,
    "order": "alternating",
    "estimator": "maximum-likelihood:samples=2",
    "average": 0.9,
    "warmup": 3,
}
_JOIN = "torch.cuda.current_stream(work.device).wait_stream(self._branch)"
_COUNT = "self._counters.add_(self._increments, alpha=count)"
FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "no joins": (CapturedSteps, "_steps", _JOIN, "pass"),
    "no join but the last": (CapturedSteps, "_steps", _JOIN, f"step + 2 == count and {_JOIN}"),
    "no fork": (
        CapturedSteps, "_gather_beside", "self._branch.wait_stream(torch.cuda.current_stream(self._work.device))", "pass",
    ),
    "a frozen learning rate": (CapturedSteps, "_steps", 'group["lr"] = schedule[0, step, 0]', "pass"),
    "the first learning rate for a launch": (CapturedSteps, "_steps", "schedule[0, step, 0]", "schedule[0, 0, 0]"),
    "the first weight of the average for a launch": (CapturedSteps, "_steps", "schedule[1, step, 0]", "schedule[1, 0, 0]"),
    "the same rows for a launch": (CapturedSteps, "_steps", "rows[step + 1]", "rows[step]"),
    "counters that stand still": (CapturedSteps, "_steps", _COUNT, "pass"),
    "counters that count launches": (CapturedSteps, "_steps", _COUNT, _COUNT.replace("alpha=count", "alpha=1")),
    "counters after the warm-up": (CapturedSteps, "_capture", "self._counters.copy_(start)", "pass"),
    "an order that is bound anew": (
        CapturedSteps, "begin_epoch", "self._order.copy_(order, non_blocking=True)", "self._order = order.clone()",
    ),
    "rows taken for batches": (CapturedSteps, "begin_epoch", "batch * self._work.batch_size", "batch"),
    "an average that is bound anew": (
        Trainer, "_update_average", "tensor.lerp_(", "average[name] = tensor.lerp(",
    ),
    "a sum that is bound anew": (
        Trainer, "learn", "self.bound_sum += bound", "self.bound_sum = self.bound_sum + bound",
    ),
    "the optimiser's state after the warm-up": (steps, "undone", "tensor.zero_()", "pass"),
    "weights after the warm-up": (steps, "undone", "tensor.copy_(value)", "pass"),
    "noise after the warm-up": (steps, "undone", "generator.set_state(state)", "pass"),
    "a generator that the graph does not know": (
        CapturedSteps, "_record", "graph.register_generator_state(self._work.generator)", "pass",
    ),
}  # fmt: skip


def _plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one line."""
    owner, name, right, wrong = FAULTS[fault]
    member = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(member))
    assert right in source
    namespace = dict(inspect.getmodule(member).__dict__)
    exec(source.replace(right, wrong), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    if owner is steps:
        monkeypatch.setattr(proof, name, namespace[name])


def _caught(expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a capture fails, or its steps are others in one order of the streams."""
    try:
        found = [_captured(order, monkeypatch, **EVERYTHING) for order in ("early", "late")]
    except RuntimeError:
        return True
    return not all(_same(tensors, expected) for tensors in found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _plain(**EVERYTHING)
    assert not _caught(expected, monkeypatch)
    _plant(fault, monkeypatch)
    assert _caught(expected, monkeypatch)


class _AsksTheHost(MaximumLikelihood):
    """An estimator that decides on the host, and does not say so."""

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        found = super().loss(flow, start, draws)
        return found if found.bound.item() < 0 else Loss(found.surrogate * 2, found.bound)


def test_a_capture_that_fails_leaves_the_plain_path() -> None:
    """With the same weights and noise as if nothing had been tried."""
    trainer = _trainer(_AsksTheHost(samples=2), **EVERYTHING)
    before, noise = _tensors(trainer), trainer.generator.get_state()
    assert trainer.captured_steps() is None
    assert "capturing one failed" in str(trainer.not_captured)
    assert _same(_tensors(trainer), before)
    assert torch.equal(trainer.generator.get_state(), noise)


# ---- a captured run proves itself ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_capture_is_chosen_and_no_step_has_been_made(kind: str) -> None:
    trainer = _trainer(**KINDS[kind])
    before, noise = _tensors(trainer), trainer.generator.get_state()
    captured = trainer.captured_steps()
    assert captured is not None, trainer.not_captured
    assert all(torch.equal(a, b) for a, b in zip(_tensors(trainer), before, strict=True))
    assert torch.equal(trainer.generator.get_state(), noise)
    assert _same(_steps(trainer, captured), _plain(**KINDS[kind]))


PROVED = [
    "no joins", "no join but the last", "no fork", "a frozen learning rate", "the same rows for a launch",
    "counters that count launches", "counters after the warm-up", "an order that is bound anew",
    "the optimiser's state after the warm-up", "weights after the warm-up", "a generator that the graph does not know",
]  # fmt: skip
"""Faults that show in the loss or the weights of the first nine steps."""


@pytest.mark.parametrize("fault", PROVED)
def test_a_wrong_capture_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one order of the streams at least: where work is done in time although nothing waits for it, nothing is wrong."""
    _plant(fault, monkeypatch)
    chosen = []
    for order in ("early", "late"):
        monkeypatch.setattr(Graph, "order", order)
        trainer = _trainer(**EVERYTHING)
        chosen.append(trainer.captured_steps())
        assert (chosen[-1] is None) == (trainer.not_captured is not None)
    assert None in chosen


def test_a_run_whose_capture_is_wrong_trains_on_the_plain_path_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = _trainer(**EVERYTHING)
    with monkeypatch.context() as without:
        without.setattr(devices, "captures", lambda device: False)
        plain.train()
    _plant("a frozen learning rate", monkeypatch)
    trainer = _trainer(**EVERYTHING)
    trainer.train()
    assert trainer.not_captured is not None
    assert caplog.text.count("captured, the first steps are others") == 1
    assert _same(_tensors(trainer), _tensors(plain))


# ---- decoding and gathering as captured launches ----


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("skipped", [(), (1, 5, 6)])
@pytest.mark.parametrize("context", [0, 2])
@torch.no_grad()
def test_captured_steps_give_the_samples_of_whole_passes(
    rotary: bool, skipped: tuple[int, ...], context: int
) -> None:
    torch.manual_seed(0)
    net = CausalTransformer(
        12,
        width=8,
        depth=2,
        heads=2,
        dropout=0.0,
        shape=(3, 4),
        rotary=rotary,
        skipped=skipped,
        context=context,
    )
    for parameter in net.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    flow = zoo.flow(zoo.Layer(net)).double().eval()
    noise = flow.draw_noise(6, torch.Generator().manual_seed(0))
    seen = torch.rand(6, context, dtype=torch.float64) if context else None
    expected = by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], seen)
    for _ in range(2):  # a second decoder captures anew
        decoder = net.incremental(6, seen, 56)
        assert decoder is not None
        order = torch.tensor(net.order)
        y = flow.base.sample(noise.base).index_select(1, order)
        found = decoder.decode(y, noise.layers[:, 0].index_select(1, order))
        assert found is not None
        assert torch.equal(found, expected.index_select(1, order))
    assert Graph.replays == 2 * 12


def test_decoding_that_cannot_be_captured_is_done_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(decoding.GraphDecoder, "run", never)
    torch.manual_seed(0)
    net = CausalTransformer(12, width=8, depth=1, heads=2, dropout=0.0, shape=(3, 4))
    flow = zoo.flow(zoo.Layer(net)).double().eval()
    noise = flow.draw_noise(6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], None)
    assert torch.equal(flow.sample_with(noise), expected.long())


def test_a_gather_can_be_captured() -> None:
    grey = (torch.arange(64 * 16) * 11 % 256).reshape(64, 16).to(torch.uint8)
    split = Split(grey, stochastic=True)
    rows, noise = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 16)
    recorded = Graph()
    with graph(recorded):
        out = split.gather(rows, noise).x
    rows.copy_(torch.randint(64, (8,)))
    noise.copy_(torch.rand(8, 16))
    recorded.replay()
    assert torch.equal(out, split.gather(rows, noise).x)
