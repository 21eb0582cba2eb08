"""The model of a `config.json`, made again: a file is untrusted, and what it makes is no larger than its weights."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from xorflow.conditioners import Conditioner, SequenceConditioner
from xorflow.conditioners.orderings import Order
from xorflow.errors import CheckpointError, ModelError
from xorflow.training.registry import MOST, PARTS, REORDERED, Call, Makers, Trainable, accepted_value


def flow_from_spec(spec: Call, classes: Makers | None = None, *, weights: float = math.inf) -> Trainable:
    """The model that a spec describes, with fresh weights.

    Args:
        spec: what `flow_to_spec` gave.
        classes: classes of your own, by their names in it.
        weights: how many numbers its weights have; a larger model is refused before it is built.
    """
    try:
        with _AtMost(_ALWAYS + _EACH * weights):
            flow = _Reader(classes or {}, min(max(weights, 2**16), MOST)).read(spec)
    except (ModelError, RecursionError) as error:
        raise CheckpointError(f"the model in this configuration is illegal: {error}") from error
    if not isinstance(flow, Trainable):
        raise _unreadable(f"it is {flow!r}")
    return flow


def model_for(spec: Call, weights: Mapping[str, Tensor], classes: Makers | None = None) -> Trainable:
    """The model of a spec, with fresh weights of the sizes of these; the generator of torch stays where it is."""
    with torch.random.fork_rng(devices=[]):
        return flow_from_spec(spec, classes, weights=sum(tensor.numel() for tensor in weights.values()))


class _Reader:
    """Makes all calls of one model, those inside others first.

    Args:
        given: constructors that a user gives, which see to the types of their arguments themselves.
        most: the largest whole number that is believed.
    """

    def __init__(self, given: Makers, most: float) -> None:
        self._given, self._most = given, most
        self._makers = {**PARTS, REORDERED: self._reordered, **given}
        self._shared: list[SequenceConditioner] = []

    def read(self, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > self._most:
            raise _too_large() if self._most < MOST else _unreadable(f"it has a number above {MOST:,}")
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if not isinstance(value, dict):
            return value
        given = {key: self.read(item) for key, item in value.items()}
        made = self._call(given.pop("name"), given) if "name" in given else given
        if isinstance(made, SequenceConditioner):
            self._shared.append(made)
        return made

    def _call(self, name: Any, given: dict[str, Any]) -> Any:
        if not isinstance(name, str) or name not in self._makers:
            raise CheckpointError(
                f"this run uses a part named {name!r}, which xorflow does not have; "
                f"open it with xorflow.load(RUN, classes={{{str(name)!r}: YourClass}})"
            )
        maker, checked = self._makers[name], name not in self._given
        signature = inspect.signature(maker, eval_str=checked)
        try:
            signature.bind(**given)
        except TypeError as error:
            raise _unreadable(f"{name}: {error}") from None
        for key, value in given.items() if checked else ():
            try:
                accepted_value(value, signature.parameters[key].annotation)
            except ValueError:
                raise _unreadable(f"{key} of {name} is {value!r}") from None
        return maker(**given)

    def _reordered(self, of: int, order: Order) -> Conditioner:
        if not 0 <= of < len(self._shared):
            raise _unreadable(f"there is no network {of} before it")
        return self._shared[of].reordered(order)


def _unreadable(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the model in this configuration is not one that this version can build ({reason}); "
        "it may be damaged, or written by another version"
    )


# ---- no larger than its weights ----

_ALWAYS = 2**26
"""So many numbers a model may make while it is built, however few weights it has: masks, orderings, receptive fields."""

_EACH = 100
"""And so many for each weight."""

_LEAST = 512
"""What any operation counts for: a module without weights takes memory, too."""

_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}


class _AtMost(TorchFunctionMode):
    """Within this block no more than so many numbers are made, counted before they are."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch._C._set_grad_enabled:  # makes nothing, and has to be restored on the way out
            return func(*args, **(kwargs or {}))
        self._left -= max(_count(func, args), _LEAST)
        if self._left < 0:
            raise _too_large()
        return func(*args, **(kwargs or {}))


def _too_large() -> CheckpointError:
    return CheckpointError(
        "the model in this configuration is larger than its weights, so they are not of it; restore the folder"
    )


def _count(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """About how many numbers an operation makes: a factory's size, or that to which its operands are broadcast."""
    if func is torch.arange:
        return len(range(*map(int, args)))
    if func in _MAKERS:
        first = args[0] if args and not isinstance(args[0], int) else args
        return math.prod(size for size in first if isinstance(size, int))
    if func is Tensor.__getitem__ and isinstance(args[1], Tensor):
        picked, index = args
        return index.numel() * math.prod(picked.shape[1:])
    shapes = [reversed(argument.shape) for argument in args if isinstance(argument, Tensor)]
    return math.prod(map(max, itertools.zip_longest(*shapes, fillvalue=1)))
