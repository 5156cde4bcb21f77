"""Whether a text is the target's own greedy text, judged by one uncached forward over all of it.

A text is greedy's if each token is the likeliest after those before it; by induction plain decoding then writes it
token by token. Unlike a second decoding, which says nothing after the first difference, this judges every token, and
shares neither cache nor loop with what it judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Two computations of one logit differ by rounding: at most 5 · eps · max|logit| between the two likeliest of
# SmolLM2-135M, read in pieces of 1 and 4 tokens against all at once, in float32 and in bfloat16.
TIE_ROUNDINGS = 8


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
