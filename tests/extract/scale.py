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


def qwen3_moe(folder: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_common(8),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    return _save(folder, Qwen3MoeForCausalLM, config)


def deepseek_v3(folder: Path) -> Path:
    """MLA with the head sizes that vLLM's CPU kernel takes, and YaRN: that kernel leaves plain RoPE half done."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

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
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": LONGEST // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"  # vLLM reads these; transformers assumes them
    return _save(folder, DeepseekV3ForCausalLM, config)


def gpt2(folder: Path) -> Path:
    """Has no EAGLE-3 interface in vLLM, so that it is captured by hooks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=128,
        n_layer=8,
        n_head=4,
        initializer_range=0.1,
        dtype="float32",
        bos_token_id=0,
        eos_token_id=0,
    )
    return _save(folder, GPT2LMHeadModel, config)
