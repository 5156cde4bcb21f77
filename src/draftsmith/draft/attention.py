"""Attention of training-time test, in its plain form: the judge of any faster one.

At unroll step k, slot j sees the step-0 keys of its own document up to itself, and of the later steps only its own:

    step 0 keys   k⁰₀ k⁰₁ … k⁰ⱼ            (what the target's true states gave: serving has just these)
    step i keys                kⁱⱼ          for i = 1 … k (what the draft fed back for this slot alone)

(EAGLE reference `traineagle3/cnets.py`, 277-305.)
"""

from __future__ import annotations

import torch

Spans = list[tuple[int, int]]  # [start, end) of each document in the flat batch


class UnrollAttention:
    """Keeps the keys and values of all steps; called once a step, in order."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[S, heads, d], [S, kv_heads, d] twice → [S, heads, d]"""
        groups = query.shape[1] // key.shape[1]
        self.keys.append(key.repeat_interleave(groups, dim=1))
        self.values.append(value.repeat_interleave(groups, dim=1))
        return torch.cat([self._document(query, start, end) for start, end in self.spans])

    def _document(self, query: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Attention within one document of T tokens: [T, heads, d]."""
        query = query[start:end] * query.shape[-1] ** -0.5
        keys = [key[start:end] for key in self.keys]
        values = [value[start:end] for value in self.values]
        causal = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril()
        past = torch.einsum("qhd,khd->qhk", query, keys[0]).masked_fill(~causal[:, None], -torch.inf)
        own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]  # k × [T, heads, 1]
        scores = torch.cat([past, *own], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
        attended = torch.einsum("qhk,khd->qhd", weights[..., : end - start], values[0])
        for i, step_value in enumerate(values[1:]):
            attended = attended + weights[..., end - start + i, None] * step_value
        return attended
