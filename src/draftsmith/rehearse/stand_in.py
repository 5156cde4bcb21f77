"""A Llama of a scale model's width, beside which the engine can load the draft where it cannot beside the model."""

from __future__ import annotations

from pathlib import Path

from draftsmith.records import TargetFacts


def build_stand_in(facts: TargetFacts, folder: Path, dtype: str) -> Path:
    """Write a Llama with the hidden size, vocabulary and number of layers of a target, and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    assert facts.hidden_size is not None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_hidden_layers=facts.num_hidden_layers,
        intermediate_size=facts.hidden_size,
        num_attention_heads=facts.hidden_size // 32,
        num_key_value_heads=facts.hidden_size // 32,
        head_dim=32,
        max_position_embeddings=facts.max_position_embeddings or 4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
