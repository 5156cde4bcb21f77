"""Attention of training-time test as fused passes: what `attention.py` computes, without its scores in memory.

Of the keys that slot j sees at step k, the step-0 keys of its document form a causal pass, which a fused kernel does;
the k keys of its own slot are a handful of dot products. With the pass's output o₀ and log-sum-exp L₀, and the own
scores sᵢ = q·kᵢ/√d, the softmax over all of them together is

    L = log(exp L₀ + Σᵢ exp sᵢ)        o = exp(L₀ − L) o₀ + Σᵢ exp(sᵢ − L) vᵢ

Its gradient falls apart the same way. Every weight is exp(s − L) and every score has gradient weight · (do·v − do·o),
so the fused backward pass, which recomputes weights from the log-sum-exp that it is given, is exact for the step-0
part when it is given the merged o and L (Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.draft.attention import Spans


@dataclass(frozen=True)
class Documents:
    """Where the documents of a flat batch lie, as the kernels want to know it."""

    spans: Spans
    offsets: torch.Tensor  # [documents + 1] int32: their starts, and S
    longest: int

    @classmethod
    def of(cls, spans: Spans, device: torch.device) -> Documents:
        offsets = torch.tensor([*(start for start, _ in spans), spans[-1][1]], dtype=torch.int32)
        return cls(spans, offsets.to(device, non_blocking=True), max(end - start for start, end in spans))


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each document.

    Args:
        query: [S, heads, d]
        key, value: [S, kv_heads, d]

    Returns:
        Output [S, heads, d] and log-sum-exp [heads, S], the latter in float32 or wider.
    """
    if query.is_cuda:
        longest = max(2, documents.longest)  # at 1 the kernel changes the layout of its log-sum-exp
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, documents.offsets, documents.offsets, longest, longest, 0.0, True, False
        )
        return out, lse
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32))
    for start, end in documents.spans:
        parts = (_one_document(x, start, end) for x in (query, key, value))
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
        out[start:end], lse[:, start:end] = attended[0].transpose(0, 1), sums[0]
    return out, lse


def causal_attention_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from the merged output and log-sum-exp."""
    if query.is_cuda:
        longest, unused = max(2, documents.longest), torch.empty(0, device=query.device)
        offsets = documents.offsets
        dquery, dkey, dvalue = torch.ops.aten._flash_attention_backward(
            dout, query, key, value, out, lse, offsets, offsets, longest, longest, 0.0, True, unused, unused
        )
        return dquery, dkey, dvalue
    dquery, dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
    for start, end in documents.spans:
        parts = (_one_document(x, start, end) for x in (dout, query, key, value, out))
        sums = lse[None, :, start:end].contiguous()
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, sums, 0.0, True)
        for whole, part in zip((dquery, dkey, dvalue), gradients, strict=True):
            whole[start:end] = part[0].transpose(0, 1)
    return dquery, dkey, dvalue


def merge_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Add a slot's own keys of steps 1 … k to the causal pass, in place.

    Args:
        query: [S, heads, d]
        keys, values: [k, S, kv_heads, d]
        out, lse: of the causal pass, [S, heads, d] and [heads, S]; become those of the whole.
    """
    if not len(keys):
        return
    if query.is_cuda:
        from draftsmith.draft import kernels

        return kernels.merge_own(query, keys, values, out, lse)
    grouped, scale = _wide(query).unflatten(1, (keys.shape[2], -1)), query.shape[-1] ** -0.5
    merged = _wide(out).unflatten(1, (keys.shape[2], -1))  # [S, kv_heads, group, d]
    total = lse.t().unflatten(1, (keys.shape[2], -1))  # [S, kv_heads, group]
    for key, value in zip(keys, values, strict=True):
        score = (grouped * key[:, :, None]).sum(-1) * scale
        before, total = total, torch.logaddexp(total, score)
        merged = merged * (before - total).exp()[..., None] + (score - total).exp()[..., None] * value[:, :, None]
    out.copy_(merged.flatten(1, 2))
    lse.copy_(total.flatten(1).t())


def merge_own_backward(
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
    """Add the gradients of the own terms to `dquery` [S, heads, d] and `dkeys`, `dvalues` [k, S, kv_heads, d].

    `out` and `lse` are the merged ones.
    """
    if not len(keys):
        return
    if query.is_cuda:
        from draftsmith.draft import kernels

        return kernels.merge_own_backward(dout, query, keys, values, out, lse, dquery, dkeys, dvalues)
    scale, kv_heads = query.shape[-1] ** -0.5, keys.shape[2]
    grouped, dgrouped = (_wide(x).unflatten(1, (kv_heads, -1)) for x in (query, dout))
    mean = (_wide(dout) * out).sum(-1).unflatten(1, (kv_heads, -1))  # Σ weight · (do·v) over all keys
    total = lse.t().unflatten(1, (kv_heads, -1))
    own = torch.zeros_like(grouped)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        weight = ((grouped * key[:, :, None]).sum(-1) * scale - total).exp()
        dscore = weight * ((dgrouped * value[:, :, None]).sum(-1) - mean) * scale
        own += dscore[..., None] * key[:, :, None]
        dkeys[i] += (dscore[..., None] * grouped).sum(2)
        dvalues[i] += (weight[..., None] * dgrouped).sum(2)
    dquery += own.flatten(1, 2)


def _one_document(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """[S, heads, d] → [1, heads, T, d]"""
    return x[start:end].transpose(0, 1)[None]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
