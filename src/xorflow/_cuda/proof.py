"""Captured steps are used only where they are the plain ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._cuda.steps import STEPS_A_LAUNCH, CapturedSteps, Training, trained_tensors, undone
from xorflow._devices import stream_of_thread

LOSS_TOLERANCE = 1e-3
"""By how much the losses of both may differ, of the loss itself or of a nat, whichever is larger."""

WEIGHT_TOLERANCE = 0.05
"""By how much the weights may, of the distance that they moved, as one vector: kernels that add up in another order, and Adam,
which makes a whole step of the rounding error of a gradient that is almost zero, move single weights differently."""

_ROUNDING = 1e-6
"""Of the weights themselves, where they hardly move."""


def proved_steps(
    work: Training, step: int, not_capturable: str | None
) -> tuple[CapturedSteps | None, str | None]:
    """Captured steps, if they are those of `make_step`; otherwise None, and why, which is also logged.

    The first step is compared, and the first launch of several. Afterwards no step has been made.

    Args:
        work: what makes steps operation by operation.
        step: the number of the first one.
        not_capturable: why none can be captured, if that is known.
    """
    captured, reason = (None, not_capturable) if not_capturable else _tried(work, step)
    if reason is not None:
        logging.getLogger("xorflow").warning("training steps are not captured as CUDA graphs: %s", reason)
    return captured, reason


def _tried(work: Training, step: int) -> tuple[CapturedSteps | None, str | None]:
    try:
        expected = [_outcome(work, None, step, count) for count in _counts(work, step)]
        captured = CapturedSteps(work, step)
        outcomes = [_outcome(work, captured, step, count) for count in _counts(work, step)]
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError
    ) as error:  # what is wrong with the step itself is met again, and said, by the plain path
        torch.cuda.current_stream(work.device).synchronize()
        for generator in work.generators:
            _out_of_capture(generator)
        said = str(error.__context__ or error).strip().splitlines()[0]
        return None, f"capturing one failed ({said})"
    reasons = [_difference(*pair) for pair in zip(outcomes, expected, strict=True)]
    reason = next((reason for reason in reasons if reason), None)
    return (captured, None) if reason is None else (None, f"captured, the first steps are others ({reason})")


@dataclass(frozen=True)
class _Outcome:
    """What some steps from the same beginning led to."""

    steps: int
    loss: float  # the mean
    weights: list[Tensor]
    moved: float  # the distance
    size: float  # of the weights before


def _counts(work: Training, step: int) -> list[int]:
    """One step; before it, where an epoch has as many, a launch of several with one after it."""
    several = STEPS_A_LAUNCH + 1
    enough = work.rows // work.batch_size >= several and work.total_steps - step >= several
    return [several, 1] if enough else [1]


def _outcome(work: Training, captured: CapturedSteps | None, step: int, count: int) -> _Outcome:
    """Of steps from where the run stands, on a stream of their own as those before a capture; they are undone."""
    aside, current = stream_of_thread(work.device, "branch"), torch.cuda.current_stream(work.device)
    start = [t.detach().clone() for t in trained_tensors(work)]
    with undone(work):
        before = float(work.bound_sum)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            order = torch.arange(work.rows, device=work.device)
            if captured is None:
                for number, rows in enumerate(order.split(work.batch_size)[:count], step):
                    work.make_step(rows, number)
            else:
                captured.begin_epoch(order, 0)
                made = 0
                while made < count:
                    made += captured.advance(count - made)
        current.wait_stream(aside)
        loss = (before - float(work.bound_sum)) / count
        weights = [t.detach().clone() for t in trained_tensors(work)]
    if captured is not None:
        captured.rewind()
    return _Outcome(count, loss, weights, _distance(weights, start), _distance(start))


def _difference(outcome: _Outcome, expected: _Outcome) -> str | None:
    """What sets two outcomes apart, in a few words; None if nothing does, or the plain steps led to no numbers."""
    if not torch.tensor([expected.loss, expected.moved]).isfinite().all():
        return None
    after = f"after {expected.steps} step{'s' * (expected.steps > 1)}"
    if not abs(outcome.loss - expected.loss) <= LOSS_TOLERANCE * max(1.0, abs(expected.loss)):
        return f"{after} a loss of {outcome.loss:.6g} instead of {expected.loss:.6g}"
    distance = _distance(outcome.weights, expected.weights)
    if not distance <= WEIGHT_TOLERANCE * expected.moved + _ROUNDING * expected.size:
        return f"{after} weights are {distance:.2g} apart that moved by {expected.moved:.2g}"
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
