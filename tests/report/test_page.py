from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from draftsmith import cli
from draftsmith import recipe as recipes
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.pipeline import run_stage
from draftsmith.report import write_report
from draftsmith.rundir import STAGES, RunPaths, read_events
from draftsmith.store.manifest import read_manifest, write_manifest
from tests.evaluate.test_served_figures import measured
from tests.report.pages import HOSTILE, Element, load, numbers_in, page_of, parse

SHOWN = [stage for stage in STAGES if stage != "report"]
SECTIONS = {"prepare": "data", "extract": "states", "train": "training", "evaluate": "acceptance", "export": "export"}


def cells(section: Element, row: str) -> list[str]:
    """The text of the cells of the one table row that begins with these words."""
    (found,) = (tr for tr in section.all("tr") if tr.all("th") and tr.all("th")[0].text == row)
    return [td.text for td in found.all("td")]


# ---- its numbers ---------------------------------------------------------------------------------------------------


def test_every_number_of_the_page_is_a_number_of_the_runs_files(finished):
    """But for those that the page itself adds up: total time, the share of identical texts, domains' own tokens."""
    files = [*finished.glob("*/stage.json"), *finished.glob("**/manifest.json"), *finished.glob("*/*.json")]
    known = set().union(*(numbers_in(load(file)) for file in files if "report" not in file.parts))
    for lines in ("events.jsonl", "train/metrics.jsonl"):
        known |= set().union(*(numbers_in(json.loads(line)) for line in (finished / lines).read_text().splitlines()))
    lossless = load(finished / "evaluate/acceptance.json")["lossless"]
    domains = load(finished / "prepare/stage.json")["report"]["by_domain"].values()
    known |= {lossless["identical"] / lossless["prompts"]} | {d["supervised_tokens"] / d["tokens"] for d in domains}
    ends = [event for event in read_events(RunPaths(finished)) if event["event"] == "done" and event["stage"] in SHOWN]
    known |= {sum(event["seconds"] for event in ends)}
    shown = page_of(finished).numbers
    assert len(shown) > 60
    assert shown <= known


def test_the_figures_of_each_stage_are_on_the_page(finished):
    page = page_of(finished)
    prepared, trained = (load(finished / f"{stage}/stage.json")["report"] for stage in ("prepare", "train"))
    assert {prepared["tokens"], prepared["supervised_share"], prepared["rows"]["read"]} <= page.by_id("data").numbers
    assert trained["validation"]["loss"] in page.by_id("training").numbers
    for line in (finished / "train/metrics.jsonl").read_text().splitlines():
        if json.loads(line)["split"] == "validation":
            assert json.loads(line)["accuracy_1"] in page.by_id("training").numbers
    acceptance = page.by_id("acceptance")
    for found in load(finished / "evaluate/acceptance.json")["prompt_sets"]:
        expected = [found["mean_acceptance_length"], *found["per_position"], *found["confidence_95"], found["tokens"]]
        assert {*expected, *numbers_in(found["per_position_95"])} <= acceptance.numbers
        assert f"{found['mean_acceptance_length']:.2f}" in cells(acceptance.all("table")[0], found["name"])[1]
    manifest = load(finished / "extract/store/manifest.json")
    assert {v for v in manifest["parity"].values() if isinstance(v, float)} <= page.by_id("states").numbers
    assert load(finished / "serve/stage.json")["report"]["command"] in page.by_id("export").text


def test_engines_that_died_and_parity_of_runs_that_went_on_are_shown(copy):
    stage, manifest = load(copy / "extract/stage.json"), read_manifest(copy / "extract/store")
    assert manifest.parity
    assert "restart" not in page_of(copy).by_id("pipeline").text, "none died"
    stage["report"]["engine_restarts"] = 2
    by_layer = {"1": {"median": 0.00123, "max": 0.456}}
    later = {"1": {"reason": "too large for this machine"}, "2": {"tolerance": 0.0789, "by_layer": by_layer}}
    (copy / "extract/stage.json").write_text(json.dumps(stage))
    write_manifest(copy / "extract/store", replace(manifest, parity={**manifest.parity, "later": later}))
    page = page_of(copy)
    assert "after 2 engine restarts" in page.by_id("pipeline").text
    states = page.by_id("states")
    assert "An engine died and was started again 2 times." in states.text
    assert {0.0789, 0.00123, 0.456, manifest.parity["tolerance"]} <= states.numbers
    assert cells(states, "reason") == ["too large for this machine"]
    labels = [one.attributes["aria-label"] for one in states.all("div")]
    assert len(labels) == len(set(labels)) == 4
    lines = write_report(copy)["summary"]
    assert [line.split()[-1] for line in lines if "engines that died in the capture" in line] == ["2"]


def test_domains_are_shown_beside_their_untrained_draft(finished):
    tables = page_of(finished).by_id("acceptance").all("table")
    (section,) = (table for table in tables if table.all("caption")[0].text == "Acceptance length by domain")
    sets = {found["name"]: found for found in load(finished / "evaluate/acceptance.json")["prompt_sets"]}
    for domain in ("plain", HOSTILE):
        before = sets["replayed untrained"]["by_domain"][domain]
        row = cells(section, domain)
        assert f"{sets['decoded trained']['by_domain'][domain]['mean_acceptance_length']:.2f}" in row[0]
        assert f"{before['mean_acceptance_length']:.2f}" in row[2]
        assert f"{before['confidence_95'][1]:.2f}" in row[2]


def titles(section: Element, chart: str) -> list[str]:
    """What a pointer is told over the chart whose description begins so."""
    (found,) = (svg for svg in section.all("svg") if svg.attributes["aria-label"].startswith(chart))
    return [title.text for title in found.all("title")]


def test_the_curves_are_of_each_step_and_the_bars_of_each_draft(finished):
    page = page_of(finished)
    lines = [json.loads(line) for line in (finished / "train/metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["split"] == "validation"]
    assert titles(page.by_id("training"), "Accuracy") == [
        f"step {k + 1}, held out: {line[f'accuracy_{k}']:.4g} at {line['step']:,g}"
        for k in (0, 1)
        for line in validations
    ]
    assert any(line["accuracy_0"] != line["accuracy_1"] for line in validations), "or all may be of one step"
    (chart,) = (svg for svg in page.by_id("training").all("svg") if svg.attributes["aria-label"].startswith("Accuracy"))
    lines_drawn = [line.attributes["points"] for line in chart.all("polyline")]
    assert len(set(lines_drawn)) == len(lines_drawn) >= 2
    sets = {found["name"]: found for found in load(finished / "evaluate/acceptance.json")["prompt_sets"]}
    shown = (("trained", sets["decoded trained"]), ("untrained", sets["replayed untrained"]))
    assert titles(page.by_id("acceptance"), "Share of rounds") == [
        f"{draft}: {of['per_position'][k]:.4g}" for k in (0, 1) for draft, of in shown
    ]


def test_accuracy_at_every_place_is_told_from_acceptance(finished):
    section = page_of(finished).by_id("acceptance")
    (found,) = (t for t in section.all("table") if "whatever came before" in t.all("caption")[0].text)
    for of in load(finished / "evaluate/acceptance.json")["prompt_sets"]:
        for name, rates in (
            (of["name"], of.get("all_slots")),
            (f"{of['name']}, at temperature 0.7", of.get("at_temperature")),
        ):
            if rates:
                *shown, places = cells(found, name)
                assert [text.split(" %")[0] for text in shown] == [
                    f"{100 * rate:.1f}" for rate in rates["unconditional_per_position"]
                ]
                assert places == f"{rates['slots']:,}"
    assert len(found.all("tr")) == 1 + 4 + 2


def test_acceptance_by_length_of_the_answer_is_shown(copy):
    acceptance = load(copy / "evaluate/acceptance.json")
    of = next(one for one in acceptance["prompt_sets"] if one["name"] == "decoded trained")
    of["within_tokens"] = {"32": {"mean_acceptance_length": 1.4, "per_position": [0.3, 0.1], "rounds": 9}}
    (copy / "evaluate/acceptance.json").write_text(json.dumps(acceptance))
    assert cells(page_of(copy).by_id("acceptance"), "32") == ["1.40", "30.0 %", "10.0 %", "9"]


def test_notes_of_the_command_that_serves_are_shown(copy):
    state = load(copy / "serve/stage.json")
    state["report"]["notes"] = ["K = 5 is the fastest as measured"]
    (copy / "serve/stage.json").write_text(json.dumps(state))
    assert "Note: K = 5 is the fastest as measured" in page_of(copy).by_id("export").text


def test_acceptance_at_temperature_is_shown_by_draft_tokens(finished):
    section = page_of(finished).by_id("acceptance")
    table = next(t for t in section.all("table") if "at temperature 0.7, by draft tokens" in t.all("caption")[0].text)
    sets = [found for found in load(finished / "evaluate/acceptance.json")["prompt_sets"] if "temperature" in found]
    assert len(sets) == 4
    for found in sets:
        how, *by_k = cells(table, found["name"])
        assert how == ("sampled" if found["draft_sample_method"] == "probabilistic" else "its likeliest")
        assert by_k[-1].startswith(f"{found['mean_acceptance_length']:.2f}")
        if found["method"] == "sampled":
            assert by_k[0] == "–"  # was measured with one K
        else:
            expected = found["by_num_speculative_tokens"]["1"]
            assert {expected["mean_acceptance_length"], *expected["confidence_95"]} <= table.numbers
    assert "tokens are spread as the target's own samples" in section.text


def test_greedy_acceptance_is_shown_by_draft_tokens_and_by_domain(finished):
    section = page_of(finished).by_id("acceptance")
    tables = {table.all("caption")[0].text: table for table in section.all("table")}
    greedy = [one for one in load(finished / "evaluate/acceptance.json")["prompt_sets"] if "temperature" not in one]
    assert len(greedy) == 5
    for found in greedy:
        shown = cells(tables["Acceptance length greedy, by draft tokens K"], found["name"])[1:]
        assert [text.split()[0] for text in shown] == [
            f"{found['by_num_speculative_tokens'][k]['mean_acceptance_length']:.2f}" for k in ("1", "2")
        ]
    for domain in ("plain", HOSTILE):
        shown = cells(tables["Acceptance length by domain and draft tokens K (decoded trained)"], domain)
        for text, of in zip(shown, greedy[0]["by_num_speculative_tokens"].values(), strict=True):
            mean, (low, high) = (of["by_domain"][domain][name] for name in ("mean_acceptance_length", "confidence_95"))
            assert text == f"{mean:.2f} ({low:.2f} to {high:.2f})"


def test_the_histogram_counts_every_sample(finished):
    (chart,) = page_of(finished).by_id("data").all("svg")
    samples = load(finished / "prepare/stage.json")["report"]["samples"]
    assert sum(int(re.search(r": ([\d,]+) samples", bar.text)[1]) for bar in chart.all("rect")) == samples
    assert f"lengths of {samples} samples" in chart.attributes["aria-label"]


def test_other_readings_of_the_draft_are_shown_where_they_were_tried(finished, copy):
    section = page_of(finished).by_id("acceptance")
    for trial in load(finished / "evaluate/why.json")["trials"] + load(finished / "evaluate/why.json")["renderings"]:
        assert cells(section, trial["name"])[0] == f"{trial['accepted']:.2f}"
    why = load(copy / "evaluate/why.json")
    assert f"Verdict: {why['verdict']}." in section.text
    own = {"name": "off-policy data", "remedy": "train on them", "accepted": 0.75, "lift": -1.5, "by_chance": 0.001}
    found = {"cause": own["name"], "verdict": "found: off-policy data; train on them", "own_answers": own}
    (copy / "evaluate/why.json").write_text(json.dumps({**why, **found, "mismatches": ["another rope_theta"]}))
    section = page_of(copy).by_id("acceptance")
    assert "Verdict: found: off-policy data; train on them." in section.text
    assert cells(section, own["name"])[:2] == ["0.75", "−1.50"]
    assert "Mismatch: another rope_theta" in section.text
    (copy / "evaluate/why.json").unlink()
    assert "as it is" not in page_of(copy).by_id("acceptance").text


def test_dropped_rows_are_counted_with_reason_and_example(finished):
    section = page_of(finished).by_id("data")
    for reason, found in load(finished / "prepare/stage.json")["report"]["rows"]["dropped"].items():
        assert cells(section, reason) == [str(found["rows"]), ", ".join(found["examples"])]


def test_time_is_that_of_all_attempts_since_the_last_redo(copy):
    done = {"time": 0, "stage": "train", "seconds": 1000.0}
    lines = [done | {"event": "done"}, done | {"event": "redo"}, *(done | {"event": "started"} for _ in range(3))]
    lines += [done | {"event": "interrupted", "seconds": 60.0}, done | {"event": "done", "seconds": 40.0}]
    with open(copy / "events.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    state, time, *_ = cells(page_of(copy).by_id("pipeline"), "train")
    assert (state, time) == ("done after 2 attempts that did not reach the end", "1 min 40 s")


# ---- runs that are not as they should be ---------------------------------------------------------------------------


@pytest.mark.parametrize("last", [None, *SHOWN])
def test_a_half_done_run_has_a_report(copy, last):
    missing = SHOWN[SHOWN.index(last) + 1 :] if last else SHOWN
    for stage in missing:
        shutil.rmtree(copy / stage)
    report = write_report(copy)
    page = parse(Path(report["page"]).read_text())
    assert report["damaged"] == []
    for stage in SHOWN:
        assert report["stages"][stage]["status"] == ("not done" if stage in missing else "done")
        assert cells(page.by_id("pipeline"), stage)[0] == report["stages"][stage]["status"]
    for stage, section in SECTIONS.items():
        text = page.by_id(section).text
        assert f"draftsmith {stage} " in text
        assert stage not in missing or "Not done." in text


def test_what_made_a_stage_fail_is_on_the_page(tmp_path, tiny_target):
    tree = {"name": "x", "run_dir": str(tmp_path / "run"), "target": {"model": str(tiny_target)}}
    recipe = recipes.parse({**tree, "prepare": {"sources": [{"path": str(tmp_path / "absent<i>.jsonl")}]}})
    run_stage("probe", recipe)
    with pytest.raises(DraftsmithError) as raised:
        run_stage("prepare", recipe)
    page = page_of(recipe.folder)
    assert cells(page.by_id("pipeline"), "prepare")[0] == "failed"
    assert str(raised.value) in [pre.text for pre in page.by_id("pipeline").all("pre")]


def test_a_stage_without_an_end_on_record_is_not_called_done(copy):
    state = load(copy / "train/stage.json")
    (copy / "train/stage.json").write_text(json.dumps({**state, "status": "running", "report": None}))
    with open(copy / "events.jsonl", "a") as file:
        file.write('{"time": 0, "stage": "train", "event": "resumed"}\n')
    page = page_of(copy)
    assert cells(page.by_id("pipeline"), "train")[0] == "in work, or killed"
    assert page.by_id("training").all("svg"), "the curves so far are shown"


@pytest.mark.parametrize(
    "name",
    [
        *(f"{stage}/stage.json" for stage in SHOWN),
        "evaluate/acceptance.json",
        "evaluate/served.json",
        "evaluate/why.json",
        "extract/store/manifest.json",
        "prepare/corpus.parquet",
        "rehearsal/rehearsal.json",
        "train/metrics.jsonl",
        "events.jsonl",
    ],
)
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2 - 1], lambda data: b"[1]\n", lambda data: b"\xff\0"]
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(copy, name, damage):
    (copy / "evaluate/served.json").write_text(json.dumps(measured()))
    file, before = copy / name, page_of(copy)
    figures = before.by_id("acceptance").numbers | before.by_id("states").numbers
    file.write_bytes(damage(file.read_bytes()))
    report = write_report(copy)
    assert [problem.split(":")[0] for problem in report["damaged"]] == [name]
    page = parse(Path(report["page"]).read_text())
    assert any(name in item.text for item in page.all("li"))
    assert len(page.all("section")) == 11
    if name in ("evaluate/acceptance.json", "extract/store/manifest.json"):  # stage.json has the same
        assert page.by_id("acceptance").numbers | page.by_id("states").numbers == figures


@pytest.mark.parametrize(
    ("stage", "gone"),
    [
        ("prepare", "prepare/corpus.parquet"),
        ("extract", "extract/store"),
        ("extract", "extract/store/shard-00000.safetensors"),
        ("train", "train/checkpoints"),
        ("train", "train/checkpoints/final/model.safetensors"),
        ("export", "export/vllm"),
    ],
)
def test_what_a_stage_wrote_and_somebody_deleted_is_named(copy, stage, gone):
    path = copy / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = write_report(copy)
    assert report["damaged"] == [f"{gone}: is not there, and `{stage}` wrote it"]
    assert "6 of 7 stages done" in report["summary"][0]
    assert f"  {stage}: not whole" in report["summary"]
    assert cells(parse(Path(report["page"]).read_text()).by_id("pipeline"), stage)[0] == "not whole"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is not the folder of a run"):
        write_report(tmp_path)


# ---- what comes from data ------------------------------------------------------------------------------------------


def test_hostile_text_is_text(finished, copy):
    with open(copy / "events.jsonl", "a") as file:
        file.write(json.dumps({"stage": "train", "event": "failed", "error": HOSTILE, "seconds": 1}) + "\n")
    state = load(copy / "train/stage.json")
    (copy / "train/stage.json").write_text(json.dumps({**state, "status": "running"}))
    page = page_of(copy, finished)
    allowed = """a body br caption circle code data dd details div dl dt figcaption figure footer h1 h2 h3 head header
        html li line link main meta nav p path polyline pre rect section span style summary svg table tbody td text th
        thead title tr ul"""
    assert {element.tag for element in page.all()} <= set(allowed.split())
    assert not [name for element in page.all() for name in element.attributes if name.startswith("on")]
    assert HOSTILE in [th.text for th in page.by_id("data").all("th")]
    assert HOSTILE in [pre.text for pre in page.by_id("pipeline").all("pre")]
    assert any(title.text.startswith(f"{HOSTILE}, trained") for title in page.by_id("acceptance").all("title"))
    assert str(finished) in page.by_id("compared").text


# ---- the document --------------------------------------------------------------------------------------------------


def test_nothing_is_fetched_and_nothing_runs(finished):
    page = page_of(finished, finished)
    assert not page.all("script", "iframe", "object", "embed", "img", "form", "base")
    assert [link.attributes for link in page.all("link")] == [{"rel": "icon", "href": "data:,"}]
    for element in page.all():
        assert not element.attributes.keys() & {"src", "srcset", "action", "data", "poster", "xlink:href"}
        assert (element.attributes.get("href") or "#").startswith(("#", "data:,"))
        assert "url(" not in (element.attributes.get("style") or "")
    (style,) = page.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    (policy,) = (m for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none';")


def test_the_page_can_be_read_by_a_screen_reader(finished):
    page = page_of(finished, finished)
    ids = [e.attributes["id"] for e in page.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    assert {a.attributes["href"][1:] for a in page.all("a")} == set(ids)
    levels = [int(h.tag[1]) for h in page.all("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all("scope" in th.attributes for th in table.all("th"))
        assert all(len(tr.all("th", "td")) for tr in table.all("tr"))
    for chart in page.all("svg"):
        assert chart.attributes["role"] == "img"
        assert len(chart.attributes["aria-label"]) > 30
        assert chart.attributes["width"], "room is kept for it before it is drawn"
    for region in (e for e in page.all() if e.attributes.get("role") == "region"):
        assert region.attributes["tabindex"] == "0"
        assert region.attributes["aria-label"]


# ---- doing it again ------------------------------------------------------------------------------------------------


def test_the_recipe_on_record_is_the_runs_own(finished):
    again = recipes.load(write_report(finished)["recipe"])
    before = len(read_events(RunPaths(finished)))
    for stage in SHOWN:
        assert run_stage(stage, again).keys() >= load(finished / stage / "stage.json")["report"].keys()
    told = [(event["stage"], event["event"]) for event in read_events(RunPaths(finished))[before:]]
    assert told[:-2] == [(stage, "skipped") for stage in SHOWN[:-1]]


def test_every_command_on_the_page_is_one(finished):
    codes = [code.text for code in page_of(finished).all("code", "pre") if code.text.startswith("draftsmith ")]
    commands = {name.name or name.callback.__name__ for name in cli.app.registered_commands}
    seen = {shlex.split(code)[1] for code in codes}
    assert seen == {*SHOWN, "rehearse", "run"}
    assert seen <= commands
    for code in codes:
        assert recipes.load(shlex.split(code)[2]).folder == finished.resolve()


def test_stages_have_their_machine_and_versions_on_record_and_those_on_the_same_share_a_row(finished, copy):
    whole = page_of(finished).by_id("machine")
    assert len(whole.all("tr")) == 2
    other = load(copy / "train/stage.json")
    other["machine"]["cpus"] += 1
    (copy / "train/stage.json").write_text(json.dumps(other))
    parted = page_of(copy).by_id("machine")
    assert len(parted.all("tr")) == 4
    for run, section, row in (
        (finished, whole, ", ".join(SHOWN)),
        (copy, parted, "probe, prepare, extract"),
        (copy, parted, "train"),
        (copy, parted, "evaluate, export, serve"),
    ):
        record = load(run / row.split(", ")[0] / "stage.json")
        version, machine, packages = cells(section, row)
        assert version == record["version"]
        assert f"{record['machine']['cpus']} × {record['machine']['processor']}" in machine
        assert f"torch {record['machine']['packages']['torch']}" in packages


# ---- two runs ------------------------------------------------------------------------------------------------------


def test_two_runs_are_set_side_by_side_with_differences(finished, copy):
    data = load(copy / "evaluate/acceptance.json")
    decoded = next(found for found in data["prompt_sets"] if found["name"] == "decoded trained")
    decoded["mean_acceptance_length"] += 0.5
    (copy / "evaluate/acceptance.json").write_text(json.dumps(data))
    state = load(copy / "prepare/stage.json")
    state["fingerprint"]["settings"]["prepare"]["sources"][0]["limit"] = 99
    (copy / "prepare/stage.json").write_text(json.dumps(state))
    report = write_report(copy, finished)
    changed = {name: value for name, value in report["against"]["differences"].items() if value}
    assert changed == {"acceptance_trained": pytest.approx(0.5)}
    assert report["against"]["settings"] == ["prepare.sources.0.limit: 14 → 99"]
    section = parse(Path(report["page"]).read_text()).by_id("compared")
    (row,) = (tr for tr in section.all("tr") if "trained draft" in tr.text and "untrained" not in tr.text)
    before = f"{decoded['mean_acceptance_length'] - 0.5:.2f}"
    assert [td.text.split()[0] for td in row.all("td")] == [f"{decoded['mean_acceptance_length']:.2f}", before, "+0.50"]
    assert "prepare.sources.0.limit: 14 → 99" in section.text


def test_a_comparison_calls_both_runs_by_their_names_even_where_their_folders_share_one(finished, copy, tmp_path):
    first, second = (shutil.copytree(finished, tmp_path / name / "run") for name in ("new", "old"))
    for one, other, names in ((first, second, ("new/run", "old/run")), (first, copy, ("run", copy.name))):
        report = write_report(one, other)
        section = parse(Path(report["page"]).read_text()).by_id("compared")
        heads = [th.text for th in section.all("tr")[0].all("th")]
        assert heads == ["Figure", *names, f"{names[0]} minus {names[1]}"]
        assert report["summary"][1].split() == " ".join(heads[1:]).split()


def test_a_run_without_figures_can_be_compared(finished, copy):
    for stage in SHOWN[1:]:
        shutil.rmtree(copy / stage)
    for report in (write_report(copy, finished), write_report(finished, copy)):
        differences = report["against"]["differences"]
        assert differences["loss"] is None
        assert differences["seconds"] is not None


def test_the_terminal_says_what_the_page_says(finished):
    report = write_report(finished)
    text = "\n".join(report["summary"])
    assert text.startswith(f"report: {report['page']}, 7 of 7 stages done")
    for label, value in ((dt.text, dd.children[0].text) for dt, dd in _cards(page_of(finished))):
        assert re.search(rf"^  {re.escape(label)} +{re.escape(value)}", text, re.MULTILINE)


def _cards(page: Element) -> list[tuple[Element, Element]]:
    (cards,) = page.all("dl")
    return list(zip(cards.all("dt"), cards.all("dd"), strict=True))
