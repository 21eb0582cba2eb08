"""CUDA code without a CUDA device: what `make test-cuda` collects, in an environment that has Triton."""

import importlib.util
import os

import pytest

import standin

# Triton reads it when a kernel is defined; on a machine with a GPU, whose tests need the same kernels compiled, it is not set
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if _INTERPRETS else ["*.py"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and streams on the CPU, without kernels."""
    standin.install(monkeypatch)


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted, on tensors of the CPU."""
    monkeypatch.setattr("xorflow._devices.TYPES", ("cpu",))
