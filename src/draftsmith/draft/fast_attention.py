"""Attention of training-time test as fused passes: what `attention.py` computes, without its scores in memory.

Of the keys that slot j sees at step k, the step-0 keys of its document form a causal pass, which a fused kernel does;
the k keys of its own slot are a handful of dot products. With the pass's output o₀ and log-sum-exp L₀, and the own
scores sᵢ = q·kᵢ/√d, the softmax over all of them together is

    L = log(exp L₀ + Σᵢ exp sᵢ)        o = exp(L₀ − L) o₀ + Σᵢ exp(sᵢ − L) vᵢ

Its gradient falls apart the same way. Every weight is exp(s − L) and every score has gradient weight · (do·v − do·o),
so a fused backward pass, which recomputes weights from the log-sum-exp that it is given, is exact for the step-0 part
when it is given the merged o and L (Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2).

On CPUs PyTorch's fused kernel runs document by document. On CUDA the kernels are ours (`kernels.py`): they know
documents, let several query heads share a key head without copies, and merge before they leave the registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftsmith.draft.attention import Spans
from draftsmith.draft.fast_layers import wide

BLOCK_SLOTS = 64  # of one document, that one program of a CUDA kernel works on


@dataclass(frozen=True)
class Documents:
    """Where the documents of a flat batch lie."""

    spans: Spans
    blocks: torch.Tensor  # [blocks, 3] int32: a block's first slot, its document's first slot, the slot after it
    longest: int  # tokens

    @classmethod
    def of(cls, spans: Spans) -> Documents:
        blocks = [(slot, start, end) for start, end in spans for slot in range(start, end, BLOCK_SLOTS)]
        return cls(spans, torch.tensor(blocks, dtype=torch.int32), max(end - start for start, end in spans))

    def of_one_shape(self, blocks: int) -> Documents:
        """The same with so many blocks, of which the last are empty, and sizes as for one document."""
        empty = (0, 0, 0, blocks - len(self.blocks))
        return Documents(self.spans, torch.nn.functional.pad(self.blocks, empty), self.spans[-1][1])

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Documents:
        return Documents(self.spans, move(self.blocks), self.longest)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    documents: Documents,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of step k.

    Args:
        query: [S, heads, d]
        keys, values: [k+1, S, kv_heads, d], of steps 0 … k.
        out: [S, heads, d], receives the output.
        lse: [heads, S] in float32 or wider, receives the log-sum-exp of all scores of a slot.
    """
    if query.is_cuda:
        from draftsmith.draft import kernels

        return kernels.attend(query, keys, values, documents.blocks, out, lse)
    for start, end in documents.spans:
        parts = (_one_document(x, start, end) for x in (query, keys[0], values[0]))
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
        out[start:end], lse[:, start:end] = attended[0].transpose(0, 1), sums[0]
    _merge_own(query, keys[1:], values[1:], out, lse)


def attend_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: Documents,
    *,
    dkeys: torch.Tensor,
    dvalues: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the query: [S, heads, d]. Those of the keys and values are added to `dkeys` and `dvalues`, in their
    shapes, where the gradients of later steps already are."""
    if query.is_cuda:
        from draftsmith.draft import kernels

        return kernels.attend_backward(dout, query, keys, values, out, lse, documents.blocks, dkeys, dvalues)
    dquery = torch.empty(query.shape, dtype=query.dtype)
    for start, end in documents.spans:
        parts = (_one_document(x, start, end) for x in (dout, query, keys[0], values[0], out))
        sums = lse[None, :, start:end].contiguous()
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, sums, 0.0, True)
        dquery[start:end] = gradients[0][0].transpose(0, 1)
        dkeys[0, start:end] += gradients[1][0].transpose(0, 1)
        dvalues[0, start:end] += gradients[2][0].transpose(0, 1)
    _merge_own_backward(dout, query, keys[1:], values[1:], out, lse, dquery, dkeys[1:], dvalues[1:])
    return dquery


def _merge_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Add a slot's own keys of steps 1 … k to the causal pass, in place."""
    grouped, scale = wide(query).unflatten(1, (keys.shape[2], -1)), query.shape[-1] ** -0.5
    merged = wide(out).unflatten(1, (keys.shape[2], -1))  # [S, kv_heads, group, d]
    total = lse.t().unflatten(1, (keys.shape[2], -1))  # [S, kv_heads, group]
    for key, value in zip(keys, values, strict=True):
        score = (grouped * key[:, :, None]).sum(-1) * scale
        before, total = total, torch.logaddexp(total, score)
        merged = merged * (before - total).exp()[..., None] + (score - total).exp()[..., None] * value[:, :, None]
    if len(keys):
        out.copy_(merged.flatten(1, 2))
        lse.copy_(total.flatten(1).t())


def _merge_own_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dquery: torch.Tensor,
    dkeys: torch.Tensor,
    dvalues: torch.Tensor,
) -> None:
    """Add the gradients of the own terms. `out` and `lse` are the merged ones."""
    scale, kv_heads = query.shape[-1] ** -0.5, keys.shape[2]
    grouped, dgrouped = (wide(x).unflatten(1, (kv_heads, -1)) for x in (query, dout))
    mean = (wide(dout) * out).sum(-1).unflatten(1, (kv_heads, -1))  # Σ weight · (do·v) over all keys
    total = lse.t().unflatten(1, (kv_heads, -1))
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        weight = ((grouped * key[:, :, None]).sum(-1) * scale - total).exp()
        dscore = weight * ((dgrouped * value[:, :, None]).sum(-1) - mean) * scale
        dquery += (dscore[..., None] * key[:, :, None]).flatten(1, 2)
        dkeys[i] += (dscore[..., None] * grouped).sum(2)
        dvalues[i] += (weight[..., None] * dgrouped).sum(2)


def _one_document(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """[S, heads, d] → [1, heads, T, d]"""
    return x[start:end].transpose(0, 1)[None]
