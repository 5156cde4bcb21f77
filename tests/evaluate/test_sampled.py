from __future__ import annotations

import json

import pytest

from draftsmith.errors import CheckFailed
from draftsmith.evaluate import run
from draftsmith.rundir import RunPaths
from tests.evaluate.builders import ANSWER_TOKENS, PROMPTS, STEPS, World, build_run, make_recipe


def recipe_of(paths: RunPaths, **settings: object):
    return make_recipe(paths, **({"temperature": 0.8, "compare_untrained": False} | settings))


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def done(world: World, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    paths = build_run(world, tmp_path_factory.mktemp("run"))
    recipe = recipe_of(paths, draft_sample_method=request.param)
    return paths, recipe, run(recipe, paths)


def test_acceptance_at_temperature_stands_beside_greedy(done) -> None:
    *_, report = done
    found = {found["name"]: found for found in report["prompt_sets"]}
    assert list(found) == ["decoded trained", "sampled trained", "replayed trained", "recorded trained"]
    assert found["sampled trained"]["tokens"] == PROMPTS * ANSWER_TOKENS
    assert 1 < found["sampled trained"]["mean_acceptance_length"] < found["decoded trained"]["mean_acceptance_length"]
    assert f"with K = {STEPS}" in report["summary"][1]


def test_the_report_says_how_likely_the_texts_are_the_targets_own(done) -> None:
    _, recipe, report = done
    found = report["lossless_sampled"]
    assert (found["temperature"], found["draft_sample_method"]) == (0.8, recipe.evaluate.draft_sample_method)
    assert (found["prompts"], found["tokens"]) == (PROMPTS, PROMPTS * ANSWER_TOKENS)
    assert found["chance"] > 0.01
    assert any("lossless at temperature 0.8: 160 tokens" in line for line in report["summary"])


def test_a_second_run_samples_nothing_and_says_the_same(done) -> None:
    paths, recipe, report = done
    journal = paths.stage("evaluate") / "sampled.jsonl"
    before = journal.read_bytes()
    assert run(recipe, paths) == report
    assert journal.read_bytes() == before
    journal.unlink()
    run(recipe, paths)
    assert journal.read_bytes() == before  # drawn by the recipe's seed


def test_without_a_temperature_nothing_is_sampled(world: World, tmp_path) -> None:
    paths = build_run(world, tmp_path)
    report = run(recipe_of(paths, temperature=0, prompts=1, max_new_tokens=4), paths)
    assert report["lossless_sampled"] is None
    assert not (paths.stage("evaluate") / "sampled.jsonl").exists()


def test_texts_that_are_not_spread_as_the_targets_own_fail_the_stage(world: World, tmp_path) -> None:
    """As if the draft's likeliest tokens had always been taken: they lie low in the target's distribution."""
    paths = build_run(world, tmp_path)
    recipe = recipe_of(paths)
    run(recipe, paths)
    journal = paths.stage("evaluate") / "sampled.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        line["result"]["places"] = [place**2 for place in line["result"]["places"]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CheckFailed, match=r"160 tokens sampled at temperature 0\.8 are not spread"):
        run(recipe, paths)
    assert json.loads(paths.acceptance.read_text())["lossless_sampled"]["chance"] < 1e-6
