from __future__ import annotations

import json
import shutil
from pathlib import Path

from draftsmith import engine_vllm
from draftsmith import recipe as recipes
from draftsmith.pipeline import run_all, run_stage
from draftsmith.report import write_report
from draftsmith.report.commands import recorded_recipe
from draftsmith.report.record import read_run
from draftsmith.rundir import RunPaths, read_events
from tests.evaluate.stand_in import Engine, serving
from tests.evaluate.test_served_figures import measured
from tests.report.pages import load, numbers_in, page_of
from tests.report.test_page import cells


def leave_served(run: Path, differing: list | None = None, **settings: object) -> dict:
    served = measured(differing=differing or [], **settings) | {
        "engine": "sglang",
        "engine_version": "0.5.17",
        "settings": {"enabled": True, "prompt_sets": ["it's.jsonl"]},
    }
    (run / "evaluate/served.json").write_text(json.dumps(served))
    return served


def test_served_figures_stand_beside_their_forecast(copy):
    served = leave_served(copy)
    section = page_of(copy).by_id("speed")
    assert "Served by SGLang 0.5.17, with and without the draft" in section.text
    for of in served["prompt_sets"]:
        row = cells(section.all("table")[0], of["name"])
        assert row[0] == f"{of['mean_acceptance_length']:.2f}"
        assert row[4] == f"{of['forecast']['speedup']:.2f}"
        assert row[6] == "2 of 2"
        shown = [of["speedup"], of["forecast"]["relative_error"], *of["speedup_95"]]
        assert {*shown, *(of["tokens_per_second"][name] for name in ("with_draft", "without_draft"))} <= section.numbers
    assert {one["speedup"] for one in served["forecast"]["all"]} <= section.numbers
    assert section.numbers <= numbers_in(load(copy / "evaluate/served.json"))
    assert """evaluate.served.enabled=true 'evaluate.served.prompt_sets=["it'"'"'s.jsonl"]'""" in section.text


def test_texts_that_differ_are_told_from_near_ties(copy):
    differing = [{"tie": tie, "prompt": 0, "index": 0, "gap_nats": 0.1} for tie in (True, False)]
    leave_served(copy, differing)
    text = page_of(copy).by_id("speed").text
    assert "1 leave at a near-tie" in text
    assert "1 differ" in text


def test_a_forecast_of_greedy_acceptance_is_marked_where_serving_sampled(copy):
    for temperature, marked in ((0.0, False), (0.7, True)):
        leave_served(copy, temperature=temperature)
        assert ("It is made of greedy acceptance" in page_of(copy).by_id("speed").text) == marked


def test_the_speedup_is_a_figure_of_the_run_with_its_interval(copy):
    served = leave_served(copy)
    report = write_report(copy)
    name = served["prompt_sets"][0]["name"]
    assert report["figures"][f"speedup {name}"] == served["prompt_sets"][0]["speedup"]
    assert any(f"speed-up, {name}" in line and "95 %" in line for line in report["summary"])


def test_serving_is_measured_on_top_of_a_finished_run_and_shown(finished, tmp_path, monkeypatch):
    copy = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.setattr(engine_vllm, "_SETTLE_SECONDS", 0.001)
    before = (copy / "evaluate/acceptance.json").read_bytes()
    tree = (recorded_recipe(read_run(copy)) or {}) | {"run_dir": str(copy)}
    with serving(Engine(drafting=False)) as alone, serving(Engine()) as drafting:
        served = {"enabled": True, "concurrency": [1], "max_tokens": 8, "url": drafting, "baseline_url": alone}
        report = run_all(recipes.parse(tree | {"evaluate": tree["evaluate"] | {"served": served}}))["evaluate"]
    (found,) = (one for one in report["prompt_sets"] if one["method"] == "served")
    assert found["speedup"] in page_of(copy).by_id("speed").numbers
    assert (copy / "evaluate/acceptance.json").read_bytes() == before
    events = [(event["stage"], event["event"]) for event in read_events(RunPaths(copy))][-8:]
    assert events.index(("export", "skipped")) < events.index(("evaluate", "done"))
    assert run_stage("evaluate", recipes.parse(tree)) == json.loads(json.dumps(report))


def test_a_run_without_served_figures_says_how_to_get_them(copy):
    assert "evaluate.served.enabled=true" in page_of(copy).by_id("speed").text
