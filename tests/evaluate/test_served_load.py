"""The load generator against a real HTTP server that streams as vLLM does; and what is made of the arrivals."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith import engine_vllm
from draftsmith.engine_api import EngineCounters, Reply, Sampling
from draftsmith.engine_server import last_exception
from draftsmith.engine_vllm import parse_counters, read_counters
from draftsmith.engines import served_model
from draftsmith.errors import EngineError
from draftsmith.evaluate.served_load import Burst, Running, ask_all, event_of, figures_of
from tests.evaluate.stand_in import METRICS, Engine, serving


def ask(url: str, prompts: list[list[int]], concurrency: int, max_tokens: int = 6, model: str = "tiny") -> Burst:
    running = Running(engine_vllm, url, model)
    return ask_all(running, prompts, concurrency, Sampling(max_tokens, 0.0, seed=7), timeout_seconds=30)


def test_so_many_are_in_flight_and_replies_keep_the_order_of_prompts() -> None:
    engine = Engine(together=3)
    with serving(engine) as url:
        burst = ask(url, [[10 * i] for i in range(9)], concurrency=3)
    assert [reply.token_ids[0] for reply in burst.replies] == [10 * i + 1 for i in range(9)]
    assert engine.most_in_flight == 3
    assert burst.tokens == 9 * 6
    assert [tokens for _, tokens in burst.replies[0].arrivals] == [2, 2, 2]


def test_counters_are_those_of_the_burst_alone() -> None:
    engine = Engine(together=1, steps=100)
    with serving(engine) as url:
        burst = ask(url, [[1], [2]], concurrency=1)
        assert served_model(engine_vllm, url, "evaluate.served.engine") == "tiny"
    assert burst.counters == EngineCounters(6, 12, 6, (6, 0), 1.5)
    found = figures_of(burst)
    assert (found["drafts"], found["accepted_per_position"], found["tokens"]) == (6, [6, 0], 12)


def test_both_engines_get_the_same_seeds_and_lengths_and_go_past_the_end() -> None:
    engines = [Engine(together=1), Engine(together=2)]
    for engine in engines:
        with serving(engine) as url:
            ask(url, [[5], [6]], concurrency=engine.together)
    first, second = ({body["prompt"][0]: body for body in engine.bodies} for engine in engines)
    assert first == second
    assert {body["seed"] for body in first.values()} == {7, 8}
    assert all(body["ignore_eos"] and body["max_tokens"] == 6 for body in first.values())


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([{"error": {"message": "out of memory"}}], "out of memory"),
        ([{"choices": [{"text": "x", "token_ids": [1]}]}], "wrote 1 tokens, not the 6"),
        ([{"choices": [{"text": "x"}]}], "without token ids"),
    ],
)
def test_a_stream_that_goes_wrong_says_how(events: list[Any], says: str) -> None:
    with serving(Engine(together=1), lambda body: iter(events)) as url, pytest.raises(EngineError, match=says):
        ask(url, [[1]], concurrency=1)


def test_a_refused_request_and_an_absent_server_are_named() -> None:
    with serving(Engine(together=1)) as url, pytest.raises(EngineError, match=r"(?s)HTTP 404.*no such model"):
        ask(url, [[1], [2]], concurrency=2, model="other")
    with pytest.raises(EngineError, match=r"(?s)/metrics.*ConnectError"):
        read_counters(url)


def test_lines_that_carry_no_tokens_are_passed_over() -> None:
    for line in ("", ": a comment", "data: [DONE]"):
        assert event_of(line, "there") is None
    for event in ({"choices": []}, {"choices": [{"text": ""}]}):
        assert engine_vllm.new_token_ids(event, 0, "there") == []
    with pytest.raises(EngineError, match="streams no JSON"):
        event_of("data: {", "there")


def test_latencies_follow_from_arrivals() -> None:
    reply = Reply([1, 2, 3, 4, 5], sent=10.0, arrivals=[(10.5, 1), (10.6, 3), (10.9, 1)], last_event={})
    assert reply.first_token_seconds == pytest.approx(0.5)
    assert reply.gaps_seconds == pytest.approx([0.1, 0.3])
    assert reply.seconds_per_token == pytest.approx(0.1)
    found = figures_of(Burst([reply, Reply([1], 9.9, [(10.0, 1)], {})], EngineCounters()))
    assert found["seconds"] == pytest.approx(1.0)
    assert found["tokens_per_second"] == pytest.approx(6.0)
    assert found["inter_token_seconds"] == pytest.approx({"p50": 0.2, "p99": 0.1 + 0.99 * 0.2})
    assert found["seconds_per_token"]["p99"] == pytest.approx(0.1)


def test_counters_are_added_up_over_engines_and_zero_without_a_draft() -> None:
    one = METRICS.format(drafts=3.0, draft_tokens=6.0, accepted=2.0, seconds=0.5)
    assert parse_counters(one + one.replace('engine="0"', 'engine="1"')) == EngineCounters(6, 12, 4, (4, 0), 1.0)
    assert parse_counters("vllm:num_requests_running 0.0\n") == EngineCounters()
    assert parse_counters(one).since(EngineCounters()) == EngineCounters(3, 6, 2, (2, 0), 0.5)


def test_the_last_exception_is_the_cause_and_not_its_echo() -> None:
    log = """\
INFO 11-30 12:00:00 [x.py:1] An Error is what this line is not: about
(EngineCore pid=7) ERROR 11-30 12:00:01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 12:00:01 [core.py:9] torch.OutOfMemoryError: Tried to allocate 2 GiB
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    assert last_exception(log) == "torch.OutOfMemoryError: Tried to allocate 2 GiB"
    assert last_exception("x\nAssertionError\n") == "AssertionError"
    log = (  # SGLang's parent, after its scheduler
        "torch.OutOfMemoryError: Tried to allocate 2 GiB\n"
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).\n"
    )
    assert last_exception(log) == "torch.OutOfMemoryError: Tried to allocate 2 GiB"
    assert last_exception("all is well\n") is None
