from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.evaluate.speculate import Decoded, speculative_decode
from tests.evaluate.builders import ANSWER_TOKENS, STEPS, Small, World, build_small, build_world


@pytest.fixture(scope="session")
def world(tiny_target: Path) -> World:
    return build_world(tiny_target)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return build_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def decoded(world: World) -> list[Decoded]:
    """Every prompt decoded with the trained draft."""
    return [
        speculative_decode(world.target, world.trained, text.prompt, ANSWER_TOKENS, (), STEPS) for text in world.texts
    ]
