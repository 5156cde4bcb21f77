"""Scale models of published configurations: what they keep of their targets, and what is said of the rest."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import TargetError
from draftsmith.probe.facts import facts_from_evidence, read_facts
from draftsmith.probe.hub import read_evidence
from draftsmith.recipe import Target
from draftsmith.records import TargetFacts
from draftsmith.rehearse.layouts import random_weight
from draftsmith.rehearse.scale_config import ORDINARY_TOKENS, VOCABULARY
from draftsmith.rehearse.scale_model import ScaleModel, build_scale_model
from draftsmith.rehearse.scale_names import compare_names
from draftsmith.target import decoder_layers, load_target
from tests.probe.folders import CONFIG, CONFIGS, evidence_of

UNKNOWN_TO_TRANSFORMERS = {"mistral-large-3"}
NAMES = sorted({file.stem for file in CONFIGS.glob("*.json")} - UNKNOWN_TO_TRANSFORMERS)
KEPT = (
    "architecture",
    "model_type",
    "text_model_type",
    "attention",
    "wrapper",
    "scoring_func",
    "topk_method",
    "tie_word_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_local_theta",
    "partial_rotary_factor",
    "head_dim",
)


class Built(NamedTuple):
    config: dict[str, Any]
    target: TargetFacts
    scale: ScaleModel


def evidence_for(name: str) -> dict[str, Any]:
    return evidence_of(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module", params=NAMES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    evidence = evidence_for(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return Built(evidence["config"], facts_from_evidence(evidence), build_scale_model(evidence, folder))


def test_facts_of_the_target_are_those_of_the_scale_model(built: Built) -> None:
    scale = read_facts(str(built.scale.folder))
    for fact in KEPT:
        wanted = getattr(built.target, fact)
        if wanted is not None or fact not in ("attention", "head_dim"):  # which a default of transformers' decides
            assert getattr(scale, fact) == wanted, fact
    assert (scale.rope_scaling or {}).get("rope_type") == (built.target.rope_scaling or {}).get("rope_type")
    assert bool(scale.llama_4_scaling) == bool(built.target.llama_4_scaling)
    assert scale.quantization == built.target.quantization
    if built.target.mla is not None:
        assert scale.mla is not None
        assert {**scale.mla, "q_lora_rank": 0} == {**built.target.mla, "q_lora_rank": 0}


def test_transformers_runs_it_and_each_layer_moves_the_stream(built: Built) -> None:
    facts = read_facts(str(built.scale.plain))
    model = load_target(facts, Target(model=facts.path), torch.device("cpu"), torch.float32)
    outputs: list[torch.Tensor] = []
    for layer in decoder_layers(model, facts):
        layer.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        ids = torch.randint(4, ORDINARY_TOKENS, (1, 80), generator=torch.Generator().manual_seed(0))
        logits = model(input_ids=ids).logits
    assert torch.isfinite(logits).all()
    assert len(outputs) == facts.num_hidden_layers
    moves = [(after - before).norm() / after.norm() for before, after in pairwise(outputs)]
    assert min(moves) > 0.1


def test_it_is_small_and_sharded(built: Built) -> None:
    weights = list(built.scale.folder.glob("*.safetensors"))
    index = json.loads((built.scale.folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert {file.name for file in weights} == set(index["weight_map"].values())
    assert len(weights) == 2
    assert sum(file.stat().st_size for file in weights) < 64 << 20
    assert {name for file in weights for name in load_file(file)} == set(index["weight_map"])


def test_special_tokens_have_ids_of_their_own(built: Built) -> None:
    written = (built.scale.folder / "config.json").read_text(encoding="utf-8")
    ids = [int(found) for found in re.findall(r'_(?:token_id|token_index)": (\d+)', written)]
    assert all(token < VOCABULARY for token in ids)
    stated = {int(found) for found in re.findall(r'_(?:token_id|token_index)": (\d+)', json.dumps(built.config))}
    assert len(stated) <= len(set(ids))


def test_what_shrank_is_told(built: Built) -> None:
    layers = read_facts(str(built.scale.folder)).num_hidden_layers
    assert (built.target.num_hidden_layers, layers) in built.scale.shrunk.values()
    assert all(old != new for old, new in built.scale.shrunk.values())


# ---- Kinds of layers ----


def layer_settings(name: str, tmp_path: Path) -> dict[str, Any]:
    scale = build_scale_model(evidence_for(name), tmp_path / "model")
    config = json.loads((scale.folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config") or config


@pytest.mark.parametrize("name", ["gemma-4-31b", "gpt-oss-20b", "qwen3.5-0.8b"])
def test_each_type_of_layer_occurs_and_the_last_is_the_targets_last(name: str, tmp_path: Path) -> None:
    evidence = evidence_for(name)
    target = (evidence["config"].get("text_config") or evidence["config"])["layer_types"]
    scale = layer_settings(name, tmp_path)["layer_types"]
    assert scale == target[: len(scale)]
    assert set(scale) == set(target)
    assert scale[-1] == target[-1]


def test_a_pattern_of_letters_keeps_each_letter(tmp_path: Path) -> None:
    text = layer_settings("nemotron-nano-9b-v2", tmp_path)
    assert set(text["hybrid_override_pattern"]) == set("M-*")
    assert len(text["hybrid_override_pattern"]) == text["num_hidden_layers"]


def test_dense_layers_come_before_those_with_experts(tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for("deepseek-v3"), tmp_path / "model")
    tensors = read_evidence(str(scale.plain))["tensors"]
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in tensors


def test_a_number_of_layers_that_is_asked_for_shows_as_many_kinds_as_fit(tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for("nemotron-nano-9b-v2"), tmp_path / "model", num_hidden_layers=8)
    config = json.loads((scale.folder / "config.json").read_text(encoding="utf-8"))
    assert len(config["hybrid_override_pattern"]) == config["num_hidden_layers"] == 8
    assert set(config["hybrid_override_pattern"]) == set("M-*")


def test_windows_and_scales_by_position_set_in_within_a_short_sequence(tmp_path: Path) -> None:
    assert layer_settings("gpt-oss-20b", tmp_path)["sliding_window"] == 64
    assert (
        layer_settings("gemma-3-1b", tmp_path)["sliding_window"] == 64
    )  # by default of its class, if it is not written
    llama_4 = layer_settings("llama-4-scout", tmp_path)
    assert llama_4["attention_chunk_size"] == 128
    assert llama_4["floor_scale"] == 8192  # below 32,768 tokens vLLM leaves it out, whatever the configuration says
    assert layer_settings("ministral-3-8b", tmp_path)["rope_parameters"]["original_max_position_embeddings"] == 64
    yarn = layer_settings("deepseek-v3", tmp_path)["rope_scaling"]
    assert yarn == evidence_for("deepseek-v3")["config"]["rope_scaling"]  # which says how frequencies were trained


# ---- Names ----

# Names of moonshotai/Kimi-K2.5's tensors on the hub, of its first layer and its second.
KIMI_LAYER = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{part}_proj.weight" for part in ("q_a", "q_b", "kv_b", "o")),
    *(f"self_attn.{part}.weight" for part in ("q_a_layernorm", "kv_a_layernorm", "kv_a_proj_with_mqa")),
]
KIMI_DENSE = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
KIMI_EXPERTS = [
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(
        f"mlp.experts.0.{part}_proj.weight_{kind}"
        for part in ("gate", "up", "down")
        for kind in ("packed", "scale", "shape")
    ),
]
KIMI = {
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    *(f"language_model.model.layers.0.{name}" for name in [*KIMI_LAYER, *KIMI_DENSE]),
    *(f"language_model.model.layers.1.{name}" for name in [*KIMI_LAYER, *KIMI_EXPERTS]),
    "mm_projector.pre_norm.weight",
    "mm_projector.proj.0.weight",
    "vision_tower.patch_embed.pos_emb.weight",
    "vision_tower.patch_embed.proj.weight",
    "vision_tower.encoder.final_layernorm.weight",
    "vision_tower.encoder.blocks.0.wqkv.weight",
}


def test_tensors_of_kimi_have_the_names_that_they_have_on_the_hub(tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for("kimi-k2.5"), tmp_path / "model")
    index = json.loads((scale.folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored = set(index["weight_map"])
    assert stored >= KIMI
    of_two_layers = {name for name in stored if re.search(r"language_model\.model\.layers\.[01]\.", name)}
    assert {re.sub(r"experts\.\d+", "experts.0", name) for name in of_two_layers} <= KIMI
    assert (scale.folder / "preprocessor_config.json").exists()


def test_a_target_with_other_tensors_in_its_decoder_is_refused(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.g_proj.weight": ("BF16", [8, 8])}
    with pytest.raises(TargetError, match=r"such as model\.layers\.N\.self_attn\.g_proj\.weight"):
        build_scale_model(evidence_of({**CONFIG, "head_dim": 32}, tensors), tmp_path / "model")


def test_tensors_outside_the_decoder_are_named_and_left_out() -> None:
    notes = compare_names(
        {"model.layers.0.a.weight": {}, "mtp.fc.weight": {}, "model.layers.0.rotary_emb.inv_freq": {}},
        ["model.layers.3.a.weight"],
    )
    assert len(notes) == 1
    assert "mtp.fc.weight" in notes[0]


def test_names_lack_the_base_models_prefix_where_the_targets_do(tmp_path: Path) -> None:
    tensors = {"wte.weight": ("F32", [50257, 768]), "h.0.attn.bias": ("F32", [1, 1])}
    evidence = evidence_of(evidence_for("gpt2")["config"], tensors)
    evidence["shards"] = [{"name": "model.safetensors", "bytes": 1}]
    scale = build_scale_model(evidence, tmp_path / "model")
    stored = load_file(scale.folder / "model.safetensors")  # one file, as the target has
    assert "h.6.mlp.c_fc.weight" in stored
    facts = read_facts(str(scale.folder))
    load_target(facts, Target(model=facts.path), torch.device("cpu"), torch.float32)


@pytest.mark.real_model
def test_tensors_of_a_real_model_have_its_names(smollm2: Path, tmp_path: Path) -> None:
    scale = build_scale_model(read_evidence(str(smollm2)), tmp_path / "model")
    assert scale.notes == ()
    assert [file.name for file in scale.folder.glob("*.safetensors")] == ["model.safetensors"]


# ---- Weights ----


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_weights_are_the_seeds(tmp_path: Path) -> None:
    evidence = evidence_of({**CONFIG, "head_dim": 32})
    first, again, other = (
        weights_of(build_scale_model(evidence, tmp_path / name, seed=seed).folder)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_no_two_weights_are_alike(tmp_path: Path) -> None:
    weights = weights_of(build_scale_model(evidence_of({**CONFIG, "head_dim": 32}), tmp_path / "model").folder)
    assert len({tensor.flatten()[0].item() for tensor in weights.values()}) == len(weights)


def test_norms_are_not_all_one_and_biases_not_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = random_weight("model.norm.weight", (512,), generator)
    assert 0.1 < (norm - 1).std() < 0.3
    router = random_weight("model.layers.3.mlp.gate.e_score_correction_bias", (512,), generator)
    assert 0.01 < router.std() < 0.1


def test_the_dtype_is_that_asked_for(tmp_path: Path) -> None:
    scale = build_scale_model(evidence_for("llama-3.2-1b"), tmp_path / "model", dtype="bfloat16")
    assert {tensor.dtype for tensor in weights_of(scale.folder).values()} == {torch.bfloat16}
    assert read_facts(str(scale.folder)).dtype == "bfloat16"


def test_full_width_keeps_every_size_but_the_number_of_layers(tmp_path: Path) -> None:
    config = {**CONFIG, "num_hidden_layers": 30, "num_attention_heads": 8, "hidden_size": 512, "vocab_size": 700}
    scale = build_scale_model(evidence_of(config), tmp_path / "model", width="full", num_hidden_layers=3)
    assert scale.shrunk == {"num_hidden_layers": (30, 3)}
    assert weights_of(scale.folder)["model.embed_tokens.weight"].shape == (700, 512)


# ---- What is refused ----


def test_an_architecture_of_the_models_own_code_is_refused_by_name(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoConfig": "x.Y"}}
    with pytest.raises(TargetError, match="FooForCausalLM") as refused:
        build_scale_model(evidence_of(config), tmp_path / "model")
    assert refused.value.hint
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", sorted(UNKNOWN_TO_TRANSFORMERS))
def test_a_published_model_that_transformers_lacks_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="PixtralForConditionalGeneration"):
        build_scale_model(evidence_for(name), tmp_path / "model")


def test_a_configuration_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="transformers cannot read its configuration"):
        build_scale_model(evidence_of({**CONFIG, "hidden_act": ["silu"]}), tmp_path / "model")


def test_a_model_that_does_not_shrink_is_refused(tmp_path: Path) -> None:
    config = {**evidence_for("gpt2")["config"], "n_positions": 10_000_000}
    with pytest.raises(TargetError, match=r"makes transformer\.wpe\.weight as large as \(10000000, 256\)"):
        build_scale_model(evidence_of(config), tmp_path / "model")


def test_a_setting_with_one_number_for_each_layer_shrinks_with_them(tmp_path: Path) -> None:
    from transformers import Gemma3nTextConfig

    config = json.loads(json.dumps(Gemma3nTextConfig().to_dict()))
    config |= {"architectures": ["Gemma3nForCausalLM"], "intermediate_size": [16384] * config["num_hidden_layers"]}
    scale = build_scale_model(evidence_of(config), tmp_path / "model")
    written = json.loads((scale.folder / "config.json").read_text(encoding="utf-8"))
    assert written["intermediate_size"] == [256] * written["num_hidden_layers"]


def test_a_wrapper_whose_folder_brings_code_is_loaded_without_it(tmp_path: Path) -> None:
    """As published Kimi-K2.5 does: `auto_map` offers a causal model of its own, which nobody asked to run."""
    plain = build_scale_model(evidence_for("kimi-k2.5"), tmp_path / "model").plain
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"}
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = load_target(read_facts(str(plain)), Target(model=str(plain)), torch.device("cpu"), torch.float32)
    assert "language_model" in {name.split(".")[1] for name, _ in loaded.named_parameters()}
