from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.evaluate.figures import summary_lines
from draftsmith.evaluate.rounds import Rounds, confidence_95, difference, position_bucket, round_starts, summarise


def text(accepted: list[int], conversation: str = "c", domain: str = "d", first: int = 10) -> Rounds:
    return Rounds(
        conversation, domain, round_starts(first, accepted), accepted, tokens=1 + sum(accepted) + len(accepted)
    )


def test_the_acceptance_length_holds_the_bonus_token_and_the_accepted_tokens_do_not() -> None:
    found = summarise("x", [text([3])], num_speculative_tokens=4, seed=0).to_json()
    assert found["mean_acceptance_length"] == 4
    assert found["mean_accepted_tokens"] == 3


def test_per_position_rates_are_joint_and_sum_to_the_acceptance_length() -> None:
    found = summarise("x", [text([3, 0, 1]), text([2])], num_speculative_tokens=3, seed=0).to_json()
    assert found["per_position"] == (3 / 4, 2 / 4, 1 / 4)
    assert found["mean_acceptance_length"] == pytest.approx(1 + sum(found["per_position"]))
    assert found["conditional_per_position"] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found["rounds"] == 4


def test_a_rate_of_nothing_is_absent_and_not_zero() -> None:
    assert summarise("x", [text([0, 1])], 3, seed=0).extra["conditional_per_position"] == [0.5, 0.0, None]


def test_every_set_of_rates_names_its_k() -> None:
    assert summarise("x", [text([1])], num_speculative_tokens=7, seed=0).to_json()["num_speculative_tokens"] == 7


def test_acceptance_is_told_by_domain_and_by_position() -> None:
    texts = [text([3, 3], domain="a", first=254), text([0], domain="b", first=600)]
    found = summarise("x", texts, num_speculative_tokens=3, seed=0).extra
    assert found["by_domain"] == {
        "a": {"mean_acceptance_length": 4, "rounds": 2, "confidence_95": (1, 4)},
        "b": {"mean_acceptance_length": 1, "rounds": 1, "confidence_95": (1, 4)},
    }
    assert list(found["by_position"]) == ["0-255", "256-511", "512-1023"]
    assert [bucket["rounds"] for bucket in found["by_position"].values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("position", "bucket"),
    [(0, "0-255"), (255, "0-255"), (256, "256-511"), (511, "256-511"), (512, "512-1023"), (4096, "4096-8191")],
)
def test_position_buckets_double(position: int, bucket: str) -> None:
    assert position_bucket(position) == bucket


def test_acceptance_is_told_by_how_much_of_an_answer_is_written() -> None:
    """Nothing is taken in an answer's first 40 tokens and both drafts from there on; a conversation has two answers."""
    hard, easy = [0] * 40, [2] * 10
    starts = [*round_starts(10, [*hard, *easy]), *round_starts(200, hard)]
    talk = Rounds("c", "d", starts, [*hard, *easy, *hard], tokens=112)
    assert list(talk.written()) == [*range(40), *range(40, 70, 3), *range(40)]
    found = summarise("x", [talk], num_speculative_tokens=2, seed=0).extra["within_tokens"]
    assert list(found) == ["32", "64"]
    assert (found["32"]["rounds"], found["32"]["per_position"]) == (64, [0.0, 0.0])
    assert found["64"] == {"mean_acceptance_length": 1 + 16 / 88, "per_position": [8 / 88] * 2, "rounds": 88}


def test_slots_that_are_all_expected_are_one_answer() -> None:
    slots = Rounds("c", "d", [*range(10, 14), *range(30, 32)], [0, 2, 0, 1, 0, 0], tokens=7, weights=[0.5] * 6)
    assert list(slots.written()) == [0, 1, 2, 3, 0, 1]


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    texts = [text([i % 4, 1, 0], conversation=str(i)) for i in range(30)]
    low, high = confidence_95(texts, 3, seed=1)
    assert low < summarise("x", texts, 3, seed=1).mean_acceptance_length < high
    assert confidence_95(texts, 3, seed=1) == (low, high)


def test_each_rate_has_an_interval_of_its_own() -> None:
    texts = [text([i % 4, 1, 0], conversation=str(i), domain="ab"[i % 2]) for i in range(30)]
    found = summarise("x", texts, 3, seed=1)
    for rate, (low, high) in zip(found.per_position, found.extra["per_position_95"], strict=True):
        assert 0 <= low < rate < high <= 1
    for name, figures in found.extra["by_domain"].items():
        assert figures["confidence_95"] == confidence_95([one for one in texts if one.domain == name], 3, seed=1)
    assert summarise("x", [text([0, 3])], 3, seed=0).extra["per_position_95"] == [(0, 1)] * 3


def test_conversations_that_agree_leave_no_spread() -> None:
    assert confidence_95([text([1, 1], conversation=str(i)) for i in range(5)], 3, seed=0) == (2, 2)


def test_rounds_of_one_conversation_say_nothing_of_the_spread() -> None:
    assert confidence_95([text([0, 3, 1]), text([2, 2])], 3, seed=0) == (1, 4)


def test_the_interval_draws_whole_conversations() -> None:
    """Many rounds of two conversations that differ are still two observations."""
    texts = [text([3] * 500, conversation="easy"), text([0] * 500, conversation="hard")]
    assert confidence_95(texts, 3, seed=0) == (1, 4)


def test_texts_of_one_conversation_are_drawn_together() -> None:
    texts = [text([a], conversation=c) for c, a in (("x", 3), ("x", 0), ("y", 0), ("y", 3))]
    assert confidence_95(texts, 3, seed=0) == (2.5, 2.5)


def test_a_round_that_is_expected_twice_as_often_counts_twice() -> None:
    texts = [text([i % 4, 1, 0], conversation=str(i), domain="ab"[i % 2]) for i in range(9)]
    often = [replace(one, weights=[2.0, 0.5, 1.0]) for one in texts]
    quarters = [
        Rounds(
            one.conversation_id,
            one.domain,
            [start for start, times in zip(one.starts, (4, 1, 2), strict=True) for _ in range(times)],
            [a for a, times in zip(one.accepted, (4, 1, 2), strict=True) for _ in range(times)],
            one.tokens,
        )
        for one in texts
    ]
    found, same = (summarise("x", some, 3, seed=0) for some in (often, quarters))
    assert found.extra["rounds"] == same.extra["rounds"] / 2
    assert found.per_position == pytest.approx(same.per_position)
    assert found.confidence_95 == pytest.approx(same.confidence_95)
    for name in ("a", "b"):
        ours, theirs = (one.extra["by_domain"][name]["mean_acceptance_length"] for one in (found, same))
        assert ours == pytest.approx(theirs)


def test_the_difference_of_two_readings_is_drawn_over_the_conversations_of_both() -> None:
    measured = [text([i % 4, 1], conversation=str(i)) for i in range(8)]
    found = difference(measured, [replace(one, accepted=[a + 1 for a in one.accepted]) for one in measured], seed=0)
    assert found == {"difference": -1, "confidence_95": (-1, -1)}  # conversations differ, and both alike
    assert difference(measured[:1], measured[:1], seed=0) == {"difference": 0, "confidence_95": None}
    assert difference([], [], seed=0) == {"difference": None, "confidence_95": None}


def test_each_round_starts_after_the_accepted_tokens_and_the_bonus() -> None:
    assert round_starts(8, [0, 3, 1]) == [8, 9, 13]
    assert round_starts(8, []) == []


@pytest.mark.parametrize(("early", "told"), [([0] * 64, True), ([2] * 22, False)])
def test_a_draft_that_accepts_less_where_answers_begin_is_said_to(early: list[int], told: bool) -> None:
    lines = summary_of([*early, *[2] * 20])
    assert ("; 1.00 within the first 64 tokens of an answer" in lines[0]) is told


@pytest.mark.parametrize(("taken", "told"), [(29, ["29.0%"]), (30, []), (0, ["0.0%"])])
def test_a_draft_that_accepts_little_is_told_once_how_to_find_out_why(taken: int, told: list[str]) -> None:
    lines = [line for line in summary_of([1] * taken + [0] * (100 - taken)) if "--why" in line]
    assert len(lines) == len(told)
    assert all(share in line for line, share in zip(lines, told, strict=True))


def summary_of(accepted: list[int]) -> list[str]:
    found = summarise("recorded trained", [text(accepted)], num_speculative_tokens=2, seed=0)
    report = {
        "num_speculative_tokens": 2,
        "prompt_sets": [{"name": found.name, "method": "recorded", "at_temperature": None} | found.to_json()],
        "lossless": None,
        "lossless_sampled": None,
        "recorded_tokens_are_top1": 1.0,
        "target_dtype": "float32",
        "store_dtype": "float32",
    }
    return summary_lines(report)
