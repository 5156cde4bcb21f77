"""Drafts that really accept, taught in seconds on a target's own answers, and what the real vLLM makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from draftsmith.draft.config import draft_config
from draftsmith.draft.loss import teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.evaluate.speculate import TargetReader, speculative_decode
from draftsmith.probe.facts import read_facts
from draftsmith.recipe import Draft as DraftSettings
from draftsmith.recipe import Target
from draftsmith.rehearse import decode
from draftsmith.target import decoder_layers, load_head, load_target
from tests.evaluate.builders import Text, as_batch

CPU, UNROLL, K = torch.device("cpu"), 3, 3


class TaughtTarget:
    """A target in float32 that reads, answers and teaches."""

    def __init__(self, folder: Path, aux_layer_ids: tuple[int, ...] | None = None) -> None:
        self.folder, self.facts = folder, read_facts(str(folder))
        self.aux_layer_ids = aux_layer_ids or self.facts.aux_layer_ids or ()
        self.head = load_head(self.facts, CPU, torch.float32)
        self.model = load_target(self.facts, Target(model=str(folder)), CPU, torch.float32)
        self.layers = decoder_layers(self.model, self.facts)
        self.reader = TargetReader(self.model, self.layers, self.aux_layer_ids)

    def text(self, prompt: list[int], answer: list[int]) -> Text:
        """A prompt with its answer and the states of both."""
        last: list[torch.Tensor] = []
        hook = self.layers[-1].register_forward_hook(lambda layer, inputs, output: last.append(output[0]))
        with torch.no_grad():
            _, aux = self.reader.read(prompt + answer, keep=1, cached=False)
        hook.remove()
        return Text(prompt, answer, aux, last[0])

    def draft(self, ids: list[int], settings: DraftSettings, hidden_size: int | None = None) -> Draft:
        """An untaught draft; one of another width than the target's starts from nothing of the target's."""
        config = draft_config(self.facts, settings, len(ids), self.aux_layer_ids)
        if hidden_size is None:
            draft = Draft(config)
            draft.initialise(self.head, ids, seed=0)
            return draft
        torch.manual_seed(0)
        draft = Draft(replace(config, hidden_size=hidden_size))
        draft.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
        draft.t2d[ids] = True
        return draft

    def teach(self, draft: Draft, texts: Sequence[Text], steps: int, texts_per_step: int, learning_rate: float) -> None:
        optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=learning_rate)
        batches = [as_batch(list(texts[i : i + texts_per_step])) for i in range(0, len(texts), texts_per_step)]
        lessons = [(batch, teacher_of(draft, self.head, batch.last)) for batch in batches]
        for _, (batch, teacher) in zip(range(steps), cycle(lessons), strict=False):
            results = unrolled_loss(draft, batch, teacher, UNROLL)
            optimizer.zero_grad()
            total_loss(results, [result.loss_count for result in results], 0.8).backward()
            optimizer.step()

    def decode(self, draft: Draft, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        """Our own speculative decoding, in the form of vLLM's answer."""
        stops = self.facts.eos_token_ids
        decoded = [speculative_decode(self.reader, draft, ids, max_new_tokens, stops, K) for ids in prompts]
        return as_counted([one.tokens for one in decoded], [count for one in decoded for count in one.accepted])


def as_counted(token_ids: list[list[int]], accepted: list[int]) -> dict[str, Any]:
    """Texts and the accepted drafts of each round, in the form of vLLM's counters."""
    return {
        "token_ids": token_ids,
        "drafts": len(accepted),
        "draft_tokens": K * len(accepted),
        "accepted": sum(accepted),
        "accepted_per_position": [sum(count > k for count in accepted) for k in range(K)],
    }


def decode_in_vllm(
    scratch: Path,
    model: Path,
    draft: Path | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> dict[str, Any]:
    """The same in the real engine, in float32."""
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": K}
    engine_args = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": max(map(len, prompts)) + max_new_tokens + 16,
        "max_num_seqs": len(prompts),
        "kv_cache_memory_bytes": 512 * 2**20,
        "speculative_config": speculative if draft else None,
        "skip_tokenizer_init": True,
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    return decode.decode_in_vllm(
        engine_args, prompts, max_new_tokens, stop_ids, folder=scratch, environment=environment
    )
