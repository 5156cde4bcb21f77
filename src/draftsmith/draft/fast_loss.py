"""The loss of `loss.py` without its logits in memory: a chunk of positions at a time, its gradient at once.

Everything is laid out by the position that teaches, not by the slot that drafts: at step k, slot j learns from the
target's distribution after position i = j+1+k (`unroll.py`). So one row of the teacher's logits serves all K steps,
and is computed once:

    chunk of positions i ─ target's head, rows of the draft vocabulary ─→ p [c, Vd]
    states [K, c, H] ─ lm_head ─→ logits [K, c, Vd] ─→ loss, and in the same memory d loss / d logits
                     ←─ d states, d lm_head ──────────┘

Whether the target's top-1 lies in the draft vocabulary, and how much of its mass, only the whole vocabulary tells.
`find_targets` streams it, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.draft.fast_attention import Documents
from draftsmith.draft.fast_layers import add_product, wide, wide_dtype
from draftsmith.draft.fast_unroll import UnrollInputs, fast_unroll
from draftsmith.draft.loss import HYBRID_DECAY, LEAST_OVERLAP, StepResult
from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import counted_slots, shift
from draftsmith.recipe import LossKind
from draftsmith.records import Batch
from draftsmith.target import TargetHead

# Rows of logits in memory at a time: the student's, and the target's in a pass over its whole vocabulary. On CUDA,
# about multiples of the 320 rows that a matrix product on a Hopper GPU works on at a time, and few of them: each chunk
# of the student's reads and writes lm_head's whole gradient.
STUDENT_ROWS = {"cuda": 7680, "cpu": 256}
STUDENT_BYTES, HOPPER_ROWS = 480 << 20, 320
TARGET_ROWS = {"cuda": 1280, "cpu": 256}


@dataclass(frozen=True)
class Slots:
    """Which positions teach which steps, as the loss mask says before anything is computed."""

    counted: torch.Tensor  # [K, S] bool, by position: what serving would draft
    positions: torch.Tensor  # [P] int64, those that any step counts
    others: torch.Tensor  # the rest of the S + K rows of the states

    @classmethod
    def of(cls, loss_mask: torch.Tensor, document: torch.Tensor, steps: int) -> Slots:
        counted = torch.zeros(steps, len(loss_mask), dtype=torch.bool)
        for k, of_step in enumerate(counted_slots(loss_mask, document, steps)):
            counted[k, 1 + k :] = of_step[: max(0, len(loss_mask) - 1 - k)]
        used = torch.nn.functional.pad(counted.any(0), (0, steps))
        return cls(counted, used.nonzero().flatten(), (~used).nonzero().flatten())

    def of_one_shape(self) -> Slots:
        """The same with every position among those that count for something."""
        steps, slots = self.counted.shape
        return Slots(self.counted, torch.arange(slots), torch.arange(slots, slots + steps))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Slots:
        return Slots(move(self.counted), move(self.positions), move(self.others))


@dataclass(frozen=True)
class Targets:
    """What the target says about them."""

    slots: Slots
    trained: torch.Tensor  # [K, S] bool, what the loss is taken over
    sayable: torch.Tensor | None  # [S] bool, the target's top-1 is in the draft vocabulary; None where not asked
    mass: torch.Tensor | None  # [S], the draft vocabulary's share of the target's probability; likewise

    @property
    def counts(self) -> torch.Tensor:
        """Slots that the loss is taken over: [K] int64."""
        return self.trained.sum(1)


def head_of_draft_vocabulary(head: TargetHead, draft: Draft) -> TargetHead:
    """The head with only the rows that the draft can say."""
    ids = draft.draft_ids
    if ids is None:
        return head
    bias = None if head.lm_head_bias is None else head.lm_head_bias.index_select(0, ids)
    rows = head.lm_head.index_select(0, ids)
    return TargetHead(head.embedding, head.norm, rows, head.logit_scale, head.softcap, bias)


@torch.no_grad()
def find_targets(
    draft: Draft, head: TargetHead, last: torch.Tensor, slots: Slots, *, top1: bool, mass: bool, mask: bool
) -> Targets:
    """Choose the slots to train on.

    Args:
        last: [S, Ht]
        slots: on the same device.
        top1: find out whether the draft can say the target's top-1.
        mass: find out the mass that the target gives to the draft vocabulary.
        mask: train only where it can; needs `top1`.
    """
    sayable = share = None
    last = last.to(head.lm_head.dtype)
    if top1 or mass:
        sayable, share = _ask_whole_vocabulary(draft, head, last, slots.positions, mass)
    trained = slots.counted & sayable if mask and sayable is not None else slots.counted
    return Targets(slots, trained, sayable, share)


def _ask_whole_vocabulary(
    draft: Draft, head: TargetHead, last: torch.Tensor, positions: torch.Tensor, mass: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sayable = torch.zeros(len(last), dtype=torch.bool, device=last.device)
    share = torch.ones(len(last), dtype=wide_dtype(last), device=last.device)
    if draft.draft_ids is None:
        return ~sayable, share
    for chunk in positions.split(TARGET_ROWS[last.device.type]):
        logits = head.logits(last[chunk])
        sayable[chunk] = draft.t2d[logits.argmax(-1)]
        if mass:
            logits = wide(logits)
            share[chunk] = (logits[:, draft.draft_ids].logsumexp(-1) - logits.logsumexp(-1)).exp()
    return sayable, share


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs beside the two tensors that it has gradients for."""

    targets: Targets
    head: TargetHead  # of the draft vocabulary
    last: torch.Tensor  # [S, Ht]
    weights: torch.Tensor  # [K], of each step's sum in the loss
    kind: LossKind
    rows: int  # of the student's logits at a time


def fast_unrolled_loss(
    draft: Draft,
    head: TargetHead,
    batch: Batch,
    documents: Documents,
    targets: Targets,
    step_weights: torch.Tensor,
    kind: LossKind,
) -> tuple[torch.Tensor, list[StepResult]]:
    """Σ_k step_weights[k] · (loss sum of step k), and the sums themselves, without gradients.

    Args:
        batch: on the device, its states in the dtype to compute in.
        step_weights: [K], decay^k over the count of the whole global batch.
    """
    counted, steps = targets.slots.counted, len(targets.slots.counted)
    states = fast_unroll(UnrollInputs(draft, batch.input_ids, batch.aux, batch.position, documents, steps))
    inputs = LossInputs(
        targets=targets,
        head=head_of_draft_vocabulary(head, draft),
        last=batch.last.to(head.lm_head.dtype),
        weights=step_weights,
        kind=kind,
        rows=student_rows(batch.aux.device.type, len(draft.lm_head.weight), batch.aux.itemsize),
    )
    loss, sums, right = ChunkedLoss.apply(states, draft.lm_head.weight, inputs)
    correct = right & counted if targets.sayable is None else right & counted & targets.sayable
    counted_sums, counts = counted.sum(1), targets.counts
    accepted = torch.ones_like(correct[0])
    results = []
    for k in range(steps):
        accepted = accepted & shift(correct[k], 1 + k)  # from positions to slots
        results.append(StepResult(sums[k], counts[k], correct[k].sum(), accepted.sum(), counted_sums[k]))
    return loss, results


def student_rows(device: str, draft_vocab: int, itemsize: int) -> int:
    """Rows of the student's logits to have in memory at a time, on a type of device."""
    if device != "cuda":
        return STUDENT_ROWS[device]
    fitting = STUDENT_BYTES // (draft_vocab * itemsize) // HOPPER_ROWS * HOPPER_ROWS
    return min(STUDENT_ROWS[device], max(HOPPER_ROWS, fitting))


class ChunkedLoss(torch.autograd.Function):
    """(states [K, S+K, H] by position, lm_head [Vd, H]) → loss, sums [K], right [K, S] bool.

    Only the loss has gradients. They are computed in the forward pass, in the memory of `states`, which is consumed:
    a function that returned it must not need its values again.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, lm_head: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        targets, steps = inputs.targets, len(states)
        learn = any(ctx.needs_input_grad)
        states, weight = states.detach(), lm_head.detach().to(states.dtype)
        row_weights = targets.trained * inputs.weights[:, None]  # [K, S]
        sums = torch.zeros(steps, dtype=wide_dtype(states), device=states.device)
        right = torch.zeros_like(targets.trained)
        dweight = None
        for at in targets.slots.positions.split(max(1, inputs.rows // steps)):
            teacher = inputs.head.logits(inputs.last[at])  # [c, Vd]
            hidden = gather_rows(states, at)  # [K·c, H]
            logits = (hidden @ weight.t()).unflatten(0, (steps, -1))
            entropy, teacher_best = teacher_rows(teacher)
            mass = None if targets.mass is None else targets.mass[at]
            losses, best = loss_rows(logits, teacher, entropy, mass, row_weights[:, at], inputs.kind)
            sums += (losses * targets.trained[:, at]).sum(1)
            right[:, at] = best == teacher_best
            gradient = logits.flatten(0, 1)  # loss_rows left it there
            if learn:
                dweight = add_product(dweight, gradient, hidden)
                scatter_rows(gradient @ weight, states, at)
            del teacher, hidden, logits, gradient  # else they would be there beside the next chunk's
        if learn:
            states.index_fill_(1, targets.slots.others, 0)
            ctx.dweight = torch.zeros_like(lm_head) if dweight is None else dweight.to(lm_head.dtype)
            ctx.dstates = states
        ctx.mark_non_differentiable(sums, right)
        return (sums * inputs.weights).sum(), sums, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        dstates, dweight = ctx.dstates, ctx.dweight
        for gradient in (dstates, dweight):
            scale_(gradient, dloss)
        del ctx.dstates, ctx.dweight
        return dstates, dweight, None


def teacher_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy and likeliest token of each row: [c, Vd] → [c] each. The rows become their softmax, in place."""
    if logits.is_cuda:
        from draftsmith.draft import kernels

        return kernels.teacher_rows(logits)
    best, log_p = logits.argmax(-1), wide(logits).log_softmax(-1)
    p = log_p.exp()
    logits.copy_(p)
    return -(p * log_p).sum(-1), best


def loss_rows(
    student: torch.Tensor,
    probs: torch.Tensor,
    entropy: torch.Tensor,
    mass: torch.Tensor | None,
    weight: torch.Tensor,
    kind: LossKind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row of logits; their memory then holds the gradient of Σ weight · loss.

    Args:
        student: [K, c, Vd] logits, overwritten.
        probs: [c, Vd], and `entropy` [c], of `teacher_rows`.
        mass: [c], as in `Targets`; None counts as 1.
        weight: [K, c]

    Returns:
        Losses and the student's likeliest tokens, as ids of the draft: [K, c] each.
    """
    mass = torch.ones_like(entropy) if mass is None else mass
    if student.is_cuda:
        from draftsmith.draft import kernels

        return kernels.loss_rows(student, probs, entropy, mass, weight, kind)
    best, log_q, p = student.argmax(-1), wide(student).log_softmax(-1), wide(probs)
    losses = -torch.einsum("cv,kcv->kc", p, log_q)
    q = log_q.exp_()
    gradient = q - p
    if kind != "soft_cross_entropy":
        losses = losses - entropy
    if kind in ("lk", "lk_hybrid"):
        bound = p * mass[:, None]
        overlap = torch.minimum(bound, q).sum(-1, keepdim=True)  # [K, c, 1]
        below = q * (q < bound)
        lift = below - q * below.sum(-1, keepdim=True)  # d overlap / d logits
        if kind == "lk":
            losses = -overlap.clamp_min(LEAST_OVERLAP).log().squeeze(-1)
            gradient = lift * -torch.where(overlap > LEAST_OVERLAP, 1 / overlap, 0)
        else:
            share = (-HYBRID_DECAY * overlap).exp()
            losses = share.squeeze(-1) * losses + ((1 - share) * (1 - overlap)).squeeze(-1)
            gradient = share * gradient - (1 - share) * lift
    student.copy_(gradient.mul_(weight[..., None]))
    return losses, best


def gather_rows(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows `at` [c] of every step: [K, N, H] → [K·c, H]"""
    if states.is_cuda:
        from draftsmith.draft import kernels

        return kernels.gather_rows(states, at)
    return states[:, at].flatten(0, 1)


def scatter_rows(packed: torch.Tensor, states: torch.Tensor, at: torch.Tensor) -> None:
    """Put [K·c, H] where `gather_rows` took them from."""
    if states.is_cuda:
        from draftsmith.draft import kernels

        return kernels.scatter_rows(packed, states, at)
    states[:, at] = packed.unflatten(0, (len(states), -1))


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """x *= factor, of one number; both contiguous. After `loss.backward()` it is one."""
    if x.is_cuda:
        from draftsmith.draft import kernels

        return kernels.scale(x, factor)
    x.mul_(factor)
