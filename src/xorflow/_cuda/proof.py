"""A captured engine is used only where it makes the steps of the plain one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._cuda.capture import stream_of_thread
from xorflow._cuda.steps import STEPS_A_LAUNCH, CapturedEngine, Engine, Work, undone

LOSS_TOLERANCE = 1e-3
"""By how much the losses of both may differ, of the loss itself or of a nat, whichever is larger."""

WEIGHT_TOLERANCE = 0.05
"""By how much the weights may, of the distance that they moved, as one vector: kernels that add up in another order, and Adam,
which makes a whole step of the rounding error of a gradient that is almost zero, move single weights differently."""

_ROUNDING = 1e-6
"""Of the weights themselves, where they hardly move."""


def proved_engine(work: Work, step: int, plain: Engine) -> tuple[CapturedEngine | None, str | None]:
    """A captured engine whose first step, and first launch of several, are those of the plain engine; or None, and why.

    Afterwards no step has been made.

    Args:
        work: what a step is.
        step: the number of the first one.
        plain: makes the same steps operation by operation.
    """
    try:
        expected = [_outcome(work, plain, step, count) for count in _counts(work, step)]
        engine = CapturedEngine(work, step)
        found = [_outcome(work, engine, step, count) for count in _counts(work, step)]
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError
    ) as error:  # what is wrong with the step itself is found again, and said, by the plain path
        torch.cuda.current_stream(work.device).synchronize()
        for generator in work.generators():
            _out_of_capture(generator)
        said = str(error.__context__ or error).strip().splitlines()[0]
        return None, f"capturing one failed ({said})"
    reasons = [_difference(*pair) for pair in zip(found, expected, strict=True)]
    reason = next((reason for reason in reasons if reason), None)
    return (engine, None) if reason is None else (None, f"captured, the first steps are others ({reason})")


@dataclass(frozen=True)
class _Outcome:
    """What some steps from the same beginning led to."""

    steps: int
    loss: float  # the mean
    weights: list[Tensor]
    moved: float  # the distance
    size: float  # of the weights before


def _counts(work: Work, step: int) -> list[int]:
    """One step; before it, where an epoch has as many, a launch of several with one after it."""
    several = STEPS_A_LAUNCH + 1
    enough = work.rows // work.batch_size >= several and work.total_steps - step >= several
    return [several, 1] if enough else [1]


def _outcome(work: Work, engine: Engine, step: int, count: int) -> _Outcome:
    """Of steps from where the run stands, on a stream of their own as those before a capture; they are undone."""
    aside, current = stream_of_thread(work.device, "branch"), torch.cuda.current_stream(work.device)
    start = [t.detach().clone() for t in work.trained_tensors()]
    with undone(work):
        before = float(work.bound_sum)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            engine.begin_epoch(torch.arange(work.rows), 0)
            made = 0
            while made < count:
                made += engine.advance(made, step + made, count - made)
        current.wait_stream(aside)
        loss = (before - float(work.bound_sum)) / count
        weights = [t.detach().clone() for t in work.trained_tensors()]
    if isinstance(engine, CapturedEngine):
        engine.rewind()
    return _Outcome(count, loss, weights, _distance(weights, start), _distance(start))


def _difference(found: _Outcome, expected: _Outcome) -> str | None:
    """What sets two outcomes apart, in words; None if nothing does, or the plain steps led to no numbers."""
    if not torch.tensor([expected.loss, expected.moved]).isfinite().all():
        return None
    after = f"after {expected.steps} step{'s' * (expected.steps > 1)}"
    if not abs(found.loss - expected.loss) <= LOSS_TOLERANCE * max(1.0, abs(expected.loss)):
        return f"{after} a loss of {found.loss:.6g} instead of {expected.loss:.6g}"
    apart = _distance(found.weights, expected.weights)
    if not apart <= WEIGHT_TOLERANCE * expected.moved + _ROUNDING * expected.size:
        return f"{after} weights are {apart:.2g} apart that moved by {expected.moved:.2g}"
    return None


def _distance(these: list[Tensor], those: list[Tensor] | None = None) -> float:
    """Of two lists of tensors as vectors, or of one from zero."""
    others = those or [torch.zeros_like(t) for t in these]
    squares = [(a - b).double().square().sum() for a, b in zip(these, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def _out_of_capture(generator: torch.Generator) -> None:
    """Free a generator from a capture that failed, which would never let go of it; it goes on where it stands."""
    if generator.device.type != "cuda":
        return
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
