from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import DataError
from draftsmith.vocab_map import check_mapping, ids_from_offsets, looks_absolute, mask, offsets, read_draft_vocab

some_ids = st.sets(st.integers(0, 63), min_size=1).map(sorted)


def test_d2t_is_the_offset_from_draft_id_to_target_id() -> None:
    assert offsets([3, 7, 9]) == [3, 6, 7]
    assert offsets(range(5)) == [0] * 5


@given(some_ids)
def test_ids_go_to_offsets_and_back_and_pass_the_check(ids: list[int]) -> None:
    assert ids_from_offsets(offsets(ids)) == ids
    check_mapping(offsets(ids), mask(ids, 64), 64, len(ids))


@given(some_ids.filter(lambda ids: ids != [0]))
def test_target_ids_in_place_of_offsets_are_refused(ids: list[int]) -> None:
    if ids == offsets(ids):  # one token: both readings are the same
        return
    with pytest.raises(DataError, match="hint: d2t seems to hold target ids"):
        check_mapping(ids, mask(ids, 64), 64, len(ids))


@pytest.mark.parametrize(
    ("d2t", "t2d_ids", "size", "said"),
    [
        ([3, 6], [3, 7], 3, "2 entries for a draft vocabulary of 3"),
        ([3, 6, 90], [3, 7], 3, "outside of 0 … 63"),
        ([-1, 6, 7], [3, 7, 9], 3, "outside of 0 … 63"),
        ([3, 1, 7], [3, 2, 9], 3, "do not ascend at draft id 1: 3, 2"),
        ([3, 2, 7], [3, 9], 3, "do not ascend at draft id 1: 3, 3"),
        ([3, 6, 7], [3, 7], 3, "reaches target id 9"),
        ([3, 6, 7], [3, 7, 9, 11], 3, "marks 4 tokens, d2t has 3"),
    ],
)
def test_a_mapping_that_does_not_hold_together_is_refused(
    d2t: list[int], t2d_ids: list[int], size: int, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        check_mapping(d2t, mask(t2d_ids, 64), 64, size)


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="t2d has 32 entries for a target vocabulary of 64"):
        check_mapping([3, 6], mask([3, 7], 32), 64, 2)


def test_the_identity_written_as_ids_and_ids_out_of_reach_as_offsets_look_absolute() -> None:
    assert looks_absolute(range(32), 64)
    assert looks_absolute([3, 20, 62], 64)
    assert not looks_absolute(offsets([3, 20, 62]), 64)
    assert not looks_absolute([0] * 32, 64)


def test_a_vocabulary_file_is_read_back_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "draft_vocab.json"
    file.write_text(json.dumps({"draft_vocab_size": 3, "target_vocab_size": 64, "token_ids": [3, 7, 9]}))
    assert read_draft_vocab(file) == [3, 7, 9]
    file.write_text(json.dumps({"draft_vocab_size": 64, "target_vocab_size": 64, "token_ids": None}))
    assert read_draft_vocab(file) is None
    file.write_text(json.dumps({"draft_vocab_size": 2, "target_vocab_size": 64, "token_ids": [3, 7, 9]}))
    with pytest.raises(DataError, match="3 entries for a draft vocabulary of 2"):
        read_draft_vocab(file)
    file.write_text("{}")
    with pytest.raises(DataError, match="no draft vocabulary"):
        read_draft_vocab(file)
