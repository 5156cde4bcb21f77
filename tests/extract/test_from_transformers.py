from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.errors import CaptureError, TargetError
from draftsmith.extract.from_transformers import Reference, batches, head_errors, measure_parity, refuse_wrong_head
from draftsmith.layers import to_sglang
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Target
from draftsmith.records import Sample, TargetFacts
from draftsmith.target import load_head, load_target
from tests.store.random_store import largest_error

Tiny = tuple[TargetFacts, Any, Reference]
CPU = torch.device("cpu")
IDS = (2, 4, 5)
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# What sets each apart: how it norms before its head, how it scales, where its text model lies.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "llama with a tied head": ("LlamaForCausalLM", "LlamaConfig", TEXT | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", TEXT),
    "gemma2, soft-capped logits": ("Gemma2ForCausalLM", "Gemma2Config", TEXT | {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", TEXT),
    "gemma3 inside its wrapper": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": TEXT, "vision_config": VISION, "image_token_index": 90},
    ),
    "gpt2, LayerNorm": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4}),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        TEXT | MOE | MLA | {"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "cohere2, LayerNorm without bias, scaled logits": ("Cohere2ForCausalLM", "Cohere2Config", TEXT),
    "granite, divided logits": ("GraniteForCausalLM", "GraniteConfig", TEXT | {"logits_scaling": 4.0}),
    "vaultgemma": ("VaultGemmaForCausalLM", "VaultGemmaConfig", TEXT | {"final_logit_softcapping": 3.0}),
    "minimax m3, one more than its weight": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "step 3.5, one more than its weight": (
        "Step3p7ForConditionalGeneration",
        "Step3p7Config",
        {
            "vision_config": VISION,
            "text_config": TEXT
            | {"moe_num_experts": 4, "moe_top_k": 2, "sliding_window": 16, "layer_types": ["full_attention"] * 4},
        },
    ),
    "dbrx, LayerNorm without bias": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"vocab_size": 96, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 256},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        },
    ),
    "hyperclovax, multiplied logits": ("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", TEXT | {"logits_scaling": 4.0}),
    "minicpm3, state divided before the head": (
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        TEXT | MLA | {"num_key_value_heads": 4, "head_dim": 4, "dim_model_base": 8},
    ),
    "falcon h1, multiplied logits": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **TEXT,
            **{"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
            **{"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8},
        },
    ),
    "phi, biased head": ("PhiForCausalLM", "PhiConfig", TEXT | {"num_key_value_heads": 4}),
    "gpt-oss, sinks": ("GptOssForCausalLM", "GptOssConfig", TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(folder: Path, architecture: str) -> Path:
    """A random model whose norms are not all ones, so that one more or one less of them shows."""
    model_class, config_class, settings = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            else:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[TargetFacts, Any]:
    facts = read_facts(str(folder))
    return facts, load_target(facts, Target(model=str(folder)), CPU, dtype)


@pytest.fixture(scope="module")
def tiny(tiny_target: Path) -> Tiny:
    facts, model = load(tiny_target)
    return facts, model, Reference(model, facts, IDS)


def samples(lengths: Sequence[int], vocabulary: int = 90) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            id=f"s{number}",
            conversation_id=f"c{number}",
            domain="chat",
            split="train",
            input_ids=torch.randint(3, vocabulary, (length,), generator=generator).tolist(),
            loss_mask=[position % 2 for position in range(length)],
        )
        for number, length in enumerate(lengths)
    ]


# ---- layer ids --------------------------------------------------------------------------------------------------


class AddsPowerOfTwo(LlamaDecoderLayer):
    """Decoder layer i adds 2**i to the residual stream."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.added = 2.0**index

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + self.added


@pytest.fixture
def powers(tiny_target: Path) -> tuple[TargetFacts, Any]:
    """A Llama of zero embeddings whose layer i adds 2**i: the state after a layers is 2**a - 1."""
    facts, model = load(tiny_target)
    model.model.layers = nn.ModuleList([AddsPowerOfTwo(model.config, index) for index in range(8)])
    model.model.embed_tokens.weight.zero_()
    return facts, model


def test_id_a_is_the_sum_of_the_layers_below_a(powers: tuple[TargetFacts, Any]) -> None:
    facts, model = powers
    every_id = tuple(range(8))
    (states,) = Reference(model, facts, every_id).states([[5, 6, 7]])
    assert states.shape == (3, 9, 32)
    for id in (*every_id, 8):
        assert (states[:, id] == sum(2**layer for layer in range(id))).all()


def test_transformers_hidden_states_have_canonical_ids_but_for_the_last(powers: tuple[TargetFacts, Any]) -> None:
    _, model = powers
    hidden = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    for index in range(8):
        assert (hidden[index] == 2**index - 1).all()
    assert not (hidden[8] == 2**8 - 1).any()
    assert torch.equal(hidden[8], model.model.norm(torch.full_like(hidden[8], 2**8 - 1)))


def test_sglangs_ids_name_the_layer_whose_output_is_read(powers: tuple[TargetFacts, Any]) -> None:
    facts, model = powers
    outputs = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda layer, inputs, output, index=index: outputs.update({index: output}))
    (states,) = Reference(model, facts, IDS).states([[5, 6, 7]])
    for place, named in enumerate(to_sglang(IDS)):
        assert torch.equal(states[:, place], outputs[named][0])


# ---- every architecture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_targets_logits_follow_from_its_captured_last_state(tmp_path: Path, architecture: str) -> None:
    facts, model = load(build(tmp_path, architecture))
    reference = Reference(model, facts, (1, 2, 3))
    head = load_head(facts, CPU, torch.float32)
    last, logits = reference.last_and_logits([5, 6, 7, 8, 9, 10, 11])
    rows = torch.tensor([3, 50, 7])
    torch.testing.assert_close(head.logits(last), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(last, rows), logits[:, rows], rtol=1e-5, atol=1e-5)
    parity = measure_parity(reference, head, samples([9, 4, 12]))
    assert parity["head_error"] < 1e-6
    assert parity["head_error_without_norm"] > 0.01
    assert parity["head_error_norm_twice"] > 0.01
    assert parity["padding_error_max"] < 1e-5
    hidden = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True).hidden_states
    (states,) = reference.states([[5, 6, 7, 8]])
    for place, id in enumerate((1, 2, 3)):
        torch.testing.assert_close(states[:, place], hidden[id][0], rtol=1e-5, atol=1e-5)


def test_bfloat16_is_within_its_tolerance(tiny_target: Path) -> None:
    facts, model = load(tiny_target, torch.bfloat16)
    parity = measure_parity(
        Reference(model, facts, IDS), load_head(facts, CPU, torch.bfloat16), samples([20, 7, 33], vocabulary=320)
    )
    assert parity["head_error"] < parity["tolerance"] == 5e-2


def test_a_last_state_that_was_normed_already_is_refused_with_the_figures(
    tiny: Tiny,
) -> None:
    facts, _, reference = tiny
    head = load_head(facts, CPU, torch.float32)
    last, logits = reference.last_and_logits([5, 6, 7, 8])
    errors = head_errors(head, head.norm(last), logits)
    with pytest.raises(CaptureError, match=r"norm applied once, .* without it and .* twice"):
        refuse_wrong_head(errors, tolerance=1e-4)


def test_a_head_that_norms_otherwise_than_the_target_is_refused(tmp_path: Path) -> None:
    facts, model = load(build(tmp_path, "gemma3"))
    head = load_head(replace(facts, text_model_type="llama"), CPU, torch.float32)
    with pytest.raises(CaptureError, match="do not follow"):
        measure_parity(Reference(model, facts, (1, 2, 3)), head, samples([9, 4]))


# ---- batches ----------------------------------------------------------------------------------------------------


def test_padding_and_company_change_nothing(tiny: Tiny) -> None:
    _, _, reference = tiny
    drawn = samples([3, 40, 17, 1], vocabulary=320)
    together = reference.features(drawn)
    for sample, batched in zip(drawn, together, strict=True):
        (alone,) = reference.features([sample])
        assert largest_error(batched.aux, alone.aux) < 1e-5
        assert largest_error(batched.last, alone.last) < 1e-5


def test_each_sample_has_a_row_for_each_of_its_tokens(tiny: Tiny) -> None:
    _, _, reference = tiny
    drawn = samples([3, 40, 17, 1], vocabulary=320)
    for sample, features in zip(drawn, reference.features(drawn), strict=True):
        tokens = len(sample.input_ids)
        assert (features.id, features.domain, features.split) == (sample.id, "chat", "train")
        assert features.input_ids.tolist() == sample.input_ids
        assert features.loss_mask.tolist() == [bool(own) for own in sample.loss_mask]
        assert features.aux.shape == (tokens, 3, 32)
        assert features.last.shape == (tokens, 32)


def test_the_head_is_not_computed(tiny_target: Path) -> None:
    facts, model = load(tiny_target)
    reference = Reference(model, facts, IDS)
    called: list[nn.Module] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: called.append(module))
    reference.features(samples([5]))
    assert not called


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_batches_hold_every_sample_once_within_the_budget(lengths: list[int], batch_tokens: int) -> None:
    drawn = [
        replace(sample, input_ids=[0] * length)
        for sample, length in zip(samples([1] * len(lengths)), lengths, strict=True)
    ]
    formed = list(batches(drawn, batch_tokens))
    assert sorted(sample.id for batch in formed for sample in batch) == sorted(sample.id for sample in drawn)
    for batch in formed:
        longest = max(len(sample.input_ids) for sample in batch)
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens
    assert formed == list(batches(iter(drawn), batch_tokens))


# ---- what goes wrong --------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """A text model of its own making: layers are called by keyword and return tuples."""

    class Layer(nn.Module):
        def forward(self, *, attention_mask: None, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return hidden_states.add_(1.0), None  # into its input, as some do

    def __init__(self, unused: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.unused = unused

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        state = torch.zeros(*input_ids.shape, 8)
        for index, layer in enumerate(self.layers):
            if index != self.unused:
                state, _ = layer(attention_mask=None, hidden_states=state)
        return self.norm(state)


def wrapped(tiny: Tiny, stack: Stack, hidden_size: int = 8) -> Reference:
    facts = replace(tiny[0], num_hidden_layers=4, hidden_size=hidden_size, final_norm_key="language_model.norm.weight")
    model = nn.Module()
    model.language_model, model.device = stack, CPU
    return Reference(model, facts, (1, 2, 3))


def test_layers_called_by_keyword_that_write_into_their_input_are_captured(
    tiny: Tiny,
) -> None:
    (states,) = wrapped(tiny, Stack()).states([[5, 6]])
    assert states[:, :, 0].tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_layer_that_is_never_called_is_an_error_that_names_it(tiny: Tiny) -> None:
    with pytest.raises(CaptureError, match="layer id 2 was not captured"):
        wrapped(tiny, Stack(unused=2)).states([[5, 6]])


def test_states_of_another_width_are_an_error(tiny: Tiny) -> None:
    with pytest.raises(CaptureError, match=r"layer id 1 is \[1, 2, 8\], not \[1, 2, 9\]"):
        wrapped(tiny, Stack(), hidden_size=9).states([[5, 6]])


def test_a_state_that_is_not_finite_names_sample_and_layer(tiny_target: Path) -> None:
    facts, model = load(tiny_target)
    model.model.embed_tokens.weight[42] = float("inf")
    good, bad = samples([4, 4])
    bad = replace(bad, input_ids=[5, 6, 42, 7])
    with pytest.raises(CaptureError, match="sample s1: the state of layer id 2 is not finite"):
        Reference(model, facts, IDS).features([good, bad])


def test_a_checkpoint_that_lacks_weights_is_refused_by_name(tmp_path: Path) -> None:
    folder = build(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_model_without_the_layers_that_the_facts_promise_is_refused(tiny: Tiny) -> None:
    with pytest.raises(TargetError, match="no list of 9 decoder layers"):
        Reference(tiny[1], replace(tiny[0], num_hidden_layers=9), IDS)
