from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import CheckpointError
from draftsmith.export.formats import NORM_FLAGS, sglang_obstacles, sglang_requirements, tensors_to_ship
from tests.draft.builders import AUX, DRAFT_IDS, HIDDEN, TARGET_VOCAB
from tests.export.builders import (
    PLAIN,
    VERIFIER,
    K,
    export_sglang,
    export_vllm,
    make_draft,
    make_facts,
    read_config,
)

FORMS = [
    dict(zip(NORM_FLAGS, values, strict=True))
    for values in itertools.product([True, False], repeat=4)
    if not (values[1] and values[2])
]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("form", FORMS)
def test_both_formats_say_every_norm_flag_wherever_an_engine_looks_for_it(tmp_path, tiny_target, form):
    facts = make_facts(tiny_target)
    config = read_config(export_vllm(tmp_path / "vllm", make_draft(**form), facts))
    assert {flag: config[flag] for flag in NORM_FLAGS} == form
    assert {flag: config["transformer_layer_config"][flag] for flag in NORM_FLAGS} == form
    if not form["norm_before_residual"]:
        config = read_config(export_sglang(tmp_path / "sglang", make_draft(**form), facts))
        assert {flag: config[flag] for flag in NORM_FLAGS} == form
        assert config["eagle_config"]["norm_before_fc"] == form["norm_before_fc"]


def test_layer_ids_are_canonical_at_the_root_and_one_less_for_sglang(tmp_path, tiny_target):
    draft = make_draft(**PLAIN, aux_layer_ids=(2, 4, 5))
    for export in (export_vllm, export_sglang):
        config = read_config(export(tmp_path / export.__name__, draft, make_facts(tiny_target)))
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


@pytest.mark.parametrize("ids", [(2,), (2, 5), (2, 3, 4, 5)])
def test_the_number_of_states_is_said_where_the_width_of_fc_is_made_of_it(tmp_path, tiny_target, ids):
    draft, facts = make_draft(**PLAIN, aux_layer_ids=ids, hidden_size=4), make_facts(tiny_target)
    config = read_config(export_vllm(tmp_path / "vllm", draft, facts))
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(ids)
    assert read_config(export_sglang(tmp_path / "sglang", draft, facts))["num_aux_hidden_states"] == len(ids)
    assert load_file(tmp_path / "vllm" / "model.safetensors")["fc.weight"].shape == (4, len(ids) * HIDDEN)


def test_rope_is_written_as_trained_in_old_and_new_form(tmp_path, tiny_target):
    for scaling, theta in [(None, 1e6), (LLAMA3, 5e5), ({"rope_type": "linear", "factor": 2.0}, 1e4)]:
        draft = make_draft(**PLAIN, rope_theta=theta, rope_scaling=scaling)
        vllm = read_config(export_vllm(tmp_path / "vllm", draft, make_facts(tiny_target)))["transformer_layer_config"]
        for config in (vllm, read_config(export_sglang(tmp_path / "sglang", draft, make_facts(tiny_target)))):
            assert (config["rope_theta"], config["rope_scaling"]) == (theta, scaling)
            assert config["rope_parameters"] == {"rope_type": "default", **(scaling or {}), "rope_theta": theta}


def test_the_targets_own_code_does_not_travel_with_the_draft(tmp_path, tiny_target):
    facts = make_facts(tiny_target, auto_map={"AutoConfig": "configuration_x.XConfig"})
    export_vllm(tmp_path / "vllm", make_draft(**PLAIN), facts)
    export_sglang(tmp_path / "sglang", make_draft(**PLAIN), facts)
    for folder in tmp_path.iterdir():
        assert "auto_map" not in (folder / "config.json").read_text()
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_head_is_the_drafts_own_and_never_tied(tmp_path, tiny_target):
    for export in (export_vllm, export_sglang):
        folder = export(tmp_path / export.__name__, make_draft(**PLAIN), make_facts(tiny_target))
        assert load_file(folder / "model.safetensors")["lm_head.weight"].shape == (len(DRAFT_IDS), HIDDEN)
        assert read_config(folder)["tie_word_embeddings"] is False
        assert read_config(folder)["draft_vocab_size"] == len(DRAFT_IDS)


def test_a_whole_vocabulary_needs_no_map_and_still_says_its_size(tmp_path, tiny_target):
    draft = make_draft(**PLAIN, draft_vocab_size=TARGET_VOCAB)
    for export in (export_vllm, export_sglang):
        folder = export(tmp_path / export.__name__, draft, make_facts(tiny_target))
        assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
        assert read_config(folder)["draft_vocab_size"] == TARGET_VOCAB


def test_the_vocabulary_map_is_offsets_and_a_mask(tmp_path, tiny_target):
    tensors = load_file(export_vllm(tmp_path, make_draft(), make_facts(tiny_target)) / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(len(DRAFT_IDS))).tolist() == DRAFT_IDS
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS


def test_the_embedding_is_shipped_only_where_the_targets_cannot_be_shared(tmp_path, tiny_target):
    for name, draft, shipped in [
        ("same width", make_draft(**PLAIN), False),
        ("another width", make_draft(**PLAIN, target_hidden_size=2 * HIDDEN), True),
        ("trained", make_draft(**PLAIN).requires_grad_(True), True),
    ]:
        for export in (export_vllm, export_sglang):
            folder = export(tmp_path / f"{export.__name__} {name}", draft, make_facts(tiny_target))
            assert ("embed_tokens.weight" in load_file(folder / "model.safetensors")) is shipped
            assert read_config(folder)["target_hidden_size"] == draft.config.target_hidden_size


def test_vllm_can_be_given_the_folder_alone(tmp_path, tiny_target):
    speculators = read_config(export_vllm(tmp_path, make_draft(), make_facts(tiny_target)))["speculators_config"]
    assert speculators["verifier"] == {"name_or_path": VERIFIER, "architectures": ["LlamaForCausalLM"]}
    assert [method["speculative_tokens"] for method in speculators["proposal_methods"]] == [K]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_are_cast_and_said_to_be(tmp_path, tiny_target, dtype):
    folder = export_vllm(tmp_path, make_draft(), make_facts(tiny_target), dtype)
    floats = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values() if tensor.is_floating_point()}
    assert floats == {dtype}
    assert f"torch.{read_config(folder)['dtype']}" == str(dtype)


def test_a_weight_that_the_dtype_cannot_hold_is_an_error_that_names_it():
    draft = make_draft()
    with torch.no_grad():
        draft.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    tensors_to_ship(draft, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight is not finite in float16"):
        tensors_to_ship(draft, torch.float16)


def test_sglang_is_refused_what_it_would_run_as_another_model(tmp_path, tiny_target):
    facts = make_facts(tiny_target)
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        export_sglang(tmp_path, make_draft(**{**PLAIN, "norm_before_residual": True}), facts)
    with pytest.raises(CheckpointError, match="fc: it is passed over"):
        export_sglang(tmp_path, make_draft(**PLAIN, target_hidden_size=4, aux_layer_ids=(2, 5)), facts)
    assert not list(tmp_path.iterdir())


def test_sglang_gets_layer_ids_only_in_a_form_that_all_its_versions_read_alike(tmp_path, tiny_target):
    mla = make_facts(tiny_target, attention="mla")
    own, other = make_draft(**PLAIN, aux_layer_ids=(2, 4, 5)), make_draft(**PLAIN, aux_layer_ids=(3, 4, 5))
    written = read_config(export_sglang(tmp_path / "mla", own, mla))["eagle_config"]
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    with pytest.raises(CheckpointError, match=r"aux_layer_ids \[3, 4, 5\]"):
        export_sglang(tmp_path / "other", other, mla)
    assert not sglang_obstacles(other.config, make_facts(tiny_target))


@pytest.mark.parametrize("ids", [(2, 4, 5), (3, 4, 8)])
def test_gpt_oss_gets_ids_that_sglang_takes_for_the_layers_whose_output_is_read(tmp_path, tiny_target, ids):
    facts = make_facts(tiny_target, text_model_type="gpt_oss")
    written = read_config(export_sglang(tmp_path, make_draft(**PLAIN, aux_layer_ids=ids), facts))["eagle_config"]
    assert written["eagle_aux_hidden_state_layer_ids"] == [id - 1 for id in ids]
    assert max(written["eagle_aux_hidden_state_layer_ids"]) < facts.num_hidden_layers, "which it would take as they are"


def test_what_an_older_sglang_would_pass_over_is_said():
    plain = make_draft(**PLAIN).config
    assert sglang_requirements(plain) == []
    for change in ({"fc_norm": True}, {"norm_output": True}, {"aux_layer_ids": (2, 5)}):
        (need,) = sglang_requirements(dataclasses.replace(plain, **change))
        assert "0.5.12.post1" in need
    (need,) = sglang_requirements(dataclasses.replace(plain, norm_before_fc=True))
    assert "0.5.17" in need
    assert AUX == 3
