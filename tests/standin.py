"""A stand-in for CUDA graphs and streams on the CPU: what is captured is recorded, not done, and replayed without Python.

A capture records every ATen operation with the memory that it reads and writes, and every interpreted Triton launch. What was
there before the capture is afterwards as it was, as on a device, where a capture executes nothing. A replay executes the
operations on the same memory: whatever the host decided, or bound anew, in between is not seen.

Each stream is a queue. A replay may go through them in any order that the recorded waits allow; the two extreme ones, side
streams as early and as late as possible, give the same numbers only if no wait is missing.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

Order = Literal["early", "late"]
_ASKS_THE_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


class Stream:
    """A queue of work; outside of a capture all work is done at once."""

    def __init__(self, device: object = None) -> None:
        del device

    def wait_stream(self, other: "Stream") -> None:
        if Graph.capturing is not None:
            Graph.capturing.wait(self, other)

    def synchronize(self) -> None:
        if Graph.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")


_CURRENT = [Stream()]


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    _CURRENT.append(chosen)
    try:
        yield
    finally:
        _CURRENT.pop()


def current_stream(device: object = None) -> Stream:
    del device
    return _CURRENT[-1]


class Graph:
    """What was recorded on each stream: operations, and waits for so many entries of another stream."""

    capturing: "Graph | None" = None
    order: Order = "late"
    replays = 0

    def __init__(self) -> None:
        self._queues: dict[Stream, list[Callable[[], None] | tuple[Stream, int]]] = defaultdict(list)
        self._main: Stream | None = None
        self._generators: list[torch.Generator] = [torch.default_generator]

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def add(self, operation: Callable[[], None]) -> None:
        self._queues[current_stream()].append(operation)

    def wait(self, waiting: Stream, other: Stream) -> None:
        self._queues[waiting].append((other, len(self._queues[other])))

    def allows(self, generator: torch.Generator) -> bool:
        return any(generator._cdata == known._cdata for known in self._generators)

    @contextlib.contextmanager
    def recording(self, main: Stream) -> Iterator[None]:
        recorder, noise = _Recorder(self), [g.get_state() for g in self._generators]
        self._main, Graph.capturing = main, self
        try:
            with stream(main), recorder:
                yield
            self._require_joined()
        finally:
            Graph.capturing = None
            recorder.restore()
            for generator, state in zip(self._generators, noise, strict=True):
                generator.set_state(state)

    def _require_joined(self) -> None:
        """As on a device: the capture's own stream must have waited for all that the others do."""
        assert self._main is not None
        for side, queue in self._queues.items():
            operations = max((n + 1 for n, entry in enumerate(queue) if callable(entry)), default=0)
            waits = [e[1] for e in self._queues[self._main] if isinstance(e, tuple) and e[0] is side]
            if side is not self._main and operations > max(waits, default=0):
                raise RuntimeError("capturing stream has unjoined work")

    def replay(self) -> None:
        Graph.replays += 1
        done = dict.fromkeys(self._queues, 0)
        side = [s for s in self._queues if s is not self._main]
        main = [s for s in self._queues if s is self._main]
        ranked = [*side, *main] if Graph.order == "early" else [*main, *side]
        with torch.no_grad():
            while any(done[s] < len(self._queues[s]) for s in ranked):
                ready = next(s for s in ranked if self._is_ready(s, done))
                entry = self._queues[ready][done[ready]]
                if not isinstance(entry, tuple):
                    entry()
                done[ready] += 1

    def _is_ready(self, candidate: Stream, done: dict[Stream, int]) -> bool:
        if done[candidate] == len(self._queues[candidate]):
            return False
        entry = self._queues[candidate][done[candidate]]
        return not isinstance(entry, tuple) or done.get(entry[0], 0) >= entry[1]


@contextlib.contextmanager
def graph(recorded: Graph, *, stream: Stream | None = None, **settings: object) -> Iterator[None]:
    del settings
    with recorded.recording(stream or Stream()):
        yield


class _Recorder(TorchDispatchMode):
    """Records operations, and remembers what they overwrote of memory that is older than the capture."""

    def __init__(self, recorded: Graph) -> None:
        super().__init__()
        self._graph = recorded
        self._made: dict[int, torch.UntypedStorage] = {}  # kept: an address must not be given out twice
        self._overwritten: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _ASKS_THE_HOST:
            raise RuntimeError(f"{func._schema.name}: operation not permitted when stream is capturing")
        generator = kwargs.get("generator")
        if generator is not None and not self._graph.allows(generator):
            raise RuntimeError("a generator that is not registered with the graph")
        for written in _written(func, args, kwargs):
            self.remember(written)
        inputs, in_kwargs = tree_map(_alias, args), tree_map(_alias, kwargs)
        known = {_address(t) for t in _tensors((args, kwargs))}
        found = func(*args, **kwargs)
        fresh = [t if _address(t) not in known else None for t in _tensors(found)]
        for tensor in fresh:
            if tensor is not None:
                self._made[_address(tensor)] = tensor.untyped_storage()
        if (
            any(t is not None for t in fresh) or func._schema.is_mutable
        ):  # anything else is another view of memory
            outputs = [None if t is None else t.detach() for t in fresh]
            self._graph.add(lambda: _execute(func, inputs, in_kwargs, outputs))
        return found

    def remember(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address not in self._made and address not in self._overwritten:
            storage = tensor.untyped_storage()
            self._overwritten[address] = storage, storage.clone()

    def restore(self) -> None:
        for storage, before in self._overwritten.values():
            storage.copy_(before)


def _execute(func: Any, args: Any, kwargs: Any, outputs: list[Tensor | None]) -> None:
    for output, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
        if output is not None:
            output.copy_(value)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [t for a, value in given if a.alias_info and a.alias_info.is_write for t in _tensors(value)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a capture an interpreted Triton launch is recorded as one operation."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(executor: Any, *args: Any, **kwargs: Any) -> None:
        if Graph.capturing is None:
            launch(executor, *args, **kwargs)
            return
        held = tree_map(_alias, (args, kwargs))
        recorder = next(
            m
            for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            if isinstance(m, _Recorder)
        )
        for tensor in _tensors(held):
            recorder.remember(tensor)
        with torch.utils._python_dispatch._disable_current_modes():
            launch(executor, *held[0], **held[1])
        Graph.capturing.add(lambda: launch(executor, *held[0], **held[1]))

    monkeypatch.setattr(GridExecutor, "__call__", recorded)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, streams and the decision to use them, for tensors on the CPU."""
    from xorflow import _devices as devices

    for name, stand_in in (
        ("Stream", Stream), ("stream", stream), ("current_stream", current_stream), ("CUDAGraph", Graph), ("graph", graph),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("TYPES", "STEPPED_ON"):
        monkeypatch.setattr(devices, name, ("cpu",))
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    monkeypatch.setattr(Graph, "replays", 0)
