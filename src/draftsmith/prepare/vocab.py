"""Choosing the draft vocabulary: the tokens that the target writes most, in the training samples alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.errors import DataError, RecipeError
from draftsmith.prepare.render import Chat
from draftsmith.records import Sample
from draftsmith.rundir import write_json

Counts = npt.NDArray[np.int64]


class TokenCounts:
    """How often the target writes each token, by split."""

    def __init__(self, target_vocab_size: int) -> None:
        self.by_split: dict[str, Counts] = {
            split: np.zeros(target_vocab_size, dtype=np.int64) for split in ("train", "validation")
        }

    def add(self, sample: Sample) -> None:
        """Raises DataError if a token lies outside of the target's vocabulary."""
        counts = self.by_split[sample.split]
        ids = np.asarray(sample.input_ids)
        if ids.max() >= len(counts):
            raise DataError(
                f"has token id {ids.max()}, and the target's embedding has {len(counts)} rows",
                where=f"sample {sample.id}",
                hint="the tokenizer in the model's folder belongs to another model",
            )
        np.add.at(counts, ids[np.asarray(sample.loss_mask, dtype=bool)], 1)


def check_size(size: int | None, target_vocab_size: int, always: set[int]) -> None:
    """Raises RecipeError if `size` exceeds the target's vocabulary, or cannot hold `always`."""
    where, hint = "prepare.draft_vocab_size", "null keeps the target's whole vocabulary"
    if size is not None and size > target_vocab_size:
        what = f"is {size}, and the target's vocabulary has {target_vocab_size} tokens"
        raise RecipeError(what, where=where, hint=hint)
    if size is not None and size < len(always):
        what = f"is {size}, too small for the {len(always)} special tokens, which a draft must be able to say"
        raise RecipeError(what, where=where, hint=hint)


def choose(counts: Counts, size: int, always: Iterable[int]) -> list[int]:
    """Ascending ids of a draft vocabulary.

    Those of `always` first, then by frequency, equal frequencies by id, at last the smallest ids that never occur.
    """
    chosen = set(always)
    for token in np.argsort(-counts, kind="stable"):
        if len(chosen) == size:
            break
        chosen.add(int(token))
    return sorted(chosen)


def coverage(counts: Counts, ids: list[int]) -> float | None:
    """Share of the target's tokens that the draft can say; None where there are none."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else None


def always_kept(chat: Chat, target_vocab_size: int) -> set[int]:
    """Special tokens, ends of turns, and the added tokens that the template writes: tool and reasoning marks."""
    named = set(chat.tokenizer.all_special_ids) | chat.turn_end_ids
    template = chat.template_text
    added = {int(i) for i, token in chat.tokenizer.added_tokens_decoder.items() if token.content in template}
    return {token for token in named | added if token < target_vocab_size}


def write_draft_vocab(
    path: Path, counts: TokenCounts, size: int | None, always: set[int], tokenizer_sha256: str | None
) -> dict[str, Any]:
    """Choose the vocabulary, write draft_vocab.json, and return its figures without the ids.

    `size` has passed `check_size`.
    A size of None, or the target's own, is the whole vocabulary: `token_ids` is null, and no d2t or t2d is needed.
    """
    train, validation = counts.by_split["train"], counts.by_split["validation"]
    target_size = len(train)
    ids = None if size in (None, target_size) else choose(train, size or 0, always)
    figures = {
        "draft_vocab_size": target_size if ids is None else len(ids),
        "target_vocab_size": target_size,
        "coverage_train": 1.0 if ids is None else coverage(train, ids),
        "coverage_validation": 1.0 if ids is None else coverage(validation, ids),
        "distinct_tokens": int((train > 0).sum()),
        "filled": 0 if ids is None else int((train[ids] == 0).sum()),
        "tokenizer_sha256": tokenizer_sha256,
    }
    write_json(path, {**figures, "token_ids": ids})
    return figures
