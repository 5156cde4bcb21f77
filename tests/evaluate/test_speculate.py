from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.draft.model import Draft
from draftsmith.errors import TargetError
from draftsmith.evaluate.speculate import (
    Decoded,
    DraftCache,
    TargetReader,
    greedy_decode,
    speculative_decode,
    stop_length,
)
from tests.conftest import build_tiny_target
from tests.evaluate.builders import ANSWER_TOKENS, STEPS, World, make_draft, make_prompts, open_target


def count_accepted(world: World, draft: Draft, target: TargetReader) -> int:
    """Accepted drafts over all prompts, having checked that every text is what the target writes alone."""
    accepted = 0
    for text in world.texts:
        decoded = speculative_decode(target, draft, text.prompt, ANSWER_TOKENS, (), STEPS)
        assert decoded.tokens == text.answer
        accepted += sum(decoded.accepted)
    return accepted


@pytest.mark.parametrize(("name", "steps"), [("trained", 1), ("trained", 5), ("untrained", 2)])
def test_the_text_equals_plain_greedy_decoding_token_by_token(world: World, name: str, steps: int) -> None:
    for text in world.texts:
        decoded = speculative_decode(world.target, getattr(world, name), text.prompt, ANSWER_TOKENS, (), steps)
        assert decoded.tokens == text.answer
        assert all(0 <= accepted <= steps for accepted in decoded.accepted)


def test_training_raises_acceptance(world: World, decoded: list[Decoded]) -> None:
    accepted = sum(sum(found.accepted) for found in decoded)
    assert accepted > 20 + count_accepted(world, world.untrained, world.target)


def test_aux_ids_shifted_by_one_are_lossless_and_lower_acceptance(
    world: World, decoded: list[Decoded], tiny_target: Path
) -> None:
    _, shifted, _ = open_target(tiny_target, shift_aux=1)
    accepted = sum(sum(found.accepted) for found in decoded)
    assert count_accepted(world, world.trained, shifted) < 0.9 * accepted


def test_wrong_rope_positions_are_lossless_and_lower_acceptance(world: World, decoded: list[Decoded]) -> None:
    astray = copy.deepcopy(world.trained)
    astray.inv_freq = astray.inv_freq * 0
    accepted = sum(sum(found.accepted) for found in decoded)
    assert count_accepted(world, astray, world.target) < 0.9 * accepted


def test_an_end_token_ends_the_text_and_is_part_of_it(world: World) -> None:
    for text in world.texts:
        end = text.answer[ANSWER_TOKENS // 2]
        decoded = speculative_decode(world.target, world.trained, text.prompt, ANSWER_TOKENS, (end,), STEPS)
        assert decoded.tokens == text.answer[: text.answer.index(end) + 1]
        assert decoded.tokens == greedy_decode(world.target, text.prompt, ANSWER_TOKENS, (end,))


def test_the_round_in_which_the_text_ends_counts_whole_as_in_vllm(world: World, decoded: list[Decoded]) -> None:
    """vLLM counts a round before it looks for a stop, so that stopping changes no round, but makes no more."""
    for text, unending in zip(world.texts[:2], decoded, strict=False):
        for end in range(2, 12):
            stopped = speculative_decode(world.target, world.trained, text.prompt, end, (), STEPS)
            rounds, written = 0, 1
            while written < end:
                written += 1 + unending.accepted[rounds]
                rounds += 1
            assert stopped.tokens == text.answer[:end]
            assert stopped.accepted == unending.accepted[:rounds]


def test_the_prefill_token_needs_no_round(world: World) -> None:
    prompt = world.texts[0].prompt
    assert speculative_decode(world.target, world.trained, prompt, 1, (), STEPS).accepted == []
    assert len(speculative_decode(world.target, world.trained, prompt, 2, (), STEPS).accepted) == 1


def test_auxiliary_states_are_the_inputs_of_the_layers_that_canonical_ids_name(tiny_target: Path) -> None:
    facts, target, model = open_target(tiny_target)
    ids = make_prompts()[0]
    with torch.inference_mode():
        inputs = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        _, whole = target.read(ids, keep=1, cached=False)
        pieces = [target.read(ids[:5], keep=1)[1], target.read(ids[5:], keep=1)[1]]
    expected = torch.stack([inputs[id][0] for id in facts.aux_layer_ids or ()], dim=1)
    assert torch.equal(whole, expected)
    torch.testing.assert_close(torch.cat(pieces), expected)


def test_a_prompt_of_one_token_can_be_decoded(world: World) -> None:
    plain = greedy_decode(world.target, [5], 12, ())
    assert speculative_decode(world.target, world.trained, [5], 12, (), STEPS).tokens == plain


def test_a_target_with_sliding_windows_is_decoded_past_its_window(tmp_path: Path, world: World) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = build_tiny_target(tmp_path)
    shape = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    size = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.2}
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**shape, **size, sliding_window=6)).save_pretrained(folder)
    _, target, _ = open_target(folder)
    for prompt in make_prompts()[:2]:
        plain = greedy_decode(target, prompt, 24, ())
        assert speculative_decode(target, world.untrained, prompt, 24, (), STEPS).tokens == plain


def test_a_recurrent_target_is_refused_before_any_decoding() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=4, state_size=2))
    with pytest.raises(TargetError, match=r"recurrent state(.|\n)*evaluate\.prompts=0"):
        TargetReader(model, nn.ModuleList(), ())


def test_the_draft_cache_attends_as_one_causal_pass_does() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(7, 4, 6), torch.randn(7, 2, 6), torch.randn(7, 2, 6)
    cache = DraftCache()
    pieces = [cache(query[a:b], key[a:b], value[a:b]) for a, b in ((0, 3), (3, 4), (4, 7))]
    wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query, wide[0]) / 6**0.5
    scores = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(torch.cat(pieces), torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1]))


def test_a_text_ends_at_its_first_end_token_or_its_longest_length() -> None:
    assert stop_length([5, 6], 4, (7,)) is None
    assert stop_length([5, 7, 6, 7], 9, (7,)) == 2
    assert stop_length([5, 6, 7], 2, (7,)) == 2


@pytest.mark.real_model
def test_smollm2_writes_the_same_in_rounds_as_alone(smollm2: Path) -> None:
    from draftsmith.evaluate.lossless import deviations
    from draftsmith.recipe import Target
    from draftsmith.target import load_head, load_tokenizer

    facts, target, _ = open_target(smollm2)
    head = load_head(facts, torch.device("cpu"), torch.float32)
    draft = make_draft(facts, head, list(range(0, 8192)))
    tokenizer = load_tokenizer(facts, Target(model=str(smollm2)))
    for question in ("Name three rivers.", "Write a Python function that adds two numbers."):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        plain = greedy_decode(target, prompt, 16, facts.eos_token_ids)
        decoded = speculative_decode(target, draft, prompt, 16, facts.eos_token_ids, STEPS)
        with torch.inference_mode():
            logits, _ = target.read(prompt + plain, keep=len(plain) + 1, cached=False)
        assert decoded.tokens == plain
        assert deviations(logits[:-1], plain) == []
