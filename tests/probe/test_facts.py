"""Facts of real configurations, and of every dialect in which a fact is written down, denied or left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith import recipe
from draftsmith.draft.config import draft_config
from draftsmith.errors import RequestError, TargetError, TargetNotFoundError
from draftsmith.probe.facts import facts_from_evidence, read_facts
from draftsmith.probe.gather import gather
from draftsmith.records import TargetFacts
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
)
from tests.probe.hub_server import COMMIT, serve_hub

MODELS = [line for line in (CONFIGS / "published.txt").read_text().splitlines() if line and not line.startswith("#")]
COLUMNS = (
    "architecture",
    "text_model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention",
    "rope_theta",
    "rope_scaling",
    "num_experts",
    "scoring_func",
    "tie_word_embeddings",
    "aux_layer_ids",
)


def facts_of(config: dict[str, Any], tensors: Tensors | None = None, **more: Any) -> TargetFacts:
    return facts_from_evidence({**evidence_of(config, tensors), **more})


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def written(facts: TargetFacts, column: str) -> str:
    """A fact as the table writes it."""
    value = getattr(facts, column)
    if column in facts.missing:
        return "-"
    if value is None:
        return "0" if column == "num_experts" else "none"
    if column == "rope_scaling":
        return value["rope_type"]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    text = f"{value:.0f}" if isinstance(value, float) else str(value)
    return text + ("*" if column in facts.derived else "")


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.split()[0])
def test_facts_of_a_published_model_are_read_as_published(row: str) -> None:
    name, *expected = row.split()
    facts = facts_of(config_of(name))
    assert {column: written(facts, column) for column in COLUMNS} == dict(zip(COLUMNS, expected, strict=True))


def test_every_configuration_of_the_tests_is_in_the_table() -> None:
    assert {row.split()[0] for row in MODELS} == {file.stem for file in CONFIGS.glob("*.json")}


def test_quantisation_is_found_in_wrapper_or_text_model() -> None:
    kimi, mistral = facts_of(config_of("kimi-k2.5")), facts_of(config_of("mistral-large-3"))
    assert kimi.quantization is not None
    assert kimi.quantization["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert mistral.quantization is not None
    assert mistral.quantization["format"] == "float-quantized"


def test_the_code_that_is_named_is_the_wrappers() -> None:
    auto_map = facts_of(config_of("kimi-k2.5")).auto_map
    assert auto_map is not None
    assert auto_map["AutoConfig"] == "configuration_kimi_k25.KimiK25Config"


def test_llama_4_scaling_is_one_fact_in_both_spellings() -> None:
    own = facts_of(config_of("mistral-large-3")).llama_4_scaling
    in_rope = facts_of(config_of("ministral-3-8b"))
    assert own == {"beta": 0.1, "original_max_position_embeddings": 8192}
    assert in_rope.llama_4_scaling == {"beta": 0.1, "original_max_position_embeddings": 16384}
    assert "llama_4_scaling_beta" not in (in_rope.rope_scaling or {})
    assert "llama_4_scaling" in facts_of(config_of("deepseek-v3")).missing


def test_facts_survive_json() -> None:
    for file in CONFIGS.glob("*.json"):
        facts = facts_of(json.loads(file.read_text()))
        assert TargetFacts.from_json(json.dumps(facts.to_json())) == facts


# ---- Wrappers ----

INNER = {"hidden_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_a_wrapped_text_model_is_unwrapped(key: str) -> None:
    facts = facts_of({"model_type": "x_vl", key: {"model_type": "x", **INNER}, "vision_config": {"hidden_size": 99}})
    assert (facts.hidden_size, facts.num_hidden_layers, facts.num_attention_heads, facts.vocab_size) == (8, 8, 2, 32)
    assert (facts.model_type, facts.text_model_type, facts.wrapper) == ("x_vl", "x", key)


def test_a_wrapper_in_a_wrapper_is_unwrapped() -> None:
    facts = facts_of({"model_type": "omni", "thinker_config": {"text_config": INNER}})
    assert facts.wrapper == "thinker_config.text_config"
    assert facts.hidden_size == 8


def test_a_text_config_of_null_falls_back_to_the_outer_one() -> None:
    facts = facts_of({"text_config": None, **INNER})
    assert (facts.num_hidden_layers, facts.wrapper) == (8, None)


def test_the_text_model_has_the_first_word_and_the_wrapper_the_second() -> None:
    facts = facts_of({"hidden_size": 99, "dtype": "bfloat16", "eos_token_id": 5, "text_config": INNER})
    assert (facts.hidden_size, facts.dtype, facts.eos_token_ids) == (8, "bfloat16", (5,))


# ---- Absent, denied, derived ----


def test_absent_and_denied_are_told_apart() -> None:
    absent = facts_of(INNER)
    denied = facts_of({**INNER, "scoring_func": None, "quantization_config": None, "rope_scaling": None})
    for name in ("scoring_func", "quantization", "rope_scaling"):
        assert getattr(absent, name) is getattr(denied, name) is None
        assert name in absent.missing
        assert name not in denied.missing


def test_what_follows_is_marked_as_derived() -> None:
    facts = facts_of(INNER)
    assert (facts.head_dim, facts.num_key_value_heads) == (4, 2)
    assert set(facts.derived) == {"head_dim", "num_key_value_heads"}
    assert not set(facts.derived) & set(facts.missing)


def test_head_size_of_mla_is_not_guessed() -> None:
    facts = facts_of({**INNER, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512, "v_head_dim": 128})
    assert facts.head_dim is None
    assert "head_dim" in facts.missing
    assert facts.mla is not None
    assert facts.mla["v_head_dim"] == 128


def test_shapes_that_the_configuration_leaves_out_are_seen_in_the_tensors() -> None:
    """Gemma 3's wrapper leaves heads, vocabulary and head size to its class; 2560 / 8 heads is not its head size."""
    prefix = "language_model.model."
    tensors: Tensors = {
        f"{prefix}embed_tokens.weight": ("BF16", [262208, 2560]),
        f"{prefix}norm.weight": ("BF16", [2560]),
        f"{prefix}layers.0.self_attn.q_norm.weight": ("BF16", [256]),
        f"{prefix}layers.0.self_attn.q_proj.weight": ("BF16", [2048, 2560]),
        f"{prefix}layers.0.self_attn.k_proj.weight": ("BF16", [1024, 2560]),
        f"{prefix}layers.0.self_attn.o_proj.weight": ("BF16", [2560, 2048]),
    }
    facts = facts_of(config_of("gemma-3-4b"), tensors)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (8, 4, 256)
    assert (facts.attention, facts.vocab_size) == ("gqa", 262208)
    assert {"num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"} <= set(facts.derived)
    assert facts.lm_head_key == facts.embedding_key == f"{prefix}embed_tokens.weight"


def test_head_size_is_measured_before_it_is_divided() -> None:
    tensors: Tensors = {"model.layers.0.self_attn.o_proj.weight": ("BF16", [8, 32])}
    assert facts_of(INNER, tensors).head_dim == 16


@pytest.mark.parametrize("value", ["61", 61.5, True, [61]])
def test_a_count_that_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(TargetError, match="num_hidden_layers"):
        facts_of({**INNER, "num_hidden_layers": value})


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"],
)
@pytest.mark.parametrize("value", [0, -4])
def test_a_size_that_no_model_has_is_refused_by_name_even_where_the_tensors_say_another(name: str, value: int) -> None:
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", [320, 32])}
    with pytest.raises(TargetError, match=f"{name} is {value}, and must be 1 or more"):
        facts_of({**INNER, name: value}, tensors)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("hidden_size", "write hidden_size into the target's config.json"), ("head_dim", "set train.draft.head_dim")],
)
def test_a_fact_that_the_drafts_shape_needs_is_asked_for_where_it_can_be_given(name: str, remedy: str) -> None:
    facts = replace(facts_of(INNER), **{name: None})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"does not say {name}.*(?s:.)*{remedy}"):
        draft_config(facts, recipe.Draft(intermediate_size=8), 4, (1, 2, 3))


def test_falcons_flag_means_one_head_for_keys_and_values() -> None:
    assert facts_of({**INNER, "multi_query": True}).attention == "mqa"
    assert facts_of({**INNER, "multi_query": True, "new_decoder_architecture": True}).attention == "mha"


def test_ends_of_turn_come_from_the_generation_configuration_first() -> None:
    config = {**INNER, "eos_token_id": 1}
    assert facts_of(config).eos_token_ids == (1,)
    assert facts_of(config, generation_config={"eos_token_id": [1, 7]}).eos_token_ids == (1, 7)
    assert facts_of(config, generation_config={"eos_token_id": 0}).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, {"linear_attention": 1, "full_attention": 1}),
        ({"layers_block_type": ["mamba", "moe", "mamba"]}, {"mamba": 2, "moe": 1}),
        ({"hybrid_override_pattern": "M-M*E"}, {"mamba": 2, "mlp": 1, "attention": 1, "moe": 1}),
        ({"attn_type_list": [0, 1, 0]}, {"linear_attention": 2, "full_attention": 1}),
        ({"full_attention_interval": 4}, {"full_attention": 2, "linear_attention": 6}),
        (
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}},
            {"full_attention": 1, "linear_attention": 3},
        ),
        ({}, None),
    ],
)
def test_kinds_of_layers_are_counted(config: dict[str, Any], kinds: dict[str, int] | None) -> None:
    assert facts_of({**INNER, **config}).layer_types == kinds


# ---- RoPE ----


@pytest.mark.parametrize(
    ("config", "theta", "scaling", "extra"),
    [
        ({"rope_theta": 5e5}, 5e5, None, {}),
        ({"rope_theta": 0}, 0.0, None, {}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            1e4,
            {"rope_type": "linear", "factor": 2},
            {},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8}},
            1e4,
            {"rope_type": "llama3", "factor": 8},
            {},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "su", "short_factor": [1.0]}},
            1e4,
            {"rope_type": "longrope", "short_factor": [1.0]},
            {},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None, {}),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}},
            1e6,
            {"rope_type": "yarn", "factor": 4},
            {},
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2}, "rope_parameters": {"rope_theta": 5e4}}, 5e4, None, {}),
        ({"rope_parameters": None, "rope_theta": 3e4}, 3e4, None, {}),
        ({"rotary_emb_base": 10000, "rotary_pct": 0.25}, 1e4, None, {"partial_rotary_factor": 0.25}),
        ({"rope_theta": 5e6, "rotary_dim": 2}, 5e6, None, {"partial_rotary_factor": 0.5}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            1e4,
            None,
            {"partial_rotary_factor": 0.5},
        ),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, 1e6, None, {"rope_local_theta": 1e4}),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8},
            {"rope_local_theta": 1e4},
        ),
        ({"rope_theta": [1e4, 1e6]}, None, None, {}),
        ({}, None, None, {}),
    ],
)
def test_rope_is_read_in_every_dialect(
    config: dict[str, Any], theta: float | None, scaling: dict[str, Any] | None, extra: dict[str, float]
) -> None:
    facts = facts_of({**INNER, **config})
    assert (facts.rope_theta, facts.rope_scaling) == (theta, scaling)
    assert ("rope_theta" in facts.missing) == (theta is None)
    assert {"partial_rotary_factor": facts.partial_rotary_factor, "rope_local_theta": facts.rope_local_theta} == {
        "partial_rotary_factor": None,
        "rope_local_theta": None,
        **extra,
    }


# ---- Tensors by their real names ----


@pytest.mark.parametrize(
    ("embedding", "head", "norm"),
    [
        ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
        (
            "language_model.model.embed_tokens.weight",
            "language_model.lm_head.weight",
            "language_model.model.norm.weight",
        ),
        ("model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.norm.weight"),
        ("backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight"),
        ("transformer.wte.weight", "lm_head.weight", "transformer.ln_f.weight"),
        ("wte.weight", "lm_head.weight", "ln_f.weight"),
        ("tok_embeddings.weight", "output.weight", "norm.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight", "gpt_neox.final_layer_norm.weight"),
        ("thinker.model.embed_tokens.weight", "thinker.lm_head.weight", "thinker.model.norm.weight"),
        ("model.strange_table.weight", "lm_head.weight", "model.norm.weight"),
    ],
)
def test_dense_tensors_are_found_under_the_names_models_give_them(embedding: str, head: str, norm: str) -> None:
    tensors: Tensors = {
        "vision_tower.embed_tokens.weight": ("BF16", [32, 8]),
        "vision_tower.norm.weight": ("BF16", [8]),
        "talker.model.embed_tokens.weight": ("BF16", [32, 8]),
        "talker.lm_head.weight": ("BF16", [32, 8]),
        "model.layers.8.embed_tokens.weight": ("BF16", [32, 8]),
        "mm_projector.pre_norm.weight": ("BF16", [8]),
        "other.norm.weight": ("BF16", [8]),
        "model.embed_tokens_per_layer.weight": ("BF16", [64, 8]),
        embedding: ("BF16", [32, 8]),
        head: ("BF16", [32, 8]),
        norm: ("BF16", [8]),
    }
    facts = facts_of(CONFIG, tensors)
    assert (facts.embedding_key, facts.lm_head_key, facts.final_norm_key) == (embedding, head, norm)


@pytest.mark.parametrize(
    ("tied", "head", "expected"),
    [
        (True, {}, "model.embed_tokens.weight"),
        (True, HEAD, "model.embed_tokens.weight"),
        (False, HEAD, "lm_head.weight"),
        (False, {}, None),
        (..., HEAD, "lm_head.weight"),
        (..., {}, "model.embed_tokens.weight"),
    ],
)
def test_tied_or_not_the_head_resolves_wherever_it_can(
    tmp_path: Path, tied: Any, head: Tensors, expected: str | None
) -> None:
    folder = write_model(tmp_path / "model", {**EMBEDDING, **NORM, **LAYERS, **head}, tie_word_embeddings=tied)
    assert read_facts(str(folder)).lm_head_key == expected


@pytest.mark.parametrize("head", [{}, HEAD])
def test_weights_decide_where_wrapper_and_text_model_contradict_each_other(head: Tensors) -> None:
    tensors = {**EMBEDDING, **NORM, **head}
    for inner, outer in ((True, False), (False, True)):
        config = {"tie_word_embeddings": outer, "text_config": {**INNER, "tie_word_embeddings": inner}}
        facts = facts_of(config, tensors)
        assert facts.lm_head_key == ("lm_head.weight" if head else "model.embed_tokens.weight")
        assert facts.tie_word_embeddings == (not head)
        assert "tie_word_embeddings" in facts.derived


def test_the_heads_dtype_comes_from_the_file(tmp_path: Path) -> None:
    facts = read_facts(str(write_model(tmp_path / "a", torch_dtype="float16")))
    assert (facts.dtype, facts.lm_head_dtype) == ("float16", "BF16")
    packed = {"lm_head.weight": ("F8_E4M3", [32, 8]), "lm_head.weight_scale": ("F32", [1])}
    facts = read_facts(str(write_model(tmp_path / "b", {**TENSORS, **packed})))
    assert (facts.lm_head_key, facts.lm_head_dtype) == (None, None)


# ---- Where a model is ----


def test_facts_of_a_real_model_are_those_transformers_saves(tiny_target: Path) -> None:
    from transformers import AutoConfig

    facts, config = read_facts(str(tiny_target)), AutoConfig.from_pretrained(tiny_target)
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert getattr(facts, name) == getattr(config, name)
    assert facts.rope_theta == config.rope_parameters["rope_theta"]
    assert facts.missing == ("num_experts", "scoring_func", "topk_method", "llama_4_scaling", "quantization")


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """The hub's cache with one model, as huggingface_hub lays it out."""
    repository = tmp_path / "hub" / "models--acme--tiny"
    write_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def read_elsewhere(cache: Path, model: str, revision: str | None = None, **environment: str) -> dict[str, Any]:
    """`read_facts` in a process of its own, since huggingface_hub reads its settings at import."""
    program = (
        "import json, sys; from draftsmith.errors import DraftsmithError\n"
        "from draftsmith.probe.facts import read_facts\n"
        "try: print(json.dumps(read_facts(sys.argv[1], revision=sys.argv[2] or None).to_json()))\n"
        "except DraftsmithError as error: print(json.dumps({'error': type(error).__name__, 'text': str(error)}))"
    )
    settings = {**os.environ, "HF_HUB_CACHE": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, model, revision or ""], env=settings, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_cached_hub_model_needs_no_network(hub_cache: Path) -> None:
    assert "error" not in read_elsewhere(hub_cache, "acme/tiny", HF_HUB_OFFLINE="1")
    with serve_hub(hub_cache) as (endpoint, sent):
        facts = read_elsewhere(hub_cache, "acme/tiny", HF_ENDPOINT=endpoint)
    assert sent == []
    assert facts["revision"] == COMMIT
    assert Path(facts["path"]).is_relative_to(hub_cache)
    assert facts["weights_sha256"] is not None


@pytest.mark.parametrize(
    ("model", "revision", "environment"),
    [
        ("acme/other", None, {"HF_HUB_OFFLINE": "1"}),
        ("acme/tiny", "no-such-branch", {"HF_HUB_OFFLINE": "1"}),
        ("acme/other", None, {"HF_ENDPOINT": "http://127.0.0.1:9"}),
    ],
)
def test_a_hub_that_cannot_be_asked_is_told_with_the_remedy(
    hub_cache: Path, model: str, revision: str | None, environment: dict[str, str]
) -> None:
    answer = read_elsewhere(hub_cache, model, revision, **environment)
    assert answer["error"] == "TargetNotFoundError"
    assert "hub cannot be reached" in answer["text"]
    assert f"hf download {model}" in answer["text"]


def test_a_hub_model_is_known_without_downloading_its_weights(tmp_path: Path) -> None:
    heavy = {"model.layers.0.mlp.up_proj.weight": ("BF16", [1024, 1024])}
    folder = write_model(tmp_path / "model", {**TENSORS, **heavy}, auto_map={"AutoConfig": "configuration_x.X"})
    with serve_hub(folder) as (endpoint, sent):
        facts = read_elsewhere(tmp_path / "cache", "acme/tiny", HF_ENDPOINT=endpoint)
    local = read_facts(str(folder))
    assert facts["revision"] == COMMIT
    assert facts["weight_bytes"] == local.weight_bytes
    for name in ("embedding_key", "lm_head_key", "final_norm_key", "lm_head_dtype", "config_sha256"):
        assert facts[name] == getattr(local, name)
    assert facts["weights_sha256"] is None
    assert sum(size for _, size in sent) < local.weight_bytes / 10


@pytest.mark.parametrize(
    ("model", "revision", "told"),
    [
        ("acme/unknown", None, "neither a folder here nor a model on the hub"),
        ("acme/gated", None, "is gated"),
        ("acme/tiny", "v9", "has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_told_as_it_is(tmp_path: Path, model: str, revision: str | None, told: str) -> None:
    folder = write_model(tmp_path / "model")
    with serve_hub(folder) as (endpoint, _):
        answer = read_elsewhere(tmp_path / "cache", model, revision, HF_ENDPOINT=endpoint)
    assert answer["error"] == "TargetNotFoundError"
    assert told in answer["text"]
    assert "hint:" in answer["text"]


def test_a_folder_that_is_not_there_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFoundError, match="there is no such folder") as caught:
        read_facts(str(tmp_path / "nowhere"))
    assert caught.value.exit_code == 2


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no revisions"):
        read_facts(str(write_model(tmp_path / "model")), revision="main")


def test_a_folder_without_configuration_is_no_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(TargetError, match=r"config\.json is not in the folder"):
        read_facts(str(folder))


def test_facts_need_the_evidence_alone(tmp_path: Path) -> None:
    """What came over ssh as JSON gives the same facts as the folder itself."""
    folder = write_model(tmp_path / "model")
    evidence = json.loads(json.dumps(gather(str(folder))))
    assert facts_from_evidence(evidence) == read_facts(str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", [1]),
        ("rope_parameters", "yarn"),
        ("quantization_config", []),
        ("auto_map", ["a.B"]),
        ("text_config", []),
        ("layer_types", [1, {}, None]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [5]),
        ("quantization", "awq"),
        ("tie_word_embeddings", []),
        ("rope_scaling", {"rope_type": ["yarn"], "factor": 2}),
        ("rope_parameters", {"full_attention": {"rope_type": 5}}),
        ("hybrid_override_pattern", 5),
        ("linear_attn_config", {"kda_layers": 5}),
        ("full_attention_interval", 0),
    ],
)
def test_a_setting_of_another_shape_is_named(key: str, value: object) -> None:
    name = "rope_type" if key.startswith("rope_") and isinstance(value, dict) else key
    name = "kda_layers" if key == "linear_attn_config" else name
    for config in ({**CONFIG, key: value}, {**CONFIG, "llm_config": {**CONFIG, key: value}}):
        with pytest.raises(TargetError, match=f"{name} is .*, not (a|true)"):
            facts_from_evidence({"path": "x", "config": config, "problems": []})


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("eos_token_id", "x", "eos_token_ids"),
        ("eos_token_id", [2, None], "eos_token_ids"),
        ("pad_token_id", "x", "pad_token_id"),
        ("intermediate_size", [], "intermediate_size"),
        ("intermediate_size", "x", "intermediate_size"),
        ("hidden_act", 5, "hidden_act"),
        ("kv_lora_rank", "x", "mla: kv_lora_rank"),
        ("rms_norm_eps", {}, "rms_norm_eps"),
    ],
)
def test_a_fact_that_no_model_has_is_named_with_the_files_to_correct(key: str, value: object, fact: str) -> None:
    with pytest.raises(TargetError, match=rf"of a kind that no model has: {fact}\b") as caught:
        facts_from_evidence({"path": "x", "config": {**CONFIG, key: value}, "problems": []})
    assert "config.json or generation_config.json" in str(caught.value)
