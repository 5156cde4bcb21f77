"""Lossless chain speculative decoding with key-value caches, as vLLM's EAGLE proposer does it.

A text x₀ … x_n whose newest token x_n the target has not read yet. One round, with K = 3:

    draft    slot n-1 (true state), x_n  → d₀      step 0; every earlier slot's step-0 keys are cached
             its own output,        d₀   → d₁      position n
             its own output,        d₁   → d₂      position n + 1
    target   reads x_n d₀ d₁ d₂; its distributions p₀ p₁ p₂ p₃ take a drafts and add a token of its own
             (`sampling.verify`); at temperature 0, as many drafts as are its likeliest tokens
    new      y₀ … y_a = d₀ … d_{a-1} and that token
    then     target and draft forget what they computed for rejected tokens; the draft reads y₀ … y_a
             beside the target's true states of x_n, y₀ … y_{a-1}

(vLLM `v1/spec_decode/llm_base_proposer.py` and `v1/core/sched/scheduler.py`.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftsmith.draft.model import Draft
from draftsmith.errors import TargetError
from draftsmith.evaluate.sampling import GREEDY, Sampling, distribution, draw, proposal, verify


@dataclass(frozen=True)
class Decoded:
    """What speculative decoding wrote, and how many drafts were accepted in each round.

    `accepted` counts as vLLM's scheduler does (`make_spec_decoding_stats` runs before the stop check): a round drafts
    K tokens however little room is left, and what was accepted past the stop counts.
    """

    tokens: list[int]
    accepted: list[int]


class TargetReader:
    """The target reading one text at a time, with its auxiliary states; its hooks stay on the model."""

    def __init__(self, model: Any, layers: nn.ModuleList, aux_layer_ids: tuple[int, ...]) -> None:
        if getattr(model, "_is_stateful", False):
            raise TargetError(
                f"{type(model).__name__} has a recurrent state, which cannot go back to before a rejected token",
                where="evaluate",
                hint="set evaluate.prompts=0: the offline estimate needs no decoding",
            )
        from transformers import DynamicCache

        self.model, self.new_cache = model, DynamicCache
        self.cache = DynamicCache()
        self._states: dict[int, torch.Tensor] = {}
        self._aux_layer_ids = aux_layer_ids
        # Canonical id a is the output of 0-based layer a - 1.
        for id in aux_layer_ids:
            layers[id - 1].register_forward_hook(self._keep(id))

    def _keep(self, id: int) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            self._states[id] = output[0] if isinstance(output, tuple) else output

        return hook

    def begin(self) -> None:
        """Forget the text."""
        self.cache = self.new_cache()

    def read(self, ids: list[int], keep: int, *, cached: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens that follow what is cached; without `cached`, a text on its own, in one piece.

        Returns:
            Logits after each of the last `keep` tokens [keep, Vt], and auxiliary states of all [n, A, Ht].
        """
        tokens = torch.tensor([ids], device=self.model.device)
        cache = self.cache if cached else None
        output = self.model(tokens, past_key_values=cache, use_cache=cached, logits_to_keep=keep)
        return output.logits[0, -keep:], torch.stack([self._states[id][0] for id in self._aux_layer_ids], dim=1)

    def forget(self, tokens: int) -> None:
        """Take the last `tokens` tokens out of the cache."""
        if tokens:
            self.cache.crop(-tokens)


class DraftCache:
    """Attention over the draft's own keys and values, [S, kv_heads, d], causal in the order they came."""

    def __init__(self) -> None:
        self.key: torch.Tensor | None = None
        self.value: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.key is None else len(self.key)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[S, heads, d], [S, kv_heads, d] twice → [S, heads, d]"""
        self.key = key if self.key is None else torch.cat([self.key, key])
        self.value = value if self.value is None else torch.cat([self.value, value])
        total = len(self.key)
        visible = torch.ones(len(query), total, dtype=torch.bool, device=query.device).tril(total - len(query))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return attended[0].transpose(0, 1)

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:length], self.value[:length]


class Drafter:
    """The draft following one text. Between rounds its cache holds step-0 keys, made of the target's true states."""

    def __init__(self, draft: Draft, temperature: float, generator: torch.Generator) -> None:
        self.draft, self.temperature, self.generator = draft, temperature, generator
        self.cache = DraftCache()

    def propose(
        self, newest: list[int], aux: torch.Tensor, num_speculative_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Read what is new and draft on.

        Args:
            newest: n tokens; each is the one after the slot of its state, so that the last has not been read by the
                target yet.
            aux: [n, A, Ht], the target's states of the slots.

        Returns:
            K target ids, and the distributions that they were drawn from [K, Vt].
        """
        draft, cache, device = self.draft, self.cache, aux.device
        position = torch.arange(cache.length, cache.length + len(newest), device=device)
        hidden = draft.fuse(aux.to(draft.fc.weight.dtype))
        hidden, normed = draft.step(torch.tensor(newest, device=device), hidden, position, cache)
        hidden, normed, position = hidden[-1:], normed[-1:], position[-1:]
        committed = cache.length
        probs = [proposal(draft, normed[0], self.temperature)]
        tokens = [draw(probs[0], self.generator)]
        while len(tokens) < num_speculative_tokens:
            position = position + 1
            hidden, normed = draft.step(tokens[-1], hidden, position, cache)
            probs.append(proposal(draft, normed[0], self.temperature))
            tokens.append(draw(probs[-1], self.generator))
        cache.keep(committed)
        return torch.cat(tokens).tolist(), torch.stack(probs)


@torch.inference_mode()
def greedy_decode(target: TargetReader, ids: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Plain greedy decoding, one token at a time: what speculative decoding must equal."""
    target.begin()
    tokens: list[int] = []
    unread = ids
    while stop_length(tokens, max_new_tokens, eos_ids) is None:
        logits, _ = target.read(unread, keep=1)
        unread = logits.argmax(-1).tolist()
        tokens += unread
    return tokens


@torch.inference_mode()
def speculative_decode(
    target: TargetReader,
    draft: Draft,
    ids: list[int],
    max_new_tokens: int,
    eos_ids: Collection[int],
    num_speculative_tokens: int,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """Decoding in rounds of `num_speculative_tokens` drafted tokens and one forward of the target.

    Args:
        ids: the prompt, not empty.
        eos_ids: the text ends with the first of these.
    """
    generator = torch.Generator(target.model.device).manual_seed(sampling.seed)
    target.begin()
    drafter = Drafter(draft, sampling.draft_temperature, generator)
    logits, aux = target.read(ids, keep=1)
    tokens = [int(draw(distribution(logits[0], sampling.temperature), generator))]
    newest, accepted_by_round = ids[1:] + tokens, []
    while (length := stop_length(tokens, max_new_tokens, eos_ids)) is None:
        drafted, proposed = drafter.propose(newest, aux, num_speculative_tokens)
        logits, aux = target.read([tokens[-1], *drafted], keep=1 + num_speculative_tokens)
        newest = verify(drafted, proposed, distribution(logits, sampling.temperature), generator)
        accepted = len(newest) - 1
        target.forget(num_speculative_tokens - accepted)
        aux = aux[: accepted + 1]
        tokens += newest
        accepted_by_round.append(accepted)
    return Decoded(tokens[:length], accepted_by_round)


def stop_length(tokens: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> int | None:
    """Length of the finished text: up to the first end token, or `max_new_tokens`. None while it goes on."""
    for i, token in enumerate(tokens[:max_new_tokens]):
        if token in eos_ids:
            return i + 1
    return max_new_tokens if len(tokens) >= max_new_tokens else None
