"""Load on an OpenAI-compatible server: so many requests in flight, each token's arrival put down.

Every request writes exactly `max_tokens` tokens (`ignore_eos`), so that both engines do the same work. A server sends a
chunk a step; with a draft, a chunk is a round and holds up to K + 1 tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import httpx
import numpy as np

from draftsmith.engine_server import EngineCounters, read_counters, settled_counters, tls
from draftsmith.errors import EngineError


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Reply:
    """What came for one prompt. Times are seconds on one clock for all."""

    token_ids: list[int]
    sent: float
    arrivals: list[tuple[float, int]]  # of each chunk: when, and how many tokens

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def gaps_seconds(self) -> list[float]:
        """Between a chunk and the next."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first chunk, on the mean."""
        tokens = sum(tokens for _, tokens in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / tokens if tokens else None


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
    url: str, model: str, prompts: Sequence[list[int]], concurrency: int, sampling: Sampling, timeout_seconds: float
) -> Burst:
    """Ask for every prompt, `concurrency` at a time: the next one as soon as one is answered.

    Raises:
        EngineError: the server refuses, breaks off, falls silent, or does not write what was asked for.
    """
    before = read_counters(url)
    replies = asyncio.run(_ask_all(url, model, prompts, concurrency, sampling, timeout_seconds))
    return Burst(replies, settled_counters(url).since(before))


async def _ask_all(
    url: str, model: str, prompts: Sequence[list[int]], concurrency: int, sampling: Sampling, timeout_seconds: float
) -> list[Reply]:
    replies: dict[int, Reply] = {}
    numbers = count()
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_seconds, pool=None),
        limits=httpx.Limits(max_connections=concurrency),
        verify=tls(),
    ) as client:

        async def one_after_another() -> None:
            while (number := next(numbers)) < len(prompts):
                body = request_body(model, prompts[number], sampling, number)
                replies[number] = await _stream(client, f"{url}/v1/completions", body)

        await asyncio.gather(*(one_after_another() for _ in range(min(concurrency, len(prompts)))))
    return [replies[number] for number in range(len(prompts))]


def request_body(model: str, prompt: list[int], sampling: Sampling, number: int) -> dict[str, Any]:
    """The seed depends on the place of the prompt alone: the same with a draft and without."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed + number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Reply:
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    sent = time.perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise EngineError(f"HTTP {response.status_code}: {text[:500]}", where=url)
            async for line in response.aiter_lines():
                if new := tokens_of(line, url):
                    ids += new
                    arrivals.append((time.perf_counter(), len(new)))
    except httpx.HTTPError as error:
        raise EngineError(
            f"broke off after {len(ids)} of {body['max_tokens']} tokens: {type(error).__name__} {error}".strip(),
            where=url,
            hint="the same command, without --redo, goes on from the last figure",
        ) from error
    if len(ids) != body["max_tokens"]:
        raise EngineError(f"wrote {len(ids)} tokens, not the {body['max_tokens']} that were asked for", where=url)
    return Reply(ids, sent, arrivals)


def tokens_of(line: str, url: str) -> list[int]:
    """Token ids in one line of an event stream; none in the lines between.

    Raises:
        EngineError: the line reports an error, or has text without ids.
    """
    if not line.startswith("data:"):
        return []
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return []
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EngineError(f"streams no JSON: {data[:200]!r}", where=url) from error
    if "error" in event:
        raise EngineError(f"reports {json.dumps(event['error'])[:500]}", where=url)
    choices = event.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is None and choices[0].get("text"):
        raise EngineError("streams text without token ids", where=url, hint="vLLM 0.24 or newer sends them")
    return ids or []


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
