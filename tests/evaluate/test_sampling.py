"""Speculative decoding at temperature writes what the target would sample: against every text's exact probability.

Each test has its seeds, so that what passes once passes always; each fault that can be planted in the code is caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from draftsmith.evaluate import sampling, speculate
from draftsmith.evaluate.lossless import chance_of, places
from draftsmith.evaluate.sampling import Sampling, distribution, draw, verify
from draftsmith.evaluate.speculate import Drafter, speculative_decode
from tests.evaluate.builders import DRAFT_IDS, SMALL_PROMPT, WORDS, Small, exact_texts

TEXTS, TOKENS = 300, 3  # the prompt's token, a draft, and with K = 1 the bonus
REFUSED = 1e-6  # a right decoder is called wrong once in a million seeds


@pytest.fixture(scope="module")
def exact(small: Small) -> dict[tuple[int, ...], float]:
    return exact_texts(small.target, TOKENS, temperature=0.8)


def chi_squared(counts: Counter, exact: dict, least: float = 5.0) -> float:
    """p-value of the counts; texts that are expected less than `least` times are counted together."""
    total = sum(counts.values())
    cells: dict[object, list[float]] = {}
    for text, prob in exact.items():
        cell = cells.setdefault(text if prob * total >= least else "rare", [0.0, 0.0])
        cell[0] += counts[text]
        cell[1] += prob * total
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells.values())
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def write_texts(small: Small, draft_temperature: float, steps: int = 1) -> tuple[Counter, float]:
    """How often each text was written, and the share of drafts that were taken."""
    counts: Counter = Counter()
    taken = []
    for seed in range(TEXTS):
        settings = Sampling(0.8, draft_temperature, seed)
        decoded = speculative_decode(small.target, small.draft, SMALL_PROMPT, TOKENS, (), steps, settings)
        counts[tuple(decoded.tokens)] += 1
        taken += decoded.accepted
    return counts, sum(taken) / (steps * len(taken))


@pytest.mark.parametrize(("draft_temperature", "steps"), [(0.0, 1), (1.0, 2)])
def test_texts_are_written_as_often_as_the_target_would(
    small: Small, exact: dict, draft_temperature: float, steps: int
) -> None:
    counts, taken = write_texts(small, draft_temperature, steps)
    assert 0.05 < taken < 0.9  # both branches are taken
    assert chi_squared(counts, exact) > 0.01


def take_all(drafted, q, p, generator):
    return [*drafted, int(draw(p[len(drafted)], generator))]


def bonus_from_the_draft(drafted, q, p, generator):
    written = verify(drafted, q, p, generator)
    return [*written[:-1], int(draw(q[-1], generator))] if len(written) > len(drafted) else written


def q_without_the_vocabulary_map(drafted, q, p, generator):
    """The draft's probabilities on the target's first words, and its drafts where they belong."""
    astray = torch.full_like(q, 1e-6)
    astray[:, : len(DRAFT_IDS)] = q[:, DRAFT_IDS]
    return verify(drafted, astray, p, generator)


@pytest.mark.parametrize(
    ("of", "name", "fault"),
    [
        (speculate, "verify", take_all),
        (speculate, "verify", bonus_from_the_draft),
        (speculate, "verify", q_without_the_vocabulary_map),
        (sampling, "residual", lambda p, q: p),
        (sampling, "residual", lambda p, q: q),
    ],
    ids=["every draft is taken", "bonus from the draft", "no d2t", "resampled from p", "resampled from q"],
)
def test_a_planted_fault_is_caught(
    small: Small, exact: dict, monkeypatch: pytest.MonkeyPatch, of: object, name: str, fault: object
) -> None:
    monkeypatch.setattr(of, name, fault)
    counts, _ = write_texts(small, draft_temperature=1.0)
    assert chi_squared(counts, exact) < REFUSED


@torch.inference_mode()
def test_a_draft_proposes_its_own_words_from_its_own_distribution(small: Small) -> None:
    _, aux = small.target.read([*SMALL_PROMPT, 0], keep=1, cached=False)
    tokens, q = Drafter(small.draft, 0.7, torch.Generator().manual_seed(0)).propose([*SMALL_PROMPT[1:], 0, 3], aux, 2)
    assert set(tokens) <= set(DRAFT_IDS)
    assert q.shape == (2, WORDS)
    assert q[:, [word for word in range(WORDS) if word not in DRAFT_IDS]].eq(0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(2))


def test_what_a_refused_draft_leaves_is_what_the_target_says_more_often() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(sampling.residual(p, q), torch.tensor([0.3, 0.1, 0.0]))
    assert torch.equal(sampling.residual(p, p), p)


def test_temperature_zero_draws_the_likeliest() -> None:
    assert distribution(torch.tensor([1.0, 3.0, 2.0]), 0).tolist() == [0, 1, 0]


def test_drafts_and_target_are_compared_in_float32() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0], dtype=torch.bfloat16)
    assert distribution(logits, 0.7).dtype == distribution(logits, 0).dtype == torch.float32


def sampled(probs: torch.Tensor, seed: int = 0) -> list[int]:
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed)).squeeze(-1).tolist()


def test_tokens_of_a_distribution_fall_on_uniform_places() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(4000, 50, generator=generator).mul(2).softmax(-1)
    found = places(probs, sampled(probs), generator)
    assert 0 <= float(found.min()) < 0.01
    assert 0.99 < float(found.max()) <= 1.001
    assert chance_of(found) > 0.01


@pytest.mark.parametrize("other", [lambda probs: probs**1.2, lambda probs: probs.roll(1, -1).add(probs * 4)])
def test_tokens_of_another_distribution_do_not(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(4000, 50, generator=generator).mul(2).softmax(-1)
    assert chance_of(places(probs, sampled(other(probs)), generator)) < REFUSED


def test_of_two_likely_tokens_each_has_its_own_place() -> None:
    probs = torch.tensor([[0.25, 0.5, 0.25]]).expand(3, 3)
    found = places(probs, [0, 1, 2], torch.Generator().manual_seed(0))
    assert [int(place * 4) for place in found] == [2, int(found[1] * 4), 3]
    assert found[1] < 0.5
