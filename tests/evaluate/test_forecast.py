from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import RequestError
from draftsmith.evaluate.forecast import StepCosts, acceptance_lengths, best, forecast, stops_paying

SIZES = range(1, 2000)
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda rates: sorted(rates, reverse=True))


def costs(target: float, draft: float, *, tokens_for_free: int = 10**9) -> StepCosts:
    """Steps that take the same time up to so many tokens, and beyond them time in proportion."""
    take = {size: max(1.0, size / tokens_for_free) for size in SIZES}
    return StepCosts({n: target * t for n, t in take.items()}, {n: draft * t for n, t in take.items()})


@settings(deadline=None)
@given(alpha=st.floats(0.01, 0.99), gamma=st.integers(1, 8), cost=st.floats(0.001, 1))
def test_one_sequence_and_independent_drafts_give_the_formula_of_the_paper(alpha, gamma, cost):
    """Leviathan et al. 2023, theorem 3.8."""
    found = forecast(acceptance_lengths([alpha ** (k + 1) for k in range(gamma)]), costs(7.0, 7.0 * cost), [1])[-1]
    expected = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))
    assert found.num_speculative_tokens == gamma
    assert found.speedup == pytest.approx(expected)


@settings(deadline=None)
@given(RATES, st.integers(1, 64))
def test_the_speedup_is_the_ratio_of_tokens_a_second(rates, concurrency):
    steps = costs(0.02, 0.001, tokens_for_free=40)
    alone = concurrency / steps.target_seconds[concurrency]
    for found in forecast(acceptance_lengths(rates), steps, [concurrency]):
        assert found.tokens_per_second == pytest.approx(alone * found.speedup)


@settings(deadline=None)
@given(RATES)
def test_a_free_draft_and_free_verification_gain_the_acceptance_length(rates):
    for found in forecast(acceptance_lengths(rates), costs(1.0, 0.0), [1, 16]):
        assert found.speedup == pytest.approx(1 + sum(rates[: found.num_speculative_tokens]))


def test_a_draft_that_is_never_right_costs_what_its_steps_take():
    found = forecast(acceptance_lengths([0.0, 0.0]), costs(1.0, 0.25), [1])
    assert [one.speedup for one in found] == pytest.approx([1 / 1.25, 1 / 1.5])
    assert best(found) == {1: None}


def test_what_a_round_takes_besides_counts_against_the_draft():
    plain = costs(1.0, 0.1)
    slower = StepCosts(plain.target_seconds, plain.draft_seconds, round_seconds=0.9)
    assert forecast([1.0, 1.6], slower, [1])[0].speedup == pytest.approx(1.6 / 2.0)


def test_a_round_that_was_measured_takes_what_it_took_and_others_are_as_far_off_as_their_neighbours():
    plain, lengths = costs(1.0, 0.1), [1.0, 1.5, 2.0, 2.2]
    one = StepCosts(plain.target_seconds, plain.draft_seconds, measured_rounds={(2, 1): 1.6})
    assert [found.speedup for found in forecast(lengths, one, [1, 8])] == pytest.approx(
        [1.5 / 1.5, 2.0 / 1.6, 2.2 / 1.7, 1.5 / 1.1, 2.0 / 1.2, 2.2 / 1.3]
    )
    two = StepCosts(plain.target_seconds, plain.draft_seconds, measured_rounds={(3, 1): 1.1, (1, 1): 1.5})
    assert [found.speedup for found in forecast(lengths, two, [1])] == pytest.approx([1.5 / 1.5, 2.0 / 1.3, 2.2 / 1.1])


def test_no_round_is_foretold_to_be_shorter_than_a_step_of_the_target():
    plain = costs(1.0, 0.3)
    quick = StepCosts(plain.target_seconds, plain.draft_seconds, measured_rounds={(3, 1): 0.9})
    assert [one.speedup for one in forecast([1.0, 1.5, 2.0, 2.2], quick, [1])] == pytest.approx([1.5, 2.0, 2.2 / 0.9])


def test_speculation_stops_paying_where_steps_begin_to_wait_for_arithmetic():
    lengths = acceptance_lengths([0.7, 0.5, 0.35, 0.25, 0.18])
    found = forecast(lengths, costs(1.0, 0.03, tokens_for_free=128), [1, 8, 32, 64, 128, 256])
    fastest = best(found)
    chosen = [one and one.num_speculative_tokens for one in fastest.values()]
    assert chosen == [5, 5, 3, 1, None, None]
    assert stops_paying(found) == 128
    assert stops_paying([one for one in found if one.concurrency <= 64]) is None


def test_the_fastest_k_is_the_fastest():
    found = forecast(acceptance_lengths([0.8, 0.6, 0.3, 0.1]), costs(1.0, 0.15), [4])
    assert best(found)[4] == max(found, key=lambda one: one.speedup)
    equal = forecast([1.0, 1.2, 1.4], costs(1.0, 0.0), [1])
    assert best([equal[0], equal[0]])[1] is equal[0]


def test_steps_between_two_measured_sizes_lie_on_the_line_between_them():
    steps = StepCosts({1: 1.0, 2: 2.0, 10: 4.0}, {1: 0.5})
    assert forecast([1.0, 1.0, 1.0, 1.0, 1.5], steps, [1])[-1].speedup == pytest.approx(1.5 / (2.75 + 4 * 0.5))


@pytest.mark.parametrize(("concurrency", "says"), [(8, "target's step of 16 tokens"), (3, "draft's step of 3 tokens")])
def test_a_step_that_nobody_measured_is_refused_rather_than_guessed(concurrency, says):
    steps = StepCosts({1: 1.0, 15: 2.0}, {1: 0.1, 2: 0.1})
    with pytest.raises(RequestError, match=says):
        forecast([1.0, 1.5], steps, [concurrency])
