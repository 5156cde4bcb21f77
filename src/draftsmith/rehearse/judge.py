"""Is what an engine wrote the model's own greedy text, by transformers?

In bfloat16 a mixture of experts is not quite its own: tokens whose experts are nearly tied go to others, so that even
the reference, computed once in bfloat16 and once in float32, chooses other tokens now and then. How often it does is
measured on the texts themselves, and twice that is allowed to an engine, which rounds at other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.evaluate.lossless import deviations
from draftsmith.extract.parity import NOISE
from draftsmith.recipe import Target
from draftsmith.records import TargetFacts
from draftsmith.target import load_target, take_long_factors

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Judgement:
    tokens: int
    others: int  # that the model would not have written, near-ties of logits left aside
    explained: float  # so many of them by rounding; 0 where no experts are chosen or nothing is rounded

    @property
    def own(self) -> bool:
        """Never where half are others: a model that rounding changes as much as that cannot be judged by its texts."""
        return self.others <= min(self.explained, self.tokens / 2)


def judge(
    facts: TargetFacts, target: Target, device: torch.device, dtype: torch.dtype, prompts: Texts, answers: Texts,
    rope_factors: str | None = None,
) -> Judgement:  # fmt: skip
    """Read prompts and answers in one forward each.

    Args:
        facts, target: of the model for transformers.
        dtype: that the engine computes in.
        answers: what it wrote after each prompt.
        rope_factors: of LongRoPE, that the engine takes.
    """
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    logits = _logits(facts, target, device, dtype, texts, rope_factors)
    others = sum(
        _others(found[-len(answer) - 1 : -1], answer) for found, answer in zip(logits, answers, strict=True) if answer
    )
    tokens, explained = sum(map(len, answers)), 0.0
    if facts.num_experts and dtype != torch.float32:
        exact = _logits(facts, target, device, torch.float32, texts, rope_factors)
        changed = sum(_others(one, found.argmax(-1).tolist()) for one, found in zip(exact, logits, strict=True))
        explained = NOISE * changed / sum(map(len, texts)) * tokens
    return Judgement(tokens, others, explained)


def _logits(
    facts: TargetFacts, target: Target, device: torch.device, dtype: torch.dtype, texts: Texts, rope_factors: str | None
) -> list[torch.Tensor]:
    """[T, Vt] of each text."""
    model = load_target(facts, target, device, dtype)
    if rope_factors == "long":
        take_long_factors(model)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([list(text)], device=device)).logits[0] for text in texts]


def _others(logits: torch.Tensor, tokens: Sequence[int]) -> int:
    return sum(not found.tie for found in deviations(logits, list(tokens)))
