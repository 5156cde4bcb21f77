"""What is in a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.store.shards import Store

_GIB = 1 << 30


def info(folder: Path) -> dict[str, Any]:
    """Counts, sizes and the manifest, from manifest and ledger alone: no shard is read."""
    store = Store.open(folder)
    manifest = store.manifest
    tokens, size = sum(store.lengths), sum(entry.bytes for entry in store.entries)
    raw = 2 * tokens * (len(manifest.aux_layer_ids) + 1) * manifest.hidden_size
    layers = ", ".join(map(str, manifest.aux_layer_ids))
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
            f"{len(store):,} samples, {tokens:,} tokens, {len(store.entries):,} shards, {size / _GIB:,.2f} GiB",
            f"  {manifest.codec}" + (f", {size / raw:.3f} of raw bf16" if raw else ""),
            f"  {manifest.model}, revision {manifest.revision}, {manifest.dtype}",
            f"  layer ids {layers} and {manifest.num_hidden_layers}, {manifest.hidden_size} wide",
            f"  by {manifest.engine} {manifest.engine_version}",
            "  " + ", ".join(f"{count:,} {name}" for name, count in sorted(splits.items())),
            "  " + ", ".join(f"{name} {count:,}" for name, count in domains.most_common(10)),
        ],
    }
