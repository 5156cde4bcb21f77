"""The real vLLM under load, with a draft that knows the target's answers by heart and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith import export
from draftsmith.evaluate import run
from draftsmith.recipe import Recipe, parse
from draftsmith.rundir import RunPaths, read_events
from tests.conftest import build_tiny_target
from tests.evaluate.builders import ANSWER_TOKENS, PROMPTS, STEPS, build_run, build_world

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CONCURRENCY, REPEATS = [1, 4], 2
ENGINE_ARGS = {"max_model_len": 128, "enforce_eager": True, "kv_cache_memory_bytes": 256 * 2**20}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run up to its export."""
    target = tmp_path_factory.mktemp("target")
    build_tiny_target(target, hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    paths = build_run(build_world(target), tmp_path_factory.mktemp("run"))
    export.run(recipe_of(paths), paths)
    return paths


def recipe_of(paths: RunPaths, **served: Any) -> Recipe:
    target = {"model": json.loads(paths.facts.read_text())["path"], "dtype": "float32"}
    settings = {"enabled": True, "concurrency": CONCURRENCY, "repeats": REPEATS, "max_tokens": ANSWER_TOKENS}
    tree = {"name": "t", "run_dir": str(paths.root), "target": target, "export": {"dtype": "float32"}}
    tree["evaluate"] = {"prompts": PROMPTS, "max_new_tokens": ANSWER_TOKENS, "served": settings | served}
    return parse(tree | {"serve": {"engine_args": ENGINE_ARGS}})


@pytest.fixture(scope="module")
def report(paths: RunPaths) -> dict[str, Any]:
    return run(recipe_of(paths), paths)


def served(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [found for found in report["prompt_sets"] if found["method"] == "served"]


def test_every_concurrency_has_its_speed_with_and_without_the_draft(report: dict[str, Any]) -> None:
    assert [found["concurrency"] for found in served(report)] == CONCURRENCY
    for found in served(report):
        rates = found["tokens_per_second"]
        times, left = divmod(found["tokens"], PROMPTS * ANSWER_TOKENS * REPEATS)
        assert (times > 0, left) == (True, 0), "each prompt is asked as often as another"
        low, high = found["speedup_95"]
        assert low <= found["speedup"] <= high
        assert min(rates["with_draft"], rates["without_draft"]) > 0
        for figures in found["latency_seconds"].values():
            assert 0 < figures["p50"]["with_draft"] <= figures["p99"]["with_draft"]


def test_the_engine_accepts_what_our_own_decoding_accepts(report: dict[str, Any]) -> None:
    ours = next(found for found in report["prompt_sets"] if found["name"] == "decoded trained")
    assert ours["mean_acceptance_length"] > 1.5
    for found in served(report):
        assert len(found["per_position"]) == STEPS
        assert found["mean_acceptance_length"] == pytest.approx(1 + sum(found["per_position"]))
        assert found["mean_acceptance_length"] == pytest.approx(ours["mean_acceptance_length"], rel=0.1)


def test_texts_are_the_same_with_the_draft(report: dict[str, Any]) -> None:
    for found in served(report):
        assert found["identical"]["identical"] + len(found["identical"]["ties"]) == PROMPTS
        assert not found["identical"]["faults"]


def test_the_forecast_stands_beside_what_was_measured(report: dict[str, Any]) -> None:
    assert set(report["step_costs"]["target_seconds"]) == {"1", "4", "16"}
    assert set(report["step_costs"]["draft_seconds"]) == {"1", "4"}
    assert len(report["busy_cores"]) == len(report["commands"]) == 2
    for found in served(report):
        foretold = found["forecast"]
        assert foretold["relative_error"] == pytest.approx(foretold["speedup"] / found["speedup"] - 1)
        expected = [
            one
            for one in report["forecast"]["all"]
            if (one["num_speculative_tokens"], one["concurrency"]) == (STEPS, found["concurrency"])
        ]
        assert [one["speedup"] for one in expected] == [foretold["speedup"]]


def test_nothing_is_measured_again_and_both_engines_have_ended(report: dict[str, Any], paths: RunPaths) -> None:
    before = (paths.stage("evaluate") / "served.jsonl").read_bytes()
    again = run(recipe_of(paths), paths)
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(report))
    assert json.loads(paths.served.read_text())["prompt_sets"] == json.loads(json.dumps(served(report)))
    assert (paths.stage("evaluate") / "served.jsonl").read_bytes() == before
    engines = [event["command"] for event in read_events(paths) if event["event"] == "engine"]
    assert len(engines) == 2
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(paths.root) not in process.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
