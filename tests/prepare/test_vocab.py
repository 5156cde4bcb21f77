from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import DataError, RecipeError
from draftsmith.prepare.vocab import TokenCounts, always_kept, check_size, choose, coverage, write_draft_vocab
from draftsmith.records import Sample
from draftsmith.vocab_map import read_draft_vocab
from tests.prepare.chats import CHATML, MARKS, TOOLS, chat_of


def sample(ids: list[int], mask: list[int], split: str = "train") -> Sample:
    return Sample("s", "c", "d", split, ids, mask)


def counts_of(*samples: Sample, size: int = 100) -> TokenCounts:
    counts = TokenCounts(size)
    for item in samples:
        counts.add(item)
    return counts


def test_only_what_the_target_wrote_in_training_samples_counts() -> None:
    counts = counts_of(sample([5, 6, 7, 7], [0, 1, 1, 1]), sample([5, 8], [0, 1], "validation"))
    assert dict(enumerate(counts.by_split["train"])) == dict.fromkeys(range(100), 0) | {6: 1, 7: 2}
    assert counts.by_split["validation"].nonzero()[0].tolist() == [8]


def test_the_most_frequent_are_chosen_in_ascending_order_and_equals_by_id() -> None:
    counts = np.zeros(100, dtype=np.int64)
    counts[[90, 20, 30, 10]] = [9, 5, 5, 5]
    assert choose(counts, 3, []) == [10, 20, 90]


def test_special_tokens_are_kept_though_they_never_occur() -> None:
    counts = np.zeros(100, dtype=np.int64)
    counts[[90, 20]] = [9, 5]
    assert choose(counts, 3, {1, 99}) == [1, 90, 99]


def test_a_short_vocabulary_is_filled_with_the_smallest_ids_that_are_missing() -> None:
    fifty = list(range(40, 90))
    counts = counts_of(sample(fifty, [1] * 50))
    chosen = choose(counts.by_split["train"], 64, {2})
    assert chosen == [*range(14), *fifty]


def test_a_size_beyond_the_targets_vocabulary_and_one_below_the_special_tokens_are_refused() -> None:
    with pytest.raises(RecipeError, match="is 101, and the target's vocabulary has 100"):
        check_size(101, 100, set())
    with pytest.raises(RecipeError, match="too small for the 3 special tokens"):
        check_size(2, 100, {1, 2, 3})
    for size in (None, 3, 100):
        check_size(size, 100, {1, 2, 3})


def test_a_token_beyond_the_targets_vocabulary_is_an_error() -> None:
    with pytest.raises(DataError, match="token id 100, and the target's embedding has 100 rows"):
        counts_of(sample([100], [1]))


def test_coverage_is_the_share_of_written_tokens_that_the_draft_can_say() -> None:
    counts = np.array([0, 6, 3, 1])
    assert coverage(counts, [1, 3]) == 0.7
    assert coverage(np.zeros(4, dtype=np.int64), [1]) is None


def test_special_tokens_ends_of_turns_and_the_templates_marks_are_always_kept() -> None:
    chat = chat_of(TOOLS)
    names = set(chat.tokenizer.convert_ids_to_tokens(sorted(always_kept(chat, 1000))))
    assert {"<|im_end|>", "<|begin_of_text|>", "<|endoftext|>", "<tool_call>", "</tool_call>"} <= names
    assert "<think>" in MARKS
    assert "<think>" not in names
    assert all(token < 20 for token in always_kept(chat, 20))


@pytest.mark.parametrize("size", [None, 400])
def test_the_whole_vocabulary_needs_no_mapping_whatever_lies_there(tmp_path: Path, size: int | None) -> None:
    file = tmp_path / "draft_vocab.json"
    file.write_text('{"draft_vocab_size": 2, "target_vocab_size": 9, "token_ids": [1, 2]}')  # left over
    counts = counts_of(sample([5], [1]), size=400)
    figures = write_draft_vocab(file, counts, size, always_kept(chat_of(CHATML), 400), "hash")
    assert figures["draft_vocab_size"] == 400
    assert figures["coverage_train"] == 1.0
    assert read_draft_vocab(file) is None


def test_the_chosen_vocabulary_is_written_with_what_it_covers(tmp_path: Path) -> None:
    file = tmp_path / "draft_vocab.json"
    counts = counts_of(sample([50, 50, 60], [1, 1, 1]), sample([50, 61], [1, 1], "validation"))
    figures = write_draft_vocab(file, counts, 3, {1}, "hash")
    assert read_draft_vocab(file) == [1, 50, 60]
    assert figures == {
        "draft_vocab_size": 3,
        "target_vocab_size": 100,
        "coverage_train": 1.0,
        "coverage_validation": 0.5,
        "distinct_tokens": 2,
        "filled": 1,
        "tokenizer_sha256": "hash",
    }
