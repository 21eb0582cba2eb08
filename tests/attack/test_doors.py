"""A few cases of every door, always the same ones; `make attack` tries new ones for as long as one likes."""

import pytest

from attack.doors import DOORS
from attack.rule import contents, run_case
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
