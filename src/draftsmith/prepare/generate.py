"""Answers by the target in this process, through transformers, in batches.

Legend: B sequences of a batch, L longest prompt of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.errors import TargetError
from draftsmith.prepare.answers import Answer
from draftsmith.prepare.dialogue import Request, message_of
from draftsmith.prepare.render import Chat
from draftsmith.recipe import Recipe, Regenerate
from draftsmith.records import TargetFacts

Pick = Callable[[torch.Tensor], torch.Tensor]  # [B, Vt] logits -> [B] token ids
_COMPACT_BELOW = 0.75  # share of rows still going at which the finished ones are taken out of the batch


class TargetInProcess:
    """The loaded target, answering batches of requests."""

    def __init__(self, chat: Chat, facts: TargetFacts, recipe: Recipe) -> None:
        from draftsmith.cpu_attention import use_grouped_heads
        from draftsmith.target import load_target, pick_device, pick_dtype

        self.chat, self.recipe = chat, recipe
        self.device = pick_device(recipe.target.device)
        self.model = load_target(facts, recipe.target, self.device, pick_dtype(recipe.target.dtype, facts, self.device))
        use_grouped_heads(self.model)

    def answer(self, requests: list[Request]) -> list[Answer]:
        """Answers in the order of the requests.

        Raises:
            TargetError: the device has too little memory for the batch.
        """
        try:
            outputs = decode(
                self.model,
                [request.prompt_ids for request in requests],
                [request.max_tokens for request in requests],
                self.chat.stop_ids,
                sampler(self.recipe.prepare.regenerate, _seed_of(self.recipe.seed, requests), self.device),
            )
        except torch.OutOfMemoryError as error:
            longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
            raise TargetError(
                f"the device has too little memory for {len(requests)} sequences of up to {longest} tokens",
                where="prepare.regenerate",
                hint="lower prepare.regenerate.batch_size or prepare.max_length_tokens",
            ) from error
        return [
            Answer(
                request.conversation_id,
                request.turn,
                request.prompt_ids,
                ids,
                "stop" if ids and ids[-1] in self.chat.stop_ids else "length",
                message_of(self.chat, ids),
            )
            for request, ids in zip(requests, outputs, strict=True)
        ]


def sampler(settings: Regenerate, seed: int, device: torch.device) -> Pick:
    """Greedy at temperature 0, else from the smallest set of tokens that holds `top_p` of the probability."""
    if settings.temperature == 0:
        return lambda logits: logits.argmax(-1)
    random = torch.Generator(device).manual_seed(seed)

    def pick(logits: torch.Tensor) -> torch.Tensor:
        probabilities, order = (logits.float() / settings.temperature).softmax(-1).sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        chosen = torch.multinomial(probabilities.masked_fill(before >= settings.top_p, 0), 1, generator=random)
        return order.gather(-1, chosen)[:, 0]

    return pick


@torch.inference_mode()
def decode(
    model: Any, prompts: list[list[int]], limits: list[int], stop_ids: frozenset[int], pick: Pick
) -> list[list[int]]:
    """What the model writes after each prompt, up to and including a stop id, or `limits` tokens.

    The same as `model.generate` of each prompt alone, but for rounding; rows that are finished leave the batch, where
    `generate` would go on computing them to the end of the longest.

        prompts, padded left   [B, L]   pad pad a b c
        mask                   [B, L]    0   0  1 1 1
        positions              [B, L]    0   0  0 1 2
    """
    ids, mask = _padded(prompts, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    accepted = inspect.signature(model.forward).parameters
    cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"  # of state-space models
    cache = None
    written: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # of the batch -> of the prompts
    while True:
        optional = {"position_ids": positions, "logits_to_keep": 1, cache_name: cache}
        known = {name: value for name, value in optional.items() if name in accepted}
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, **known)
        cache = output[cache_name]
        following = pick(output.logits[:, -1])  # [B]
        going = []
        for place, (row, token) in enumerate(zip(rows, following.tolist(), strict=True)):
            if not _is_over(written[row], limits[row], stop_ids):
                written[row].append(token)
            if not _is_over(written[row], limits[row], stop_ids):
                going.append(place)
        if not going:
            return written
        positions = positions[:, -1:] + 1
        if len(going) <= _COMPACT_BELOW * len(rows):
            kept = torch.tensor(going, device=model.device)
            cache.reorder_cache(kept)  # which every kind of cache layer has, for beam search; here it drops rows
            mask, positions, following = mask[kept], positions[kept], following[kept]
            rows = [rows[place] for place in going]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        ids = following[:, None]


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, [B, L] each."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _is_over(answer: list[int], limit: int, stop_ids: frozenset[int]) -> bool:
    return len(answer) == limit or (bool(answer) and answer[-1] in stop_ids)


def _seed_of(seed: int, requests: list[Request]) -> int:
    """A seed that depends on what is in the batch, and not on how many batches came before."""
    names = " ".join(f"{request.conversation_id}#{request.turn}" for request in requests)
    return int.from_bytes(hashlib.sha256(f"{seed} {names}".encode()).digest()[:6], "big")
