"""`evaluate` with two running engines, which are small servers here; test_served_by_vllm.py has the real ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith import engine_vllm, export
from draftsmith.errors import CheckFailed, EngineError, MissingExtraError, MissingInputError, RequestError
from draftsmith.evaluate import run
from draftsmith.evaluate.served import WARM_UP_TOKENS, _side, check_served, make_plan
from draftsmith.pipeline import run_all
from draftsmith.recipe import Recipe
from draftsmith.rundir import RunPaths, write_json
from tests.evaluate.builders import PROMPTS, World, build_run, make_draft, make_recipe, seen_ids
from tests.evaluate.stand_in import Engine, K, serving
from tests.export.builders import PLAIN

CONCURRENCY, REPEATS, TOKENS = [1, 3], 2, 8


@pytest.fixture(autouse=True)
def short_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.evaluate.served.REPEAT_SECONDS", 0.0)


@pytest.fixture
def recipe_of(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Recipe, RunPaths]]:
    monkeypatch.setattr(engine_vllm, "_SETTLE_SECONDS", 0.001)
    return exported(build_run(world, tmp_path / "run"))


@pytest.fixture
def plain_recipe_of(world: World, tmp_path: Path) -> Callable[..., tuple[Recipe, RunPaths]]:
    """Of a draft that SGLang can hold, too."""
    draft = make_draft(world.facts, world.head, seen_ids(world.texts), **PLAIN)
    return exported(build_run(replace(world, trained=draft, untrained=draft), tmp_path / "run"))


def exported(paths: RunPaths) -> Callable[..., tuple[Recipe, RunPaths]]:
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
    assert report["busy_cores"] == {}, "of engines that ran already nothing is known"
    assert report["engine_version"] == "of vllm", "of the one that answers, not of the one that is installed here"
    assert json.loads(paths.acceptance.read_text())["prompt_sets"] == json.loads(json.dumps(offline["prompt_sets"]))
    assert len([line for line in report["summary"] if "tokens/s against" in line]) == len(CONCURRENCY)


def test_a_repeat_that_is_soon_over_asks_the_prompts_again_as_often_with_the_draft_as_without(recipe_of, monkeypatch):
    monkeypatch.setattr("draftsmith.evaluate.served.REPEAT_SECONDS", 1e9)
    monkeypatch.setattr("draftsmith.evaluate.served.MOST_TURNS", 4)
    with serving(Engine(drafting=False)) as alone, serving(Engine()) as drafting:
        recipe, paths = recipe_of(url=drafting, baseline_url=alone)
        served = [found for found in run(recipe, paths)["prompt_sets"] if found["method"] == "served"]
    assert [found["prompts"] for found in served] == [PROMPTS, 6], "each counts once"
    assert [found["identical"]["identical"] for found in served] == [PROMPTS, 6]
    lines = map(json.loads, (paths.stage("evaluate") / "served.jsonl").read_text().splitlines())
    measured = [line["result"] for line in lines if "repeats" in line["result"]]
    assert [one["times"] for one in measured] == [4] * 2 * len(CONCURRENCY)
    tokens = [[repeat["tokens"] for repeat in one["repeats"]] for one in measured]
    assert tokens == 2 * [[4 * PROMPTS * TOKENS] * REPEATS, [4 * 6 * TOKENS] * REPEATS]


class ColdEngine(Engine):
    """Its first request takes a thousand steps more, as a kernel's compilation would."""

    def rounds(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.lock:
            self.steps += 0 if self.bodies else 1000
        yield from super().rounds(body)


def test_an_engine_is_warmed_up_first_and_what_that_costs_is_in_no_figure(recipe_of):
    tokens = WARM_UP_TOKENS + 4
    cold = ColdEngine(drafting=False), ColdEngine()
    with serving(cold[0]) as alone, serving(cold[1]) as drafting:
        recipe, paths = recipe_of(url=drafting, baseline_url=alone, max_tokens=tokens)
        report = run(recipe, paths)
    for engine, most in zip(cold, (max(CONCURRENCY) * (K + 1), max(CONCURRENCY)), strict=True):
        asked = [body["max_tokens"] for body in engine.bodies]
        assert asked[: 1 + most] == [WARM_UP_TOKENS] * (1 + most), "one alone, then as many as will be asked at once"
        assert WARM_UP_TOKENS not in asked[1 + most :]
    assert report["step_costs"]["target_seconds"] == pytest.approx({"1": 0.25, "3": 0.25, "9": 0.25})
    assert report["step_costs"]["draft_seconds"] == pytest.approx({"1": 0.0, "3": 0.0})
    lines = map(json.loads, (paths.stage("evaluate") / "served.jsonl").read_text().splitlines())
    repeats = [one for line in lines for one in line["result"].get("repeats", [])]
    assert len(repeats) == 2 * len(CONCURRENCY) * REPEATS
    assert {one["drafts"] / one["tokens"] for one in repeats} == {0.0, 0.5}, "a round of this engine is two tokens"


class SlowlyWarmingEngine(Engine):
    """Its steps take twice as long until one short and one long burst of a single request are over."""

    def metrics(self) -> str:
        slow = min(WARM_UP_TOKENS, TOKENS) * (1 + max(CONCURRENCY) * (K + 1)) + max(2, TOKENS // 4) + TOKENS
        seconds = (self.steps + min(self.steps, slow)) / 4
        return "\n".join(
            f"{line.rsplit(' ', 1)[0]} {seconds}" if "seconds_sum" in line else line
            for line in super().metrics().splitlines()
        )


def test_a_step_is_measured_by_short_and_long_bursts_in_turns_so_that_a_drift_is_in_both(recipe_of):
    with serving(SlowlyWarmingEngine(drafting=False)) as alone, serving(Engine()) as drafting:
        report = run(*recipe_of(url=drafting, baseline_url=alone))
    assert report["step_costs"]["target_seconds"] == pytest.approx({"1": 0.25, "3": 0.25, "9": 0.25})


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
        with pytest.raises(RequestError, match=r"with the draft, K = 1 drafts 2 tokens"):
            run(*recipe_of(url=drafting, baseline_url=alone, num_speculative_tokens=[1]))


def test_more_draft_tokens_than_acceptance_is_measured_with_are_refused_before_any_work(recipe_of):
    recipe, paths = recipe_of(num_speculative_tokens=[1, K + 1])
    for begin in (lambda: check_served(recipe), lambda: run(recipe, paths), lambda: run_all(recipe)):
        with pytest.raises(RequestError, match=rf"{K + 1} draft tokens are to be served.*with {K}:") as caught:
            begin()
        assert f"`draftsmith evaluate RECIPE evaluate.num_speculative_tokens={K + 1} --redo` deletes" in str(
            caught.value.hint
        )
    assert not paths.stage("evaluate").exists()
    assert not paths.events.exists()


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
    with pytest.raises(MissingInputError, match="is not there, which `export` makes"):
        run(make_recipe(paths, prompts=0, served={"enabled": True}), paths)


def test_sglang_is_measured_by_what_it_says_of_each_request(plain_recipe_of):
    with serving(Engine("sglang", drafting=False)) as alone, serving(Engine("sglang")) as drafting:
        recipe, paths = plain_recipe_of(engine="sglang", url=drafting, baseline_url=alone)
        report = run(recipe, paths)
    assert (report["engine"], report["engine_version"]) == ("sglang", "of sglang")
    served = [found for found in report["prompt_sets"] if found["method"] == "served"]
    assert [found["concurrency"] for found in served] == CONCURRENCY
    for found in served:
        assert (found["per_position"], found["mean_acceptance_length"]) == ([1.0, 0.0], 2.0)
        assert found["identical"]["identical"] == found["prompts"]
    assert set(report["step_costs"]["target_seconds"]) == {"1", "3", "9"}
    assert any(line.strip().startswith("in SGLang") for line in report["summary"])


def test_figures_of_one_engine_are_not_taken_for_the_others(plain_recipe_of):
    engines = [Engine(kind, drafting=drafting) for kind in ("vllm", "sglang") for drafting in (False, True)]
    with serving(engines[0]) as alone, serving(engines[1]) as drafting:
        assert run(*plain_recipe_of(engine="vllm", url=drafting, baseline_url=alone))["engine"] == "vllm"
    with serving(engines[2]) as alone, serving(engines[3]) as drafting:
        recipe, paths = plain_recipe_of(engine="sglang", url=drafting, baseline_url=alone)
        assert run(recipe, paths)["engine"] == "sglang"
        assert engines[2].bodies
        assert engines[3].bodies


def test_another_text_in_sglang_fails_by_its_own_log_probabilities(plain_recipe_of):
    with serving(Engine("sglang", drafting=False)) as alone, serving(Engine("sglang", slip=3)) as drafting:
        recipe, paths = plain_recipe_of(engine="sglang", url=drafting, baseline_url=alone)
        with pytest.raises(CheckFailed, match=r"4 of 4 texts .*at token 3.*not among its likeliest"):
            run(recipe, paths)


@pytest.mark.parametrize(("runs", "wanted", "says"), [("sglang", "vllm", "SGLang"), ("vllm", "sglang", "vLLM")])
def test_a_running_engine_of_the_other_kind_is_refused_with_the_setting(plain_recipe_of, runs, wanted, says):
    with serving(Engine(runs, drafting=False)) as alone, serving(Engine(runs)) as drafting:
        recipe, paths = plain_recipe_of(engine=wanted, url=drafting, baseline_url=alone)
        with pytest.raises(RequestError, match=f"{says} runs there, not") as caught:
            run(recipe, paths)
    assert caught.value.hint == f"evaluate.served.engine={runs}, or another address"


def test_a_draft_that_sglang_cannot_hold_is_refused_before_and_after_the_export(recipe_of):
    recipe, paths = recipe_of(engine="sglang", url="http://127.0.0.1:9", baseline_url="http://127.0.0.1:9")
    with pytest.raises(RequestError, match="cannot hold a draft with norm_before_residual") as early:
        check_served(recipe)
    write_json(paths.stage_file("export"), {"status": "done", "report": export.run(recipe, paths)})
    with pytest.raises(RequestError, match="SGLang cannot hold this draft: norm_before_residual") as late:
        run(recipe, paths)
    for caught in (early, late):
        assert "train.draft.norm_before_residual=false" in f"{caught.value} {caught.value.hint}"


def test_an_address_where_nobody_is_comes_back_with_a_remedy(plain_recipe_of):
    recipe, paths = plain_recipe_of(url="http://127.0.0.1:9", baseline_url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match="refused") as caught:
        run(recipe, paths)
    assert "is an engine running" in (caught.value.hint or "")


def test_a_proxy_of_the_environment_is_not_asked_for_engines_on_this_machine(plain_recipe_of, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(Engine(drafting=False)) as alone, serving(Engine()) as drafting:
        recipe, paths = plain_recipe_of(url=drafting, baseline_url=alone)
        assert run(recipe, paths)["step_costs"]["target_seconds"]


def test_an_engine_that_runs_fewer_sequences_than_are_measured_at_once_is_refused_before_it_starts(recipe_of):
    recipe, _ = recipe_of(concurrency=[1, 64])
    for given in ({"max_num_seqs": 191}, {"max_running_requests": 64}):
        serve = recipe.serve.model_copy(update={"engine_args": given})
        with pytest.raises(RequestError, match="measured by 192"):
            check_served(recipe.model_copy(update={"serve": serve}))
    serve = recipe.serve.model_copy(update={"engine_args": {"max_num_seqs": 192}})
    check_served(recipe.model_copy(update={"serve": serve}))


def test_where_an_engine_listens_while_it_is_measured_is_not_where_it_will_serve(recipe_of):
    recipe, paths = recipe_of()
    given = {"host": "10.0.0.5", "port": 80, "api_key": "secret"}
    plan = make_plan(recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"engine_args": given})}), paths)
    command = _side(plan, 0).command
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert not {"--port", "--api-key"} & set(command)
    assert "--no-enable-prefix-caching" in command, "prompts are asked again: a cache would answer"
    assert int(command[command.index("--max-num-seqs") + 1]) == max(plan.target_sizes)


def test_an_sglang_that_is_not_installed_is_missed_before_anything_is_trained(plain_recipe_of):
    if importlib.util.find_spec("sglang"):
        pytest.skip("SGLang is installed")
    with pytest.raises(MissingExtraError, match="SGLang is not installed") as caught:
        check_served(plain_recipe_of(engine="sglang")[0])
    assert "sglang>=0.5.17" in (caught.value.hint or "")
