"""What a draft saves, from its acceptance and the time that steps take: before anything is served.

With c sequences at once, a round of K draft tokens takes K steps of the draft and one of the target on K + 1 tokens of
each sequence, and gives L_K tokens to each; without a draft, one step of the target gives one:

    speed-up(K, c) = L_K · T(c) / R(K, c)        R(K, c) = T(c · (K + 1)) + K · D(c) + o + r(K, c)

T and D are the seconds of a step of the target and of the draft by the tokens in it, o what a round takes besides, r
what is left where rounds of that K and c were measured: those take what they took. Between two measured K r lies on the
line, beyond them it is that of the nearest, so that no K looks better for having been measured. With T constant, D / T
= c, o = r = 0 and joint rates α, α², … this is theorem 3.8 of Leviathan, Kalman and Matias 2023, "Fast inference from
transformers via speculative decoding". T is all but constant while a step waits for the weights to be read, and
grows with its tokens once it waits for arithmetic: there speculation stops paying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from draftsmith.errors import RequestError


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step as measured, by the number of tokens in it; linear between two that were measured."""

    target_seconds: Mapping[int, float]
    draft_seconds: Mapping[int, float]
    round_seconds: float = 0.0  # of a round besides: sampling, acceptance, scheduling
    measured_rounds: Mapping[tuple[int, int], float] = field(default_factory=dict)  # whole ones, by (K, concurrency)


@dataclass(frozen=True)
class Forecast:
    """What serving should show for one K and concurrency."""

    num_speculative_tokens: int
    concurrency: int  # sequences at once
    acceptance_length: float
    tokens_per_second: float  # of all sequences together
    speedup: float  # over the target alone, at the same concurrency
    measured: bool = False  # in serving: no forecast at all


def acceptance_lengths(joint: Sequence[float]) -> list[float]:
    """L_0, L_1 … L_K from the joint rates of K draft tokens: L_k = 1 + the first k of them, the bonus token included.

    Rates depend a little on K, which says where rounds begin: those of another K are an estimate for this one, for
    where its own length is not known.
    """
    return list(accumulate(joint, initial=1.0))


def forecast(lengths: Sequence[float], costs: StepCosts, concurrencies: Iterable[int]) -> list[Forecast]:
    """Every K and concurrency, by concurrency and then by K.

    Args:
        lengths: L_0, L_1 …, as `acceptance_lengths` gives them.

    Raises:
        RequestError: a step is needed of a size beyond those that were measured.
    """
    return [
        _forecast(k, concurrency, lengths[k], costs) for concurrency in concurrencies for k in range(1, len(lengths))
    ]


def best(forecasts: Iterable[Forecast]) -> dict[int, Forecast | None]:
    """The fastest K of each concurrency, the least of equals; None where the target alone is as fast."""
    found: dict[int, Forecast | None] = {}
    for one in forecasts:
        before = found.setdefault(one.concurrency, None)
        if one.speedup > (before.speedup if before else 1.0):
            found[one.concurrency] = one
    return found


def stops_paying(forecasts: Iterable[Forecast]) -> int | None:
    """The least concurrency from which on no K is faster than the target alone; None if some K is at the largest."""
    stops = None
    for concurrency, fastest in sorted(best(forecasts).items(), reverse=True):
        if fastest is not None:
            break
        stops = concurrency
    return stops


def _forecast(k: int, concurrency: int, length: float, costs: StepCosts) -> Forecast:
    alone = seconds_of(costs.target_seconds, concurrency, "the target's")
    seconds = _seconds_of_round(k, concurrency, alone, costs)
    return Forecast(k, concurrency, length, concurrency * length / seconds, length * alone / seconds)


def _seconds_of_round(k: int, concurrency: int, alone: float, costs: StepCosts) -> float:
    if (k, concurrency) in costs.measured_rounds:
        return costs.measured_rounds[k, concurrency]
    parts = _seconds_of_parts(k, concurrency, costs)
    rests = {
        measured: seconds - _seconds_of_parts(measured, concurrency, costs)
        for (measured, at), seconds in sorted(costs.measured_rounds.items())
        if at == concurrency
    }
    if not rests:
        return parts
    return max(alone, parts + float(np.interp(k, list(rests), list(rests.values()))))  # it has a step of the target


def _seconds_of_parts(k: int, concurrency: int, costs: StepCosts) -> float:
    verify = seconds_of(costs.target_seconds, concurrency * (k + 1), "the target's")
    return verify + k * seconds_of(costs.draft_seconds, concurrency, "the draft's") + costs.round_seconds


def seconds_of(measured: Mapping[int, float], tokens: int, whose: str) -> float:
    """Of a step of so many tokens, on the line between the measured ones beside it. Raises RequestError beyond them."""
    below = max((size for size in measured if size <= tokens), default=None)
    above = min((size for size in measured if size >= tokens), default=None)
    if below is None or above is None:
        sizes = ", ".join(map(str, sorted(measured))) or "none"
        raise RequestError(
            f"{whose} step of {tokens:,} tokens lies beyond those that were measured: {sizes}",
            where="forecast",
            hint="measure a step of that size, or ask for a lower concurrency or fewer draft tokens",
        )
    if below == above:
        return measured[below]
    share = (tokens - below) / (above - below)
    return measured[below] + share * (measured[above] - measured[below])
