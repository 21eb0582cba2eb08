"""A kill of a run, a rival, a full disk and a short soak; `make attack` and `make soak` do it at length."""

import random
from pathlib import Path

import pytest

from attack.kills import Kills, small_disk
from attack.soak import require_flat, soak
from attack.world import World


@pytest.mark.parametrize("name", ["transformer", "coupling"])
def test_a_killed_run_goes_on_to_the_same_bits(world: World, name: str) -> None:
    Kills(world, random.Random(0)).try_one(name, kills=1)


def test_a_rival_harms_nothing(world: World) -> None:
    Kills(world, random.Random(0)).try_two("mixture")


def test_a_full_disk_loses_nothing(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("a file system of its own is not allowed here")
        Kills(world, random.Random(0)).try_full_disk("deep", disk)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_descriptors_and_threads_stay(world: World) -> None:
    require_flat(soak(world, 0.08), 1, most=200)
