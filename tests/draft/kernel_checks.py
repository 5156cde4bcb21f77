"""The Triton kernels against the torch code beside them. `test_fast_kernels.py` runs this file in a process of its own.

On CUDA the kernels run as they are, elsewhere through Triton's interpreter, which has to be asked for by
TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch

from draftsmith.draft import fast_attention, fast_loss, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*tensors):
    return [x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 10), (8, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merge_kernels_are_the_merge(heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    slots, steps = 9, 3
    packed = torch.randn(steps, slots, (heads + 2 * kv_heads) * dim).to(dtype)  # strided, as the unroll has them
    query, keys, values = packed.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=-2)
    query = query[-1]
    out, dout, dquery = (torch.randn(slots, heads, dim).to(dtype) for _ in range(3))
    lse, dkv = torch.randn(heads, slots), torch.randn(steps, slots, 2, kv_heads, dim).to(dtype)
    merged, merged_lse, dquery_there, dkv_there = out.clone(), lse.clone(), dquery.clone(), dkv.clone()
    fast_attention.merge_own(query, keys, values, merged, merged_lse)
    fast_attention.merge_own_backward(
        dout, query, keys, values, merged, merged_lse, dquery_there, dkv_there[:, :, 0], dkv_there[:, :, 1]
    )
    inputs = on_device(dout, merged, merged_lse)
    packed, out, lse, dquery, dkv = on_device(packed, out, lse, dquery, dkv)
    query, keys, values = packed.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=-2)
    kernels.merge_own(query[-1], keys, values, out, lse)
    kernels.merge_own_backward(inputs[0], query[-1], keys, values, *inputs[1:], dquery, dkv[:, :, 0], dkv[:, :, 1])
    for found, there in [(out, merged), (lse, merged_lse), (dquery, dquery_there), (dkv, dkv_there)]:
        torch.testing.assert_close(found.cpu(), there)


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "forward_kl", "lk", "lk_hybrid"])
@pytest.mark.parametrize("vocab", [100, 5000])
def test_the_loss_kernel_is_the_loss(kind, vocab):
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 4, vocab) * 2, torch.randn(4, vocab) * 2
    log_mass, weight = -torch.rand(4), torch.rand(3, 4)
    weight[0, 0] = 0
    expected = student.clone()
    losses, best, _ = fast_loss.loss_rows(expected, teacher, log_mass, weight, kind)
    lse, entropy, _ = fast_loss._teacher_rows(teacher)
    if kind == "soft_cross_entropy":
        entropy = torch.zeros_like(entropy)
    found, *inputs = on_device(student, teacher, lse, entropy, log_mass, weight)
    found_losses, found_best = kernels.loss_rows(found, *inputs, kind)
    torch.testing.assert_close(found_losses.cpu(), losses)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(found_best.cpu(), best)
