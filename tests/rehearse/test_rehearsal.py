"""The whole way on scale models: through transformers alone, and with the real vLLM for those that matter most."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import RequestError
from draftsmith.extract.engine_settings import device_shares
from draftsmith.probe.facts import facts_from_evidence
from draftsmith.recipe import parse
from draftsmith.rehearse import rehearse
from draftsmith.rehearse.rehearsal import LONGEST_TOKENS, SEQUENCES, make_samples, scale_recipe, scaled_ids
from tests.extract.vllm_runs import REPOSITORY

CONFIGS = Path(__file__).parents[1] / "probe" / "configs"
STEPS = ["scale model", "capture", "layer id", "training", "draft for", "draft in the engine"]
FAULTS = "tests.extract.vllm_faults"


def config_folder(folder: Path, name: str) -> Path:
    """A model folder that holds a configuration and nothing else."""
    folder.mkdir()
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    return folder


def rows(report: dict[str, Any], status: str) -> list[str]:
    return [check["name"] for check in report["checks"] if check["status"] == status]


# ---- without an engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("rehearsal")
    model = config_folder(folder / "model", "llama-3.2-1b")
    chosen = ["extract.engine=transformers", "extract.aux_layer_ids=[1,4,8,13]", "train.draft.head_dim=64"]
    return rehearse(str(model), overrides=chosen, folder=folder / "out"), folder / "out"


def test_a_configuration_alone_is_enough_to_rehearse(without_engine: tuple[dict[str, Any], Path]) -> None:
    report, _ = without_engine
    assert report["verdict"] == "warn"
    assert rows(report, "warn") == ["draft in the engine"]  # no engine was asked for
    for step in STEPS:
        assert any(check["name"].startswith(step) for check in report["checks"]), step


def test_the_report_is_kept_and_says_what_was_shrunk(without_engine: tuple[dict[str, Any], Path]) -> None:
    report, folder = without_engine
    kept = json.loads((folder / "rehearsal.json").read_text())
    assert kept == {key: value for key, value in report.items() if key != "summary"}
    assert any(line.startswith("shrunk: ") and "16 → 7" in line for line in report["summary"])


def test_chosen_layer_ids_are_rehearsed_where_they_lie(without_engine: tuple[dict[str, Any], Path]) -> None:
    named = [check["name"] for check in without_engine[0]["checks"] if check["name"].startswith("layer id")]
    assert named == ["layer id 1", "layer id 2", "layer id 4", "layer id 6", "layer id 7"]


def test_a_rehearsal_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    precious = tmp_path / "out" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    model = config_folder(tmp_path / "model", "llama-3.2-1b")
    with pytest.raises(RequestError, match="not empty, and not of an earlier rehearsal"):
        rehearse(str(model), overrides=["extract.engine=transformers"], folder=tmp_path / "out")
    assert precious.read_text() == "mine"


@given(st.data())
def test_scaled_layer_ids_are_ascending_and_below_the_scaled_n(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 100))
    ids = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=6)))
    scaled_layers = data.draw(st.integers(len(ids) + 1, 8))
    found = scaled_ids(ids, layers, scaled_layers)
    assert len(found) == len(ids)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] < scaled_layers


def test_more_layer_ids_than_a_scale_model_has_layers_are_refused() -> None:
    with pytest.raises(RequestError, match="7 layer ids do not fit"):
        scaled_ids(list(range(1, 8)), 61, 7)


def test_settings_that_have_nothing_to_do_with_size_are_the_recipes(tmp_path: Path) -> None:
    tree = {
        "name": "real",
        "target": {"model": "a/b", "revision": "main", "trust_remote_code": True},
        "extract": {"engine": "vllm", "capture": "hooked", "tensor_parallel_size": 8, "engine_args": {"seed": 7}},
        "train": {
            "unroll_steps": 7,
            "loss": "lk",
            "draft": {"fc_norm": True, "norm_before_fc": False, "head_dim": 128},
        },
    }
    recipe = parse(tree)
    evidence = {"path": "a/b", "config": json.loads((CONFIGS / "llama-3.2-1b.json").read_text()), "problems": []}
    facts = facts_from_evidence(evidence)
    scaled, changes = scale_recipe(recipe, facts, facts, tmp_path)
    assert (scaled.extract.engine, scaled.extract.capture) == ("vllm", "hooked")
    assert scaled.extract.engine_args == {"seed": 7}
    assert (scaled.train.unroll_steps, scaled.train.loss) == (7, "lk")
    assert scaled.train.draft.fc_norm
    assert scaled.train.draft.head_dim is None
    assert not scaled.target.trust_remote_code
    assert any("instead of 8" in change for change in changes)


@pytest.mark.parametrize(
    ("devices", "each", "engines", "rehearsed"),
    [(0, 1, 8, (1, 1)), (0, 4, 2, (1, 1)), (1, 4, 2, (1, 1)), (4, 2, 4, (2, 2)), (8, 4, 2, (4, 2)), (3, 2, 2, (2, 1))],
)
def test_no_more_engines_are_rehearsed_than_there_are_devices_for_and_the_report_says_so(
    devices: int, each: int, engines: int, rehearsed: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    extract = {"engine": "vllm", "tensor_parallel_size": each, "data_parallel_size": engines}
    evidence = {"path": "a/b", "config": json.loads((CONFIGS / "llama-3.2-1b.json").read_text()), "problems": []}
    facts = facts_from_evidence(evidence)
    recipe = parse({"name": "real", "target": {"model": "a/b"}, "extract": extract})
    scaled, changes = scale_recipe(recipe, facts, facts, tmp_path)
    assert (scaled.extract.tensor_parallel_size, scaled.extract.data_parallel_size) == rehearsed
    assert len(device_shares(scaled)) == rehearsed[1]
    assert any(f"{rehearsed[1]} of {engines} engines" in change for change in changes) == (rehearsed[1] < engines)


def test_made_up_sequences_hold_no_special_token_and_every_length(without_engine: tuple[dict[str, Any], Path]) -> None:
    from draftsmith.probe.facts import read_facts

    facts = read_facts(str(without_engine[1] / "model"))
    samples = make_samples(facts, seed=0)
    lengths = [len(sample.input_ids) for sample in samples]
    assert len(samples) == SEQUENCES
    assert {1, 2, LONGEST_TOKENS} <= set(lengths)
    special = {facts.bos_token_id, *facts.eos_token_ids, facts.pad_token_id} - {None}
    assert special
    assert not special & {id for sample in samples for id in sample.input_ids}


# ---- with the real engine ---------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["kimi-k2.5", "gpt-oss-20b"])
def test_a_rehearsal_through_the_real_engine_passes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftsmith", "rehearse", str(config_folder(tmp_path / "model", name))]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "out"), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not rows(report, "fail")
    expected = ["quantized weights", "draft in the engine"] if name == "kimi-k2.5" else ["quantized weights"]
    assert rows(report, "warn") == expected
    assert any(check["name"] == "layer id 2" for check in report["checks"])
    assert any(check["detail"].startswith("vLLM, by vLLM's own method: ") for check in report["checks"])


@pytest.mark.vllm
def test_a_fault_in_capture_is_a_row_with_the_reason_and_nothing_is_trained_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    recipe = tmp_path / "recipe.yaml"
    model = config_folder(tmp_path / "model", "llama-3.2-1b")
    worker = {"worker_cls": f"{FAULTS}.ShufflingWorker"}
    tree = {"name": "t", "run_dir": str(tmp_path / "run"), "target": {"model": str(model)}}
    recipe.write_text(json.dumps({**tree, "extract": {"engine": "vllm", "engine_args": worker}}))  # JSON is YAML
    report = rehearse(str(recipe))
    assert report["verdict"] == "fail"
    assert report["checks"][-1]["name"] == "capture"
    assert "differs from the reference's" in report["checks"][-1]["detail"]
    assert "differs from the reference's" in report["failure"]
    assert not (tmp_path / "run" / "rehearsal" / "run" / "train").exists()
