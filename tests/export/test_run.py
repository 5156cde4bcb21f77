from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import export, recipe
from draftsmith.draft.config import draft_config
from draftsmith.draft.files import save_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError, MissingInputError, RequestError
from draftsmith.export.parity import read_sglang, read_vllm
from draftsmith.probe.facts import read_facts
from draftsmith.rundir import RunPaths, write_json
from draftsmith.target import load_head
from tests.draft.builders import sign
from tests.export.builders import PLAIN, change_tensors

DRAFT_IDS = list(range(0, 320, 2))


def trained_run(root: Path, target: Path, aux_layer_ids: tuple[int, ...] = (2, 4, 5), **form: object) -> RunPaths:
    """A run folder with what `probe` and `train` leave in it."""
    paths, facts = RunPaths(root), read_facts(str(target))
    write_json(paths.facts, facts.to_json())
    draft = Draft(draft_config(facts, recipe.Draft(**form), len(DRAFT_IDS), aux_layer_ids))
    draft.initialise(load_head(facts, torch.device("cpu"), torch.float32), DRAFT_IDS, seed=1)
    save_draft(paths.checkpoints / "final", draft)
    return paths


def make_recipe(target: Path, **sections: Any) -> recipe.Recipe:
    return recipe.parse({"name": "test", "target": {"model": str(target)}, **sections})


def test_every_format_that_can_hold_the_draft_is_written(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    report = export.run(make_recipe(tiny_target), paths)
    assert report["formats"].keys() == {"vllm", "sglang"}
    assert report["left_out"] == {}
    assert read_vllm(paths.export("vllm")).config == read_sglang(paths.export("sglang")).config
    assert read_vllm(paths.export("vllm")).tensors["fc.weight"].dtype == torch.bfloat16


def test_a_format_that_cannot_is_left_out_with_the_reason_or_refused_if_asked_for(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target)  # norm_before_residual
    report = export.run(make_recipe(tiny_target), paths)
    assert report["formats"].keys() == {"vllm"}
    assert "norm_before_residual" in report["left_out"]["sglang"]
    assert any("sglang: left out" in line for line in report["summary"])
    assert not paths.export("sglang").exists()
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        export.run(make_recipe(tiny_target, export={"formats": ["sglang"]}), paths)
    assert not paths.export("sglang").exists()


def test_only_what_is_asked_for_is_written(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    report = export.run(make_recipe(tiny_target, export={"formats": ["sglang"], "dtype": "float32"}), paths)
    assert report["formats"].keys() == {"sglang"}
    assert not paths.export("vllm").exists()
    assert read_sglang(paths.export("sglang")).tensors["fc.weight"].dtype == torch.float32


def test_the_manifest_says_what_was_trained_what_is_frozen_and_for_which_target(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    export.run(make_recipe(tiny_target), paths)
    manifest = json.loads((paths.export("vllm") / "draftsmith.json").read_text())
    tensors = manifest["tensors"]
    assert tensors["of_the_target"] == ["embed_tokens.weight"]
    assert tensors["frozen"] == ["d2t", "t2d"]
    assert {*tensors["trained"], *tensors["frozen"]} == read_vllm(paths.export("vllm")).tensors.keys()
    facts = read_facts(str(tiny_target))
    for name in ("tokenizer_sha256", "weights_sha256", "config_sha256", "dtype", "quantization"):
        assert manifest["target"][name] == getattr(facts, name)
    assert manifest["aux_layer_ids"]["ids"] == [2, 4, 5]
    assert "canonical" in manifest["aux_layer_ids"]["convention"]
    assert manifest["acceptance"] is None


def test_acceptance_is_in_the_manifest_if_it_is_that_of_this_draft(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    for stage, trained in [("export", "a"), ("evaluate", "a")]:
        state = {"status": "done", "fingerprint": {"inputs": {"train": trained}}}
        write_json(paths.stage_file(stage), state)
    write_json(paths.acceptance, {"mean_acceptance_length": 2.5})
    manifest = paths.export("vllm") / "draftsmith.json"
    export.run(make_recipe(tiny_target), paths)
    assert json.loads(manifest.read_text())["acceptance"] == {"mean_acceptance_length": 2.5}
    for other in ({"fingerprint": {"inputs": {"train": "another"}}}, {"status": "running"}):
        write_json(paths.stage_file("evaluate"), {**state, **other})
        export.run(make_recipe(tiny_target), paths)
        assert json.loads(manifest.read_text())["acceptance"] is None


def test_an_earlier_export_is_replaced_and_nothing_is_left_beside_it(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    (paths.export("vllm")).mkdir(parents=True)
    (paths.export("vllm") / "of another run").touch()
    (paths.stage("export") / ".vllm.partial").mkdir()  # of a run that was killed
    export.run(make_recipe(tiny_target), paths)
    assert sorted(file.name for file in paths.stage("export").iterdir()) == ["sglang", "vllm"]
    assert sorted(file.name for file in paths.export("vllm").iterdir()) == [
        "config.json",
        "draftsmith.json",
        "model.safetensors",
    ]


def test_a_weight_that_the_dtype_cannot_hold_leaves_no_folder(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, **PLAIN)
    change_tensors(paths.checkpoints / "final", lambda tensors: tensors["fc.weight"].fill_(1e6))
    sign(paths.checkpoints / "final")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        export.run(make_recipe(tiny_target, export={"dtype": "float16"}), paths)
    assert not paths.export("vllm").exists()


def test_the_state_before_the_final_norm_is_no_auxiliary_layer(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target, aux_layer_ids=(2, 4, 8))  # 8 layers
    with pytest.raises(RequestError, match="layer id 8"):
        export.run(make_recipe(tiny_target), paths)


def test_there_must_be_a_trained_draft(tmp_path, tiny_target):
    write_json(RunPaths(tmp_path).facts, read_facts(str(tiny_target)).to_json())
    with pytest.raises(MissingInputError, match="train"):
        export.run(make_recipe(tiny_target), RunPaths(tmp_path))
