"""The stage as a whole: one report for people and programs, at once, and facts on record for the other stages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import CheckFailed, RecipeError, RequestError, StaleError
from draftsmith.pipeline import run_stage
from draftsmith.probe import examine, run
from draftsmith.recipe import Recipe, parse
from draftsmith.rundir import RunPaths
from tests.probe.folders import CONFIGS
from tests.probe.hub_server import COMMIT, serve_hub

# The facts that DESIGN.md promises to programs.
PROMISED = {
    "architecture", "model_type", "text_model_type", "num_hidden_layers", "hidden_size", "vocab_size", "head_dim",
    "attention", "scoring_func", "llama_4_scaling", "rope_theta", "rope_scaling", "tie_word_embeddings", "quantization",
    "weight_bytes", "weight_files", "aux_layer_ids",
}  # fmt: skip
QUICK = ["probe.engine=transformers"]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "draftsmith", *arguments], env=settings, capture_output=True, text=True
    )


def recipe_for(model: Path, run_dir: Path, **extract: Any) -> Recipe:
    tree = {
        "name": "test",
        "run_dir": str(run_dir),
        "target": {"model": str(model)},
        "probe": {"engine": "transformers"},
        "extract": extract,
    }
    return parse(tree)


def test_the_report_keeps_its_promise_to_programs(tiny_target: Path) -> None:
    done = command("probe", str(tiny_target), "--json", *QUICK)
    report = json.loads(done.stdout)
    assert set(report) == {"verdict", "facts", "missing", "checks"}
    assert set(report["facts"]) >= PROMISED
    assert report["facts"]["aux_layer_ids"] == [2, 4, 5]
    assert all(set(check) == {"name", "status", "detail", "hint"} for check in report["checks"])
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn", "fail"}
    assert report["verdict"] in ("ok", "warn")
    assert all(report["facts"][name] is None for name in report["missing"])
    assert done.returncode == 0


def test_a_failing_check_is_exit_code_1_and_a_wrong_path_2(tiny_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    (copy / "model.safetensors").unlink()
    failed = command("probe", str(copy), "--json", *QUICK)
    assert (failed.returncode, json.loads(failed.stdout)["verdict"]) == (1, "fail")
    wrong = command("probe", str(tmp_path / "nowhere"), "--json")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "hint:" in wrong.stderr


def test_people_get_one_screen_in_which_absence_is_seen(tiny_target: Path) -> None:
    lines = examine(str(tiny_target), overrides=QUICK)["summary"]
    assert len(lines) <= 50
    shown = dict(line.split(maxsplit=1) for line in lines[1:22])
    assert shown["scoring_func"] == shown["llama_4_scaling"] == "NOT FOUND"
    assert shown["rope_scaling"] == "none"
    assert shown["attention"] == "gqa"
    assert lines[-1].startswith("verdict: ")


def test_kimi_k2_5_is_told_from_its_configuration_alone(tmp_path: Path) -> None:
    """The case the tool exists for: no code run, no weight there, and still all that a user must know."""
    folder = tmp_path / "Kimi-K2.5"
    folder.mkdir()
    shutil.copy(CONFIGS / "kimi-k2.5.json", folder / "config.json")
    report = examine(str(folder), overrides=QUICK)
    facts = report["facts"]
    assert (facts["attention"], facts["scoring_func"], facts["vocab_size"]) == ("mla", "sigmoid", 163840)
    assert (facts["num_hidden_layers"], facts["aux_layer_ids"]) == (61, (2, 30, 58))
    assert {"llama_4_scaling", "head_dim", "weight_bytes"} <= set(report["missing"])
    text = "\n".join(report["summary"])
    assert "compressed-tensors pack-quantized, 4-bit int, groups of 32" in text
    assert report["verdict"] == "fail"  # no weights, no tokenizer


def test_a_probe_loads_nothing_heavy_and_runs_no_code_of_the_model(tiny_target: Path) -> None:
    code = (
        "import sys; sys.argv = ['draftsmith', 'probe', sys.argv[1], '--json']\n"
        "from draftsmith.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'vllm', 'numpy', 'huggingface_hub')\n"
        "print('loaded', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_target)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_settings_given_with_a_model_bear_on_its_verdict(tiny_target: Path) -> None:
    report = examine(str(tiny_target), overrides=["extract.aux_layer_ids=[1,3]", *QUICK])
    assert report["facts"]["aux_layer_ids"] == (1, 3)
    with pytest.raises(RequestError, match="layer id 9"):
        examine(str(tiny_target), overrides=["extract.aux_layer_ids=[1,9]"])
    with pytest.raises(RecipeError, match="did you mean"):
        examine(str(tiny_target), overrides=["probe.gpu=8"])


def test_a_run_leaves_the_facts_where_the_other_stages_read_them(tiny_target: Path, tmp_path: Path) -> None:
    recipe = recipe_for(tiny_target, tmp_path / "run")
    report = run_stage("probe", recipe)
    facts = RunPaths(recipe.folder).read_facts()
    assert facts.aux_layer_ids == (2, 4, 5)
    assert facts.lm_head_key == "lm_head.weight"
    assert json.loads(json.dumps(report["facts"])) == json.loads(json.dumps(facts.to_json()))


def test_samples_too_long_for_the_target_are_told_of_before_prepare_begins(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_for(tiny_target, tmp_path / "run")
    run_stage("probe", recipe)
    capsys.readouterr()
    with pytest.raises(RecipeError, match="names no conversations"):
        run_stage("prepare", recipe)
    said = capsys.readouterr().err
    assert "prepare: sample length: prepare.max_length_tokens is 2,048, and the target has 512 positions" in said
    assert "set prepare.max_length_tokens to at most 512" in said


def test_a_run_with_chosen_layer_ids_records_those_and_notices_a_change(tiny_target: Path, tmp_path: Path) -> None:
    run_stage("probe", recipe_for(tiny_target, tmp_path / "run", aux_layer_ids=[1, 4, 7]))
    facts = json.loads(RunPaths(tmp_path / "run").facts.read_text())
    assert facts["aux_layer_ids"] == [1, 4, 7]
    with pytest.raises(StaleError, match="aux_layer_ids"):
        run_stage("probe", recipe_for(tiny_target, tmp_path / "run", aux_layer_ids=[1, 4, 6]))


def test_a_run_stops_where_a_check_fails_and_says_all_of_them(tiny_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckFailed) as caught:
        run(recipe_for(copy, tmp_path / "run"), RunPaths(tmp_path / "run"))
    assert "layer ids: has 3 decoder layers" in str(caught.value)
    assert "weights: model.safetensors is empty" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_run_on_a_hub_model_asks_for_its_weights_first(tiny_target: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: test\nrun_dir: {tmp_path / 'run'}\ntarget: {{model: acme/tiny}}\n")
    with serve_hub(tiny_target) as (endpoint, _):
        settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
        read = command("probe", "acme/tiny", "--json", *QUICK, **settings)
        ran = command("probe", str(recipe), *QUICK, **settings)
    assert (read.returncode, json.loads(read.stdout)["verdict"]) == (0, "warn")
    assert ran.returncode == 1
    assert f"hf download acme/tiny --revision {COMMIT}" in ran.stderr


def test_other_weights_make_a_finished_probe_stale(tiny_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    recipe = recipe_for(copy, tmp_path / "run")
    run_stage("probe", recipe)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(StaleError, match="target weights"):
        run_stage("probe", recipe)
