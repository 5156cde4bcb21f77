"""An engine's text is judged by the model's own choices, and by how far rounding changes those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Target
from draftsmith.records import TargetFacts
from draftsmith.rehearse.judge import Judgement, judge
from draftsmith.rehearse.scale_config import ORDINARY_TOKENS
from draftsmith.rehearse.scale_model import build_scale_model
from draftsmith.target import load_target

CONFIGS = Path(__file__).parents[1] / "probe" / "configs"
CPU, BF16 = torch.device("cpu"), torch.bfloat16
CHANCE = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(1, ORDINARY_TOKENS, (12 + n,), generator=CHANCE).tolist() for n in range(6)]


def scaled(name: str, folder: Path) -> TargetFacts:
    evidence = {"path": name, "config": json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))}
    return read_facts(str(build_scale_model(evidence, folder / name).plain))


def judged(facts: TargetFacts, dtype: torch.dtype, answers: list[list[int]]) -> Judgement:
    return judge(facts, Target(model=facts.path), CPU, dtype, PROMPTS, answers)


def greedy(facts: TargetFacts, dtype: torch.dtype) -> list[list[int]]:
    """Decoded with a cache, one token at a time: rounded at other places than when all is read at once."""
    model = load_target(facts, Target(model=facts.path), CPU, dtype)
    texts = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
        for prompt in PROMPTS
    ]
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


def anything() -> list[list[int]]:
    return [torch.randint(1, ORDINARY_TOKENS, (12,), generator=CHANCE).tolist() for _ in PROMPTS]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2.5"])
def test_experts_that_rounding_swaps_are_no_fault_and_text_of_another_model_is(name: str, tmp_path: Path) -> None:
    facts = scaled(name, tmp_path)
    rounded = greedy(facts, BF16)
    found = judged(facts, BF16, rounded)
    assert found.own
    assert 0 < found.explained < 30, "of 72: what it lets pass is a third of a text, and no more"
    assert found.tokens == 72
    assert judged(facts, torch.float32, greedy(facts, torch.float32)).others == 0
    other = judged(facts, BF16, anything())
    assert not other.own
    assert other.others > 60
    half = [one[:6] + any_[6:] for one, any_ in zip(rounded, anything(), strict=True)]
    assert not judged(facts, BF16, half).own


def test_a_dense_model_is_allowed_nothing(tmp_path: Path) -> None:
    facts = scaled("llama-3.1-8b", tmp_path)
    answers = greedy(facts, BF16)
    assert judged(facts, BF16, answers) == Judgement(72, 0, 0.0)
    answers[0][3] = (answers[0][3] + 1) % ORDINARY_TOKENS
    assert not judged(facts, BF16, answers).own


def test_texts_that_rounding_changes_by_half_say_nothing() -> None:
    assert not Judgement(tokens=10, others=6, explained=20.0).own
