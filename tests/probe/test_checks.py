"""Verdicts: what a run would die of fails, what is to be known warns, and each says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.probe.checks import Check, check_target, describe_quantization, verdict
from draftsmith.probe.facts import facts_from_evidence
from draftsmith.probe.hub import read_evidence
from tests.probe.folders import (
    CONFIG,
    CONFIGS,
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    TENSORS,
    Tensors,
    evidence_of,
    write_model,
    write_shard,
    write_sharded,
)


def judge(evidence: dict[str, Any], **options: bool) -> dict[str, Check]:
    checks = check_target(facts_from_evidence(evidence), evidence, **options)
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.hint for check in checks if check.status == "fail" and check.name != "layer ids")
    return {check.name: check for check in checks}


def judge_folder(folder: Path, **options: bool) -> dict[str, Check]:
    return judge(read_evidence(str(folder)), **options)


def judge_config(name: str) -> dict[str, Check]:
    return judge(evidence_of(json.loads((CONFIGS / f"{name}.json").read_text())))


def test_a_sound_model_passes_every_check(tiny_target: Path) -> None:
    checks = judge_folder(tiny_target)
    assert {check.status for check in checks.values()} == {"ok"}
    assert verdict(list(checks.values())) == "ok"


def test_the_verdict_is_the_worst_check() -> None:
    ok, warn, fail = (Check("a", status, "") for status in ("ok", "warn", "fail"))
    assert [verdict(found) for found in ([ok], [ok, warn], [warn, fail, ok])] == ["ok", "warn", "fail"]


# ---- Configuration and layers ----


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_configuration_without_a_size_fails_by_name(name: str) -> None:
    check = judge(evidence_of({key: value for key, value in CONFIG.items() if key != name}))["configuration"]
    assert check.status == "fail"
    assert name in check.detail


def test_an_encoder_decoder_is_no_target() -> None:
    assert judge(evidence_of({**CONFIG, "is_encoder_decoder": True}))["configuration"].status == "fail"


def test_a_wrapper_is_named() -> None:
    assert "kimi_k2 under text_config" in judge_config("kimi-k2.5")["configuration"].detail


@pytest.mark.parametrize("layers", range(1, 13))
def test_layer_ids_are_chosen_or_refused_for_every_depth(layers: int) -> None:
    check = judge(evidence_of({**CONFIG, "num_hidden_layers": layers}))["layer ids"]
    assert check.status == ("fail" if layers < 4 else "ok")


def test_both_numberings_of_the_layers_are_told() -> None:
    detail = judge_config("kimi-k2.5")["layer ids"].detail
    assert detail.startswith("2, 30, 58 of 61")
    assert "SGLang writes 1, 29, 57" in detail


def test_fewer_layers_in_the_files_than_configured_fail(tmp_path: Path) -> None:
    check = judge_folder(write_model(tmp_path / "model", num_hidden_layers=9))["layer ids"]
    assert check.status == "fail"
    assert "hold 8 under model.layers" in check.detail


def test_layers_of_multi_token_prediction_are_no_mismatch(tmp_path: Path) -> None:
    extra = {"model.layers.8.eh_proj.weight": ("BF16", [8, 16])}
    assert judge_folder(write_model(tmp_path / "model", {**TENSORS, **extra}))["layer ids"].status == "ok"


# ---- Weights ----


def test_missing_and_damaged_files_fail_by_name(tmp_path: Path) -> None:
    shards = {f"model-{i}.safetensors": {name: TENSORS[name]} for i, name in enumerate(TENSORS)}
    folder = write_sharded(tmp_path / "model", shards)
    (folder / "model-1.safetensors").unlink()
    os.truncate(folder / "model-2.safetensors", 90)
    for number in range(3, 8):
        (folder / f"model-{number}.safetensors").write_bytes(b"")
    check = judge_folder(folder)["weights"]
    assert check.status == "fail"
    assert "model-1.safetensors is named in the index and not in the folder" in check.detail
    assert "model-2.safetensors is cut off" in check.detail
    assert "and 4 more" in check.detail


def test_each_kind_of_damage_has_its_own_remedy(tmp_path: Path) -> None:
    pointer = write_model(tmp_path / "pointer")
    (pointer / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    pickled = write_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    lost = write_sharded(tmp_path / "lost", {"a.safetensors": TENSORS})
    write_shard(lost / "a.safetensors", {**EMBEDDING, **NORM, **LAYERS})
    hints = [judge_folder(folder)["weights"].hint or "" for folder in (pointer, pickled, lost)]
    assert "git lfs pull" in hints[0]
    assert "convert" in hints[1]
    assert "not of one checkpoint" in hints[2]


def test_weights_on_the_hub_warn_a_reader_and_stop_a_run(tmp_path: Path) -> None:
    evidence = {**read_evidence(str(write_model(tmp_path / "model"))), "weights_at": "hub", "hub_id": "acme/tiny"}
    assert judge(evidence)["weights"].status == "warn"
    check = judge(evidence, weights_needed=True)["weights"]
    assert check.status == "fail"
    assert "hf download acme/tiny" in (check.hint or "")


def test_a_damaged_side_file_fails_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in judge_folder(folder)["other files"].detail


# ---- Embedding and head ----


@pytest.mark.parametrize(
    ("tied", "head", "status", "told"),
    [
        (True, {}, "ok", "tied to model.embed_tokens.weight"),
        (True, HEAD, "warn", "is stored all the same"),
        (False, HEAD, "ok", "lm_head.weight, BF16 [32, 8]"),
        (False, {}, "fail", "no lm_head.weight is stored"),
        (..., {}, "ok", "not stored and not denied"),
    ],
)
def test_flag_and_tensor_of_tied_embeddings_are_reconciled(
    tmp_path: Path, tied: Any, head: Tensors, status: str, told: str
) -> None:
    folder = write_model(tmp_path / "model", {**EMBEDDING, **NORM, **LAYERS, **head}, tie_word_embeddings=tied)
    check = judge_folder(folder)["lm_head"]
    assert (check.status, told in check.detail) == (status, True)


def test_an_absent_head_is_named_as_the_model_would_name_it(tmp_path: Path) -> None:
    prefix = "language_model.model."
    tensors = {f"{prefix}embed_tokens.weight": ("BF16", [32, 8]), f"{prefix}norm.weight": ("BF16", [8])}
    check = judge_folder(write_model(tmp_path / "model", tensors))["lm_head"]
    assert "language_model.lm_head.weight" in (check.hint or "")


@pytest.mark.parametrize(
    "packed",
    [
        {"lm_head.weight": ("F8_E4M3", [32, 8]), "lm_head.weight_scale": ("F32", [1])},
        {"lm_head.weight_packed": ("I32", [32, 1]), "lm_head.weight_scale": ("BF16", [32, 1])},
        {"lm_head.qweight": ("I32", [1, 32]), "lm_head.scales": ("F16", [1, 32])},
    ],
)
def test_a_packed_head_fails_and_says_where_dense_rows_are(tmp_path: Path, packed: Tensors) -> None:
    tensors = {**EMBEDDING, **NORM, **LAYERS, **packed}
    check = judge_folder(write_model(tmp_path / "model", tensors, quantization_config={"quant_method": "fp8"}))[
        "lm_head"
    ]
    assert check.status == "fail"
    assert next(iter(packed)) in check.detail
    assert "unquantised model" in (check.hint or "")


def test_an_embedding_that_cannot_be_told_fails_with_the_candidates(tmp_path: Path) -> None:
    tensors = {"a.table.weight": ("BF16", [32, 8]), "b.table.weight": ("BF16", [32, 8]), **HEAD, **NORM}
    check = judge_folder(write_model(tmp_path / "model", tensors))["embedding"]
    assert check.status == "fail"
    assert "a.table.weight [32, 8]" in check.detail
    assert "b.table.weight [32, 8]" in check.detail


# ---- Vocabulary and tokenizer ----


def with_tokenizer(folder: Path, tokens: int, **settings: Any) -> Path:
    vocabulary = {f"t{i}": i for i in range(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("tokens", "config", "status", "told"),
    [
        (32, {}, "ok", "32 token ids in 32 rows"),
        (30, {}, "ok", "2 rows pad"),
        (33, {}, "fail", "33 token ids; the embedding has 32 rows"),
        (20, {"vocab_size": 24}, "warn", "says 24; the embedding has 32 rows"),
    ],
)
def test_tokenizer_configuration_and_embedding_are_compared(
    tmp_path: Path, tokens: int, config: dict[str, int], status: str, told: str
) -> None:
    check = judge_folder(with_tokenizer(write_model(tmp_path / "model", **config), tokens))["vocabulary"]
    assert (check.status, told in check.detail) == (status, True)


def test_a_model_without_a_tokenizer_fails_and_one_without_a_template_warns(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert judge_folder(folder)["tokenizer"].status == "fail"
    assert judge_folder(with_tokenizer(folder, 32))["tokenizer"].status == "warn"
    assert judge_folder(with_tokenizer(folder, 32, chat_template="x"))["tokenizer"].status == "ok"


@pytest.mark.parametrize(
    ("config", "status"),
    [
        ({"pad_token_id": 2}, "ok"),
        ({"pad_token_id": -1}, "ok"),
        ({"pad_token_id": 32}, "fail"),
        ({"eos_token_id": [2, 99]}, "fail"),
        ({"eos_token_id": ...}, "warn"),
    ],
)
def test_special_tokens_lie_in_the_vocabulary(tmp_path: Path, config: dict[str, Any], status: str) -> None:
    assert judge_folder(write_model(tmp_path / "model", **config))["special tokens"].status == status


# ---- Shape ----


def test_the_draft_of_an_mla_target_is_llama_style_with_heads_of_its_own() -> None:
    """7168 / 128 heads would give 56, which is nobody's head size."""
    check = judge_config("deepseek-v3")["attention"]
    assert "Llama-style" in check.detail
    assert "heads of 128" in check.detail
    assert "56" not in check.detail


def test_what_the_draft_keeps_of_rope_is_said() -> None:
    assert "scaling, which only the target's own attention" not in judge_config("llama-3.1-8b")["RoPE"].detail
    assert "llama3 scaling by 8" in judge_config("llama-3.1-8b")["RoPE"].detail
    assert "without the scaling" in judge_config("kimi-k2.5")["RoPE"].detail
    assert "llama_4_scaling" in judge_config("mistral-large-3")["RoPE"].detail
    assert "theta 10000 in sliding windows" in judge_config("gemma-4-31b")["RoPE"].detail


def test_an_absent_theta_warns_and_a_theta_of_zero_does_not() -> None:
    assert judge_config("gpt2")["RoPE"].status == "warn"
    assert judge(evidence_of({**CONFIG, "rope_theta": 0}))["RoPE"].status == "ok"
    assert "not one number" in judge(evidence_of({**CONFIG, "rope_theta": [1e4, 1e6]}))["RoPE"].detail


@pytest.mark.parametrize("wrapped", [False, True])
def test_of_longrope_the_length_is_said_from_which_engines_take_the_long_factors(wrapped: bool) -> None:
    phi = {
        **CONFIG,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [4.0]},
    }
    detail = judge(evidence_of({"text_config": phi} if wrapped else phi))["RoPE"].detail
    assert "short factors, unless serve.engine_args.max_model_len is above 4,096" in detail


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "nemotron-nano-9b-v2"])
def test_layers_with_recurrent_state_warn(name: str) -> None:
    assert judge_config(name)["layer types"].status == "warn"


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-4-31b", "minimax-m2", "llama-3.1-8b"])
def test_sliding_windows_are_no_warning(name: str) -> None:
    assert "layer types" not in judge_config(name)


# ---- Quantisation and code ----


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        (json.loads((CONFIGS / "kimi-k2.5.json").read_text())["text_config"]["quantization_config"],
         "compressed-tensors pack-quantized, 4-bit int, groups of 32"),
        (json.loads((CONFIGS / "deepseek-v3.json").read_text())["quantization_config"], "fp8, blocks of 128 by 128"),
        (json.loads((CONFIGS / "gpt-oss-20b.json").read_text())["quantization_config"], "mxfp4"),
        (json.loads((CONFIGS / "mistral-large-3.json").read_text())["quantization_config"],
         "compressed-tensors float-quantized, 8-bit float, blocks of 128 by 128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "awq, 4-bit, groups of 128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq, 8-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_algo": "NVFP4", "group_size": 16}, "NVFP4, groups of 16"),
    ],
)  # fmt: skip
def test_quantisation_is_described_in_a_few_words(quantization: dict[str, Any], told: str) -> None:
    assert describe_quantization(quantization) == told


def test_packed_tensors_and_configuration_must_agree(tmp_path: Path) -> None:
    packed = {"model.layers.0.mlp.up_proj.weight_packed": ("I32", [16, 1])}
    silent = judge_folder(write_model(tmp_path / "a", {**TENSORS, **packed}))["quantization"]
    said = judge_folder(write_model(tmp_path / "b", {**TENSORS, **packed}, quantization_config={"quant_method": "awq"}))
    dense = judge_folder(write_model(tmp_path / "c", quantization_config={"quant_method": "awq"}))["quantization"]
    assert (silent.status, said["quantization"].status, dense.status) == ("fail", "ok", "warn")
    assert "I32" in silent.detail


def test_code_that_a_folder_brings_is_named_and_never_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", auto_map={"AutoConfig": "configuration_x.XConfig"})
    bomb = tmp_path / "ran"
    for name in ("configuration_x.py", "config.py", "__init__.py", "tokenization_x.py"):
        (folder / name).write_text(f"open({str(bomb)!r}, 'w')")
    with_tokenizer(folder, 32, auto_map={"AutoTokenizer": ["tokenization_x.XTokenizer", None]})
    check = judge_folder(folder)["remote code"]
    assert check.status == "warn"
    assert "configuration_x.py, tokenization_x.py" in check.detail
    assert "trust_remote_code" in (check.hint or "")
    assert not bomb.exists()


def test_code_that_is_named_and_not_there_is_told(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "model", auto_map={"AutoConfig": "configuration_x.XConfig", "AutoModel": "a/b--c.D"}
    )
    detail = judge_folder(folder)["remote code"].detail
    assert "names configuration_x.py, which the folder lacks" in detail


def test_code_that_the_recipe_trusts_is_no_warning(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", auto_map={"AutoConfig": "configuration_x.XConfig"})
    (folder / "configuration_x.py").touch()
    assert judge_folder(folder)["remote code"].status == "warn"
    assert judge_folder(folder, code_trusted=True)["remote code"].status == "ok"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": 5}, "5"),
        ({"quant_method": "x", "config_groups": "y"}, "x"),
        ({"quant_method": "x", "config_groups": {"g": {"weights": 5}, "h": 5}}, "x"),
        ({"quant_method": "x", "group_size": "all", "bits": 4}, "x, 4-bit"),
    ],
)
def test_a_quantisation_of_unknown_shape_is_described_as_far_as_it_goes(quantization: Any, said: str) -> None:
    assert describe_quantization(quantization) == said
