from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.draft.files import save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckFailed, CheckpointError, DataError, StoreError
from draftsmith.evaluate import run
from draftsmith.evaluate.held_out import choose_prompts, open_held_out, open_target
from draftsmith.evaluate.rounds import round_starts
from draftsmith.evaluate.speculate import speculative_decode
from draftsmith.rundir import RunPaths
from tests.evaluate.builders import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    STEPS,
    World,
    build_run,
    build_world,
    make_prompts,
    make_recipe,
)
from tests.extract import scale


@pytest.fixture(scope="module")
def done(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, dict]:
    paths = build_run(world, tmp_path_factory.mktemp("run"))
    return paths, run(make_recipe(paths), paths)


def sets_by_name(report: dict) -> dict[str, dict]:
    return {found["name"]: found for found in report["prompt_sets"]}


def test_the_report_says_what_the_contract_asks(done: tuple[RunPaths, dict]) -> None:
    _, report = done
    for found in report["prompt_sets"]:
        assert {"mean_acceptance_length", "per_position", "prompts", "tokens", "confidence_95"} <= found.keys()
        assert found["num_speculative_tokens"] == STEPS
        assert found["mean_acceptance_length"] == pytest.approx(1 + found["mean_accepted_tokens"])
    assert sets_by_name(report)["decoded trained"]["tokens"] == PROMPTS * ANSWER_TOKENS


def test_the_trained_draft_is_measured_beside_the_untrained(done: tuple[RunPaths, dict]) -> None:
    found = sets_by_name(done[1])
    for trained, untrained in (("decoded trained", "replayed untrained"), ("recorded trained", "recorded untrained")):
        assert found[trained]["mean_acceptance_length"] > 0.3 + found[untrained]["mean_acceptance_length"]


def test_every_decoded_text_is_the_targets_own(done: tuple[RunPaths, dict]) -> None:
    assert done[1]["lossless"] == {"prompts": PROMPTS, "identical": PROMPTS, "ties": [], "faults": []}


def test_replay_and_decoding_agree_in_the_report(done: tuple[RunPaths, dict]) -> None:
    _, report = done
    found = sets_by_name(report)
    assert report["replay_equals_decoding"] == {"prompts": PROMPTS, "equal": PROMPTS}
    assert report["recorded_tokens_are_top1"] == 1
    assert found["replayed trained"]["per_position"] == found["recorded trained"]["per_position"]  # the same texts


def test_the_acceptance_length_of_every_k_is_that_of_decoding_with_it_by_domain_too(
    done: tuple[RunPaths, dict], world: World
) -> None:
    """Over the rounds whose draft tokens, were they STEPS, would all lie in the text."""
    last = len(world.texts[0].input_ids) - 2 - STEPS  # slot
    by_k = sets_by_name(done[1])["recorded trained"]["by_num_speculative_tokens"]
    assert [*by_k] == ["1", "2", "3"]
    for k in range(1, STEPS + 1):
        accepted: dict[str, list[int]] = {"domain0": [], "domain1": []}
        for i, text in enumerate(world.texts):
            decoded = speculative_decode(world.target, world.trained, text.prompt, ANSWER_TOKENS, (), k)
            starts = round_starts(PROMPT_TOKENS - 1, decoded.accepted)
            accepted[f"domain{i % 2}"] += [
                a for start, a in zip(starts, decoded.accepted, strict=True) if start <= last
            ]
        found, whole = by_k[str(k)], [a for own in accepted.values() for a in own]
        assert found["mean_acceptance_length"] == pytest.approx(1 + sum(whole) / len(whole))
        assert found["confidence_95"][0] <= found["mean_acceptance_length"] <= found["confidence_95"][1]
        for domain, own in accepted.items():
            assert found["by_domain"][domain]["mean_acceptance_length"] == pytest.approx(1 + sum(own) / len(own))
            assert len(found["by_domain"][domain]["confidence_95"]) == 2


def test_every_greedy_set_has_every_k_and_its_own_as_it_stands(done: tuple[RunPaths, dict]) -> None:
    for found in done[1]["prompt_sets"]:
        by_k = found["by_num_speculative_tokens"]
        assert [*by_k] == ["1", "2", "3"]
        for name in ("mean_acceptance_length", "confidence_95", "by_domain", "within_tokens"):
            assert by_k[str(STEPS)][name] == found[name]
    (line,) = (line for line in done[1]["summary"] if "with K = 1" in line)
    assert "trained draft, decoded" in line


def test_texts_replayed_by_an_earlier_version_give_the_figures_of_one_k(
    done: tuple[RunPaths, dict], world: World, tmp_path: Path
) -> None:
    paths = build_run(world, tmp_path / "run")
    run(make_recipe(paths, prompts=0), paths)
    journal = paths.stage("evaluate") / "recorded.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for replay in lines[0]["result"]["replays"].values():
        del replay["fewer"]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = sets_by_name(run(make_recipe(paths, prompts=0), paths))["recorded trained"]
    assert found["mean_acceptance_length"] == sets_by_name(done[1])["recorded trained"]["mean_acceptance_length"]
    assert [*found["by_num_speculative_tokens"]] == [str(STEPS)]


def test_the_acceptance_file_is_the_report(done: tuple[RunPaths, dict]) -> None:
    paths, report = done
    written = json.loads(paths.acceptance.read_text())
    assert written == json.loads(json.dumps({name: value for name, value in report.items() if name != "summary"}))


def test_every_line_of_rates_names_its_k(done: tuple[RunPaths, dict]) -> None:
    rates = [line for line in done[1]["summary"] if "by position" in line]
    assert len(rates) == 4
    assert all(f"K = {STEPS}" in line for line in rates)


def test_a_second_run_decodes_nothing_and_says_the_same(done: tuple[RunPaths, dict]) -> None:
    paths, report = done
    before = (paths.stage("evaluate") / "decoded.jsonl").stat().st_mtime_ns
    assert run(make_recipe(paths), paths) == report
    assert (paths.stage("evaluate") / "decoded.jsonl").stat().st_mtime_ns == before


def test_a_text_that_is_not_the_targets_own_fails_the_stage(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    recipe = make_recipe(paths, prompts=1, max_new_tokens=8)
    run(recipe, paths)
    journal = paths.stage("evaluate") / "decoded.jsonl"
    line = json.loads(journal.read_text())
    line["result"]["deviations"] = [{"index": 3, "token": 5, "likeliest": 6, "gap": 2.5, "tie": False}]
    journal.write_text(json.dumps(line) + "\n")
    with pytest.raises(CheckFailed, match=r"1 of 1 texts.*token 3 of its answer.*prefers 6 to 5.*2\.5"):
        run(recipe, paths)
    assert json.loads(paths.acceptance.read_text())["lossless"]["faults"]


def test_without_prompts_the_target_is_not_loaded(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path / "run")
    report = run(make_recipe(paths, prompts=0), paths)
    assert list(sets_by_name(report)) == ["recorded trained", "recorded untrained"]
    assert report["lossless"] is None


def test_the_untrained_draft_is_left_out_on_request(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    report = run(make_recipe(paths, prompts=0, compare_untrained=False), paths)
    assert list(sets_by_name(report)) == ["recorded trained"]


def test_a_store_made_with_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path, tokenizer_sha256="another")
    with pytest.raises(StoreError, match='tokenizer_sha256 is "another"'):
        run(make_recipe(paths), paths)


def test_another_dtype_than_the_stores_is_said(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path, dtype="bfloat16")
    report = run(make_recipe(paths, prompts=0), paths)
    assert (report["target_dtype"], report["store_dtype"]) == ("float32", "bfloat16")
    assert any("states computed in bfloat16" in line for line in report["summary"])


def test_words_that_are_not_the_targets_are_said(world: World, tmp_path: Path) -> None:
    others = [replace(text, answer=[7] * len(text.answer)) for text in world.texts]
    paths = build_run(replace(world, texts=others), tmp_path)
    report = run(make_recipe(paths, prompts=0), paths)
    assert report["recorded_tokens_are_top1"] < 0.5
    assert any("are the target's own top-1" in line for line in report["summary"])


def test_a_draft_of_other_layers_is_refused(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    other = Draft(replace(world.trained.config, aux_layer_ids=(1, 4, 5)))
    save_draft(paths.checkpoints / "final", other)
    with pytest.raises(CheckpointError, match=r"trained on auxiliary layers \(1, 4, 5\).*\(2, 4, 5\)"):
        run(make_recipe(paths), paths)


def test_a_run_that_held_nothing_out_is_told_how_to(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path, split="train")
    with pytest.raises(DataError, match="validation_fraction"):
        run(make_recipe(paths), paths)


def test_prompts_without_room_for_an_answer_are_refused(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    with pytest.raises(DataError, match="no held-out prompt leaves room"):
        run(make_recipe(paths, max_new_tokens=510), paths)


def test_the_seed_draws_the_prompts(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)

    def draw(seed: int) -> list[str]:
        recipe = make_recipe(paths, prompts=2, compare_untrained=False).model_copy(update={"seed": seed})
        return choose_prompts(open_held_out(recipe, paths))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(6)}) > 1


def test_fewer_prompts_than_wanted_is_said(world: World, tmp_path: Path) -> None:
    paths = build_run(world, tmp_path)
    report = run(make_recipe(paths, prompts=9, max_new_tokens=4), paths)
    assert any("9 prompts were wanted" in line for line in report["summary"])


@pytest.mark.parametrize("factors", ["short", "long"])
def test_a_target_with_longrope_decodes_with_the_factors_that_its_states_are_of(tmp_path: Path, factors: str) -> None:
    original = 128
    world = build_world(scale.phi3(tmp_path / "phi3", original), training_steps=0, prompts=2)
    paths = build_run(world, tmp_path / "run", rope_factors=factors)
    held_out = open_held_out(make_recipe(paths), paths)
    text = [token for prompt in make_prompts(prompts=20) for token in prompt][: original + 20]
    short = text[:40]  # transformers takes the factors by the whole text
    _, aux = open_target(held_out, held_out.store.manifest.aux_layer_ids).read(short, keep=1, cached=False)
    _, of_short = world.target.read(short, keep=1, cached=False)
    _, of_long = world.target.read(text, keep=1, cached=False)
    assert not torch.allclose(of_short, of_long[:40], rtol=1e-2)
    torch.testing.assert_close(aux, of_short if factors == "short" else of_long[:40], rtol=1e-4, atol=1e-4)
