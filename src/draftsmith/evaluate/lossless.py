"""Whether a text is the target's own, greedy or sampled, judged by one uncached forward over all of it.

A text is greedy's if each token is the likeliest after those before it; by induction plain decoding then writes it
token by token. Unlike a second decoding, which says nothing after the first difference, this judges every token, and
shares neither cache nor loop with what it judges.

A sampled text can only be judged with many others. Lay the target's distribution after the tokens before out from 0 to
1, likeliest token first: a token that was drawn from it falls on a place that is uniform, and independent of all places
before (Rosenblatt 1952). Text of the draft's falls too often on what the draft likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Two computations of one logit differ by rounding: at most 5 · eps · max|logit| between the two likeliest of
# SmolLM2-135M, read in pieces of 1 and 4 tokens against all at once, in float32 and in bfloat16.
TIE_ROUNDINGS = 8
BINS, BIN_TOKENS = 20, 20  # of places: at most, and at the least in each, or χ² is far from what is left of it


@dataclass(frozen=True)
class Deviation:
    """A token that is not the likeliest."""

    index: int  # from the first token of the answer
    token: int
    likeliest: int
    gap: float  # between their logits
    tie: bool  # the gap is within rounding: another order of the same sums may prefer either


def deviations(logits: torch.Tensor, tokens: list[int]) -> list[Deviation]:
    """Compare a text with the logits before each of its tokens: [n, Vt]."""
    written = torch.tensor(tokens, device=logits.device)
    best, likeliest = logits.float().max(-1)
    gaps = best - logits.float().gather(-1, written[:, None]).squeeze(-1)
    tolerance = TIE_ROUNDINGS * torch.finfo(logits.dtype).eps * logits.float().abs().amax(-1)
    return [
        Deviation(i, tokens[i], int(likeliest[i]), float(gaps[i]), bool(gaps[i] <= tolerance[i]))
        for i in gaps.nonzero().squeeze(-1).tolist()
    ]


def places(probs: torch.Tensor, tokens: list[int], generator: torch.Generator) -> torch.Tensor:
    """Where each token lies in the distribution that it should be drawn from: [n, Vt] → [n], from 0 to 1.

    Anywhere within its own share, for which `generator` is asked; of equally likely tokens the first comes first.
    """
    written = torch.tensor(tokens, device=probs.device)[:, None]
    own = probs.gather(-1, written)
    ids = torch.arange(probs.shape[-1], device=probs.device)
    before = (probs > own) | ((probs == own) & (ids < written))
    within = torch.rand(len(tokens), generator=generator, device=probs.device)
    return (probs * before).sum(-1) + within * own.squeeze(-1)


def chance_of(places: torch.Tensor) -> float:
    """How often the target's own samples would be spread this unevenly or worse: χ² over equal bins. [n] → p-value"""
    bins = max(2, min(BINS, len(places) // BIN_TOKENS))
    counts = (places * bins).long().clamp(0, bins - 1).bincount(minlength=bins).double()
    expected = len(places) / bins
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), chi_squared / 2))
