"""Tests that only a machine with a CUDA device collects. They last passed on one, an H200, at commit 7835f54.

Without a device the same code is tested by `make test-cuda` (tests/cuda): kernels interpreted and compiled, captured steps and
decoding on a stand-in for CUDA graphs.
"""

import warnings
from collections.abc import Callable

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def synchronisations() -> Callable[[Callable[[], object]], int]:
    """synchronisations(act) -> how often the host waited for the GPU while `act()` ran."""

    def count(act: Callable[[], object]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # itself warns that it is a prototype
            try:
                act()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(warning.message) for warning in caught)

    return count
