"""Acceptance at temperature from texts that the target sampled, without drawing anything.

A drafted token y is drawn from q and taken with probability min(1, p(y) / q(y)): drawn and taken with min(p, q)(y).
With p_i and q_i given y₀ … y_{i-1}, and x the target's own sample in place of y,

    P(drafts 0 … k are taken) = Σ_y Π_{i≤k} min(p_i, q_i)(y_i) = E_x r₀ … r_k        r_i = min(1, q_i(x_i) / p_i(x_i))

so it is enough that the draft reads x as if it had drafted it. More is true. A round writes x₀ … x_a having taken a < K
drafts with probability Π_{i<a} min(p_i, q_i)(x_i) · max(p_a − q_a, 0)(x_a) (`sampling.verify`), which is the target's
probability of these tokens times

    P(a | x) = r₀ … r_{a-1} · (1 − r_a)     and     r₀ … r_{K-1} for a = K

Given the text, whatever draft wrote it, each token was a taken draft with probability r, and the slots that rounds
begin at are a Markov chain: how often each is visited is counted exactly. Of a draft that proposes its likeliest token
d, r = [x = d]: no chance is left, and these are the hops of `offline`.

What a round accepts depends on x₀ … x_k, of which the last is replaced by its mean (Rao and Blackwell):

    E_x r₀ … r_k = E_x r₀ … r_{k-1} · o_k        o_k = Σ min(p_k, q_k) = E[r_k | x₀ … x_{k-1}], p(d) of a likeliest d

None of this holds of texts from elsewhere, but that o_k is how often draft k would be taken after these words, had it
come so far: an unconditional rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import counted_slots, unroll
from draftsmith.evaluate.rounds import Rounds
from draftsmith.evaluate.sampling import Sampling, distribution, proposal

SLOTS = 256  # at once: float32 distributions of so many tokens, [256, Vt]


@dataclass(frozen=True)
class Taken:
    """How likely a draft's tokens are to be taken on one text."""

    slots: list[int]  # n, whose K drafts all have a recorded token
    ratios: list[list[float]]  # [n, K], r of the recorded token, to four places
    overlaps: list[list[float]]  # [n, K], o


@torch.inference_mode()
def taken(
    draft: Draft,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    aux: torch.Tensor,
    logits_after: Callable[[torch.Tensor], torch.Tensor],
    sampling: Sampling,
    steps: int,
) -> Taken:
    """Draft at every slot of a text, on its recorded tokens and states.

    Args:
        input_ids: [T] int64.
        loss_mask: [T] bool, where the target wrote the token itself.
        aux: [T, A, Ht].
        logits_after: the target's logits after the tokens at these places, [m] → [m, Vt].
        sampling: its two temperatures.
        steps: K.
    """
    position = torch.arange(len(input_ids), device=input_ids.device)
    states = list(unroll(draft, input_ids, aux.to(draft.fc.weight.dtype), position, [(0, len(input_ids))], steps))
    *_, whole = counted_slots(loss_mask, torch.zeros_like(input_ids), steps)
    slots = whole.nonzero().squeeze(-1)
    ratios, overlaps = torch.zeros(2, len(slots), steps, dtype=torch.float64, device=slots.device)
    for first in range(0, len(slots), SLOTS):
        some = slots[first : first + SLOTS]
        read = some[:, None] + 1 + torch.arange(steps, device=some.device)  # [n, K], the newest token of each draft
        at, where = read.unique(return_inverse=True)
        after = distribution(logits_after(at), sampling.temperature)
        for k, normed in enumerate(states):
            p, q = after[where[:, k]], proposal(draft, normed[some], sampling.draft_temperature)
            p_x, q_x = (probs.gather(-1, input_ids[read[:, k, None] + 1]).squeeze(-1) for probs in (p, q))
            ratios[first : first + SLOTS, k] = torch.where(q_x >= p_x, 1.0, q_x / p_x)
            overlaps[first : first + SLOTS, k] = torch.minimum(p, q).sum(-1)
    return Taken(slots.tolist(), ratios.round(decimals=4).tolist(), overlaps.round(decimals=4).tolist())


def expected_rounds(
    slots: list[int], ratios: list[list[float]], overlaps: list[list[float]]
) -> list[tuple[int, int, float]]:
    """Slot, drafts accepted, and how often such a round is to be expected.

    The first slot of each run of slots begins a round for certain; one is due `accepted + 1` after each other. A
    weight may be below 0: that of a accepted is the chance of a or more less that of a + 1 or more, each estimated.
    """
    rounds: list[tuple[int, int, float]] = []
    due: dict[int, float] = defaultdict(float)
    for i, slot in enumerate(slots):
        if i == 0 or slot != slots[i - 1] + 1:  # an answer begins
            due = defaultdict(float, {slot: 1.0})
        left = reached = due[slot]  # times r₀ … r_{a-1}, and with o in the last place
        if not left:
            continue
        # After K drafts the target's own token ends the round.
        for accepted, (ratio, overlap) in enumerate(zip([*ratios[i], 0.0], [*overlaps[i], 0.0], strict=True)):
            rounds.append((slot, accepted, reached - left * overlap))
            due[slot + accepted + 1] += left * (1 - ratio)
            left, reached = left * ratio, left * overlap
    return rounds


def expect(conversation_id: str, domain: str, found: Taken, num_speculative_tokens: int, tokens: int) -> Rounds:
    """The rounds of a text with so many draft tokens, at most those that it was read with."""
    ratios, overlaps = ([row[:num_speculative_tokens] for row in rows] for rows in (found.ratios, found.overlaps))
    rounds = expected_rounds(found.slots, ratios, overlaps)
    return Rounds(
        conversation_id,
        domain,
        starts=[start for start, _, _ in rounds],
        accepted=[accepted for _, accepted, _ in rounds],
        tokens=tokens,
        weights=[weight for *_, weight in rounds],
    )
