"""Seconds of a step of the target and of the draft on the machine at hand, from engines under an even load.

n sequences begin together and write a few tokens each, and then again, more. What more tokens take longer, by the
engine's own clock, over the steps that they take more, is T(n): what reading the prompts takes cancels. With the draft,
a step is a round of K draft tokens, and

    R(K, c) = T(c · (K + 1)) + K · D(c) + o

which least squares divide between D and o, neither below zero, where several K were measured; of one K alone, o is
counted as the draft's. The division is for the other K: of those that were measured, a forecast takes the whole round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from draftsmith.errors import EngineError
from draftsmith.evaluate.forecast import StepCosts, seconds_of
from draftsmith.evaluate.served_load import Burst


def sizes_of_target_steps(concurrencies: Iterable[int], most_draft_tokens: int) -> list[int]:
    """The steps of the target that a forecast needs: of c tokens, and of up to c · (K + 1), with lines between."""
    return sorted(set(chain.from_iterable((c, c * (most_draft_tokens + 1)) for c in concurrencies)))


def seconds_per_step(short: Sequence[Burst], long: Sequence[Burst]) -> float:
    """Of n sequences, from bursts of few and of many tokens. Of each kind the fastest counts: whatever else ran on the
    machine can only have added.

    Raises:
        EngineError: the engine does not count its time, or more tokens took it less.
    """
    few, many = (min(bursts, key=lambda burst: burst.counters.decode_seconds) for bursts in (short, long))
    steps, seconds = _steps(many) - _steps(few), many.counters.decode_seconds - few.counters.decode_seconds
    if steps <= 0 or seconds <= 0:
        raise EngineError(
            f"{len(few.replies)} sequences took {few.counters.decode_seconds:.3f} s for {few.tokens} tokens and "
            f"{many.counters.decode_seconds:.3f} s for {many.tokens}: no step time follows",
            where="evaluate.served",
            hint="raise evaluate.served.max_tokens; nothing else should run on the machine",
        )
    return seconds / steps


def _steps(burst: Burst) -> int:
    """Of each sequence by itself, added up. The first token comes of reading the prompt."""
    return burst.counters.drafts or burst.tokens - len(burst.replies)


def divide(target_seconds: Mapping[int, float], round_seconds: Mapping[tuple[int, int], float]) -> StepCosts:
    """Costs of the draft from those of rounds, by (K, concurrency), and of the target's steps, by their tokens.

    Raises:
        RequestError: a round's step of the target was not measured.
    """
    rests = {
        (k, c): seconds - seconds_of(target_seconds, c * (k + 1), "the target's")
        for (k, c), seconds in round_seconds.items()
    }
    concurrencies = sorted({c for _, c in rests})
    several = len({k for k, _ in rests}) > 1
    rows = [[k * (c == at) for at in concurrencies] + [1.0] * several for k, c in rests]  # [rounds, D(c) … and o]
    found = _least_squares(np.array(rows, float), np.array(list(rests.values())))
    draft = dict(zip(concurrencies, found, strict=False))
    return StepCosts(dict(target_seconds), draft, found[-1] if several else 0.0, dict(round_seconds))


def _least_squares(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Coefficients none of which is below zero: the lowest is set to it, and the rest found anew, until none is."""
    kept = list(range(rows.shape[1]))
    while True:
        found = np.zeros(rows.shape[1])
        found[kept] = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
        if found.min() >= 0:
            return [float(one) for one in found]
        kept.remove(int(found.argmin()))
