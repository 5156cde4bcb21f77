"""Triton kernels for CUDA. Each does what the torch code beside its only caller does, without the memory in between.

Numbers of slots, rows and steps are not specialised on, so that a batch of another size compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.draft.fast_attention import BLOCK_SLOTS
from draftsmith.draft.loss import HYBRID_DECAY, LEAST_OVERLAP

_LEAST_OVERLAP, _HYBRID_DECAY = tl.constexpr(LEAST_OVERLAP), tl.constexpr(HYBRID_DECAY)
# How the kernels that take the most time are launched: the fastest that were tried on an H200 (decision 0006).
ATTEND = {"COLUMNS": 64, "num_warps": 4, "num_stages": 3}
QUERY_BACKWARD = {"COLUMNS": 64, "num_warps": 4, "num_stages": 2}
KEY_BACKWARD = {"COLUMNS": 32, "num_warps": 4, "num_stages": 3}
LOSS = {"BLOCK": 4096, "num_warps": 16}
BACKWARD_PROGRAMS = 264  # twice the multiprocessors of a Hopper GPU: each sums the weight gradient of its rows


def _row_warps(size):
    return min(16, max(1, triton.next_power_of_2(size) // 512))


# --- norms ---------------------------------------------------------------------------------------------------------


def rms_norm(x, weight, eps, normed):
    """`fast_layers.rms_norm`."""
    size, groups = x.shape[-1], 1 if weight is None else weight.numel() // x.shape[-1]
    _rms_norm[(x.numel() // size,)](
        x, x, weight, x, normed, eps, groups, size, ADD=False, WEIGHTED=weight is not None,
        BLOCK=triton.next_power_of_2(size), num_warps=_row_warps(size),
    )  # fmt: skip


def add_rms_norm(x, other, weight, eps, total, normed):
    """`fast_layers.add_rms_norm`."""
    size = x.shape[-1]
    _rms_norm[(len(x),)](
        x, other, weight, total, normed, eps, 1, size, ADD=True, WEIGHTED=True,
        BLOCK=triton.next_power_of_2(size), num_warps=_row_warps(size),
    )  # fmt: skip


def rms_norm_backward(x, weight, dnormed, eps, through, around, dx):
    """`fast_layers.rms_norm_backward`."""
    rows, size = x.shape
    programs = min(rows, BACKWARD_PROGRAMS)
    dweight = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        x, weight, dnormed, through, around, dx, dweight, eps, rows, size, THROUGH=through is not None,
        AROUND=around is not None, BLOCK=triton.next_power_of_2(size), num_warps=_row_warps(size),
    )  # fmt: skip
    return dweight.sum(0)


@triton.jit(do_not_specialize=["groups"])
def _rms_norm(
    x, other, weight, total, normed, eps, groups, size, ADD: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    on, at = lane < size, row * size + lane
    value = tl.load(x + at, on, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(other + at, on, 0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + at, value, on)
        value = value.to(tl.float32)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    if WEIGHTED:
        unit *= tl.load(weight + (row % groups) * size + lane, on, 0.0).to(tl.float32)
    tl.store(normed + at, unit, on)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    x, weight, dnormed, through, around, dx, dweight, eps, rows, size,
    THROUGH: tl.constexpr, AROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    on = lane < size
    scale = tl.load(weight + lane, on, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    at = tl.program_id(0).to(tl.int64) * size + lane
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        value = tl.load(x + at, on, 0.0).to(tl.float32)
        dy = tl.load(dnormed + at, on, 0.0).to(tl.float32)
        if THROUGH:
            dy += tl.load(through + at, on, 0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        unit, dunit = value * inverse, dy * scale
        gradient = inverse * (dunit - unit * (tl.sum(dunit * unit, 0) / size))
        if AROUND:
            gradient += tl.load(around + at, on, 0.0).to(tl.float32)
        tl.store(dx + at, gradient, on)
        total += dy * unit
        at += tl.num_programs(0).to(tl.int64) * size
    tl.store(dweight + tl.program_id(0).to(tl.int64) * size + lane, total, on)


# --- SwiGLU --------------------------------------------------------------------------------------------------------


SWIGLU_BLOCK = 1024


def swiglu(gate_up):
    """`fast_layers.swiglu`."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    active = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(size, SWIGLU_BLOCK))](gate_up, active, size, BLOCK=SWIGLU_BLOCK)
    return active


def swiglu_backward(gate_up, dactive):
    """`fast_layers.swiglu_backward_`."""
    rows, size = dactive.shape
    _swiglu_backward[(rows, triton.cdiv(size, SWIGLU_BLOCK))](gate_up, dactive, size, BLOCK=SWIGLU_BLOCK)


@triton.jit
def _swiglu(gate_up, active, size, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on, gate = lane < size, gate_up + row * 2 * size + lane
    g, u = tl.load(gate, on, 0.0).to(tl.float32), tl.load(gate + size, on, 0.0).to(tl.float32)
    tl.store(active + row * size + lane, g * tl.sigmoid(g) * u, on)


@triton.jit
def _swiglu_backward(gate_up, dactive, size, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on, gate, at = lane < size, gate_up + row * 2 * size + lane, row * size + lane
    g, u = tl.load(gate, on, 0.0).to(tl.float32), tl.load(gate + size, on, 0.0).to(tl.float32)
    d, share = tl.load(dactive + at, on, 0.0).to(tl.float32), tl.sigmoid(g)
    tl.store(dactive + at, g * share * u, on)
    tl.store(gate, d * u * share * (1 + g * (1 - share)), on)
    tl.store(gate + size, d * g * share, on)


# --- what is added up over steps or rows ----------------------------------------------------------------------------


SUM_BLOCK, STRIPS, STRIP_ROWS, STRIP_COLUMNS = 1024, 32, 16, 128


def sum_shifted(parts):
    """`fast_layers.sum_shifted`."""
    steps, slots, width = parts.shape
    total = torch.empty(slots + steps, width, dtype=parts.dtype, device=parts.device)
    _sum_shifted[(slots + steps, triton.cdiv(width, SUM_BLOCK))](parts, total, steps, slots, width, BLOCK=SUM_BLOCK)
    return total


def scale_columns(product, scale, weight):
    """`fast_layers.scale_columns_`."""
    rows, columns = product.shape
    sums = torch.empty(STRIPS, columns, dtype=torch.float32, device=product.device)
    _scale_columns[(STRIPS, triton.cdiv(columns, STRIP_COLUMNS))](
        product, scale, weight, sums, rows, columns, weight.stride(0), ROWS=STRIP_ROWS, COLUMNS=STRIP_COLUMNS
    )
    return sums.sum(0)


@triton.jit(do_not_specialize=["steps", "slots"])
def _sum_shifted(parts, total, steps, slots, width, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for k in range(steps):
        slot = row - 1 - k
        on = lane < tl.where((slot >= 0) & (slot < slots), width, 0)
        sums += tl.load(parts + slot * width + lane, on, 0.0).to(tl.float32)
        parts += slots.to(tl.int64) * width
    tl.store(total + row * width + lane, sums, lane < width)


@triton.jit
def _scale_columns(product, scale, weight, sums, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale + column, column < columns, 0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        on = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        value = tl.load(product + at, on, 0.0)
        total += tl.sum(value * tl.load(weight + row[:, None] * stride + column[None, :], on, 0.0).to(tl.float32), 0)
        tl.store(product + at, value * factor[None, :], on)
    tl.store(sums + tl.program_id(0) * columns + column, total, column < columns)


# --- rotation ------------------------------------------------------------------------------------------------------

HEAD_BLOCK = 16


def rotate_sum(projected, embedded, target, rotation, unrotated):
    """`fast_layers.rotate_sum`."""
    slots, heads, dim = target.shape
    _rotate_sum[(slots, triton.cdiv(heads, HEAD_BLOCK))](
        projected, embedded, target, rotation.cos, rotation.sin, rotation.position, rotation.step, heads,
        heads - unrotated, HALF=dim // 2, HALF_P=triton.next_power_of_2(dim // 2), BLOCK=HEAD_BLOCK, num_warps=2,
    )  # fmt: skip


def rotate_back(dquery, dkv, rotation, unrotated, gradient):
    """`fast_layers.rotate_back`."""
    slots, query_heads, dim = dquery.shape
    heads = query_heads + dkv.shape[1]
    _rotate_back[(slots, triton.cdiv(heads, HEAD_BLOCK))](
        dquery, dkv, gradient, rotation.cos, rotation.sin, rotation.position, rotation.step, query_heads,
        heads, heads - unrotated, HALF=dim // 2, HALF_P=triton.next_power_of_2(dim // 2), BLOCK=HEAD_BLOCK, num_warps=2,
    )  # fmt: skip


@triton.jit
def _angle(cos, sin, position, step, head, rotated, half, HALF: tl.constexpr):
    """Cosine and sine of this program's slot by head and half dimension; those of 0 for heads that are not rotated."""
    at = (tl.load(position + tl.program_id(0)) + step) * HALF + half
    turned = (head < rotated)[:, None]
    c = tl.where(turned, tl.load(cos + at, half < HALF, 1.0)[None, :], 1.0)
    return c, tl.where(turned, tl.load(sin + at, half < HALF, 0.0)[None, :], 0.0)


@triton.jit(do_not_specialize=["step"])
def _rotate_sum(
    projected, embedded, target, cos, sin, position, step, heads, rotated,
    HALF: tl.constexpr, HALF_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, half = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HALF_P)
    on = (head < heads)[:, None] & (half < HALF)[None, :]
    c, s = _angle(cos, sin, position, step, head, rotated, half, HALF)
    at = (tl.program_id(0).to(tl.int64) * heads + head[:, None]) * (2 * HALF) + half[None, :]
    first = tl.load(projected + at, on, 0.0).to(tl.float32) + tl.load(embedded + at, on, 0.0).to(tl.float32)
    second = tl.load(projected + at + HALF, on, 0.0).to(tl.float32)
    second += tl.load(embedded + at + HALF, on, 0.0).to(tl.float32)
    tl.store(target + at, first * c - second * s, on)
    tl.store(target + at + HALF, second * c + first * s, on)


@triton.jit(do_not_specialize=["step"])
def _rotate_back(
    dquery, dkv, gradient, cos, sin, position, step, query_heads, heads, rotated,
    HALF: tl.constexpr, HALF_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head, half = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HALF_P)
    on = (head < heads)[:, None] & (half < HALF)[None, :]
    of_query = on & (head < query_heads)[:, None]
    of_kv = on & (head >= query_heads)[:, None]
    c, s = _angle(cos, sin, position, step, head, rotated, half, HALF)
    at_query = (slot * query_heads + head[:, None]) * (2 * HALF) + half[None, :]
    at_kv = (slot * (heads - query_heads) + head[:, None] - query_heads) * (2 * HALF) + half[None, :]
    first = tl.load(dquery + at_query, of_query, 0.0).to(tl.float32)
    first += tl.load(dkv + at_kv, of_kv, 0.0).to(tl.float32)
    second = tl.load(dquery + at_query + HALF, of_query, 0.0).to(tl.float32)
    second += tl.load(dkv + at_kv + HALF, of_kv, 0.0).to(tl.float32)
    at = (slot * heads + head[:, None]) * (2 * HALF) + half[None, :]
    tl.store(gradient + at, first * c + second * s, on)
    tl.store(gradient + at + HALF, second * c - first * s, on)


# --- attention -----------------------------------------------------------------------------------------------------

_LOG2_E = tl.constexpr(1.4426950408889634)


def attend(query, keys, values, blocks, out, lse):
    """`fast_attention.attend`."""
    slots, heads, dim = query.shape
    kv_heads = keys.shape[2]
    _attend[(len(blocks), heads)](
        query, keys, values, blocks, out, lse, slots, len(keys), dim**-0.5, query.stride(0), keys.stride(0),
        keys.stride(1), heads, heads // kv_heads, D=dim, D_P=triton.next_power_of_2(dim), BLOCK=BLOCK_SLOTS,
        **ATTEND,
    )  # fmt: skip


def attend_backward(dout, query, keys, values, out, lse, blocks, dkeys, dvalues):
    """`fast_attention.attend_backward`."""
    slots, heads, dim = query.shape
    kv_heads, wide_dim = keys.shape[2], triton.next_power_of_2(dim)
    group = heads // kv_heads
    dquery, mean = torch.empty_like(dout), torch.empty_like(lse)
    _own_backward[(slots, kv_heads)](
        dout, query, keys, values, out, lse, dquery, mean, dkeys, dvalues, slots, len(keys), dim**-0.5,
        query.stride(0), keys.stride(0), keys.stride(1), dkeys.stride(0), dkeys.stride(1),
        GROUP=group, GROUP_P=triton.next_power_of_2(group), D=dim, D_P=wide_dim, num_warps=1,
    )  # fmt: skip
    shape = slots, dim**-0.5, query.stride(0), keys.stride(1), heads, group
    tiles = {"D": dim, "D_P": wide_dim, "BLOCK": BLOCK_SLOTS}
    _query_backward[(len(blocks), heads)](
        dout, query, keys, values, blocks, lse, mean, dquery, *shape, **tiles, **QUERY_BACKWARD
    )  # fmt: skip
    _key_backward[(len(blocks), kv_heads)](
        dout, query, keys, values, blocks, lse, mean, dkeys, dvalues, dkeys.stride(1), *shape, **tiles, **KEY_BACKWARD
    )  # fmt: skip
    return dquery


@triton.jit
def _tile(base, start, slot_stride, last, D: tl.constexpr, D_P: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """ROWS slots of one head from slot `start` on, as [ROWS, D_P]; if MASKED, zeros from slot `last` on."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, D_P)
    base += tl.cast(start, tl.int64) * slot_stride
    at = row[:, None] * slot_stride + dim[None, :]
    if MASKED:
        return tl.load(base + at, (row < last - start)[:, None] & (dim < D)[None, :], 0.0)
    if D == D_P:
        return tl.load(base + at)
    return tl.load(base + at, (dim < D)[None, :], 0.0)


@triton.jit(do_not_specialize=["slots", "steps"])
def _attend(
    query, keys, values, blocks, out, lse, slots, steps, scale, q_slot, kv_step, kv_slot, heads, group,
    D: tl.constexpr, D_P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """BLOCK slots of one document and one head against their document's step-0 keys, then each against its own."""
    start, first = tl.load(blocks + 3 * tl.program_id(0)), tl.load(blocks + 3 * tl.program_id(0) + 1)
    last, head, dim = tl.load(blocks + 3 * tl.program_id(0) + 2), tl.program_id(1), tl.arange(0, D_P)
    if start >= last:
        return
    rows = start + tl.arange(0, BLOCK)
    keys += head // group * D
    values += head // group * D
    q = _tile(query + head * D, start, q_slot, last, D, D_P, BLOCK, True)
    most = tl.full([BLOCK], -float("inf"), tl.float32)  # of scores in base 2
    total, merged = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, D_P], tl.float32)
    to_base_2 = scale * _LOG2_E
    for own in tl.static_range(2):  # the document's slots before the block, then the block's own
        begin = start if own else first
        end = tl.minimum(start + BLOCK, last) if own else start
        for column in range(begin, end, COLUMNS):
            key = _tile(keys, column, kv_slot, last, D, D_P, COLUMNS, own == 1)
            score = tl.dot(q, tl.trans(key)) * to_base_2
            if own:
                columns = column + tl.arange(0, COLUMNS)
                score = tl.where(columns[None, :] <= rows[:, None], score, -float("inf"))
            higher = tl.maximum(most, tl.max(score, 1))
            share, fade = tl.exp2(score - higher[:, None]), tl.exp2(most - higher)
            total = total * fade + tl.sum(share, 1)
            merged = merged * fade[:, None]
            value = _tile(values, column, kv_slot, last, D, D_P, COLUMNS, own == 1)
            merged = tl.dot(share.to(value.dtype), value, merged)
            most = higher
    for _ in range(1, steps):
        keys += kv_step
        values += kv_step
        key = _tile(keys, start, kv_slot, last, D, D_P, BLOCK, True).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * key, 1) * to_base_2
        higher = tl.maximum(most, score)
        share, fade = tl.exp2(score - higher), tl.exp2(most - higher)
        total = total * fade + share
        value = _tile(values, start, kv_slot, last, D, D_P, BLOCK, True).to(tl.float32)
        merged = merged * fade[:, None] + share[:, None] * value
        most = higher
    at = (rows.to(tl.int64)[:, None] * heads + head) * D + dim[None, :]
    tl.store(out + at, merged / total[:, None], (rows < last)[:, None] & (dim < D)[None, :])
    tl.store(lse + head.to(tl.int64) * slots + rows, (most + tl.log2(total)) / _LOG2_E, rows < last)


@triton.jit(do_not_specialize=["slots", "steps"])
def _own_backward(
    dout, query, keys, values, out, lse, dquery, means, dkeys, dvalues, slots, steps, scale,
    q_slot, kv_step, kv_slot, dkv_step, dkv_slot,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
):  # fmt: skip
    """One slot and one key-value head: Σ weight · (do·v) over all its keys, and the gradients through its own keys."""
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, dim = tl.arange(0, GROUP_P), tl.arange(0, D_P)
    head = kv_head * GROUP + group
    inner = head[:, None] * D + dim[None, :]
    packed = slot * tl.num_programs(1) * GROUP * D + inner
    lse_at, lse_on, kv_on = head.to(tl.int64) * slots + slot, group < GROUP, dim < D
    on = lse_on[:, None] & kv_on[None, :]
    kv_at, dkv_at = slot * kv_slot + kv_head * D + dim, slot * dkv_slot + kv_head * D + dim
    q = tl.load(query + slot * q_slot + inner, on, 0.0).to(tl.float32)
    do = tl.load(dout + packed, on, 0.0).to(tl.float32)
    mean = tl.sum(do * tl.load(out + packed, on, 0.0).to(tl.float32), 1)
    total, dq = tl.load(lse + lse_at, lse_on, 0.0), tl.zeros([GROUP_P, D_P], tl.float32)
    for _ in range(1, steps):
        keys += kv_step
        values += kv_step
        dkeys += dkv_step
        dvalues += dkv_step
        key = tl.load(keys + kv_at, kv_on, 0.0).to(tl.float32)
        value = tl.load(values + kv_at, kv_on, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[None, :], 1) * scale - total)
        dscore = weight * (tl.sum(do * value[None, :], 1) - mean) * scale
        dq += dscore[:, None] * key[None, :]
        dkey = tl.load(dkeys + dkv_at, kv_on, 0.0).to(tl.float32) + tl.sum(dscore[:, None] * q, 0)
        dvalue = tl.load(dvalues + dkv_at, kv_on, 0.0).to(tl.float32) + tl.sum(weight[:, None] * do, 0)
        tl.store(dkeys + dkv_at, dkey, kv_on)
        tl.store(dvalues + dkv_at, dvalue, kv_on)
    tl.store(dquery + packed, dq, on)
    tl.store(means + lse_at, mean, lse_on)


@triton.jit(do_not_specialize=["slots"])
def _query_backward(
    dout, query, keys, values, blocks, lse, means, dquery, slots, scale, q_slot, kv_slot, heads, group,
    D: tl.constexpr, D_P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the gradient through the step-0 keys to `dquery`, for BLOCK slots of one document and one head."""
    start, first = tl.load(blocks + 3 * tl.program_id(0)), tl.load(blocks + 3 * tl.program_id(0) + 1)
    last, head, dim = tl.load(blocks + 3 * tl.program_id(0) + 2), tl.program_id(1), tl.arange(0, D_P)
    if start >= last:
        return
    rows = start + tl.arange(0, BLOCK)
    keys += head // group * D
    values += head // group * D
    lse_at = head.to(tl.int64) * slots + rows
    q = _tile(query + head * D, start, q_slot, last, D, D_P, BLOCK, True)
    do = _tile(dout + head * D, start, heads * D, last, D, D_P, BLOCK, True)
    total = tl.load(lse + lse_at, rows < last, 0.0) * _LOG2_E
    mean = tl.load(means + lse_at, rows < last, 0.0)
    dq = tl.zeros([BLOCK, D_P], tl.float32)
    for own in tl.static_range(2):
        begin = start if own else first
        end = tl.minimum(start + BLOCK, last) if own else start
        for column in range(begin, end, COLUMNS):
            key = _tile(keys, column, kv_slot, last, D, D_P, COLUMNS, own == 1)
            weight = tl.exp2(tl.dot(q, tl.trans(key)) * (scale * _LOG2_E) - total[:, None])
            if own:
                columns = column + tl.arange(0, COLUMNS)
                weight = tl.where(columns[None, :] <= rows[:, None], weight, 0.0)
            value = _tile(values, column, kv_slot, last, D, D_P, COLUMNS, own == 1)
            dscore = weight * (tl.dot(do, tl.trans(value)) - mean[:, None])
            dq = tl.dot(dscore.to(key.dtype), key, dq)
    at = (rows.to(tl.int64)[:, None] * heads + head) * D + dim[None, :]
    on = (rows < last)[:, None] & (dim < D)[None, :]
    tl.store(dquery + at, tl.load(dquery + at, on, 0.0).to(tl.float32) + dq * scale, on)


@triton.jit(do_not_specialize=["slots"])
def _key_backward(
    dout, query, keys, values, blocks, lse, means, dkeys, dvalues, dkv_slot, slots, scale, q_slot, kv_slot, heads,
    group, D: tl.constexpr, D_P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of BLOCK step-0 keys and values of one document and one key-value head."""
    start, last = tl.load(blocks + 3 * tl.program_id(0)), tl.load(blocks + 3 * tl.program_id(0) + 2)
    kv_head, dim = tl.program_id(1), tl.arange(0, D_P)
    if start >= last:
        return
    rows = start + tl.arange(0, BLOCK)
    key = _tile(keys + kv_head * D, start, kv_slot, last, D, D_P, BLOCK, True)
    value = _tile(values + kv_head * D, start, kv_slot, last, D, D_P, BLOCK, True)
    dkey, dvalue = tl.zeros([BLOCK, D_P], tl.float32), tl.zeros([BLOCK, D_P], tl.float32)
    own = tl.cdiv(tl.minimum(BLOCK, last - start), COLUMNS)
    after = tl.maximum(last - start - BLOCK, 0) // COLUMNS
    tail = start + BLOCK + after * COLUMNS
    edges = own + (tail < last).to(tl.int32)
    for head in range(kv_head * group, kv_head * group + group):
        # Who sees these keys: whole columns of slots after the block, then what needs a mask, its own and the last.
        for edge in tl.static_range(2):
            for i in range(0, edges if edge else after):
                column = start + BLOCK + i * COLUMNS
                if edge:
                    column = tl.where(i < own, start + i * COLUMNS, tail)
                columns = column + tl.arange(0, COLUMNS)
                at = columns + slots.to(tl.int64) * head
                if edge:
                    total = tl.load(lse + at, columns < last, float("inf")) * _LOG2_E
                    mean = tl.load(means + at, columns < last, 0.0)
                else:
                    total, mean = tl.load(lse + at) * _LOG2_E, tl.load(means + at)
                q = _tile(query + head * D, column, q_slot, last, D, D_P, COLUMNS, edge == 1)
                do = _tile(dout + head * D, column, heads * D, last, D, D_P, COLUMNS, edge == 1)
                weight = tl.exp2(tl.dot(key, tl.trans(q)) * (scale * _LOG2_E) - total[None, :])
                if edge:
                    weight = tl.where(columns[None, :] >= rows[:, None], weight, 0.0)
                dvalue = tl.dot(weight.to(do.dtype), do, dvalue)
                dscore = weight * (tl.dot(value, tl.trans(do)) - mean[None, :])
                dkey = tl.dot(dscore.to(q.dtype), q, dkey)
    at = rows.to(tl.int64)[:, None] * dkv_slot + kv_head * D + dim[None, :]
    on = (rows < last)[:, None] & (dim < D)[None, :]
    tl.store(dkeys + at, tl.load(dkeys + at, on, 0.0).to(tl.float32) + dkey * scale, on)
    tl.store(dvalues + at, tl.load(dvalues + at, on, 0.0).to(tl.float32) + dvalue, on)


# --- loss ----------------------------------------------------------------------------------------------------------


def gather_rows(states, at):
    """`fast_loss.gather_rows`."""
    steps, rows, size = states.shape
    packed = torch.empty(steps * len(at), size, dtype=states.dtype, device=states.device)
    _copy_rows[(steps * len(at),)](
        states, packed, at, len(at), rows, size, GATHER=True, BLOCK=triton.next_power_of_2(size)
    )
    return packed


def scatter_rows(packed, states, at):
    """`fast_loss.scatter_rows`."""
    steps, rows, size = states.shape
    _copy_rows[(steps * len(at),)](
        packed, states, at, len(at), rows, size, GATHER=False, BLOCK=triton.next_power_of_2(size)
    )


@triton.jit(do_not_specialize=["count", "rows"])
def _copy_rows(source, target, at, count, rows, size, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    on, packed = lane < size, row * size + lane
    spread = (row // count * rows + tl.load(at + row % count)) * size + lane
    if GATHER:
        tl.store(target + packed, tl.load(source + spread, on), on)
    else:
        tl.store(target + spread, tl.load(source + packed, on), on)


def teacher_rows(logits):
    """`fast_loss.teacher_rows`."""
    rows, vocab = logits.shape
    entropy = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _teacher_rows[(rows,)](logits, entropy, best, vocab, **LOSS)
    return entropy, best


def loss_rows(student, probs, entropy, mass, weight, kind):
    """`fast_loss.loss_rows`."""
    steps, rows, vocab = student.shape
    loss = torch.empty(steps, rows, dtype=torch.float32, device=student.device)
    best = torch.empty(steps, rows, dtype=torch.int64, device=student.device)
    terms = {"soft_cross_entropy": 0, "forward_kl": 1, "lk": 2, "lk_hybrid": 3}[kind]
    _loss_rows[(steps * rows,)](
        student, probs, entropy, mass, weight.contiguous(), loss, best, steps, rows, vocab, TERMS=terms,
        **LOSS,
    )  # fmt: skip
    return loss, best


_LEAST_LOGIT = tl.constexpr(-1e30)  # in place of -inf, of which differences are no numbers


SCALE_BLOCK = 8192


def scale(x, factor):
    """`fast_loss.scale_`, which neither reads nor writes where the factor is one."""
    _scale[(triton.cdiv(x.numel(), SCALE_BLOCK),)](x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["size"])
def _scale(x, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by == 1.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < size, 0.0).to(tl.float32) * by, at < size)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _of_lanes(most, best, sums, others):
    """One row's maximum, where it is first, and sums relative to it, from those of each lane relative to its own."""
    top = tl.max(most, 0)
    fade = _exp(most - top)
    first = tl.min(tl.where(most == top, best, 2147483647), 0)
    return top, first, tl.sum(sums * fade, 0), tl.sum(others * fade, 0)


@triton.jit
def _teacher_rows(logits, entropies, bests, vocab, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * vocab
    most, best = tl.full([BLOCK], _LEAST_LOGIT, tl.float32), tl.zeros([BLOCK], tl.int32)
    sums, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)  # Σ exp z, Σ z exp z
    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        z = tl.load(logits + start + lane, on, -float("inf")).to(tl.float32)
        faded = _exp(-tl.abs(z - most))
        more = z > most
        sums = tl.where(more, sums * faded + 1.0, sums + faded)
        shared = tl.where(on, z, 0.0)
        weighted = tl.where(more, weighted * faded + shared, weighted + faded * shared)
        most, best = tl.where(more, z, most), tl.where(more, start + lane, best)
    most, best, total, weighted = _of_lanes(most, best, sums, weighted)
    lse = most + tl.log(total)
    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        z = tl.load(logits + start + lane, on, -float("inf")).to(tl.float32)
        tl.store(logits + start + lane, _exp(z - lse), on)
    tl.store(entropies + row, lse - weighted / total)
    tl.store(bests + row, best.to(tl.int64))


@triton.jit(do_not_specialize=["steps", "rows"])
def _loss_rows(
    student, probs, entropies, masses, weights, losses, bests, steps, rows, vocab,
    TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the student's logits: loss, likeliest token, and the gradient in the row's own memory."""
    row, step = tl.program_id(0) // steps, tl.program_id(0) % steps  # neighbours share the teacher's row in cache
    at = step * rows + row
    student += at.to(tl.int64) * vocab
    probs += row.to(tl.int64) * vocab
    weight, lane = tl.load(weights + at), tl.arange(0, BLOCK)

    most, best = tl.full([BLOCK], _LEAST_LOGIT, tl.float32), tl.zeros([BLOCK], tl.int32)
    sums, product = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)  # Σ exp z, Σ p z
    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        z = tl.load(student + start + lane, on, -float("inf")).to(tl.float32)
        p = tl.load(probs + start + lane, on, 0.0).to(tl.float32)
        product += tl.where(on, p * z, 0.0)
        faded = _exp(-tl.abs(z - most))
        more = z > most
        sums = tl.where(more, sums * faded + 1.0, sums + faded)
        most, best = tl.where(more, z, most), tl.where(more, start + lane, best)
    most, best, total, _ = _of_lanes(most, best, sums, sums)
    lse = most + tl.log(total)
    loss = lse - tl.sum(product, 0)
    tl.store(bests + at, best.to(tl.int64))

    pull, lift, lift_mean, mass = 1.0, 0.0, 0.0, 1.0  # gradient = pull (q − p) − lift q ([q < p*] − lift_mean)
    if TERMS != 0:
        loss -= tl.load(entropies + row)
    if TERMS >= 2:
        mass = tl.load(masses + row)
        overlaps, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            on = start + lane < vocab
            q = _exp(tl.load(student + start + lane, on, -float("inf")).to(tl.float32) - lse)
            p = tl.load(probs + start + lane, on, 0.0).to(tl.float32) * mass
            overlaps += tl.minimum(p, q)
            below += tl.where(q < p, q, 0.0)
        overlap, lift_mean = tl.sum(overlaps, 0), tl.sum(below, 0)
        if TERMS == 2:
            pull, lift = 0.0, tl.where(overlap > _LEAST_OVERLAP, 1.0 / overlap, 0.0)
            loss = -tl.log(tl.maximum(overlap, _LEAST_OVERLAP))
        else:
            pull = tl.exp(-(overlap * _HYBRID_DECAY))
            lift = 1.0 - pull
            loss = pull * loss + lift * (1.0 - overlap)
    tl.store(losses + at, loss)

    pull, lift = tl.where(weight == 0.0, 0.0, weight * pull), tl.where(weight == 0.0, 0.0, weight * lift)
    for start in range(0, vocab, BLOCK):
        on = start + lane < vocab
        q = _exp(tl.load(student + start + lane, on, -float("inf")).to(tl.float32) - lse)
        p = tl.load(probs + start + lane, on, 0.0).to(tl.float32)
        gradient = pull * (q - p)
        if TERMS >= 2:
            gradient -= lift * q * (tl.where(q < p * mass, 1.0, 0.0) - lift_mean)
        tl.store(student + start + lane, gradient, on)
