from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.engine_api import EngineCounters
from draftsmith.errors import EngineError, RequestError
from draftsmith.evaluate.served_load import Burst, Reply
from draftsmith.evaluate.step_costs import divide, seconds_per_step, sizes_of_target_steps


def burst(sequences: int, tokens: int, seconds: float, prompt_seconds: float, drafts: int = 0) -> Burst:
    """Sequences of so many tokens, each of whose steps takes so long; reading the prompts delays all."""
    steps = drafts or tokens - 1
    engine_seconds = sequences * (prompt_seconds + steps * seconds)
    replies = [Reply([0] * tokens, 0.0, [(1.0, tokens)], {}) for _ in range(sequences)]
    return Burst(replies, EngineCounters(drafts * sequences, decode_seconds=engine_seconds))


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(9, 60), st.floats(1e-3, 1.0), st.floats(0.0, 2.0), st.booleans())
def test_a_step_takes_what_it_takes_however_many_share_it_and_however_long_the_prompts(
    sequences, tokens, seconds, prompt_seconds, drafted
):
    def one(tokens: int) -> Burst:
        return burst(sequences, tokens, seconds, prompt_seconds, drafts=tokens // 2 if drafted else 0)

    assert seconds_per_step([one(4)], [one(tokens)]) == pytest.approx(seconds)


def test_a_burst_that_something_else_delayed_does_not_count():
    few, many = burst(4, 4, 0.1, 0.0), burst(4, 40, 0.1, 0.0)
    delayed = [burst(4, tokens, 0.1, delay) for tokens, delay in ((4, 3.0), (40, 7.0))]
    assert seconds_per_step([delayed[0], few], [many, delayed[1]]) == pytest.approx(0.1)


def test_an_engine_whose_clock_says_nothing_gives_no_step_time():
    silent = [Burst(burst(2, tokens, 0.1, 0.0).replies, EngineCounters()) for tokens in (4, 40)]
    with pytest.raises(EngineError, match=r"no step time follows\n.*max_tokens"):
        seconds_per_step(silent[:1], silent[1:])


def test_the_steps_of_the_target_reach_to_those_of_the_widest_round():
    assert sizes_of_target_steps([1, 8], 3) == [1, 4, 8, 32]


@settings(deadline=None)
@given(st.floats(0.001, 0.1), st.floats(0.0, 0.1), st.lists(st.floats(0.0001, 0.1), min_size=3, max_size=3))
def test_draft_steps_and_the_rest_of_a_round_are_told_apart_by_several_k(target, rest, draft):
    sizes = {c: target * (1 + c / 100) for c in sizes_of_target_steps([1, 8, 64], 5)}
    sizes |= {c * (k + 1): target * (1 + c * (k + 1) / 100) for c in (1, 8, 64) for k in (1, 3, 5)}
    concurrencies = dict(zip((1, 8, 64), draft, strict=True))
    rounds = {
        (k, c): sizes[c * (k + 1)] + k * seconds + rest for k in (1, 3, 5) for c, seconds in concurrencies.items()
    }
    found = divide(sizes, rounds)
    assert found.draft_seconds == pytest.approx(concurrencies, abs=1e-9)
    assert found.round_seconds == pytest.approx(rest, abs=1e-9)
    assert found.measured_rounds == rounds


def test_of_one_k_alone_the_rest_of_a_round_is_counted_as_the_drafts():
    found = divide({1: 1.0, 4: 2.0}, {(3, 1): 2.6})
    assert found.draft_seconds == pytest.approx({1: 0.2})
    assert found.round_seconds == 0.0
    assert divide({1: 1.0, 4: 2.0}, {(3, 1): 1.9}).draft_seconds == {1: 0.0}


def test_rounds_shorter_than_their_target_step_make_neither_the_draft_nor_the_rest_of_a_round_dear():
    """As on a machine that did something else while K = 1 was measured."""
    sizes = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 3.0, 32: 6.0}
    found = divide(sizes, {(1, 1): 1.8, (1, 8): 4.0, (3, 1): 1.0, (3, 8): 2.0})
    assert found.draft_seconds == pytest.approx({1: 0.08, 8: 0.0})
    assert found.round_seconds == 0.0
    assert divide(sizes, {(1, 1): 1.8, (3, 1): 1.2}).round_seconds == pytest.approx(0.5)


def test_a_round_whose_target_step_was_not_measured_is_refused():
    with pytest.raises(RequestError, match="step of 4 tokens"):
        divide({1: 1.0}, {(3, 1): 2.0})
