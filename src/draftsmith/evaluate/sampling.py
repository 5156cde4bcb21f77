"""Which drafted tokens a sampling target takes, so that what is written has the target's own distribution.

A draft token d, drawn from q, is taken with probability min(1, p(d) / q(d)). In place of the first that is refused, one
is drawn from max(p − q, 0), normed; if all are taken, one more is drawn from p. Whatever q is, token x is written with

    min(p, q)(x) + (1 − Σ min(p, q)) · max(p − q, 0)(x) / Σ max(p − q, 0) = p(x)

(Leviathan, Kalman and Matias 2023, algorithm 1; vLLM `v1/sample/rejection_sampler.py`.) At temperature 0 all of p and
of q is on one token: a draft is taken where it is the target's own, and decoding is greedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.draft.model import Draft


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. A greedy draft under a sampling target is what vLLM does unless told otherwise."""

    temperature: float = 0.0
    draft_temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What a model draws from: [..., V] → [..., V] float32.

    The same precision for draft and target, whatever they compute in: the ratio of the two decides.
    """
    if temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, likeliest, 1.0)
    return (logits.float() / temperature).softmax(-1)


def proposal(draft: Draft, normed: torch.Tensor, temperature: float) -> torch.Tensor:
    """What a draft draws from, by the target's ids, nothing on those that it cannot say: [..., H] → [..., Vt]."""
    own = distribution(draft.lm_head(normed), temperature)
    if draft.draft_ids is None:
        return own
    return own.new_zeros(*own.shape[:-1], draft.config.vocab_size).index_copy_(-1, draft.draft_ids, own)


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of a distribution, or of weights that need not sum to 1: [V] → [1] int64."""
    return torch.multinomial(probs, 1, generator=generator)


def verify(drafted: list[int], q: torch.Tensor, p: torch.Tensor, generator: torch.Generator) -> list[int]:
    """The tokens that a round writes: the drafts that are taken, and one of the target's.

    Args:
        drafted: K tokens, each drawn from its q.
        q: [K, Vt], what the draft drew from.
        p: [K + 1, Vt], the target's distribution after the newest token and after each draft.
    """
    places, tokens = torch.arange(len(drafted), device=p.device), torch.tensor(drafted, device=p.device)
    ratios = p[places, tokens] / q[places, tokens]
    taken = torch.rand(len(drafted), device=p.device, generator=generator) < ratios
    accepted = int(taken.cumprod(0).sum())
    weights = residual(p[accepted], q[accepted]) if accepted < len(drafted) else p[accepted]
    return [*drafted[:accepted], int(draw(weights, generator))]


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the target says more often than the draft, not normed: [V] → [V]."""
    more = (p - q).clamp(min=0)
    return more if more.any() else p  # equal but for rounding, which alone refused the draft
