"""What the draft learns from: the target's distribution on the draft's vocabulary.

    loss = Σ_k decay^k · mean over counted slots of ℓ(p, q_k)

    soft_cross_entropy   − Σ_v p(v) log q(v)     (EAGLE reference `traineagle3/cnets.py`, 831-865)
    forward_kl           Σ_v p(v) log (p(v) / q(v)), which has the same gradient
    lk                   − log α,   α = Σ_v min(p*(v), q(v)), the chance that a draft token is accepted
    lk_hybrid            λ · forward_kl + (1 − λ) (1 − α),   λ = exp(−3α) without gradient  (LK, arXiv 2602.23881)

p is the target's softmax restricted to the draft vocabulary and renormalised; p* is not renormalised, since what the
draft cannot say it cannot have accepted. Unlike in the EAGLE reference, the mean is over the slots that count, so that
the gradient does not depend on how much of a batch is prompt or padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.draft.attention import Spans
from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import counted_slots, unroll
from draftsmith.recipe import LossKind
from draftsmith.records import Batch
from draftsmith.target import TargetHead

LEAST_OVERLAP = 1e-5  # below it, lk has no gradient
HYBRID_DECAY = 3.0


@dataclass(frozen=True)
class Teacher:
    """The target's opinion after each token of a flat batch."""

    probs: torch.Tensor  # [S, Vd], sums to 1
    mass: torch.Tensor  # [S], what the draft vocabulary has of the target's probability
    top1: torch.Tensor  # [S] int64, target id of the likeliest token of the whole vocabulary
    top1_in_vocab: torch.Tensor  # [S] bool, whether the draft can say it


@dataclass(frozen=True)
class StepResult:
    """Sums over the slots of one unroll step, to be divided by counts of all ranks together."""

    loss_sum: torch.Tensor  # scalar, over the slots trained on
    loss_count: int | torch.Tensor
    correct: torch.Tensor  # slots whose draft token is the target's own top-1
    accepted: torch.Tensor  # slots where this draft token and all before it are right
    counted: int | torch.Tensor  # slots that serving would draft for; denominator of both


@torch.no_grad()
def teacher_of(draft: Draft, head: TargetHead, last: torch.Tensor, chunk_tokens: int = 1024) -> Teacher:
    """The target's distribution from its last states [S, Ht], before the final norm.

    Logits of the whole vocabulary exist for `chunk_tokens` tokens at a time.
    """
    ids = draft.draft_ids
    probs, mass, top1 = [], [], []
    for states in last.split(chunk_tokens):
        logits = head.logits(states)
        top1.append(logits.argmax(-1))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        kept = logits if ids is None else logits[:, ids]
        mass.append((kept.logsumexp(-1) - logits.logsumexp(-1)).exp())
        probs.append(kept.softmax(-1))
    best = torch.cat(top1)
    sayable = torch.ones_like(best, dtype=torch.bool) if ids is None else draft.t2d[best]
    return Teacher(torch.cat(probs), torch.cat(mass), best, sayable)


def slot_losses(logits: torch.Tensor, probs: torch.Tensor, mass: torch.Tensor, kind: LossKind) -> torch.Tensor:
    """ℓ of each slot: logits and probs [S, Vd], mass [S] → [S], in float32 or wider."""
    log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    cross_entropy = -(probs * log_q).sum(-1)
    if kind == "soft_cross_entropy":
        return cross_entropy
    kl = cross_entropy - torch.special.entr(probs).sum(-1)
    if kind == "forward_kl":
        return kl
    overlap = torch.minimum(probs * mass[:, None], log_q.exp()).sum(-1)
    if kind == "lk":
        return -overlap.clamp_min(LEAST_OVERLAP).log()
    share = (-HYBRID_DECAY * overlap.detach()).exp()
    return share * kl + (1 - share) * (1 - overlap)


def unrolled_loss(
    draft: Draft,
    batch: Batch,
    teacher: Teacher,
    steps: int,
    mask_out_of_vocab: bool = True,
    kind: LossKind = "soft_cross_entropy",
) -> list[StepResult]:
    """Loss and acceptance of every unroll step on one batch.

    A slot whose target top-1 lies outside the draft vocabulary is never accepted; with `mask_out_of_vocab` it is not
    trained on either, since what is left of its distribution is a renormalised tail.
    """
    counted_by_step = counted_slots(batch.loss_mask, batch.document, steps)
    states = unroll(draft, batch.input_ids, batch.aux, batch.position, spans_of(batch.document), steps)
    accepted = torch.ones_like(batch.loss_mask)
    results = []
    for k, (normed, counted) in enumerate(zip(states, counted_by_step, strict=True)):
        slots = counted.nonzero().squeeze(-1)
        logits = draft.lm_head(normed[slots])
        losses = slot_losses(logits, teacher.probs[slots + 1 + k], teacher.mass[slots + 1 + k], kind)
        if mask_out_of_vocab:
            losses = losses[teacher.top1_in_vocab[slots + 1 + k]]
        correct = torch.zeros_like(counted)
        correct[slots] = draft.to_target_ids(logits.argmax(-1)) == teacher.top1[slots + 1 + k]
        accepted = accepted & correct
        results.append(StepResult(losses.sum(), losses.numel(), correct.sum(), accepted.sum(), slots.numel()))
    return results


def total_loss(results: list[StepResult], counts: list[int | torch.Tensor], step_decay: float) -> torch.Tensor:
    """Σ_k decay^k · loss_sum_k / counts_k, where counts are those of the whole global batch. A step of none adds 0."""
    parts = [
        step_decay**k * result.loss_sum / count
        for k, (result, count) in enumerate(zip(results, counts, strict=True))
        if count
    ]
    return torch.stack(parts).sum() if parts else results[0].loss_sum * 0


def spans_of(document: torch.Tensor) -> Spans:
    """[start, end) of each run of equal numbers: [S] → list."""
    edges = (torch.nonzero(document[1:] != document[:-1]).flatten() + 1).tolist()
    return list(zip([0, *edges], [*edges, len(document)], strict=True))
