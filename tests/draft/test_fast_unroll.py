from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.draft.attention import UnrollAttention
from draftsmith.draft.fast_attention import Documents, attend, attend_backward
from draftsmith.draft.fast_unroll import Unroll, UnrollInputs, Weights, fast_unroll
from draftsmith.draft.loss import spans_of
from draftsmith.draft.unroll import unroll
from tests.draft.builders import Recomputed, make_batch, make_draft

CPU = torch.device("cpu")
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
EVERY_FORM = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product([True, False], repeat=3)]
EVERY_FORM += [{"norm_before_fc": False, "fc_norm": True}]
lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def plain_states(draft, batch, steps):
    """The plain unroll's states in the layout of the fast one's."""
    slots = len(batch.input_ids)
    states = batch.aux.new_zeros(steps, slots + steps, draft.config.hidden_size)
    for k, state in enumerate(
        unroll(draft, batch.input_ids, batch.aux, batch.position, spans_of(batch.document), steps)
    ):
        states[k, 1 + k : 1 + k + slots] = state
    return states


def fast_states(draft, batch, steps):
    documents = Documents.of(spans_of(batch.document))
    return fast_unroll(UnrollInputs(draft, batch.input_ids, batch.aux, batch.position, documents, steps))


def states_and_gradients(run, draft, batch, steps):
    draft.zero_grad()
    states = run(draft, batch, steps)
    torch.manual_seed(5)
    (states * torch.randn(states.shape, dtype=torch.float64).to(states.dtype)).sum().backward()
    gradients = {n: p.grad for n, p in draft.named_parameters() if p.requires_grad and not n.startswith("lm_head")}
    return {"states": states.detach(), **gradients}


def cast(draft, batch, dtype):
    return draft.to(dtype), batch.to(CPU, dtype)


@pytest.mark.parametrize("form", EVERY_FORM, ids=lambda form: ",".join(k for k, on in form.items() if on) or "plain")
def test_the_fast_unroll_has_the_values_and_gradients_of_the_plain_one(form):
    draft, batch = make_draft(**form), make_batch([7, 1, 5])
    expected = states_and_gradients(plain_states, draft, batch, 4)
    found = states_and_gradients(fast_states, draft, batch, 4)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(lengths=lengths_of_documents, steps=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_documents_of_any_length_do_not_change_that(lengths, steps, seed):
    draft, batch = make_draft(), make_batch(lengths, seed)
    expected = states_and_gradients(plain_states, draft, batch, steps)
    found = states_and_gradients(fast_states, draft, batch, steps)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision_the_fast_unroll_is_as_near_to_float64_as_the_plain_one(dtype):
    truth = states_and_gradients(plain_states, make_draft(), make_batch([17, 1, 9]), 4)
    plain = states_and_gradients(plain_states, *cast(make_draft(), make_batch([17, 1, 9]), dtype), 4)
    fast = states_and_gradients(fast_states, *cast(make_draft(), make_batch([17, 1, 9]), dtype), 4)
    for name, value in truth.items():
        distance_of_plain, distance_of_fast = ((x[name].double() - value).norm() / value.norm() for x in (plain, fast))
        assert fast[name].dtype == dtype
        assert distance_of_fast < 2 * distance_of_plain + torch.finfo(dtype).eps, name


def test_the_unrolls_gradient_is_the_slope_of_its_values():
    draft, batch = make_draft(intermediate_size=3, num_attention_heads=2, num_key_value_heads=1), make_batch([3, 2])
    documents = Documents.of(spans_of(batch.document))
    inputs = UnrollInputs(draft, batch.input_ids, batch.aux, batch.position, documents, 3)
    weights = [w.detach().clone().requires_grad_() for w in Weights.of(draft)]
    run = functools.partial(Recomputed.apply, lambda *w: Unroll.apply(inputs, *w))
    assert torch.autograd.gradcheck(run, weights, fast_mode=True)


class FastAttention(torch.autograd.Function):
    """The fast attention of step k by itself, to be held against the plain one."""

    @staticmethod
    def forward(ctx, documents, query, keys, values):
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        attend(query, keys, values, documents, out=out, lse=lse)
        ctx.documents = documents
        ctx.save_for_backward(query, keys, values, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        _, keys, values, *_ = ctx.saved_tensors
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        dquery = attend_backward(dout.contiguous(), *ctx.saved_tensors, ctx.documents, dkeys=dkeys, dvalues=dvalues)
        return None, dquery, dkeys, dvalues


@given(lengths=lengths_of_documents, k=st.integers(0, 4), kv_heads=st.sampled_from([1, 2, 4]))
@settings(max_examples=15, deadline=None)
def test_a_causal_pass_merged_with_the_slots_own_keys_is_attention_over_both(lengths, k, kv_heads):
    torch.manual_seed(0)
    slots = sum(lengths)
    query = torch.randn(slots, 4, 6, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(k + 1, slots, kv_heads, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    spans = spans_of(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)))
    plain = UnrollAttention(spans)
    for key, value in zip(keys, values, strict=True):
        expected = plain(query, key, value)
    found = FastAttention.apply(Documents.of(spans), query, keys, values)
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(found)
    gradients = (torch.autograd.grad(x, (query, keys, values), dout) for x in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_fast_attentions_gradient_is_the_slope_of_its_values():
    torch.manual_seed(0)
    query = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(3, 6, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    documents = Documents.of([(0, 5), (5, 6)])
    assert torch.autograd.gradcheck(lambda *x: FastAttention.apply(documents, *x), (query, keys, values))


def test_no_tensor_of_the_unroll_grows_with_the_square_of_a_documents_length():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self.numbers = max(self.numbers, tensor.numel())
            return made

    largest = []
    for length in (256, 512):
        draft, batch = make_draft(max_position_embeddings=1024), make_batch([length])
        with Largest() as seen:
            fast_states(draft, batch, 3).sum().backward()
        largest.append(seen.numbers)
    assert largest[1] < 2.1 * largest[0]
