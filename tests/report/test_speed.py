from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from draftsmith import engine_vllm
from draftsmith import recipe as recipes
from draftsmith.pipeline import run_all, run_stage
from draftsmith.report import write_report
from draftsmith.report.commands import recorded_recipe
from draftsmith.report.record import read_run
from draftsmith.rundir import RunPaths, read_events
from tests.evaluate.stand_in import Engine, serving
from tests.evaluate.test_served_figures import measured
from tests.report.pages import Element, load, numbers_in, page_of
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
        both = of["tokens_per_second"]
        assert row[1:3] == [f"{both[engine]:,.1f}" for engine in ("without_draft", "with_draft")]
        assert both["without_draft"] < both["with_draft"]
        assert row[4] == f"{of['forecast']['speedup']:.2f}"
        assert row[6] == "2 of 2"
        shown = [of["speedup"], of["forecast"]["relative_error"], *of["speedup_95"]]
        assert {*shown, *(of["tokens_per_second"][name] for name in ("with_draft", "without_draft"))} <= section.numbers
    assert {one["speedup"] for one in served["forecast"]["all"]} <= section.numbers
    files = [load(copy / f"evaluate/{name}.json") for name in ("served", "acceptance")]
    assert section.numbers <= numbers_in(files)
    assert """evaluate.served.enabled=true 'evaluate.served.prompt_sets=["it'"'"'s.jsonl"]'""" in section.text


def table(section: Element, caption: str) -> Element:
    (found,) = (one for one in section.all("table") if one.all("caption")[0].text.startswith(caption))
    return found


def test_latency_is_shown_without_the_draft_and_with_it(copy):
    (first, *_) = leave_served(copy)["prompt_sets"]
    row = cells(table(page_of(copy).by_id("speed"), "Latency"), first["name"])
    assert row == ["30.0 → 15.0", "70.0 → 35.0", "– → –", "– → –", "10.0 → 5.0"]


def test_what_was_served_once_is_shown_without_an_interval(copy):
    for one in leave_served(copy, once=True)["prompt_sets"]:
        beside = table(page_of(copy).by_id("speed"), "Share accepted of each draft token, in serving and offline")
        assert cells(beside, one["name"]) == ["2.25", "–", "75.0 %", "50.0 %"]


def test_acceptance_in_serving_stands_beside_that_offline_and_each_interval_says_what_it_is_over(copy):
    offline = load(copy / "evaluate/acceptance.json")
    of = next(one for one in offline["prompt_sets"] if one["name"] == "recorded trained")
    of["within_tokens"] = {"32": {"mean_acceptance_length": 1.4, "per_position": [0.3, 0.1], "rounds": 9}}
    (copy / "evaluate/acceptance.json").write_text(json.dumps(offline))
    served = leave_served(copy, within=of["within_tokens"], max_tokens=20)
    section = page_of(copy).by_id("speed")
    beside = table(section, "Share accepted of each draft token, in serving and offline")
    length, over, *rates = cells(beside, "offline, recorded trained")
    assert length.startswith(f"{of['mean_acceptance_length']:.2f} ({of['confidence_95'][0]:.2f} to ")
    assert (over, rates) == ("conversations", [f"{100 * rate:.1f} %" for rate in of["per_position"]])
    assert cells(beside, "offline, within 32 tokens") == ["1.40", "–", "30.0 %", "10.0 %"]
    for one in served["prompt_sets"]:
        assert cells(beside, one["name"]) == ["2.25 (2.25 to 2.25)", "repeats", "75.0 %", "50.0 %"]
    assert "(recorded trained, within the first 32 tokens of an answer)" in section.text
    assert "over repeats of the same prompts" in section.text


def test_the_best_k_is_shown_by_concurrency_and_how_it_is_known(copy):
    for share, said in ((1.0, "K = 2: 1.88, measured"), (0.6, "K = 1: 1.59, forecast")):
        leave_served(copy, forecast_share=share)
        found = table(page_of(copy).by_id("speed"), "Forecast of the speed-up")
        assert [cells(found, concurrency)[-1] for concurrency in ("1", "8")] == [said, said]
    report = write_report(copy)
    assert report["figures"]["best_k 8"] == 1
    assert any(re.fullmatch(r" *best K at 8 at once, by the forecast +1", line) for line in report["summary"])
    leave_served(copy, draft=5.0)
    found = table(page_of(copy).by_id("speed"), "Forecast of the speed-up")
    assert cells(found, "8")[-1] == "none is faster than the target alone"


@pytest.mark.parametrize(
    ("draft", "says"),
    [(0.1, "some K is faster than the target alone even at the most"), (5.0, "speculation stops paying at 1 seq")],
)
def test_the_page_says_where_speculation_stops_paying(copy, draft, says):
    leave_served(copy, draft=draft)
    assert says in page_of(copy).by_id("speed").text


def test_the_commands_of_the_engines_that_were_measured_are_shown(copy):
    commands = {"without the draft": "vllm serve t", "with the draft, K = 2": "vllm serve t --speculative-config '{}'"}
    (copy / "evaluate/served.json").write_text(json.dumps(leave_served(copy) | {"commands": commands}))
    section = page_of(copy).by_id("speed")
    assert [pre.text for pre in section.all("pre")] == [*commands.values()]
    assert all(f"{side}:" in section.text for side in commands)


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
    assert any(f"speed-up, {name}" in line and "95 % over repeats" in line for line in report["summary"])


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
