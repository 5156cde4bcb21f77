"""A draft's folder is read as vLLM reads it, and what contradicts its manifest or the target is said by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.engine_draft import is_for_engines, load_engine_draft
from draftsmith.errors import CheckpointError
from draftsmith.evaluate import why
from draftsmith.export import run as export
from draftsmith.rundir import RunPaths
from tests.evaluate.builders import World, build_run, build_world, make_recipe


@pytest.fixture(scope="module")
def world(tiny_target: Path) -> World:
    """As many conversations as it takes to tell a cause from chance, and short ones."""
    return build_world(tiny_target, prompts=12, answer_tokens=16)


@pytest.fixture
def exported(world: World, tmp_path: Path) -> RunPaths:
    paths = build_run(world, tmp_path)
    recipe = make_recipe(paths)
    wanted = recipe.export.model_copy(update={"dtype": "float32"})
    export(recipe.model_copy(update={"export": wanted}), paths)
    return paths


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def both(**values: object) -> Callable[[dict[str, Any]], object]:
    """A change of the configuration's root and of the decoder layer's."""
    return lambda config: [of.update(values) for of in (config, config["transformer_layer_config"])]


def test_an_exported_draft_is_the_trained_one(world: World, exported: RunPaths) -> None:
    assert is_for_engines(exported.export("vllm"))
    assert not is_for_engines(exported.checkpoints / "final")
    draft, mismatches = load_engine_draft(exported.export("vllm"), world.facts, world.head)
    assert mismatches == []
    assert draft.config == world.trained.config
    for name, tensor in world.trained.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name


def test_a_flat_draft_of_the_other_engine_is_read_too(world: World, tmp_path: Path) -> None:
    from draftsmith.draft.names import rename_all, to_sglang
    from draftsmith.export.formats import sglang_config, tensors_to_ship, write_folder

    config = sglang_config(world.trained.config, torch.float32)
    write_folder(tmp_path, config, rename_all(tensors_to_ship(world.trained, torch.float32), to_sglang))
    draft, mismatches = load_engine_draft(tmp_path, world.facts, world.head)
    assert draft.config == world.trained.config
    assert mismatches == []


def in_two_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, there in weight_map.items() if there == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("stored", [in_two_files, pickled])
def test_published_weights_are_read_from_several_files_and_as_torch_pickles_them(
    world: World, exported: RunPaths, stored: Callable[[Path], None]
) -> None:
    folder = exported.export("vllm")
    stored(folder)
    draft, mismatches = load_engine_draft(folder, world.facts, world.head)
    assert mismatches == []
    for name, tensor in world.trained.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"\x80\x04]q\x00."])
@pytest.mark.parametrize("stored", [in_two_files, pickled])
def test_published_weights_that_are_damaged_are_named(
    world: World, exported: RunPaths, stored: Callable[[Path], None], damage: Callable[[bytes], bytes]
) -> None:
    folder = exported.export("vllm")
    stored(folder)
    file = next(file for pattern in ("*.bin", "model-1.*") for file in folder.glob(pattern))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*read|index.json.*read"):
        load_engine_draft(folder, world.facts, world.head)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (both(norm_output=False), "config.json says norm_output false, it was trained with true"),
        (both(rope_theta=5.0, rope_parameters={"rope_theta": 5.0}), "rope_theta 5.0, it was trained with 10000.0"),
        (
            lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
            "aux_layer_ids [1, 3, 4], it was trained with [2, 4, 5]",
        ),
        (lambda config: config.pop("norm_before_residual"), "does not say norm_before_residual: vLLM takes true"),
        (lambda config: config.pop("eagle_aux_hidden_state_layer_ids"), "aux_layer_ids: vLLM takes [2, 4, 5]"),
    ],
)
def test_what_engines_read_otherwise_than_was_trained_is_said(
    world: World, exported: RunPaths, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    edit(exported.export("vllm") / "config.json", change)
    _, mismatches = load_engine_draft(exported.export("vllm"), world.facts, world.head)
    assert said in " ".join(mismatches)


def test_another_target_than_it_was_trained_for_is_said(world: World, exported: RunPaths) -> None:
    other = replace(world.facts, weights_sha256="another", quantization={"quant_method": "fp8"})
    _, mismatches = load_engine_draft(exported.export("vllm"), other, world.head)
    assert len(mismatches) == 2
    assert re.search('weights_sha256 ".*", this one has "another"', mismatches[0])
    assert 'quantization null, this one has {"quant_method": "fp8"}' in mismatches[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.update(target_hidden_size=64), "target_hidden_size is 64, the target's is 32"),
        (
            lambda config: config["transformer_layer_config"].update(vocab_size=999),
            "vocab_size is 999, the target's is 320",
        ),
        (lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "layer id 9 is not one of 8 layers"),
        (lambda config: config["transformer_layer_config"].pop("intermediate_size"), "does not say intermediate_size"),
        (both(num_attention_heads=0), "does not say num_attention_heads"),
        (both(num_attention_heads="many"), 'num_attention_heads is "many": Input should be a valid integer'),
        (lambda config: config.update(eagle_aux_hidden_state_layer_ids="2"), 'aux_layer_ids is "2": Input should be'),
        (lambda config: config.update(transformer_layer_config=7), "transformer_layer_config is not a mapping"),
        (lambda config: config["transformer_layer_config"].update(rope_parameters="yarn"), "rope_parameters is not a"),
        (both(num_attention_heads=3, num_key_value_heads=2), "3 attention heads cannot share 2 key-value heads"),
        (both(norm_before_fc=False, fc_norm=True), "fc_norm.0.weight: not in the weights"),
        (lambda config: config.update(draft_vocab_size=7), "lm_head.weight: of another shape than config.json says"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_by_name(
    world: World, exported: RunPaths, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    edit(exported.export("vllm") / "config.json", change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_engine_draft(exported.export("vllm"), world.facts, world.head)


def test_why_says_the_mismatch_and_what_it_costs(world: World, exported: RunPaths) -> None:
    """The ids one lower, as another engine writes them: told from the manifest, and found by trying."""
    edit(
        exported.export("vllm") / "config.json",
        lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
    )
    report = why(make_recipe(exported), exported, exported.export("vllm"))
    assert report["summary"][1] == (
        "          mismatch: config.json says aux_layer_ids [1, 3, 4], it was trained with [2, 4, 5]"
    )
    assert report["cause"] == "layer ids one higher"


def test_a_mismatch_is_the_cause_where_nothing_that_is_tried_helps(world: World, exported: RunPaths) -> None:
    edit(exported.export("vllm") / "draftsmith.json", lambda manifest: manifest["target"].update(dtype="float16"))
    report = why(make_recipe(exported), exported, exported.export("vllm"))
    assert report["cause"] == report["mismatches"][0]
    assert "dtype" in report["cause"]
    assert any(line.startswith("          mismatch: ") for line in report["summary"])
