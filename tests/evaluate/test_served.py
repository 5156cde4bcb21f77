"""`evaluate` with two running engines, which are small servers here; test_served_by_vllm.py has the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith import engine_server, export
from draftsmith.errors import CheckFailed, EngineError, MissingInputError, RequestError
from draftsmith.evaluate import run
from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths
from tests.evaluate.builders import PROMPTS, World, build_run, make_recipe
from tests.evaluate.stand_in import Engine, K, serving

CONCURRENCY, REPEATS, TOKENS = [1, 3], 2, 8


@pytest.fixture
def recipe_of(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Recipe, RunPaths]]:
    monkeypatch.setattr(engine_server, "_SETTLE_SECONDS", 0.001)
    paths = build_run(world, tmp_path / "run")

    def make(**served: Any) -> tuple[Recipe, RunPaths]:
        settings = {"enabled": True, "concurrency": CONCURRENCY, "repeats": REPEATS, "max_tokens": TOKENS} | served
        return make_recipe(paths, prompts=0, num_speculative_tokens=K, served=settings), paths

    export.run(*make(enabled=False))
    return make


def test_running_engines_are_measured_and_the_other_figures_stay(recipe_of):
    recipe, paths = recipe_of(enabled=False)
    offline = run(recipe, paths)
    with serving(Engine(drafting=False)) as alone, serving(Engine()) as drafting:
        report = run(*recipe_of(url=f"{drafting}/v1", baseline_url=alone))
    sets = report["prompt_sets"]
    assert json.loads(json.dumps(offline["prompt_sets"])) == sets[: len(offline["prompt_sets"])]
    served = sets[len(offline["prompt_sets"]) :]
    assert [found["concurrency"] for found in served] == CONCURRENCY
    assert [found["prompts"] for found in served] == [PROMPTS, 6], "whole waves"
    for found in served:
        assert found["per_position"] == [1.0, 0.0]
        assert found["mean_acceptance_length"] == 2.0
        assert found["identical"]["identical"] == found["prompts"]
    assert report["step_costs"]["target_seconds"] == pytest.approx({"1": 0.25, "3": 0.25, "9": 0.25})
    assert report["step_costs"]["draft_seconds"] == pytest.approx({"1": 0.0, "3": 0.0})
    assert json.loads(paths.acceptance.read_text())["prompt_sets"] == json.loads(json.dumps(offline["prompt_sets"]))
    assert len([line for line in report["summary"] if "tokens/s against" in line]) == len(CONCURRENCY)


def test_what_was_measured_before_a_failure_is_not_measured_again(recipe_of):
    first, second = Engine(drafting=False), Engine(drafting=False)
    with serving(first) as alone, pytest.raises(EngineError, match="ConnectError"):
        run(*recipe_of(url="http://127.0.0.1:9", baseline_url=alone))
    assert first.bodies
    with serving(second) as alone, serving(Engine()) as drafting:
        run(*recipe_of(url=drafting, baseline_url=alone))
        seen = len(second.bodies)
        run(*recipe_of(url=drafting, baseline_url=alone))
        assert len(second.bodies) == seen
        run(*recipe_of(url=drafting, baseline_url=alone, concurrency=[*CONCURRENCY, 2]))
        assert len(second.bodies) > seen


def test_engines_that_are_named_the_wrong_way_round_are_refused(recipe_of):
    with serving(Engine(drafting=False)) as alone, serving(Engine()) as drafting:
        with pytest.raises(RequestError, match=r"the engine without the draft drafts 2 tokens in a round"):
            run(*recipe_of(url=alone, baseline_url=drafting))
        with pytest.raises(RequestError, match=r"with the draft, K = 2 drafts nothing"):
            run(*recipe_of(url=alone, baseline_url=alone))
        with pytest.raises(RequestError, match=r"with the draft, K = 3 drafts 2 tokens"):
            run(*recipe_of(url=drafting, baseline_url=alone, num_speculative_tokens=[3]))


def test_another_text_with_the_draft_fails_the_stage_once_all_is_on_disk(recipe_of):
    with serving(Engine(drafting=False)) as alone, serving(Engine(slip=3)) as drafting:
        recipe, paths = recipe_of(url=drafting, baseline_url=alone)
        with pytest.raises(CheckFailed, match=r"4 of 4 texts are not what the engine writes.*at token 3"):
            run(recipe, paths)
    assert json.loads(paths.served.read_text())["prompt_sets"][0]["identical"]["identical"] == 0


def test_at_a_temperature_texts_are_not_compared(recipe_of):
    with serving(Engine(drafting=False)) as alone, serving(Engine(slip=3)) as drafting:
        report = run(*recipe_of(url=drafting, baseline_url=alone, temperature=0.7))
    assert report["prompt_sets"][-1]["identical"] is None


def test_serving_cannot_be_measured_before_the_export(world, tmp_path):
    paths = build_run(world, tmp_path)
    with pytest.raises(MissingInputError, match="`export` has not been done"):
        run(make_recipe(paths, prompts=0, served={"enabled": True}), paths)
