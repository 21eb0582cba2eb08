"""The world that the small set attacks."""

from __future__ import annotations

import pytest

from attack.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))
