"""The processes that make one run: those that torchrun or a scheduler began, or others that are begun here."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch.distributed as dist

from xorflow._distributed import process_count, process_group, under_torchrun
from xorflow.errors import ConfigError, ProcessLost, UserError
from xorflow.training.jobs import INTERRUPTED, begin_child, how_ended, torch_threads
from xorflow.training.trainer import Interrupted, handled_signals


@contextmanager
def together(processes: int | None, work: Callable[[], object]) -> Iterator[None]:
    """Within this block this process is one of those that make a run.

    Args:
        processes: how many, of which this is the first; None: as many as torchrun began.
        work: what the others do meanwhile.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes is at least 1; got {processes}")
    if process_count() > 1:  # begun below
        yield
    elif under_torchrun():
        if processes is not None:
            raise ConfigError(
                "torchrun has begun the processes of this run, and --processes begins others; leave it out"
            )
        if os.environ["RANK"] != "0":
            _hush()
        with process_group():
            yield
    else:
        with _begun(processes or 1, work):
            yield


@contextmanager
def _begun(count: int, work: Callable[[], object]) -> Iterator[None]:
    """Within this block `count` - 1 further processes do `work`; they meet by a file and the loopback interface."""
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    share = max(1, (os.cpu_count() or 1) // count)
    with tempfile.TemporaryDirectory(prefix="xorflow-") as folder, _loopback(), torch_threads(share):
        path = Path(folder) / "store"
        others = [
            context.Process(target=_work, args=(work, number, count, path, share), daemon=True)
            for number in range(1, count)
        ]
        try:
            with handled_signals({signal.SIGINT: signal.SIG_IGN}):  # Ctrl-C in a terminal is for us alone
                for other in others:
                    other.start()
            store = _met(path, count, others)
            with process_group(store=store, rank=0, world_size=count):
                yield
        except ProcessLost as error:
            raise _explained(error, others) from error
        except BaseException:
            for other in others:
                if other.is_alive():
                    other.terminate()
            raise
        finally:
            for other in others:
                _end(other)


def _met(path: Path, count: int, others: Sequence[SpawnProcess] = ()) -> dist.Store:
    """The store of all processes, once all of them are there."""
    store = dist.FileStore(str(path), count)
    store.add("there", 1)
    while store.add("there", 0) < count:
        if any(not other.is_alive() for other in others):
            raise ProcessLost("a process of this run ended before the others met it; begin it again")
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore("run", store)


_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
"""That a process has to end after it was told to."""


def _work(work: Callable[[], object], number: int, count: int, path: Path, threads: int) -> None:
    """What another process does."""
    _hush()
    begin_child(threads)
    try:
        with process_group(store=_met(path, count), rank=number, world_size=count):
            work()
    except UserError:  # the first process says it
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(INTERRUPTED)


def _explained(error: ProcessLost, others: Sequence[SpawnProcess]) -> BaseException:
    """The error, with how the process ended that is lost; a fault has said itself what it is."""
    for number, other in enumerate(others, 1):
        other.join(_GRACE_SECONDS / len(others))
        if other.exitcode == 1:
            return SystemExit(1)
        if other.exitcode is not None and other.exitcode < 0:
            return ProcessLost(f"process {number} {how_ended(other.exitcode)}; continue with --resume")
    return error


def _end(process: SpawnProcess) -> None:
    """Its work is done, or it is not to go on."""
    if process.pid is not None:
        process.join(_GRACE_SECONDS)
        process.kill()
        process.join()


@contextmanager
def _loopback() -> Iterator[None]:
    """Within this block processes talk to each other on this machine alone."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    given = {
        name: names[0]
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if names and name not in os.environ
    }
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def _hush() -> None:
    """The first process says everything; the others, which end with the run, say nothing but of faults."""
    logging.getLogger("xorflow").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
