"""Held-out prompts sampled with the draft, and each token's place in the target's own distribution."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from draftsmith.evaluate.held_out import HeldOut, choose_prompts, first_prompt
from draftsmith.evaluate.journal import work_through
from draftsmith.evaluate.lossless import places
from draftsmith.evaluate.sampling import Sampling, distribution
from draftsmith.evaluate.speculate import TargetReader, speculative_decode


def sample_prompts(held_out: HeldOut, target: TargetReader) -> dict[str, dict[str, Any]]:
    """Decode the prompts of `decode_prompts` again, at temperature, with the trained draft."""
    settings = held_out.recipe.evaluate
    prompts = choose_prompts(held_out)

    def work(id: str) -> dict[str, Any]:
        prompt = first_prompt(held_out.store[held_out.indexes[id]])
        sampling = Sampling(
            temperature=settings.temperature,
            draft_temperature=settings.temperature if settings.draft_sample_method == "probabilistic" else 0.0,
            seed=zlib.crc32(f"{held_out.recipe.seed} {id}".encode()),
        )
        decoded = speculative_decode(
            target,
            held_out.drafts["trained"],
            prompt,
            settings.max_new_tokens,
            held_out.facts.eos_token_ids,
            held_out.steps,
            sampling,
        )
        with torch.inference_mode():
            logits, _ = target.read(prompt + decoded.tokens, keep=len(decoded.tokens) + 1, cached=False)
        generator = torch.Generator(logits.device).manual_seed(sampling.seed + 1)
        found = places(distribution(logits[:-1], settings.temperature), decoded.tokens, generator)
        return {
            "prompt_ids": prompt,
            "answer_ids": decoded.tokens,
            "accepted": decoded.accepted,
            "places": found.tolist(),
        }

    results = work_through(held_out.folder / "sampled.jsonl", "sample", "prompts", prompts, work)
    return dict(zip(prompts, results, strict=True))
