from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.draft.loss import teacher_of, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.evaluate import offline
from draftsmith.evaluate.offline import Replay, hops, replay, slot_rates, target_top1
from draftsmith.evaluate.rounds import round_starts
from draftsmith.evaluate.speculate import speculative_decode
from tests.evaluate.builders import ANSWER_TOKENS, PROMPT_TOKENS, STEPS, Text, World, as_batch, open_target


def replay_text(world: World, draft: Draft, text: Text, steps: int = STEPS) -> Replay:
    top1 = target_top1(world.head, text.last, text.loss_mask)
    return replay(draft, text.input_ids, text.loss_mask, text.aux, top1, steps)


@pytest.mark.parametrize(("name", "steps"), [("trained", 1), ("trained", 4), ("untrained", 3)])
def test_the_hops_are_the_rounds_of_real_speculative_decoding(world: World, name: str, steps: int) -> None:
    draft = getattr(world, name)
    for text in world.texts:
        decoded = speculative_decode(world.target, draft, text.prompt, ANSWER_TOKENS, (), steps)
        found = replay_text(world, draft, text, steps)
        rounds = len(found.accepted)
        assert found.accepted == decoded.accepted[:rounds]
        assert found.starts == round_starts(PROMPT_TOKENS - 1, decoded.accepted)[:rounds]
        unseen = len(text.input_ids) - 1 - (found.starts[-1] + found.accepted[-1] + 1)
        assert unseen < steps + 1  # only rounds whose drafts reach past the recorded text are left out


def test_with_fewer_draft_tokens_the_hops_are_the_rounds_of_decoding_with_so_many(world: World) -> None:
    for text in world.texts:
        found = replay_text(world, world.trained, text, steps=4)
        assert [*found.fewer] == ["1", "2", "3"]
        for k in (1, 2, 3):
            decoded = speculative_decode(world.target, world.trained, text.prompt, ANSWER_TOKENS, (), k)
            hops_of_k = found.rounds(k, steps=4)
            assert hops_of_k is not None
            rounds = len(hops_of_k.accepted)
            assert hops_of_k.accepted == decoded.accepted[:rounds]
            assert hops_of_k.starts == round_starts(PROMPT_TOKENS - 1, decoded.accepted)[:rounds]
            assert len(text.input_ids) - 1 - (hops_of_k.starts[-1] + hops_of_k.accepted[-1] + 1) < 4 + 1


def test_hops_land_where_the_accepted_run_ends() -> None:
    assert hops([0, 1, 2, 3, 4, 5, 6], [1, 0, 3, 1, 2, 0, 1]) == [0, 2, 6]


def test_every_answer_of_a_conversation_begins_with_a_round() -> None:
    assert hops([4, 5, 6, 20, 21, 22], [3, 0, 0, 0, 1, 0]) == [0, 3, 4]


def test_a_conversation_of_two_turns_gives_the_rounds_of_both(world: World) -> None:
    first, second = world.texts[:2]
    ids = torch.cat([first.input_ids, second.input_ids])
    mask = torch.cat([first.loss_mask, second.loss_mask])
    aux, last = torch.cat([first.aux, second.aux]), torch.cat([first.last, second.last])
    found = replay(world.trained, ids, mask, aux, target_top1(world.head, last, mask), STEPS)
    turn = len(first.input_ids)
    assert PROMPT_TOKENS - 1 in found.starts
    assert turn + PROMPT_TOKENS - 1 in found.starts
    assert not any(turn - STEPS <= start < turn + PROMPT_TOKENS - 1 for start in found.starts)


def test_the_last_draft_of_all_slots_is_right_as_often_as_training_says(world: World) -> None:
    batch = as_batch(world.texts)
    with torch.no_grad():
        in_training = unrolled_loss(world.trained, batch, teacher_of(world.trained, world.head, batch.last), STEPS)
    rates = slot_rates([replay_text(world, world.trained, text) for text in world.texts], STEPS)
    assert rates["slots"] == in_training[-1].counted
    assert rates["per_position"][-1] == pytest.approx(int(in_training[-1].accepted) / in_training[-1].counted)


def test_aux_ids_shifted_by_one_lower_the_estimate(world: World, tiny_target: Path) -> None:
    _, shifted, _ = open_target(tiny_target, shift_aux=1)

    def accepted(text: Text, aux: torch.Tensor) -> int:
        top1 = target_top1(world.head, text.last, text.loss_mask)
        return sum(replay(world.trained, text.input_ids, text.loss_mask, aux, top1, STEPS).joint)

    right = sum(accepted(text, text.aux) for text in world.texts)
    with torch.inference_mode():
        states = [shifted.read(text.input_ids.tolist(), 1, cached=False)[1] for text in world.texts]
    wrong = sum(accepted(text, aux) for text, aux in zip(world.texts, states, strict=True))
    assert wrong < 0.9 * right


def test_target_top1_is_the_recorded_greedy_answer_and_unknown_elsewhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "HEAD_ROWS", 7)
    for text in world.texts:
        top1 = target_top1(world.head, text.last, text.loss_mask)
        assert top1[PROMPT_TOKENS - 1 : -1].tolist() == text.answer
        assert top1[: PROMPT_TOKENS - 1].tolist() == [-1] * (PROMPT_TOKENS - 1)
        assert top1[-1] == -1


def test_a_text_too_short_for_a_round_gives_none(world: World) -> None:
    text = world.texts[0]
    end = PROMPT_TOKENS + STEPS
    top1 = target_top1(world.head, text.last, text.loss_mask)
    found = replay(world.trained, text.input_ids[:end], text.loss_mask[:end], text.aux[:end], top1[:end], STEPS)
    nothing = {str(k): {"starts": [], "accepted": []} for k in range(1, STEPS)}
    assert found == Replay([], [], 0, [0] * STEPS, [0] * STEPS, nothing)


def test_joint_conditional_and_unconditional_rates_are_told_apart() -> None:
    correct = torch.tensor([[1, 1, 0], [1, 0, 1]])
    joint = correct.cumprod(-1)
    found = Replay([], [], 2, correct.sum(0).tolist(), joint.sum(0).tolist())
    rates = slot_rates([found], steps=3)
    assert rates["per_position"] == [1, 0.5, 0]
    assert rates["conditional_per_position"] == [1, 0.5, 0]
    assert rates["unconditional_per_position"] == [1, 0.5, 0.5]
