"""What is in a store."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.store.codec import CODECS
from draftsmith.store.folder import shards_in
from draftsmith.store.shard_file import taught
from draftsmith.store.shards import Store
from draftsmith.store.threads import one_core_threads

_GIB = 1 << 30
# What drafts of SmolLM2-135M gained in acceptance length, in percent of one trained on bf16, by seed: 196 samples, two
# epochs, at 3,767 held-out slots in bf16 (benchmarks/results/codec_acceptance.json).
ACCEPTANCE_PERCENT = {"int8": (0.339, 0.1, -0.773), "fp8": (-0.159, -0.658, -0.159)}


def info(folder: Path) -> dict[str, Any]:
    """Counts, sizes and the manifest, from manifest and ledger alone: no shard is read."""
    store = Store.open(folder)
    manifest = store.manifest
    tokens, size = sum(store.lengths), sum(entry.bytes for entry in store.entries)
    raw = 2 * tokens * (len(manifest.aux_layer_ids) + 1) * manifest.hidden_size
    layers = ", ".join(map(str, manifest.aux_layer_ids))
    unlisted = ", ".join(sorted(set(shards_in(folder)) - {entry.shard for entry in store.entries}))
    splits, domains = Counter(store.splits), Counter(store.domains)
    return {
        "samples": len(store),
        "tokens": tokens,
        "shards": len(store.entries),
        "bytes": size,
        "bytes_per_raw_bf16_byte": round(size / raw, 4) if raw else None,
        "splits": dict(splits),
        "domains": dict(domains),
        "manifest": asdict(manifest),
        "summary": [
            f"{len(store):,} samples, {tokens:,} tokens, shards: {len(store.entries):,}, {size / _GIB:,.2f} GiB",
            f"  {manifest.codec}" + (f", {size / raw:.3f} of raw bf16" if raw else ""),
            ", ".join(filter(None, [f"  {manifest.model}", manifest.revision, manifest.dtype])),
            f"  layer ids {layers} and {manifest.num_hidden_layers}, {manifest.hidden_size} wide",
            f"  by {manifest.engine} {manifest.engine_version}",
            "  " + ", ".join(f"{count:,} {name}" for name, count in sorted(splits.items())),
            "  " + ", ".join(f"{name} {count:,}" for name, count in domains.most_common(10)),
            *([f"  not in the ledger: {unlisted}; `draftsmith store verify {folder}` says more"] if unlisted else []),
        ],
    }


def compare_codecs(folder: Path, tokens: int = 4096) -> dict[str, Any]:
    """What each codec would make of the first sequences of a store: bytes, error, speed of one core.

    What it does to a trained draft is not measured here, but said of the one that was.

    A codec that cannot hold the states exactly as they are in the store, where it promises to, is left out.
    """
    store = Store.open(folder)
    states: list[torch.Tensor] = []
    for found in store:
        states += [found.aux, found.last[taught(found.loss_mask)]]
        if sum(map(len, states[::2])) >= tokens:
            break
    fit = [
        name
        for name, codec in CODECS.items()
        if codec.dtype is None or all(str(one.dtype) == f"torch.{codec.dtype}" for one in states)
    ]
    with one_core_threads("codec") as threads:
        figures = {name: threads.submit(_codec_figures, name, states).result() for name in fit}
    lines = [
        f"  {name:<9} {of['bytes_per_raw_bf16_byte']:.3f} of raw bf16, within {of['largest_relative_error']:.1e}, "
        f"encodes {of['encode_gb_per_second']:.2f} and decodes {of['decode_gb_per_second']:.2f} GB/s"
        for name, of in figures.items()
    ]
    lines.append("the acceptance length of drafts trained on it (SmolLM2-135M, three seeds), against bf16:")
    for name, by_seed in ACCEPTANCE_PERCENT.items():
        lines.append(
            f"  {name:<9} {statistics.fmean(by_seed):+.1f} %, {min(by_seed):+.1f} to {max(by_seed):+.1f} by seed"
        )
    return {"codecs": figures, "summary": [f"of {sum(map(len, states[::2])):,} tokens, by one core:", *lines]}


def _codec_figures(name: str, states: list[torch.Tensor]) -> dict[str, float]:
    raw = max(1, 2 * sum(one.numel() for one in states))
    started = time.thread_time()
    encoded = [CODECS[name].encode(one) for one in states]
    between = time.thread_time()
    decoded = [CODECS[name].decode(parts) for parts in encoded]
    ended = time.thread_time()
    errors = [relative_errors(ours, exact) for ours, exact in zip(decoded, states, strict=True)]
    return {
        "bytes_per_raw_bf16_byte": round(sum(values.nbytes for parts in encoded for values in parts.values()) / raw, 4),
        "largest_relative_error": float(torch.cat(errors).max()) if raw > 1 else 0.0,
        "encode_gb_per_second": round(raw / max(between - started, 1e-9) / 1e9, 3),
        "decode_gb_per_second": round(raw / max(ended - between, 1e-9) / 1e9, 3),
    }


def relative_errors(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each vector, the distance relative to its length."""
    distance = (ours.float() - exact.float()).norm(dim=-1)
    return (distance / exact.float().norm(dim=-1).clamp_min(1e-30)).flatten()
