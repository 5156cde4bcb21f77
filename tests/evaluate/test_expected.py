from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.draft.model import Draft
from draftsmith.evaluate import expected, speculate
from draftsmith.evaluate.expected import Taken, expect, expected_rounds, taken
from draftsmith.evaluate.offline import hops
from draftsmith.evaluate.rounds import Rounds, difference, round_starts, summarise
from draftsmith.evaluate.sampling import Sampling, distribution
from draftsmith.evaluate.speculate import Decoded, Drafter, TargetReader, speculative_decode
from tests.evaluate.builders import SMALL_PROMPT, STEPS, WORDS, Small, exact_texts, make_draft, open_target

TEXTS, TOKENS = 20, 24
T = 0.5


@torch.inference_mode()
def read(
    target: TargetReader, draft: Draft, prompt: list[int], answer: list[int], sampling: Sampling, steps: int
) -> Taken:
    first = len(prompt) - 1
    logits, aux = target.read(prompt + answer, keep=len(answer) + 1, cached=False)
    ids = torch.tensor(prompt + answer)
    return taken(draft, ids, torch.arange(len(ids)) > first, aux, lambda at: logits[at - first], sampling, steps)


# ---- the rounds, of given ratios ------------------------------------------------------------------------------------


def likely(draw: st.DrawFn, steps: int) -> list[list[float]]:
    return draw(st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=steps, max_size=steps), max_size=5))


def visits(slots: list[int], ratios: list[list[float]]) -> dict[tuple[int, int], float]:
    """How often each round is, by following every way that a text can come about."""
    found: dict[tuple[int, int], float] = defaultdict(float)

    def follow(slot: int, chance: float) -> None:
        if slot not in slots or not chance:
            return
        row = ratios[slots.index(slot)]
        for accepted in range(len(row) + 1):
            took = torch.tensor(row[:accepted]).prod().item()
            ends = took if accepted == len(row) else took * (1 - row[accepted])
            found[slot, accepted] += chance * ends
            if all(passed in slots for passed in range(slot, slot + accepted + 1)):  # not into the next answer
                follow(slot + accepted + 1, chance * ends)

    for slot in slots:
        if slot - 1 not in slots:
            follow(slot, 1.0)
    return {round: chance for round, chance in found.items() if chance}


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_every_way_that_a_text_can_come_about_is_counted(data: st.DataObject, steps: int, gap: int) -> None:
    ratios = likely(data.draw, steps) + likely(data.draw, steps)
    slots = [4 + i + (gap if i > 1 else 0) for i in range(len(ratios))]
    found = {(slot, accepted): weight for slot, accepted, weight in expected_rounds(slots, ratios, ratios) if weight}
    assert found == pytest.approx(visits(slots, ratios))


@given(st.lists(st.tuples(*[st.booleans()] * STEPS), min_size=1, max_size=8))
def test_drafts_that_are_taken_for_certain_make_the_hops_of_the_greedy_replay(right: list[tuple[bool, ...]]) -> None:
    slots = [*range(3), *range(5, 2 + len(right))][: len(right)]
    ratios = [[float(one) for one in row] for row in right]
    accepted = [int(torch.tensor(row).cumprod(0).sum()) for row in right]
    found = [(slot, a) for slot, a, weight in expected_rounds(slots, ratios, ratios) if weight]
    assert found == [(slots[i], accepted[i]) for i in hops(slots, accepted)]


# ---- against serving's own draft, exactly ---------------------------------------------------------------------------


@torch.inference_mode()
def chances_of_serving(small: Small, draft_temperature: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """That the first draft, and the first two of a round are taken: min(p, q) summed over all that can be drafted."""
    joint = torch.zeros(2, dtype=torch.float64)
    for newest, drafted in product(range(WORDS), repeat=2):
        text = [*SMALL_PROMPT, newest, drafted]
        logits, aux = small.target.read(text, keep=3, cached=False)
        before, p0, p1 = distribution(logits, T).double()
        monkeypatch.setattr(speculate, "draw", lambda probs, generator, token=drafted: torch.tensor([token]))
        drafter = Drafter(small.draft, draft_temperature, torch.Generator())
        _, (q0, q1) = drafter.propose([*SMALL_PROMPT[1:], newest], aux[: len(SMALL_PROMPT)], 2)
        first = before[newest] * torch.minimum(p0, q0.double())[drafted]
        joint += torch.stack([first, first * torch.minimum(p1, q1.double()).sum()])
    return joint.tolist()


@pytest.mark.parametrize("draft_temperature", [0.0, T, 1.0])
def test_the_mean_over_the_targets_texts_is_the_chance_that_serving_takes_the_drafts(
    small: Small, monkeypatch: pytest.MonkeyPatch, draft_temperature: float
) -> None:
    by_ratio, by_overlap = torch.zeros(2, 2, dtype=torch.float64)
    for text, chance in exact_texts(small.target, 3, T).items():
        found = read(small.target, small.draft, SMALL_PROMPT, list(text), Sampling(T, draft_temperature), steps=2)
        assert found.slots == [len(SMALL_PROMPT) - 1]
        ratios, overlaps = (torch.tensor(rows[0], dtype=torch.float64) for rows in (found.ratios, found.overlaps))
        by_ratio += chance * ratios.cumprod(0)
        by_overlap += chance * torch.stack([overlaps[0], ratios[0] * overlaps[1]])
        texts = expect("c", "d", found, 2, 3)
        joint = [sum(w for _, a, w in texts.each() if a > k) for k in range(2)]
        assert joint == pytest.approx([found.overlaps[0][0], found.ratios[0][0] * found.overlaps[0][1]])
    exact = chances_of_serving(small, draft_temperature, monkeypatch)
    assert 0.02 < exact[1] < exact[0] < 0.98
    assert by_ratio.tolist() == pytest.approx(exact, abs=1e-4)  # ratios are kept to four places
    assert by_overlap.tolist() == pytest.approx(exact, abs=1e-4)


# ---- against sampled decoding ---------------------------------------------------------------------------------------


def measured(id: str, decoded: Decoded, prompt: list[int], found: Taken) -> Rounds:
    """The rounds of decoding, over the slots that have an expectation."""
    starts = [start for start in round_starts(len(prompt) - 1, decoded.accepted) if start <= found.slots[-1]]
    return Rounds(id, "d", starts, decoded.accepted[: len(starts)], len(decoded.tokens))


@pytest.mark.parametrize("draft_temperature", [0.0, T])
def test_sampled_decoding_accepts_what_is_expected_within_the_interval(small: Small, draft_temperature: float) -> None:
    """Of its own texts, and of texts that were written without a draft."""
    by_decoding, same_texts, other_texts = [], [], []
    sampling = Sampling(T, draft_temperature)
    for i in range(TEXTS):
        settings = Sampling(T, draft_temperature, seed=i)
        decoded = speculative_decode(small.target, small.draft, SMALL_PROMPT, TOKENS, (), STEPS, settings)
        found = read(small.target, small.draft, SMALL_PROMPT, decoded.tokens, sampling, STEPS)
        by_decoding.append(measured(str(i), decoded, SMALL_PROMPT, found))
        same_texts.append(expect(str(i), "d", found, STEPS, TOKENS))
        plain = sample_plainly(small.target, 1000 + i)
        found = read(small.target, small.draft, SMALL_PROMPT, plain, sampling, STEPS)
        other_texts.append(expect(str(i), "d", found, STEPS, TOKENS))
    found = difference(by_decoding, same_texts, seed=0)
    assert abs(found["difference"]) < 3 * standard_error(found["confidence_95"]) < 0.2
    decoding, same, other = (summarise("", texts, STEPS, seed=0) for texts in (by_decoding, same_texts, other_texts))
    for one in (same, other):
        assert standard_error(one.confidence_95) < standard_error(decoding.confidence_95) < 0.07
        apart = abs(one.mean_acceptance_length - decoding.mean_acceptance_length)
        assert apart < 3 * standard_error(decoding.confidence_95)
    if draft_temperature == 0:  # no chance is left: the rounds are those of decoding
        for rounds, texts in zip(by_decoding, same_texts, strict=True):
            assert sorted(set(texts.starts)) == rounds.starts


def standard_error(confidence_95: tuple[float, float]) -> float:
    """A right estimate lies three of them off once in 400 seeds; outside its interval, once in 20."""
    return (confidence_95[1] - confidence_95[0]) / (2 * 1.96)


@torch.inference_mode()
def sample_plainly(target: TargetReader, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    text = list(SMALL_PROMPT)
    for _ in range(TOKENS):
        logits, _ = target.read(text, keep=1, cached=False)
        text.append(int(torch.multinomial(distribution(logits[0], T), 1, generator=generator)))
    return text[len(SMALL_PROMPT) :]


def test_slots_are_read_in_parts(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = sample_plainly(small.target, 0)
    whole = read(small.target, small.draft, SMALL_PROMPT, answer, Sampling(T, T), STEPS)
    monkeypatch.setattr(expected, "SLOTS", 7)
    assert read(small.target, small.draft, SMALL_PROMPT, answer, Sampling(T, T), STEPS) == whole
    assert len(whole.slots) == TOKENS - STEPS


def test_a_text_too_short_for_a_round_expects_none(small: Small) -> None:
    found = read(small.target, small.draft, SMALL_PROMPT, [1, 2], Sampling(T), STEPS)
    assert found == Taken([], [], [])
    assert expect("c", "d", found, STEPS, 2).accepted == []


@pytest.mark.real_model
def test_smollm2_accepts_what_is_expected_within_the_interval(smollm2: Path) -> None:
    from draftsmith.recipe import Target
    from draftsmith.target import load_head, load_tokenizer

    facts, target, _ = open_target(smollm2)
    draft = make_draft(facts, load_head(facts, torch.device("cpu"), torch.float32), list(range(0, 8192)))
    tokenizer = load_tokenizer(facts, Target(model=str(smollm2)))
    by_decoding, by_states = [], []
    for i, question in enumerate(("Name three rivers.", "What is rain?", "Tell me a story.")):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        prompt = list(prompt["input_ids"])
        decoded = speculative_decode(target, draft, prompt, TOKENS, (), STEPS, Sampling(0.7, 0.7, seed=i))
        found = read(target, draft, prompt, decoded.tokens, Sampling(0.7, 0.7), STEPS)
        by_decoding.append(measured(str(i), decoded, prompt, found))
        by_states.append(expect(str(i), "d", found, STEPS, TOKENS))
    found = difference(by_decoding, by_states, seed=0)
    assert abs(found["difference"]) < 3 * standard_error(found["confidence_95"]) < 0.3
