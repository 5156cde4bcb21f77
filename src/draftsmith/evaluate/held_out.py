"""The held-out conversations of a run, and what the drafts are worth on them: from recorded states, and decoded."""

from __future__ import annotations

import dataclasses
import gc
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.corpus import corpus_conversations
from draftsmith.draft.files import load_draft
from draftsmith.draft.model import Draft
from draftsmith.errors import CheckpointError, DataError
from draftsmith.evaluate.journal import work_through
from draftsmith.evaluate.lossless import deviations
from draftsmith.evaluate.offline import replay, target_top1
from draftsmith.evaluate.speculate import TargetReader, speculative_decode
from draftsmith.recipe import Recipe
from draftsmith.records import Features, TargetFacts
from draftsmith.rundir import RunPaths
from draftsmith.store.check import refuse_shortened
from draftsmith.store.manifest import identity
from draftsmith.store.shards import Store
from draftsmith.target import (
    TargetHead,
    decoder_layers,
    load_head,
    load_target,
    pick_device,
    pick_dtype,
    read_facts_of_run,
    take_long_factors,
)


@dataclass(frozen=True)
class HeldOut:
    """All that the measurements share."""

    recipe: Recipe
    folder: Path  # of the stage
    facts: TargetFacts
    head: TargetHead
    drafts: dict[str, Draft]  # trained, and untrained where wanted
    store: Store
    indexes: dict[str, int]  # place in the store of each held-out sample, by id
    conversations: dict[str, str]  # of each sample, by id
    device: torch.device
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        return self.recipe.evaluate.num_speculative_tokens


def open_held_out(recipe: Recipe, paths: RunPaths) -> HeldOut:
    """Open the store and the drafts of a run.

    Raises:
        StoreError: the store was made of another target or with another tokenizer; names the field.
        CheckpointError: a draft is not there, damaged, or was trained on other auxiliary layers.
        DataError: nothing was held out.
    """
    facts = read_facts_of_run(paths)
    device = pick_device(recipe.evaluate.device)
    dtype = pick_dtype(recipe.evaluate.dtype, facts, device)
    head = load_head(facts, device, dtype)
    store = Store.open(paths.require(paths.store, "extract"), expect=identity(facts))
    refuse_shortened(paths.store, len(store))
    indexes = {
        id: i for i, (id, split) in enumerate(zip(store.sample_ids, store.splits, strict=True)) if split == "validation"
    }
    if not indexes:
        raise DataError(
            "no conversation was held out", where="evaluate", hint="raise prepare.validation_fraction, or add data"
        )
    folders = {"trained": "final"} | ({"untrained": "initial"} if recipe.evaluate.compare_untrained else {})
    drafts = {}
    for name, folder in folders.items():
        drafts[name] = load_draft(paths.require(paths.checkpoints / folder, "train"), head).to(dtype).eval()
        if drafts[name].config.aux_layer_ids != store.manifest.aux_layer_ids:
            raise CheckpointError(
                f"was trained on auxiliary layers {drafts[name].config.aux_layer_ids}, and the store holds "
                f"{store.manifest.aux_layer_ids}",
                where=str(paths.checkpoints / folder),
            )
    return HeldOut(
        recipe=recipe,
        folder=paths.stage("evaluate"),
        facts=facts,
        head=head,
        drafts=drafts,
        store=store,
        indexes=indexes,
        conversations=corpus_conversations(paths.require(paths.corpus, "prepare")),
        device=device,
        dtype=dtype,
    )


def replay_recorded(held_out: HeldOut) -> dict[str, dict[str, Any]]:
    """For every held-out sample: how many of its own words are the target's top-1, and a Replay of each draft."""

    def work(id: str) -> dict[str, Any]:
        sample = held_out.store[held_out.indexes[id]]
        ids, mask, aux, last = (
            x.to(held_out.device) for x in (sample.input_ids, sample.loss_mask, sample.aux, sample.last)
        )
        top1 = target_top1(held_out.head, last, mask)
        own = mask[1:].sum()
        return {
            "own_tokens": int(own),
            "own_tokens_top1": int((top1[:-1] == ids[1:])[mask[1:]].sum()),
            "replays": _replay_each(held_out, ids, mask, aux, top1),
        }

    ids = list(held_out.indexes)
    results = work_through(held_out.folder / "recorded.jsonl", "replay", "samples", ids, work)
    return dict(zip(ids, results, strict=True))


def open_target(held_out: HeldOut, aux_layer_ids: tuple[int, ...]) -> TargetReader:
    """The target itself, which gives its states at these layer ids."""
    model = load_target(held_out.facts, held_out.recipe.target, held_out.device, held_out.dtype)
    if held_out.store.manifest.rope_factors == "long":  # as serving does, whatever the length
        take_long_factors(model)
    return TargetReader(model, decoder_layers(model, held_out.facts), aux_layer_ids)


def decode_prompts(held_out: HeldOut, target: TargetReader) -> dict[str, dict[str, Any]]:
    """Decode held-out prompts with the trained draft, judge each text, and replay every draft on it."""
    settings = held_out.recipe.evaluate
    prompts = choose_prompts(held_out)

    def work(id: str) -> dict[str, Any]:
        prompt = first_prompt(held_out.store[held_out.indexes[id]])
        eos_ids = held_out.facts.eos_token_ids
        decoded = speculative_decode(
            target, held_out.drafts["trained"], prompt, settings.max_new_tokens, eos_ids, held_out.steps
        )
        text, written = prompt + decoded.tokens, len(decoded.tokens)
        with torch.inference_mode():
            logits, aux = target.read(text, keep=written + 1, cached=False)
        ids = torch.tensor(text, device=held_out.device)
        mask = torch.arange(len(text), device=held_out.device) >= len(prompt)
        top1 = torch.cat([torch.full_like(ids[: len(prompt) - 1], -1), logits.argmax(-1)])
        return {
            "prompt_ids": prompt,
            "answer_ids": decoded.tokens,
            "accepted": decoded.accepted,
            "deviations": [dataclasses.asdict(found) for found in deviations(logits[:-1], decoded.tokens)],
            "replays": _replay_each(held_out, ids, mask, aux, top1),
        }

    results = work_through(held_out.folder / "decoded.jsonl", "decode", "prompts", prompts, work)
    return dict(zip(prompts, results, strict=True))


def release_memory() -> None:
    """Give back what models that nobody holds any more left with the device's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def choose_prompts(held_out: HeldOut) -> list[str]:
    """Ids of the samples whose first question is asked: of distinct conversations, drawn by the recipe's seed.

    Raises:
        DataError: none leaves room for an answer.
    """
    settings = held_out.recipe.evaluate
    room = held_out.facts.max_position_embeddings
    by_conversation: dict[str, str] = {}
    for id in held_out.indexes:
        by_conversation.setdefault(held_out.conversations[id], id)
    candidates = list(by_conversation.values())
    random.Random(held_out.recipe.seed).shuffle(candidates)
    chosen: list[str] = []
    for id in candidates:
        prompt = first_prompt(held_out.store[held_out.indexes[id]])
        fits = room is None or len(prompt) + settings.max_new_tokens + held_out.steps <= room
        if prompt and fits:
            chosen.append(id)
        if len(chosen) == settings.prompts:
            break
    if not chosen:
        raise DataError(
            f"no held-out prompt leaves room for {settings.max_new_tokens} tokens of the {room} positions",
            where="evaluate",
            hint="lower evaluate.max_new_tokens",
        )
    return chosen


def first_prompt(sample: Features) -> list[int]:
    """A sample up to the target's first word."""
    own = sample.loss_mask.nonzero()
    return sample.input_ids[: int(own[0])].tolist() if len(own) else []


def _replay_each(
    held_out: HeldOut, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, top1: torch.Tensor
) -> dict[str, Any]:
    return {
        name: dataclasses.asdict(replay(draft, ids, mask, aux, top1, held_out.steps))
        for name, draft in held_out.drafts.items()
    }
