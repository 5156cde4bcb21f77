"""The layer's parts between its matrix products, forward and back, each in one pass over memory.

The torch code defines them and runs on CPUs; on CUDA a kernel of `kernels.py` does the same. All sums are in float32 or
wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """float32, or wider where x already is."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x))


def add_product(total: torch.Tensor | None, doutput: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Add a linear layer's weight gradient doutputᵀ·inputs to `total`, in float32 or wider whatever they are.

    On CUDA the matrix product itself adds to `total`, so that no rounded gradient exists in between.
    """
    transposed = doutput.t()
    if doutput.is_cuda and doutput.dtype not in (torch.float32, torch.float64):
        if total is None:
            return torch.mm(transposed, inputs, out_dtype=torch.float32)
        return torch.addmm(total, transposed, inputs, out_dtype=torch.float32, out=total)
    if total is None:
        return wide(torch.mm(transposed, inputs))
    if total.dtype == doutput.dtype:
        return total.addmm_(transposed, inputs)
    return total.add_(torch.mm(transposed, inputs))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / rms(x) ⊙ weight over the last dimension, in `out` if given, which may be x; no weight is one of ones."""
    out = torch.empty_like(x) if out is None else out
    if x.is_cuda:
        from draftsmith.draft import kernels

        kernels.rms_norm(x, weight, eps, out)
        return out
    value = wide(x)
    unit = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return out.copy_(unit if weight is None else unit * weight)


def add_rms_norm(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float, *, total: torch.Tensor, out: torch.Tensor
) -> None:
    """total = x + other, and its norm in `out`; all [S, H]."""
    if x.is_cuda:
        from draftsmith.draft import kernels

        return kernels.add_rms_norm(x, other, weight, eps, total, out)
    torch.add(x, other, out=total)
    rms_norm(total, weight, eps, out=out)


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    dnormed: torch.Tensor,
    eps: float,
    *,
    through: torch.Tensor | None = None,
    around: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Gradient of a norm's input in `out` [S, H], which may be any of the inputs; returns that of its weight [H].

    Args:
        through: more gradient of the norm's output.
        around: gradient of the input by a way that goes around the norm.
    """
    if x.is_cuda:
        from draftsmith.draft import kernels

        return kernels.rms_norm_backward(x, weight, dnormed, eps, through, around, out)
    value, dy = wide(x), wide(dnormed)
    if through is not None:
        dy = dy + through
    scale = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    unit, dunit = value * scale, dy * weight
    dx = scale * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    dweight = (dy * unit).sum(0)
    out.copy_(dx if around is None else dx + around)
    return dweight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) ⊙ up: [S, 2I] → [S, I]"""
    if gate_up.is_cuda:
        from draftsmith.draft import kernels

        return kernels.swiglu(gate_up)
    gate, up = wide(gate_up).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_(gate_up: torch.Tensor, dactive: torch.Tensor) -> None:
    """Leaves the gradient in `gate_up`, and the activation itself in `dactive`."""
    if gate_up.is_cuda:
        from draftsmith.draft import kernels

        return kernels.swiglu_backward(gate_up, dactive)
    gate, up = wide(gate_up).chunk(2, dim=1)
    share, d = gate.sigmoid(), wide(dactive)
    active = gate * share
    gradient = torch.cat([d * up * share * (1 + gate * (1 - share)), d * active], dim=1)
    dactive.copy_(active * up)
    gate_up.copy_(gradient)


@dataclass(frozen=True)
class Rotation:
    """RoPE at unroll step `step`: slot j stands at position[j] + step."""

    cos: torch.Tensor  # [positions, d/2], float32 or wider
    sin: torch.Tensor
    position: torch.Tensor  # [S] int64
    step: int


def rotate_sum(
    projected: torch.Tensor, embedded: torch.Tensor, target: torch.Tensor, rotation: Rotation, unrotated: int
) -> None:
    """target = projected + embedded, all but the last `unrotated` heads rotated, in Llama's half-split layout.

    All [S, heads, d], contiguous.
    """
    if target.is_cuda:
        from draftsmith.draft import kernels

        return kernels.rotate_sum(projected, embedded, target, rotation, unrotated)
    cos, sin = (table[rotation.position + rotation.step, None] for table in (rotation.cos, rotation.sin))
    total, rotated = wide(projected) + embedded, target.shape[1] - unrotated
    first, second = total[:, :rotated].chunk(2, dim=-1)
    target[:, :rotated] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(target.dtype)
    target[:, rotated:] = total[:, rotated:]


def rotate_back(
    dquery: torch.Tensor, dkv: torch.Tensor, rotation: Rotation, unrotated: int, *, out: torch.Tensor
) -> None:
    """Gradient of `projected`, and of `embedded`, in `rotate_sum`, from [S, heads, d] and [S, 2·kv_heads, d]."""
    if dquery.is_cuda:
        from draftsmith.draft import kernels

        return kernels.rotate_back(dquery, dkv, rotation, unrotated, out)
    cos, sin = (table[rotation.position + rotation.step, None] for table in (rotation.cos, rotation.sin))
    torch.cat([dquery, dkv], dim=1, out=out)
    turned = out[:, : out.shape[1] - unrotated]
    first, second = wide(turned).chunk(2, dim=-1)
    turned.copy_(torch.cat([first * cos + second * sin, second * cos - first * sin], -1))


def sum_shifted(parts: torch.Tensor) -> torch.Tensor:
    """Row r is Σ_k parts[k, r − 1 − k], of the rows that there are: [K, S, W] → [S+K, W]"""
    if parts.is_cuda:
        from draftsmith.draft import kernels

        return kernels.sum_shifted(parts)
    steps, slots, width = parts.shape
    total = parts.new_zeros(slots + steps, width, dtype=wide_dtype(parts))
    for k, part in enumerate(parts):
        total[1 + k : 1 + k + slots] += part
    return total.to(parts.dtype)


def scale_columns_(product: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply column c of `product` [M, N] by scale[c]; returns Σ over rows of product ⊙ weight as it was: [N]

    Args:
        weight: [M, N], which may be a part of a wider matrix.
    """
    if product.is_cuda:
        from draftsmith.draft import kernels

        return kernels.scale_columns(product, scale, weight)
    sums = (product * weight).sum(0)
    product.mul_(scale)
    return sums
