"""Stores of random states, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.records import Features
from draftsmith.store.manifest import Manifest
from draftsmith.store.shard_file import taught
from draftsmith.store.writer import StoreWriter

AUX_LAYERS, HIDDEN_SIZE = 3, 8


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "model": "a/model",
        "revision": None,
        "config_sha256": "c0",
        "weights_sha256": "w0",
        "quantization": None,
        "tokenizer_sha256": "t0",
        "template_sha256": "m0",
        "num_hidden_layers": 8,
        "hidden_size": HIDDEN_SIZE,
        "aux_layer_ids": (2, 4, 5),
        "dtype": "float32",
        "codec": "fp32",
        "engine": "transformers",
        "engine_version": "5",
        "draftsmith_version": "0",
    }
    return Manifest(**fields | changes)


def features(number: int, tokens: int, **changes: Any) -> Features:
    """With zeros for the last states that a store does not keep."""
    generator = torch.Generator().manual_seed(number)
    fields: dict[str, Any] = {
        "id": f"sample-{number}",
        "domain": "chat" if number % 2 else "code",
        "split": "train" if number % 3 else "validation",
        "input_ids": torch.randint(0, 320, (tokens,), generator=generator),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.5,
        "aux": torch.randn(tokens, AUX_LAYERS, HIDDEN_SIZE, generator=generator),
        "last": torch.randn(tokens, HIDDEN_SIZE, generator=generator),
    }
    fields["last"] *= taught(fields["loss_mask"])[:, None]
    return Features(**fields | changes)


def in_bf16(sample: Features) -> Features:
    return replace(sample, aux=sample.aux.bfloat16(), last=sample.last.bfloat16())


def some_features(count: int = 7) -> list[Features]:
    return [features(number, tokens=3 + 5 * number % 7) for number in range(count)]


def write_store(folder: Path, samples: Sequence[Features], **changes: Any) -> Path:
    """A shard for every two samples."""
    with StoreWriter.open(folder, manifest(**changes), shard_bytes=1) as writer:
        for first in range(0, len(samples), 2):
            writer.add(samples[first : first + 2])
    return folder


def assert_same(ours: Features, theirs: Features) -> None:
    assert (ours.id, ours.domain, ours.split) == (theirs.id, theirs.domain, theirs.split)
    for name in ("input_ids", "loss_mask", "aux", "last"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def largest_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of all vectors, the largest error relative to the vector's length."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
