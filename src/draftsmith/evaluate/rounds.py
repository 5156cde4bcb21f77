"""Rounds of speculative decoding, and the figures made of them.

In a round the draft proposes K tokens and the target takes the first a of them, 0 ≤ a ≤ K, and adds one of its own
(the bonus token). Three rates of draft position k, each over some set of rounds or slots:

    joint          draft tokens 0 … k are all right            engines print this one; 1 + Σ joint = acceptance length
    conditional    k is right where 0 … k-1 were               joint_k / joint_{k-1}
    unconditional  k is right, whatever came before            the accuracy that training prints; no serving rate
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from draftsmith.records import Acceptance

BOOTSTRAP_DRAWS = 2000
FIRST_BUCKET_TOKENS = 256
FEWEST_TOKENS = 32


@dataclass(frozen=True)
class Rounds:
    """The rounds of one text, in order."""

    conversation_id: str
    domain: str
    starts: list[int]  # slot that each round begins at: the position before that of the newest token
    accepted: list[int]  # a of each round
    tokens: int  # written, from the prompt to the stop
    weights: list[float] | None = None  # how often each is to be expected, of texts read at temperature; None: once

    def each(self) -> Iterator[tuple[int, int, float]]:
        """Start, accepted and weight of each round."""
        return zip(self.starts, self.accepted, self.weights or [1] * len(self.starts), strict=True)

    def written(self) -> Iterator[int]:
        """Of each round, the tokens of its answer that were there before it, but for the first."""
        first = end = -1
        for start, accepted in zip(self.starts, self.accepted, strict=True):
            if start > end:  # not where the round before left off: the next answer of a conversation
                first = start
            end = start + accepted + 1
            yield start - first


def round_starts(first: int, accepted: Iterable[int]) -> list[int]:
    """Where each round begins: `accepted + 1` tokens after the one before."""
    return list(accumulate((a + 1 for a in accepted), initial=first))[:-1]


def summarise(name: str, texts: list[Rounds], num_speculative_tokens: int, seed: int) -> Acceptance:
    """Acceptance over all rounds of some texts, in vLLM's definition, with figures by domain and by position."""
    accepted = [(a, weight) for text in texts for _, a, weight in text.each()]
    rounds, joint = joint_rates(accepted, num_speculative_tokens)
    mean = share(sum(a * weight for a, weight in accepted), rounds)
    return Acceptance(
        name=name,
        num_speculative_tokens=num_speculative_tokens,
        mean_acceptance_length=1 + mean,
        per_position=tuple(joint),
        prompts=len(texts),
        tokens=sum(text.tokens for text in texts),
        confidence_95=confidence_95(texts, num_speculative_tokens, seed),
        extra={
            "confidence_95_over": "conversations",
            "rounds": rounds,
            "mean_accepted_tokens": mean,
            "conditional_per_position": conditional(joint),
            "per_position_95": [_rate_95(texts, k, seed) for k in range(num_speculative_tokens)],
            "by_domain": _by_domain(texts, num_speculative_tokens, seed),
            "by_position": _by(texts, lambda text, start: position_bucket(start)),
            "within_tokens": within_tokens(texts, num_speculative_tokens),
        },
    )


def joint_rates(accepted: list[tuple[int, float]], num_speculative_tokens: int) -> tuple[float, list[float]]:
    """How many rounds there are, and in which share of them draft token k and all before it are accepted.

    Args:
        accepted: a and weight of each round.
    """
    rounds = sum(weight for _, weight in accepted)
    taken = [sum(weight for a, weight in accepted if a > k) for k in range(num_speculative_tokens)]
    return rounds, [share(part, rounds) for part in taken]


def within_tokens(texts: list[Rounds], num_speculative_tokens: int) -> dict[str, dict[str, Any]]:
    """Rounds of the first 32, 64, 128 … tokens of answers, as far as there are more: greedy texts come to repeat
    themselves, and what serving accepts depends on how long its answers are."""
    rounds = [(n, a, w) for text in texts for n, (_, a, w) in zip(text.written(), text.each(), strict=True)]
    found, tokens = {}, FEWEST_TOKENS
    while tokens <= max((n for n, *_ in rounds), default=0):
        count, joint = joint_rates([(a, w) for n, a, w in rounds if n < tokens], num_speculative_tokens)
        found[str(tokens)] = {"mean_acceptance_length": 1 + sum(joint), "per_position": joint, "rounds": count}
        tokens *= 2
    return found


def conditional(joint: list[float]) -> list[float | None]:
    """Share of k right where all before were: from joint rates. None where nothing got that far."""
    return [share_or_none(now, before) for before, now in zip([1.0, *joint], joint, strict=False)]


def position_bucket(position: int) -> str:
    """`0-255`, `256-511`, `512-1023` …: each as long as all before it."""
    first = 0 if position < FIRST_BUCKET_TOKENS else 1 << position.bit_length() - 1
    return f"{first}-{max(FIRST_BUCKET_TOKENS, 2 * first) - 1}"


def confidence_95(texts: list[Rounds], num_speculative_tokens: int, seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the mean acceptance length over whole conversations, whose rounds are not independent.

    Fewer than two conversations say nothing of the spread: then the interval is all that is possible, 1 to 1 + K.
    """
    low, high = _mean_95(texts, lambda accepted: accepted, num_speculative_tokens, seed)
    return 1 + low, 1 + high


def _rate_95(texts: list[Rounds], k: int, seed: int) -> tuple[float, float]:
    """The same of the share of rounds in which draft token k and all before it are accepted."""
    return _mean_95(texts, lambda accepted: accepted > k, 1, seed)


def _mean_95(texts: list[Rounds], value: Callable[[int], int], most: int, seed: int) -> tuple[float, float]:
    """Of the mean over rounds of `value(accepted)`, which is between 0 and `most`."""
    sums = _sums(texts, value)
    if len(sums) < 2:
        return 0.0, float(most)
    return bootstrap_95(list(sums.values()), lambda total, rounds: total / rounds, seed)


def difference(measured: list[Rounds], expected: list[Rounds], seed: int) -> dict[str, Any]:
    """Of two acceptance lengths on the same texts, with its interval over conversations; None of fewer than two."""
    pairs = [_sums(texts, lambda accepted: accepted) for texts in (measured, expected)]
    rows = [(*pairs[0][id], *pairs[1][id]) for id in pairs[0] if id in pairs[1]]
    if not rows:
        return {"difference": None, "confidence_95": None}

    def of(a: Any, n: Any, b: Any, m: Any) -> Any:
        return a / n - b / m

    bounds = bootstrap_95(rows, of, seed) if len(rows) > 1 else None
    return {"difference": float(of(*np.array(rows).sum(0))), "confidence_95": bounds}


def bootstrap_95(rows: Sequence[tuple[float, ...]], of: Callable[..., Any], seed: int) -> tuple[float, float]:
    """Percentile bootstrap of a function of the rows' sums."""
    columns = np.array(rows).T
    draws = np.random.default_rng(seed).integers(len(rows), size=(BOOTSTRAP_DRAWS, len(rows)))
    low, high = np.percentile(of(*(column[draws].sum(1) for column in columns)), [2.5, 97.5])
    return float(low), float(high)


def _sums(texts: list[Rounds], value: Callable[[int], float]) -> dict[str, tuple[float, float]]:
    """Of each conversation that has rounds: `value(accepted)` over its rounds, and how many they are."""
    sums: dict[str, tuple[float, float]] = {}
    for text in texts:
        if text.accepted:
            total, rounds = sums.get(text.conversation_id, (0, 0))
            total += sum(value(accepted) * weight for _, accepted, weight in text.each())
            sums[text.conversation_id] = total, rounds + sum(weight for *_, weight in text.each())
    return sums


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def share_or_none(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _by_domain(texts: list[Rounds], num_speculative_tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {**_by(texts, lambda text, start: text.domain)}
    for name, figures in found.items():
        own = [text for text in texts if text.domain == name]
        figures["confidence_95"] = confidence_95(own, num_speculative_tokens, seed)
    return found


def _by(texts: list[Rounds], key: Callable[[Rounds, int], str]) -> dict[str, dict[str, float]]:
    """Acceptance length and number of rounds for each value of `key(text, start)`, in order of first appearance."""
    groups: dict[str, tuple[float, float]] = {}
    for text in texts:
        for start, accepted, weight in text.each():
            total, rounds = groups.get(key(text, start), (0, 0))
            groups[key(text, start)] = total + accepted * weight, rounds + weight
    return {
        name: {"mean_acceptance_length": 1 + share(total, rounds), "rounds": rounds}
        for name, (total, rounds) in groups.items()
    }
