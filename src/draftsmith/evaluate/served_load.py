"""Load on an engine's server: so many requests in flight, each token's arrival put down.

Every request writes exactly `max_tokens` tokens (`ignore_eos`), so that both engines do the same work. A server sends a
chunk a step; with a draft, a chunk is a round and holds up to K + 1 tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import httpx
import numpy as np

from draftsmith.engine_api import Engine, EngineCounters, Reply, Sampling
from draftsmith.engine_server import is_remote, tls
from draftsmith.errors import EngineError


@dataclass(frozen=True)
class Running:
    engine: Engine
    url: str
    model: str


@dataclass(frozen=True)
class Burst:
    """Replies in the order of the prompts, and what the server counted meanwhile."""

    replies: list[Reply]
    counters: EngineCounters

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return max(reply.arrivals[-1][0] for reply in self.replies) - min(reply.sent for reply in self.replies)

    @property
    def tokens(self) -> int:
        return sum(len(reply.token_ids) for reply in self.replies)


def ask_all(
    running: Running, prompts: Sequence[list[int]], concurrency: int, sampling: Sampling, timeout_seconds: float
) -> Burst:
    """Ask for every prompt, `concurrency` at a time: the next one as soon as one is answered.

    Raises:
        EngineError: the server refuses, breaks off, falls silent, or does not write what was asked for.
    """
    counted = running.engine.counting(running.url)
    replies = asyncio.run(_ask_all(running, prompts, concurrency, sampling, timeout_seconds))
    return Burst(replies, counted(replies))


async def _ask_all(
    running: Running, prompts: Sequence[list[int]], concurrency: int, sampling: Sampling, timeout_seconds: float
) -> list[Reply]:
    replies: dict[int, Reply] = {}
    numbers = count()
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_seconds, pool=None),
        limits=httpx.Limits(max_connections=concurrency),
        verify=tls(),
        trust_env=is_remote(running.url),
    ) as client:

        async def one_after_another() -> None:
            while (number := next(numbers)) < len(prompts):
                # The seed depends on the place of the prompt alone: the same with a draft and without.
                own = replace(sampling, seed=sampling.seed + number)
                replies[number] = await _stream(client, running, prompts[number], own)

        await asyncio.gather(*(one_after_another() for _ in range(min(concurrency, len(prompts)))))
    return [replies[number] for number in range(len(prompts))]


async def _stream(client: httpx.AsyncClient, running: Running, prompt: list[int], sampling: Sampling) -> Reply:
    engine, url = running.engine, running.url + running.engine.STREAM_PATH
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    last: dict[str, Any] = {}
    sent = time.perf_counter()
    try:
        async with client.stream("POST", url, json=engine.stream_request(running.model, prompt, sampling)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise EngineError(f"HTTP {response.status_code}: {text[:500]}", where=url)
            async for line in response.aiter_lines():
                if (event := event_of(line, url)) is None:
                    continue
                last = event
                if new := engine.new_token_ids(event, len(ids), url):
                    ids += new
                    arrivals.append((time.perf_counter(), len(new)))
    except httpx.HTTPError as error:
        raise EngineError(
            f"broke off after {len(ids)} of {sampling.max_tokens} tokens: {type(error).__name__} {error}".strip(),
            where=url,
            hint="the same command, without --redo, goes on from the last figure",
        ) from error
    if len(ids) != sampling.max_tokens:
        raise EngineError(f"wrote {len(ids)} tokens, not the {sampling.max_tokens} that were asked for", where=url)
    return Reply(ids, sent, arrivals, last)


def event_of(line: str, url: str) -> dict[str, Any] | None:
    """What one line of an event stream says; None of the lines between.

    Raises:
        EngineError: the line reports an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise EngineError(f"streams no JSON: {data[:200]!r}", where=url) from error
    if "error" in event:
        raise EngineError(f"reports {json.dumps(event['error'])[:500]}", where=url)
    return event


def figures_of(burst: Burst) -> dict[str, Any]:
    """What is kept of a burst: tokens a second, latencies in seconds, counters."""
    gaps = [gap for reply in burst.replies for gap in reply.gaps_seconds]
    each = [seconds for reply in burst.replies if (seconds := reply.seconds_per_token) is not None]
    return {
        "seconds": burst.seconds,
        "tokens": burst.tokens,
        "tokens_per_second": burst.tokens / burst.seconds,
        "first_token_seconds": percentiles([reply.first_token_seconds for reply in burst.replies]),
        "inter_token_seconds": percentiles(gaps),
        "seconds_per_token": percentiles(each),
        "drafts": burst.counters.drafts,
        "draft_tokens": burst.counters.draft_tokens,
        "accepted_tokens": burst.counters.accepted_tokens,
        "accepted_per_position": list(burst.counters.accepted_per_position),
    }


def percentiles(values: list[float]) -> dict[str, float] | None:
    """None where there is nothing: of one chunk there are no gaps."""
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
