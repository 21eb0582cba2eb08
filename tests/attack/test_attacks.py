"""A few cases of every door, always the same, a kill, a full disk and a short soak; `make attack` and `make soak` do more."""

import random
from pathlib import Path

import pytest

from attack.doors import DOORS
from attack.processes import Kills, small_disk
from attack.rule import contents, run_case
from attack.soak import require_flat, soak
from attack.world import KINDS, World

CASES = 25


@pytest.mark.parametrize("name", DOORS)
def test_a_door(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for kind in KINDS:
        world.run(kind)
    before = contents(world.root)
    for number in range(CASES):
        run_case(world, DOORS[name], name, number, seed=0)
    assert contents(world.root) == before


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
