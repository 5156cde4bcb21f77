"""Triton kernels for CUDA. Each does what the torch code beside its only caller does, without the memory in between.

Numbers of slots and steps are not specialised on, so that a batch of another size compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.draft.loss import HYBRID_DECAY, LEAST_OVERLAP


def merge_own(query, keys, values, out, lse):
    """`fast_attention.merge_own`."""
    grid, shape = _slots_by_kv_head(query, keys)
    _merge_own[grid](query, keys, values, out, lse, *shape)


def merge_own_backward(dout, query, keys, values, out, lse, dquery, dkeys, dvalues):
    """`fast_attention.merge_own_backward`."""
    grid, shape = _slots_by_kv_head(query, keys)
    _merge_own_backward[grid](
        dout, query, keys, values, out, lse, dquery, dkeys, dvalues, dkeys.stride(0), dkeys.stride(1), *shape
    )


def loss_rows(student, teacher, lse, entropy, log_mass, weight, kind):
    """`fast_loss.loss_rows`."""
    steps, rows, vocab = student.shape
    loss = torch.empty(steps, rows, dtype=torch.float32, device=student.device)
    best = torch.empty(steps, rows, dtype=torch.int64, device=student.device)
    terms = {"soft_cross_entropy": 0, "forward_kl": 0, "lk": 1, "lk_hybrid": 2}[kind]
    _loss_rows[(steps * rows,)](
        student, teacher, lse, entropy, log_mass, weight, loss, best, steps, rows, vocab, TERMS=terms, BLOCK=4096,
        num_warps=8,
    )  # fmt: skip
    return loss, best


SLOTS = 4  # of one program
_LEAST_OVERLAP, _HYBRID_DECAY = tl.constexpr(LEAST_OVERLAP), tl.constexpr(HYBRID_DECAY)


def _slots_by_kv_head(query, keys):
    slots, heads, dim = query.shape
    steps, _, kv_heads, _ = keys.shape
    shape = (
        slots, steps, dim**-0.5, query.stride(0), keys.stride(0), keys.stride(1),
        heads // kv_heads, triton.next_power_of_2(heads // kv_heads), dim, triton.next_power_of_2(dim), SLOTS,
    )  # fmt: skip
    return (triton.cdiv(slots, SLOTS), kv_heads), shape


@triton.jit
def _where(slots, q_slot, kv_slot, GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
           SLOTS: tl.constexpr):  # fmt: skip
    """Offsets and masks of this program's slots: queries [SLOTS, GROUP, D], keys [SLOTS, D], one number per query."""
    slot = (tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)).to(tl.int64)
    kv_head, group, dim = tl.program_id(1), tl.arange(0, GROUP_P), tl.arange(0, D_P)
    head = kv_head * GROUP + group
    heads = tl.num_programs(1) * GROUP
    q_at = slot[:, None, None] * q_slot + head[None, :, None] * D + dim[None, None, :]
    out_at = (slot[:, None, None] * heads + head[None, :, None]) * D + dim[None, None, :]
    kv_at = slot[:, None] * kv_slot + kv_head * D + dim[None, :]
    lse_at = head[None, :].to(tl.int64) * slots + slot[:, None]
    lse_on = (slot < slots)[:, None] & (group < GROUP)[None, :]
    q_on = lse_on[:, :, None] & (dim < D)[None, None, :]
    kv_on = (slot < slots)[:, None] & (dim < D)[None, :]
    return slot, kv_head, dim, q_at, out_at, kv_at, lse_at, q_on, kv_on, lse_on


@triton.jit(do_not_specialize=["slots", "steps"])
def _merge_own(
    query, keys, values, out, lse, slots, steps, scale, q_slot, kv_step, kv_slot,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    _, _, _, q_at, out_at, kv_at, lse_at, q_on, kv_on, lse_on = _where(
        slots, q_slot, kv_slot, GROUP, GROUP_P, D, D_P, SLOTS
    )
    q = tl.load(query + q_at, q_on, 0.0).to(tl.float32)
    merged = tl.load(out + out_at, q_on, 0.0).to(tl.float32)
    total = tl.load(lse + lse_at, lse_on, 0.0)
    for _ in range(steps):
        key = tl.load(keys + kv_at, kv_on, 0.0).to(tl.float32)
        value = tl.load(values + kv_at, kv_on, 0.0).to(tl.float32)
        score = tl.sum(q * key[:, None, :], 2) * scale
        most = tl.maximum(total, score)
        sums = most + tl.log(tl.exp(total - most) + tl.exp(score - most))
        merged = merged * tl.exp(total - sums)[:, :, None] + tl.exp(score - sums)[:, :, None] * value[:, None, :]
        total = sums
        keys += kv_step
        values += kv_step
    tl.store(out + out_at, merged, q_on)
    tl.store(lse + lse_at, total, lse_on)


@triton.jit(do_not_specialize=["slots", "steps"])
def _merge_own_backward(
    dout, query, keys, values, out, lse, dquery, dkeys, dvalues, dkv_step, dkv_slot,
    slots, steps, scale, q_slot, kv_step, kv_slot,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot, kv_head, dim, q_at, out_at, kv_at, lse_at, q_on, kv_on, lse_on = _where(
        slots, q_slot, kv_slot, GROUP, GROUP_P, D, D_P, SLOTS
    )
    dkv_at = slot[:, None] * dkv_slot + kv_head * D + dim[None, :]
    q = tl.load(query + q_at, q_on, 0.0).to(tl.float32)
    do = tl.load(dout + out_at, q_on, 0.0).to(tl.float32)
    dq = tl.load(dquery + out_at, q_on, 0.0).to(tl.float32)
    mean = tl.sum(do * tl.load(out + out_at, q_on, 0.0).to(tl.float32), 2)
    total = tl.load(lse + lse_at, lse_on, 0.0)
    for _ in range(steps):
        key = tl.load(keys + kv_at, kv_on, 0.0).to(tl.float32)
        value = tl.load(values + kv_at, kv_on, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[:, None, :], 2) * scale - total)
        dscore = weight * (tl.sum(do * value[:, None, :], 2) - mean) * scale
        dq += dscore[:, :, None] * key[:, None, :]
        dkey = tl.load(dkeys + dkv_at, kv_on, 0.0).to(tl.float32) + tl.sum(dscore[:, :, None] * q, 1)
        dvalue = tl.load(dvalues + dkv_at, kv_on, 0.0).to(tl.float32) + tl.sum(weight[:, :, None] * do, 1)
        tl.store(dkeys + dkv_at, dkey, kv_on)
        tl.store(dvalues + dkv_at, dvalue, kv_on)
        keys += kv_step
        values += kv_step
        dkeys += dkv_step
        dvalues += dkv_step
    tl.store(dquery + out_at, dq, q_on)


@triton.jit(do_not_specialize=["steps", "rows"])
def _loss_rows(
    student, teacher, teacher_lse, teacher_entropy, teacher_log_mass, weights, losses, bests, steps, rows, vocab,
    TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the student's logits: loss, likeliest token, and the gradient in the row's own memory."""
    row, step = tl.program_id(0) // steps, tl.program_id(0) % steps  # neighbours share the teacher's row in cache
    at = step * rows + row
    student += at.to(tl.int64) * vocab
    teacher += row.to(tl.int64) * vocab
    lse_p, weight = tl.load(teacher_lse + row), tl.load(weights + at)
    lane = tl.arange(0, BLOCK)

    most, sums, product, best = -float("inf"), 0.0, 0.0, 0  # of the student; Σ p z
    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        z = tl.load(student + start + lane, on, -float("inf")).to(tl.float32)
        p = tl.exp(tl.load(teacher + start + lane, on, -float("inf")).to(tl.float32) - lse_p)
        product += tl.sum(tl.where(on, p * z, 0.0), 0)
        high = tl.max(z, 0)
        best = tl.where(high > most, start + tl.argmax(z, 0), best)
        higher = tl.maximum(most, high)
        sums = sums * tl.exp(most - higher) + tl.sum(tl.exp(z - higher), 0)
        most = higher
    lse_q = most + tl.log(sums)
    loss = lse_q - product - tl.load(teacher_entropy + row)
    tl.store(bests + at, best.to(tl.int64))

    pull, lift, lift_mean = 1.0, 0.0, 0.0  # gradient = pull (q − p) − lift q ([q < p] − lift_mean)
    if TERMS != 0:
        log_mass = tl.load(teacher_log_mass + row)
        overlap, lift_mean = 0.0, 0.0
        for start in range(0, vocab, BLOCK):
            on = start + lane < vocab
            q = tl.exp(tl.load(student + start + lane, on, -float("inf")).to(tl.float32) - lse_q)
            p = tl.exp(tl.load(teacher + start + lane, on, -float("inf")).to(tl.float32) - lse_p + log_mass)
            overlap += tl.sum(tl.minimum(p, q), 0)
            lift_mean += tl.sum(tl.where(q < p, q, 0.0), 0)
        if TERMS == 1:
            pull, lift = 0.0, tl.where(overlap > _LEAST_OVERLAP, 1.0 / overlap, 0.0)
            loss = -tl.log(tl.maximum(overlap, _LEAST_OVERLAP))
        else:
            pull = tl.exp(-(overlap * _HYBRID_DECAY))
            lift = 1.0 - pull
            loss = pull * loss + lift * (1.0 - overlap)
    tl.store(losses + at, loss)

    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        q = tl.exp(tl.load(student + start + lane, on, -float("inf")).to(tl.float32) - lse_q)
        t = tl.load(teacher + start + lane, on, -float("inf")).to(tl.float32) - lse_p
        gradient = pull * (q - tl.exp(t))
        if TERMS != 0:
            gradient -= lift * q * (tl.where(q < tl.exp(t + log_mass), 1.0, 0.0) - lift_mean)
        tl.store(student + start + lane, tl.where(weight == 0.0, 0.0, weight * gradient), on)
