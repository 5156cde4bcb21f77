from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import CheckFailed
from draftsmith.evaluate.served_figures import (
    STEPS,
    differences,
    interval_95,
    make_served,
    refuse_other_texts,
    summary_lines,
)
from draftsmith.recipe import Recipe, parse

K, RATES = 2, [0.75, 0.5]


def repeat(tokens_per_second: float, rounds: int = 0) -> dict[str, Any]:
    seconds = 0.005 if rounds else 0.01  # with the draft half as long
    return {
        "tokens": 100,
        "tokens_per_second": tokens_per_second,
        "first_token_seconds": {"p50": 3 * seconds, "p99": 7 * seconds},
        "inter_token_seconds": None,
        "seconds_per_token": {"p50": seconds, "p99": 2 * seconds},
        "drafts": rounds,
        "draft_tokens": K * rounds,
        "accepted_tokens": int(sum(RATES) * rounds),
        "accepted_per_position": [int(rate * rounds) for rate in RATES] if rounds else [],
    }


def recipe(**served: Any) -> Recipe:
    return parse({"name": "t", "target": {"model": "m"}, "evaluate": {"served": {"concurrency": [1, 8]} | served}})


def measured(
    target: float = 1.0,
    draft: float = 0.1,
    differing: Any = (),
    forecast_share: float = 1.0,
    sampled: Any = (),
    within: Any = None,
    spread: float = 1.0,
    offline_rates: Any = RATES,
    by_k: Any = None,
    once: bool = False,
    **served: Any,
) -> dict[str, Any]:
    """A machine whose steps always take the same, with such a share of the forecast's speed-up."""
    alone: Any = {(STEPS, size): {"seconds": target} for size in (1, 3, 8, 24)}
    drafted: Any = {(STEPS, size): {"seconds": target + K * draft} for size in (1, 8)}
    speedup = forecast_share * (1 + sum(RATES)) * target / (target + K * draft)
    for c in (1, 8):
        alone["chat", c] = {"repeats": [repeat(10.0 * c), repeat(12.0 * c)], "texts": [[1], [2]]}
        ours = [repeat(10.0 * c * speedup * spread, 16), repeat(12.0 * c * speedup / spread, 16)]
        drafted["chat", c] = {"repeats": ours, "texts": [[1], [2]], "differences": list(differing)}
        if once:
            for found in (alone, drafted):
                found["chat", c]["repeats"] = found["chat", c]["repeats"][:1]
    greedy = {"name": "recorded trained", "method": "recorded", "draft": "trained", "per_position": offline_rates}
    greedy |= {"within_tokens": within or {}} | ({"by_num_speculative_tokens": by_k} if by_k else {})
    offline = {"prompt_sets": [*sampled, greedy]}
    return make_served(recipe(**served), alone, {K: drafted}, offline)


def test_a_machine_of_even_steps_is_as_fast_as_forecast():
    found = measured()
    assert found["step_costs"]["draft_seconds"] == pytest.approx({"1": 0.1, "8": 0.1})
    for one in found["prompt_sets"]:
        assert one["speedup"] == pytest.approx(2.25 / 1.2)
        assert one["forecast"]["relative_error"] == pytest.approx(0, abs=1e-9)
        assert one["forecast"]["relative_error_at_served_acceptance"] == pytest.approx(0, abs=1e-9)
        assert one["mean_acceptance_length"] == pytest.approx(2.25)
        assert one["per_position"] == RATES
    assert found["forecast"]["best"]["8"]["num_speculative_tokens"] == K
    assert found["forecast"]["stops_paying"] is None
    json.dumps(found, allow_nan=False)


def test_repeats_twice_and_half_as_fast_are_as_fast_and_never_slower_than_nothing():
    for one in measured(spread=2.0)["prompt_sets"]:
        assert one["speedup"] == pytest.approx(2.25 / 1.2)
        assert one["speedup_95"][0] > 0


def test_what_was_measured_once_has_no_interval():
    found = measured(once=True)
    for one in found["prompt_sets"]:
        assert (one["confidence_95"], one["speedup_95"]) == (None, None)
        assert one["mean_acceptance_length"] == pytest.approx(2.25)
    assert "acceptance length 2.25" in (said := "\n".join(summary_lines(found)))
    assert "95 %" not in said


def test_a_forecast_of_twice_what_was_served_is_off_by_all_of_it():
    for one in measured(forecast_share=0.5)["prompt_sets"]:
        assert one["forecast"]["relative_error"] == pytest.approx(1.0)
        assert one["forecast"]["relative_error_at_served_acceptance"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "rates"),
    [(20, 32, [0.3, 0.1]), (33, 64, [0.5, 0.2]), (64, 64, [0.5, 0.2]), (65, None, RATES)],
)
def test_the_forecast_is_of_as_much_of_an_answer_as_is_served(max_tokens: int, tokens: int | None, rates: list[float]):
    within = {"32": {"per_position": [0.3, 0.1]}, "64": {"per_position": [0.5, 0.2]}}
    found = measured(within=within, max_tokens=max_tokens)
    assert (found["forecast"]["within_tokens"], found["forecast"]["per_position"]) == (tokens, rates)
    assert found["prompt_sets"][0]["forecast"]["speedup"] == pytest.approx((1 + sum(rates)) / 1.2)
    said = f"of acceptance within the first {tokens} tokens of an answer"
    assert (said in "\n".join(summary_lines(found))) is (tokens is not None)


def test_each_k_is_forecast_from_what_it_was_found_to_accept_itself():
    within = {"32": {"per_position": [0.3, 0.1]}}
    by_k = {"1": {"mean_acceptance_length": 1.7, "within_tokens": {"32": {"mean_acceptance_length": 1.25}}}}
    for max_tokens, lengths in ((64, [1.7, 2.25]), (20, [1.25, 1.4])):
        found = measured(by_k=by_k, within=within, max_tokens=max_tokens)["forecast"]["all"]
        assert [one["acceptance_length"] for one in found] == pytest.approx(lengths * 2)
        assert [one["speedup"] for one in found[:2]] == pytest.approx([lengths[0] / 1.1, lengths[1] / 1.2])


def at_temperature(method: str, rates: list[float], **how: Any) -> dict[str, Any]:
    usual = {"draft": "trained", "temperature": 0.7, "draft_sample_method": "greedy"}
    return {"name": f"{method} trained", "method": method, "per_position": rates} | usual | how


@pytest.mark.parametrize(
    ("sampled", "acceptance_of"),
    [
        ([at_temperature("expected", [0.4, 0.1]), at_temperature("sampled", [0.5, 0.2])], "sampled trained"),
        # an engine's draft proposes its likeliest token, whatever was sampled with here
        (
            [
                at_temperature("sampled", [0.6, 0.3], draft_sample_method="probabilistic"),
                at_temperature("expected", [0.5, 0.2]),
            ],
            "expected trained",
        ),
    ],
)
def test_serving_at_a_temperature_is_forecast_from_acceptance_at_it(sampled: Any, acceptance_of: str):
    found = measured(sampled=sampled, temperature=0.7)
    assert found["forecast"]["acceptance_of"] == acceptance_of
    assert found["forecast"]["per_position"] == [0.5, 0.2]
    assert "greedy" not in "\n".join(summary_lines(found))
    assert measured(sampled=sampled)["forecast"]["acceptance_of"] == "recorded trained"


@pytest.mark.parametrize("sampled", [[], [at_temperature("sampled", [0.5, 0.2], temperature=0.8)]])
def test_a_forecast_of_greedy_acceptance_says_so_where_serving_samples(sampled: Any):
    found = measured(sampled=sampled, temperature=0.7)
    assert (found["forecast"]["temperature"], found["forecast"]["served_temperature"]) == (0, 0.7)
    lines = "\n".join(summary_lines(found))
    assert "made of greedy acceptance (recorded trained), and served at temperature 0.7" in lines
    assert "evaluate.temperature=0.7" in lines
    assert "greedy" not in "\n".join(summary_lines(measured(sampled=sampled)))


def test_rates_are_those_of_both_and_the_speedup_is_over_repeats():
    one = measured()["prompt_sets"][1]
    assert one["tokens_per_second"]["without_draft"] == pytest.approx(88.0)
    assert one["tokens_per_second"]["with_draft"] == pytest.approx(88.0 * 2.25 / 1.2)
    assert one["speedup_95"] == pytest.approx([one["speedup"]] * 2)
    assert one["latency_seconds"]["inter_token_seconds"]["p50"]["with_draft"] is None


def test_a_dear_draft_is_said_not_to_pay():
    found = measured(draft=2.0)
    assert found["forecast"]["stops_paying"] == 1
    lines = "\n".join(summary_lines(found))
    assert "no K is faster than the target alone" in lines
    assert "stops paying at 1 at once" in lines


def test_the_best_k_is_by_its_measured_speed_before_its_forecast():
    """K = 2 is forecast to be 1.88 times as fast, K = 1 to be 1.59 times; only K = 2 was measured."""
    as_forecast, far_slower = measured(), measured(forecast_share=0.6)
    for found, k, speedup, how in (
        (as_forecast, 2, 2.25 / 1.2, "as measured"),
        (far_slower, 1, 1.75 / 1.1, "by the forecast"),
    ):
        best = found["forecast"]["best"]["8"]
        assert (best["num_speculative_tokens"], best["measured"]) == (k, how == "as measured")
        assert best["speedup"] == pytest.approx(speedup)
        assert any(f"8 at once: best K = {k}, {speedup:.2f} times as fast, {how}" in x for x in summary_lines(found))
    assert measured(offline_rates=[0.0, 0.0])["forecast"]["stops_paying"] is None, "it pays, whatever was forecast"
    slow = measured(forecast_share=0.5, offline_rates=[0.0, 0.0])["forecast"]
    assert (slow["best"], slow["stops_paying"]) == ({"1": None, "8": None}, 1)


def test_a_k_beyond_the_offline_figures_is_chosen_where_it_was_measured_to_be_the_fastest():
    found = measured(offline_rates=RATES[:1])
    assert [one["forecast"] for one in found["prompt_sets"]] == [None, None]
    best = found["forecast"]["best"]["1"]
    assert (best["num_speculative_tokens"], best["measured"]) == (2, True)
    assert (best["acceptance_length"], best["speedup"]) == pytest.approx((2.25, 2.25 / 1.2))
    assert best["tokens_per_second"] == found["prompt_sets"][0]["tokens_per_second"]["with_draft"]


def test_lines_name_the_k_and_the_error_of_the_forecast():
    lines = [line for line in summary_lines(measured()) if "served" in line]
    assert len(lines) == 2
    assert all("K = 2" in line and "forecast 1.88, +0.0%" in line for line in lines)


def test_a_machine_that_did_something_else_is_said_below_the_figures():
    assert summary_lines({**measured(), "busy_note": None}) == summary_lines(measured())
    *figures, note = summary_lines({**measured(), "busy_note": "9 of 10 cores were at work"})
    assert figures == summary_lines(measured())
    assert note.endswith("note: 9 of 10 cores were at work")


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=10))
def test_the_interval_holds_the_mean(values):
    low, high = interval_95(values) or (1.0, -1.0)
    assert low <= sum(values) / len(values) + 1e-9
    assert high >= sum(values) / len(values) - 1e-9


def test_the_interval_is_students():
    assert interval_95([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert interval_95([1.0]) is None


def likeliest(ids: list[int]) -> dict[int, float]:
    return {9: -0.7, 8: -0.72, 7: -3.0} if ids[-1] == 5 else {}


def test_a_text_that_leaves_at_a_tie_is_told_from_one_that_does_not():
    alone = [[4, 5, 9, 1], [4, 5, 9, 1], [4, 5, 9, 1], [4, 6, 9, 1]]
    ours = [[4, 5, 9, 1], [4, 5, 8, 3], [4, 5, 7, 3], [4, 6, 8, 1]]
    found = differences([[1], [2], [3], [4]], alone, ours, likeliest)
    assert [(one["prompt"], one["index"], one["tie"]) for one in found] == [(1, 2, True), (2, 2, False), (3, 2, False)]
    assert found[0]["gap_nats"] == pytest.approx(0.02)
    assert found[2]["gap_nats"] is None
    report = measured(differing=found)
    assert report["prompt_sets"][0]["identical"]["ties"] == found[:1]
    assert "1 leave it at a near-tie, 2 AT NO TIE" in "\n".join(summary_lines(report))
    with pytest.raises(CheckFailed, match=r"2 of 2 texts.*text 2 first, at token 2: 7 in place of 9.*2\.3 nats apart"):
        refuse_other_texts(report)
    refuse_other_texts(measured(differing=found[:1]))
