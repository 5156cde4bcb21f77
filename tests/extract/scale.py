"""Targets of a few million weights, one for each way in which an engine runs decoder layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
LONGEST = 512  # tokens of the longest sequence that they read


def _save(folder: Path, model_class: Any, config: Any) -> Path:
    import torch

    torch.manual_seed(0)
    config.architectures = [model_class.__name__]
    model_class(config).save_pretrained(folder)
    return folder


def _common(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.1,  # so that each layer changes the stream by much more than rounding
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_common(8),
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    return _save(folder, LlamaForCausalLM, config)


def deepseek_v3(folder: Path, rope: str) -> Path:
    """MLA, with the head sizes that vLLM's CPU kernel takes. With `rope` default, that kernel leaves q unrotated; with
    yarn it does not."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = {
        "factor": 4.0,
        "original_max_position_embeddings": LONGEST // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }

    config = DeepseekV3Config(
        **_common(7),
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **(yarn if rope == "yarn" else {})},
    )
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"  # vLLM reads these; transformers assumes them
    return _save(folder, DeepseekV3ForCausalLM, config)


def phi3(folder: Path, original: int) -> Path:
    """LongRoPE, with factors that differ by much."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        **_common(8),
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": original,
        },
    )
    return _save(folder, Phi3ForCausalLM, config)
