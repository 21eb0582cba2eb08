"""A kill of a run, a full disk and a short soak; `make attack` and `make soak` do it at length."""

import random
from pathlib import Path

import pytest

from attack.kills import Kills, small_disk
from attack.soak import require_flat, soak
from attack.world import World


def test_a_killed_run_goes_on_to_the_same_bits(world: World) -> None:
    """A coupling with a posterior; tests of interrupts kill a flow of two layers."""
    Kills(world, random.Random(0)).try_one("coupling", kills=1)


def test_a_full_disk_loses_nothing(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("a file system of its own is not allowed here")
        Kills(world, random.Random(0)).try_full_disk("deep", disk)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_descriptors_and_threads_stay(world: World) -> None:
    """Of 40 rounds the first ten warm up; a leak of a model in each would be hundreds of megabytes a minute."""
    readings = soak(world, 0, rounds=40)
    require_flat(readings, readings[10].seconds, most=100)
