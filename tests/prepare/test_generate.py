from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import recipe as recipes
from draftsmith.prepare.generate import decode, sampler
from draftsmith.recipe import Regenerate
from draftsmith.target import load_target
from tests.prepare.chats import facts_of

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40], [100, 101, 102], [7, 7, 7, 7]]
GREEDY = sampler(Regenerate(), 0, torch.device("cpu"))
LENGTH = 24


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    target = recipes.Target(model=str(tiny_target))
    return load_target(facts_of(tiny_target), target, torch.device("cpu"), torch.float32)


def generated(model: Any, prompt: list[int], stop_ids: list[int], length: int = LENGTH) -> list[int]:
    """What `generate` of transformers writes after one prompt alone."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def test_a_batch_says_what_generate_says_of_each_prompt_alone(model: Any) -> None:
    free = [generated(model, prompt, [319]) for prompt in PROMPTS]
    assert decode(model, PROMPTS, [LENGTH] * 4, frozenset([319]), GREEDY) == free
    # Stop ids at which the answers end at different places, so that rows leave the batch one after the other.
    stops = [free[0][3], free[2][9]]
    alone = [generated(model, prompt, stops) for prompt in PROMPTS]
    assert len({len(answer) for answer in alone}) > 1
    assert decode(model, PROMPTS, [LENGTH] * 4, frozenset(stops), GREEDY) == alone


MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "qwen3_next": MIXTURE
    | {"num_experts": 4, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "deepseek_v3": MIXTURE
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_windows_states_and_latents_are_kept_in_step_too(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **KINDS[kind]})).eval()
    stops = [generated(model, PROMPTS[0], [319])[3], generated(model, PROMPTS[2], [319])[9]]
    alone = [generated(model, prompt, stops) for prompt in PROMPTS]
    assert len({len(answer) for answer in alone}) > 1
    assert decode(model, PROMPTS, [LENGTH] * 4, frozenset(stops), GREEDY) == alone


def test_each_answer_keeps_to_its_own_limit(model: Any) -> None:
    limits = [1, 5, 9, 3]
    answers = decode(model, PROMPTS, limits, frozenset(), GREEDY)
    assert answers == [generated(model, p, [319], n) for p, n in zip(PROMPTS, limits, strict=True)]


def test_sampling_follows_the_distribution_within_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
    settings = Regenerate(temperature=1.0, top_p=0.7)
    drawn = sampler(settings, 7, torch.device("cpu"))(logits)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0, 0]), atol=0.015, rtol=0)
    assert torch.equal(drawn, sampler(settings, 7, torch.device("cpu"))(logits))
    assert not torch.equal(drawn, sampler(settings, 8, torch.device("cpu"))(logits))


def test_temperature_sharpens_the_distribution() -> None:
    logits = torch.tensor([0.6, 0.4]).log().repeat(20_000, 1)
    drawn = sampler(Regenerate(temperature=0.5), 1, torch.device("cpu"))(logits)
    expected = 0.36 / (0.36 + 0.16)
    assert abs((drawn == 0).float().mean().item() - expected) < 0.015
