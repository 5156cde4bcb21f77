"""Held-out prompts sampled with the draft, each token's place in the target's own distribution, and what drafts would
accept at that temperature: on these texts, and on the recorded ones."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.evaluate.expected import taken
from draftsmith.evaluate.held_out import HeldOut, choose_prompts, first_prompt
from draftsmith.evaluate.journal import work_through
from draftsmith.evaluate.lossless import places
from draftsmith.evaluate.sampling import Sampling, distribution
from draftsmith.evaluate.speculate import TargetReader, speculative_decode
from draftsmith.recipe import Recipe

METHODS = ("greedy", "probabilistic")  # vLLM's draft_sample_method


def sample_prompts(held_out: HeldOut, target: TargetReader) -> dict[str, dict[str, Any]]:
    """Decode the prompts of `decode_prompts` again, at temperature, with the trained draft; then read each text with
    every draft."""
    settings = held_out.recipe.evaluate
    prompts = choose_prompts(held_out)

    def work(id: str) -> dict[str, Any]:
        prompt = first_prompt(held_out.store[held_out.indexes[id]])
        sampling = _sampling(
            held_out, settings.draft_sample_method, seed=zlib.crc32(f"{held_out.recipe.seed} {id}".encode())
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
        text, first = prompt + decoded.tokens, len(prompt) - 1
        with torch.inference_mode():
            logits, aux = target.read(text, keep=len(decoded.tokens) + 1, cached=False)
        generator = torch.Generator(logits.device).manual_seed(sampling.seed + 1)
        found = places(distribution(logits[:-1], settings.temperature), decoded.tokens, generator)
        ids = torch.tensor(text, device=held_out.device)
        mask = torch.arange(len(text), device=held_out.device) > first
        return {
            "prompt_ids": prompt,
            "answer_ids": decoded.tokens,
            "accepted": decoded.accepted,
            "places": found.tolist(),
            "own_tokens": len(decoded.tokens),
            "taken": _read_each(held_out, ids, mask, aux, lambda at: logits[at - first]),
        }

    results = work_through(held_out.folder / "sampled.jsonl", "sample", "prompts", prompts, work)
    return dict(zip(prompts, results, strict=True))


def read_recorded(held_out: HeldOut) -> dict[str, dict[str, Any]]:
    """For every held-out sample, how likely each draft's tokens are to be taken at temperature.

    Slot by slot only where rounds may be made of it: of the target's own samples.
    """
    own = sampled_by_the_target(held_out.recipe)

    def work(id: str) -> dict[str, Any]:
        sample = held_out.store[held_out.indexes[id]]
        ids, mask, aux, last = (
            x.to(held_out.device) for x in (sample.input_ids, sample.loss_mask, sample.aux, sample.last)
        )
        head = held_out.head
        found = _read_each(held_out, ids, mask, aux, lambda at: head.logits(last[at].to(head.lm_head.dtype)))
        return {
            "own_tokens": int(mask.sum()),
            "slots": len(found[f"trained {METHODS[0]}"]["slots"]),
            "overlap": {name: torch.tensor(one["overlaps"]).sum(0).tolist() for name, one in found.items()},
            "taken": found if own else None,
        }

    ids = list(held_out.indexes)
    results = work_through(held_out.folder / "recorded_at_temperature.jsonl", "at temperature", "samples", ids, work)
    return dict(zip(ids, results, strict=True))


def sampled_by_the_target(recipe: Recipe) -> bool:
    """Whether the recorded answers were drawn from the very distribution that serving at this temperature draws from.

    A server may cut the distribution by defaults of its own.
    """
    written, wanted = recipe.prepare.regenerate, recipe.evaluate.temperature
    return written.using == "transformers" and written.top_p == 1 and written.temperature == wanted > 0


def _read_each(
    held_out: HeldOut,
    ids: torch.Tensor,
    mask: torch.Tensor,
    aux: torch.Tensor,
    logits_after: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Of each draft, proposing as the recipe says; of the trained one also the other way."""
    wanted = held_out.recipe.evaluate.draft_sample_method
    return {
        f"{name} {method}": dataclasses.asdict(
            taken(draft, ids, mask, aux, logits_after, _sampling(held_out, method), held_out.steps)
        )
        for name, draft in held_out.drafts.items()
        for method in METHODS
        if name == "trained" or method == wanted
    }


def _sampling(held_out: HeldOut, method: str, seed: int = 0) -> Sampling:
    temperature = held_out.recipe.evaluate.temperature
    return Sampling(temperature, temperature if method == "probabilistic" else 0.0, seed)
