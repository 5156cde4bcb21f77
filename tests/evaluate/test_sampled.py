from __future__ import annotations

import json
from dataclasses import replace

import pytest

from draftsmith.errors import CheckFailed
from draftsmith.evaluate import run
from draftsmith.evaluate.sampled import sampled_by_the_target
from draftsmith.rundir import RunPaths
from tests.evaluate.builders import ANSWER_TOKENS, PROMPTS, STEPS, World, build_run, make_recipe, read_text


def recipe_of(paths: RunPaths, **settings: object):
    return make_recipe(paths, **({"temperature": 0.8, "compare_untrained": False} | settings))


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def done(world: World, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    paths = build_run(world, tmp_path_factory.mktemp("run"))
    recipe = recipe_of(paths, draft_sample_method=request.param)
    return paths, recipe, run(recipe, paths)


def test_acceptance_at_temperature_stands_beside_greedy(done) -> None:
    _, recipe, report = done
    found = {found["name"]: found for found in report["prompt_sets"]}
    other = (
        "sampling its tokens" if recipe.evaluate.draft_sample_method == "greedy" else "proposing its likeliest tokens"
    )
    expected = [name for name in found if name.startswith("expected")]
    assert sorted(expected) == ["expected trained", f"expected trained, {other}"]
    greedy = ["decoded trained", "replayed trained", "recorded trained"]
    assert [name for name in found if name not in expected] == [greedy[0], "sampled trained", *greedy[1:]]
    assert found["sampled trained"]["tokens"] == PROMPTS * ANSWER_TOKENS
    assert 1 < found["sampled trained"]["mean_acceptance_length"] < found["decoded trained"]["mean_acceptance_length"]
    assert f"with K = {STEPS}" in report["summary"][1]


def test_what_is_expected_of_the_sampled_texts_stands_beside_what_decoding_took(done) -> None:
    _, recipe, report = done
    found = {found["name"]: found for found in report["prompt_sets"]}
    measured, expected = found["sampled trained"], found["expected trained"]
    low, high = measured["confidence_95"]
    assert low - 0.05 < expected["mean_acceptance_length"] < high + 0.05
    assert (expected["temperature"], expected["prompts"], expected["tokens"]) == (0.8, PROMPTS, PROMPTS * ANSWER_TOKENS)
    assert expected["draft_sample_method"] == measured["draft_sample_method"] == recipe.evaluate.draft_sample_method
    assert expected["mean_acceptance_length"] == pytest.approx(1 + sum(expected["per_position"]))
    lengths = expected["by_num_speculative_tokens"]
    assert list(lengths) == [str(k + 1) for k in range(STEPS)]
    assert lengths[str(STEPS)]["mean_acceptance_length"] == expected["mean_acceptance_length"]
    for of in lengths.values():
        assert of["confidence_95"][0] <= of["mean_acceptance_length"] <= of["confidence_95"][1]
    against = report["sampled_against_expected"]
    assert against["confidence_95"][0] <= against["difference"] <= against["confidence_95"][1]
    lines = [line for line in report["summary"] if "expected of the sampled texts at temperature 0.8" in line]
    assert len(lines) == 2
    assert all(f"with K = {k + 1}" in line for line in lines for k in range(STEPS))


def test_a_draft_that_samples_is_expected_to_be_taken_more_often(done) -> None:
    """From the same texts, whichever draft wrote them."""
    *_, report = done
    by_method = {f["draft_sample_method"]: f for f in report["prompt_sets"] if f["method"] == "expected"}
    length = by_method["probabilistic"]["mean_acceptance_length"]
    assert length > 0.1 + by_method["greedy"]["mean_acceptance_length"]
    assert length > 0.01 + by_method["probabilistic"]["by_num_speculative_tokens"]["1"]["mean_acceptance_length"]


def test_recorded_texts_of_another_origin_give_unconditional_rates_alone(done) -> None:
    _, recipe, report = done
    (recorded,) = (found for found in report["prompt_sets"] if found["method"] == "recorded")
    found = recorded["at_temperature"]
    assert found["slots"] == PROMPTS * (ANSWER_TOKENS - STEPS)
    assert found["draft_sample_method"] == recipe.evaluate.draft_sample_method
    for rate, (low, high) in zip(found["unconditional_per_position"], found["unconditional_95"], strict=True):
        assert 0 < low <= rate <= high < 1
    assert not any(found["method"] == "expected recorded" for found in report["prompt_sets"])
    assert any("after the recorded words alone" in line for line in report["summary"])


def test_recorded_samples_of_the_target_give_the_rounds_as_sampled_texts_do(world: World, tmp_path) -> None:
    """As if the store held what decoding at this temperature wrote."""
    paths = build_run(world, tmp_path)
    recipe = recipe_of(paths)
    journal = paths.stage("evaluate") / "sampled.jsonl"
    run(recipe, paths)
    written = {line["id"]: line["result"] for line in map(json.loads, journal.read_text().splitlines())}
    texts = [
        read_text(world.facts, world.target, text.prompt, written[str(i)]["answer_ids"])
        for i, text in enumerate(world.texts)
    ]
    paths = build_run(replace(world, texts=texts), tmp_path / "again")
    regenerate = recipe.prepare.regenerate.model_copy(update={"temperature": 0.8})
    prepare = recipe.prepare.model_copy(update={"regenerate": regenerate})
    report = run(recipe_of(paths, prompts=0).model_copy(update={"prepare": prepare}), paths)
    found = {found["name"]: found for found in report["prompt_sets"]}
    results = {name: found[name]["per_position"] for name in found if name.startswith("expected recorded trained")}
    assert len(results) == 2
    again = run(recipe, RunPaths(tmp_path))
    for name, rates in results.items():
        (same,) = (f for f in again["prompt_sets"] if f["name"] == name.replace(" recorded", ""))
        assert rates == pytest.approx(same["per_position"], abs=1e-3)


@pytest.mark.parametrize("fault", [{"temperature": 0.7}, {"top_p": 0.9}, {"using": "server", "url": "http://h/v1"}])
def test_answers_that_were_drawn_otherwise_are_not_taken_for_the_targets_samples(world: World, tmp_path, fault) -> None:
    paths = build_run(world, tmp_path)
    recipe = recipe_of(paths)

    def written(settings: dict) -> bool:
        regenerate = recipe.prepare.regenerate.model_copy(update={"temperature": 0.8} | settings)
        prepare = recipe.prepare.model_copy(update={"regenerate": regenerate})
        return sampled_by_the_target(recipe.model_copy(update={"prepare": prepare}))

    assert written({})
    assert not written(fault)


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
