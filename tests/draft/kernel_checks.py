"""The Triton kernels against the torch code beside them. `test_fast_kernels.py` runs this file in a process of its own.

On CUDA the kernels run as they are, elsewhere through Triton's interpreter, which has to be asked for by
TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch

from draftsmith.draft import fast_attention, fast_layers, fast_loss, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # on CUDA, matrix units round float32 to tf32


def on_device(*tensors):
    return [x.to(DEVICE) for x in tensors]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "steps"), [(2, 2, 16, 1), (3, 1, 24, 3)])
def test_the_attention_kernels_are_the_attention(heads, kv_heads, dim, steps):
    torch.manual_seed(0)
    spans, slots = [(0, 1), (1, 140), (140, 160)], 160
    here = fast_attention.Documents.of(spans)
    there = here.moved(lambda blocks: blocks.to(DEVICE))
    packed = torch.randn(steps, slots, (heads + 2 * kv_heads) * dim).to(ATTENTION)  # strided, as the unroll has them
    dout = torch.randn(slots, heads, dim).to(ATTENTION)
    dkv = torch.randn(steps, slots, 2, kv_heads, dim).to(ATTENTION)
    outcomes = []
    for documents, device in [(here, "cpu"), (there, DEVICE)]:
        query, keys, values = packed.to(device).unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=-2)
        query, out, added = (
            query[-1],
            torch.empty(slots, heads, dim, dtype=ATTENTION, device=device),
            dkv.to(device, copy=True),
        )
        lse = torch.empty(heads, slots, device=device)
        attend, attend_backward = fast_attention.attend, fast_attention.attend_backward
        if documents is there:  # where there is no GPU, the interpreter's tensors are on the CPU too
            kernels.attend(query, keys, values, documents.blocks, out, lse)
            dquery = kernels.attend_backward(
                dout.to(device), query, keys, values, out, lse, documents.blocks, added[:, :, 0], added[:, :, 1]
            )
        else:
            attend(query, keys, values, documents, out=out, lse=lse)
            dquery = attend_backward(
                dout, query, keys, values, out, lse, documents, dkeys=added[:, :, 0], dvalues=added[:, :, 1]
            )
        outcomes.append([x.float().cpu() for x in (out, lse, dquery, added)])
    for found, expected in zip(*outcomes[::-1], strict=True):
        assert (found - expected).norm() < (1e-2 if DEVICE == "cuda" else 1e-5) * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_kernels_are_the_norms(dtype):
    torch.manual_seed(0)
    x, other, dnormed, through, around = (torch.randn(5, 300).to(dtype) for _ in range(5))
    weight, grouped, of_groups = torch.randn(300), torch.randn(5, 3, 40).to(dtype), torch.randn(3, 40)
    for value, scale in ((x, None), (x, weight), (grouped, of_groups)):
        moved, normed = value.to(DEVICE), torch.empty_like(value, device=DEVICE)
        kernels.rms_norm(moved, None if scale is None else scale.to(DEVICE), 1e-5, normed)
        assert_same([normed], [fast_layers.rms_norm(value, scale, 1e-5)])
    total, normed = torch.empty_like(x), torch.empty_like(x)
    fast_layers.add_rms_norm(x, other, weight, 1e-5, total=total, out=normed)
    found = on_device(torch.empty_like(x), torch.empty_like(x))
    kernels.add_rms_norm(*on_device(x, other, weight), 1e-5, *found)
    assert_same(found, [total, normed])
    for more in ({}, {"through": through}, {"around": around}, {"through": through, "around": around}):
        dx, moved = torch.empty_like(x), on_device(x.clone(), weight, dnormed)
        dweight = fast_layers.rms_norm_backward(x, weight, dnormed, 1e-5, **more, out=dx)
        pointers = [more[name].to(DEVICE) if name in more else None for name in ("through", "around")]
        found = kernels.rms_norm_backward(*moved, 1e-5, *pointers, moved[0])  # in place
        assert_same([found, moved[0]], [dweight, dx])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_swiglu_kernels_are_swiglu(dtype):
    torch.manual_seed(0)
    expected = [torch.randn(7, 2 * 1100).to(dtype), torch.randn(7, 1100).to(dtype)]
    found = on_device(*(x.clone() for x in expected))
    assert_same([kernels.swiglu(found[0])], [fast_layers.swiglu(expected[0])])
    kernels.swiglu_backward(*found)
    fast_layers.swiglu_backward_(*expected)
    assert_same(found, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (18, 3, 20)])
def test_the_rotation_kernels_are_the_rotation(heads, kv_heads, dim):
    torch.manual_seed(0)
    slots, width = 6, heads + 2 * kv_heads
    angle, position = torch.rand(20, dim // 2) * 6, torch.randint(0, 17, (slots,))
    rotation = fast_layers.Rotation(angle.cos(), angle.sin(), position, 2)
    moved = fast_layers.Rotation(*on_device(angle.cos(), angle.sin(), position), 2)
    projected, embedded = (torch.randn(slots, width, dim) for _ in range(2))
    dquery, dkv = projected[:, :heads].contiguous(), projected[:, heads:].contiguous()
    target = torch.empty_like(projected)
    inputs = on_device(projected, embedded, torch.empty_like(target))
    fast_layers.rotate_sum(projected, embedded, target, rotation, kv_heads)
    kernels.rotate_sum(*inputs, moved, kv_heads)
    assert_same([inputs[2]], [target])
    of_query, of_kv, found = on_device(dquery, dkv, torch.empty_like(target))
    kernels.rotate_back(of_query, of_kv, moved, kv_heads, found)
    fast_layers.rotate_back(dquery, dkv, rotation, kv_heads, out=target)
    assert_same([found], [target])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_added_up_by_the_position_that_they_read(dtype):
    parts = torch.randn(3, 5, 1100).to(dtype)
    by_hand = torch.zeros(8, 1100)
    for k in range(3):
        for slot in range(5):
            by_hand[1 + k + slot] += parts[k, slot]
    expected = fast_layers.sum_shifted(parts)
    torch.testing.assert_close(expected, by_hand.to(dtype))
    assert_same([kernels.sum_shifted(parts.to(DEVICE))], [expected])


def test_columns_are_scaled_and_their_products_summed():
    wide, scale = torch.randn(700, 2 * 300).bfloat16(), torch.randn(300)
    weight = wide[:, 300:]
    expected = torch.randn(700, 300)
    found = expected.to(DEVICE, copy=True)
    by_hand = expected * scale, (expected * weight).sum(0)
    there = kernels.scale_columns(found, scale.to(DEVICE), wide.to(DEVICE)[:, 300:])
    here = fast_layers.scale_columns_(expected, scale, weight)
    assert_same([found, there], [expected, here])
    assert_same([expected, here], by_hand)


def test_rows_are_gathered_and_put_back():
    states, at = torch.randn(3, 9, 10), torch.tensor([7, 0, 4, 5])
    moved = on_device(states.clone(), at)
    packed = fast_loss.gather_rows(states, at)
    found = kernels.gather_rows(*moved)
    assert torch.equal(found.cpu(), packed)
    fast_loss.scatter_rows(packed * 2, states, at)
    kernels.scatter_rows(found * 2, *moved)
    assert torch.equal(moved[0].cpu(), states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_by_a_factor_on_the_device(dtype):
    x = torch.randn(3, 5000).to(dtype)
    for factor in (1.0, 0.25):
        found = on_device(x.clone(), torch.tensor(factor))
        kernels.scale(*found)
        assert_same(found[:1], [x * factor])


def test_the_teachers_kernel_is_its_softmax_entropy_and_choice():
    expected = torch.randn(4, 9000) * 3
    expected[0, [7, 8, 4100, 8199]] = 20.0  # a tie, as in bfloat16 they are: the first is the choice
    found = expected.to(DEVICE, copy=True)
    assert_same(kernels.teacher_rows(found), fast_loss.teacher_rows(expected))
    assert_same([found], [expected])


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "forward_kl", "lk", "lk_hybrid"])
@pytest.mark.parametrize("vocab", [100, 5000])
def test_the_loss_kernel_is_the_loss(kind, vocab):
    torch.manual_seed(0)
    student, probs = torch.randn(3, 4, vocab) * 2, torch.randn(4, vocab) * 2
    entropy, _ = fast_loss.teacher_rows(probs)
    mass, weight = torch.rand(4), torch.rand(3, 4)
    weight[0, 0] = 0
    student[0, 0, [7, 8, -1]] = student[1, 2, [-2, -1]] = 9.0  # ties
    expected = student.clone()
    losses, best = fast_loss.loss_rows(expected, probs, entropy, mass, weight, kind)
    found, *inputs = on_device(student, probs, entropy, mass, weight)
    found_losses, found_best = kernels.loss_rows(found, *inputs, kind)
    torch.testing.assert_close(found_losses.cpu(), losses)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(found_best.cpu(), best)
