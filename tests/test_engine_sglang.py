"""SGLang's form of the protocol: command lines, and what a reply says of itself.

Events are recorded: SGLang 0.5.17 with SmolLM2-135M on a CPU, where EAGLE-3 does not run. So the counters of a draft
are made up in the form that `_calculate_spec_decoding_metrics` of its `managers/tokenizer_manager.py` gives them.
"""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith import engine_sglang
from draftsmith.engine_api import EngineCounters, Reply
from draftsmith.engine_sglang import counters_of, counting, new_token_ids, translated
from draftsmith.errors import EngineError

ENDED = {
    "id": "2e52ecc280da49b3a97d85185af9af3a",
    "finish_reason": {"type": "length", "length": 5},
    "prompt_tokens": 4,
    "weight_version": "default",
    "num_retractions": 0,
    "reasoning_tokens": 0,
    "completion_tokens": 5,
    "cached_tokens": 0,
    "cached_tokens_details": None,
    "dp_rank": None,
    "e2e_latency": 0.43023597399587743,
}
WITH_METRICS = {**ENDED, "decode_throughput": 15.363219914608216}  # 4 tokens in 0.26 s


def drafted(histogram: list[int], draft_tokens: int, **fields: Any) -> dict[str, Any]:
    rounds, accepted = sum(histogram), sum(n * count for n, count in enumerate(histogram))
    return ENDED | {
        "spec_accept_rate": accepted / (rounds * draft_tokens),
        "spec_accept_length": 5 / rounds,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": rounds * draft_tokens,
        "spec_verify_ct": rounds,
        "spec_accepted_drafts": accepted,
        "spec_proposed_drafts": rounds * draft_tokens,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_histogram": histogram,
        **fields,
    }


@pytest.mark.parametrize(
    ("chunks", "incremental"),
    [([[351], [351, 253], [351, 253, 2365]], False), ([[351], [253], [2365]], True), ([[351, 253], [2365]], True)],
)
def test_events_say_what_is_new_or_all_so_far(chunks: list[list[int]], incremental: bool) -> None:
    found: list[int] = []
    for ids in chunks:
        written = len(found) + len(ids) if incremental else len(ids)
        event = {"text": "", "output_ids": ids, "meta_info": {"completion_tokens": written}}
        found += new_token_ids(event, len(found), "there")
    assert found == [351, 253, 2365]


def test_an_event_that_has_run_ahead_of_its_count_is_taken_for_all_so_far() -> None:
    event = {"output_ids": [351, 253, 2365], "meta_info": {"completion_tokens": 2}}
    assert new_token_ids(event, 1, "there") == [253, 2365]


def test_a_stream_without_ids_is_another_servers() -> None:
    with pytest.raises(EngineError, match="output_ids"):
        new_token_ids({"text": "x", "meta_info": {}}, 0, "there")


def test_a_token_is_accepted_at_a_place_in_every_round_that_accepted_so_many() -> None:
    found = counters_of(drafted([4, 3, 0, 2], draft_tokens=4), 0.5, "there")
    assert found == EngineCounters(9, 36, 9, (5, 2, 2, 0), 0.5)
    assert counters_of(drafted([3], draft_tokens=2), 0.0, "there").accepted_per_position == (0, 0)


def test_a_reply_without_a_draft_has_no_rounds() -> None:
    assert counters_of(ENDED, 0.5, "there") == EngineCounters(decode_seconds=0.5)


def test_counts_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(EngineError, match="reports 7 accepted draft tokens in 5 rounds"):
        counters_of(drafted([4, 1], draft_tokens=2, spec_num_correct_drafts=7), 0.0, "there")
    older = {"spec_verify_ct": 5, "spec_accept_token_num": 3}
    with pytest.raises(EngineError, match="spec_num_proposed_drafts") as caught:
        counters_of(ENDED | older, 0.0, "there")
    assert "0.5.17" in (caught.value.hint or "")


def test_a_burst_is_what_its_replies_say_by_sglangs_clock_if_it_has_one() -> None:
    replies = [
        Reply([1] * 5, 0.0, [(1.0, 1), (1.5, 4)], {"meta_info": WITH_METRICS | drafted([1, 1], 2)}),
        Reply([1] * 5, 0.0, [(1.0, 1), (1.5, 4)], {"meta_info": drafted([0, 0, 2], 2)}),
    ]
    found = counting("there")(replies)
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (4, 8, 5)
    assert found.accepted_per_position == (3, 2)
    assert found.decode_seconds == pytest.approx(4 / 15.363219914608216 + 0.5)


def test_four_of_vllms_names_are_understood() -> None:
    ours = {"max_model_len": 64, "gpu_memory_utilization": 0.8, "max_num_seqs": 4, "enable_prefix_caching": False}
    assert translated(ours | {"page_size": 1}) == {
        "context_length": 64,
        "mem_fraction_static": 0.8,
        "max_running_requests": 4,
        "disable_radix_cache": True,
        "page_size": 1,
    }


def test_what_a_recipe_says_counts_for_more_than_what_measuring_needs_by_either_name() -> None:
    needed = engine_sglang.measuring_args(64)
    assert needed["max_running_requests"] == 64
    found = translated({**needed, "max_num_seqs": 8, "enable_prefix_caching": True})
    assert (found["max_running_requests"], found["disable_radix_cache"]) == (8, False)
