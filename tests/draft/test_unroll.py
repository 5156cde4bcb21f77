from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.draft.loss import spans_of, teacher_of, total_loss, unrolled_loss
from draftsmith.draft.unroll import counted_slots, unroll
from tests.draft.builders import DRAFT_IDS, make_batch, make_draft, make_head

FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
EVERY_FORM = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product([True, False], repeat=3)]
EVERY_FORM += [{"norm_before_fc": False, "fc_norm": True}]


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rope(x, position):
    """Interleave nothing: pair i with i + d/2, angle position / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angle = position / 10000.0 ** (2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def draft_one_slot(draft, input_ids, aux, slot, steps):
    """What serving does for one document: committed tokens give keys of step 0, then the draft goes on alone.

    Written from the fact sheet, token by token and head by head; shares nothing with the package but the weights.
    """
    w, c = dict(draft.named_parameters()), draft.config
    layer = "layers.0."

    def fuse(states):
        if c.fc_norm:
            states = torch.stack([rms(s, w[f"fc_norm.{i}.weight"]) for i, s in enumerate(states)])
        flat = states.flatten()
        return w["fc.weight"] @ (rms(flat, w["input_norm.weight"]) if c.norm_before_fc else flat)

    def project(token, hidden, position):
        normed = rms(hidden, w[layer + "hidden_norm.weight"])
        both = torch.cat([rms(w["embed_tokens.weight"][token], w[layer + "input_layernorm.weight"]), normed])
        q, k, v = ((w[f"{layer}self_attn.{n}_proj.weight"] @ both).view(-1, c.head_dim) for n in ("q", "k", "v"))
        return rope(q, position), rope(k, position), v, (normed if c.norm_before_residual else hidden)

    keys, values = [], []
    for i in range(slot + 1):
        hidden = fuse(aux[i])
        q, k, v, residual = project(input_ids[i + 1], hidden, i)
        keys.append(k)
        values.append(v)
    outputs = []
    for step in range(steps):
        if step:
            q, k, v, residual = project(input_ids[slot + 1 + step], hidden, slot + step)
            keys.append(k)
            values.append(v)
        groups = c.num_attention_heads // c.num_key_value_heads
        heads = []
        for h in range(c.num_attention_heads):
            scores = torch.stack([q[h] @ key[h // groups] for key in keys]) / c.head_dim**0.5
            heads.append(sum(p * value[h // groups] for p, value in zip(scores.softmax(0), values, strict=True)))
        state = residual + w[layer + "self_attn.o_proj.weight"] @ torch.cat(heads)
        inner = rms(state, w[layer + "post_attention_layernorm.weight"])
        gate, up = (w[f"{layer}mlp.{n}_proj.weight"] @ inner for n in ("gate", "up"))
        state = state + w[layer + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = rms(state, w["norm.weight"])
        hidden = normed if c.norm_output else state
        outputs.append(normed)
    return outputs


@pytest.mark.parametrize("form", EVERY_FORM, ids=lambda form: ",".join(k for k, on in form.items() if on) or "plain")
def test_every_slot_of_the_unroll_is_what_serving_would_draft_from_there(form):
    draft, batch, steps = make_draft(**form), make_batch([7, 5]), 3
    by_step = list(unroll(draft, batch.input_ids, batch.aux, batch.position, spans_of(batch.document), steps))
    for start, end in spans_of(batch.document):
        for slot in range(end - start - steps):
            expected = draft_one_slot(draft, batch.input_ids[start:end], batch.aux[start:end], slot, steps)
            for k in range(steps):
                torch.testing.assert_close(by_step[k][start + slot], expected[k])


def test_loss_and_gradients_equal_a_reference_written_by_hand():
    draft, head, batch, steps, decay = make_draft(), make_head(), make_batch([6, 4]), 2, 0.8
    counts_needed = unrolled_loss(draft, batch, teacher_of(draft, head, batch.last), steps)
    loss = total_loss(counts_needed, [r.loss_count for r in counts_needed], decay)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()

    terms = [[] for _ in range(steps)]
    right, accepted = [0] * steps, [0] * steps
    for start, end in [(0, 6), (6, 10)]:
        ids, mask, last = batch.input_ids[start:end], batch.loss_mask[start:end], batch.last[start:end]
        for j in range(end - start):
            taken = True
            for k in range(steps):
                if j + 2 + k >= end - start or not all(mask[j + 1 : j + 3 + k]):
                    continue
                p = (rms(last[j + 1 + k], head.norm.weight) @ head.lm_head.T).softmax(-1)
                if int(p.argmax()) not in DRAFT_IDS:
                    taken = False
                    continue
                normed = draft_one_slot(draft, ids, batch.aux[start:end], j, k + 1)[k]
                log_q = (draft.lm_head.weight @ normed).log_softmax(-1)
                hit = DRAFT_IDS[int(log_q.argmax())] == int(p.argmax())
                taken = taken and hit
                right[k], accepted[k] = right[k] + hit, accepted[k] + taken
                p = p[DRAFT_IDS] / p[DRAFT_IDS].sum()
                terms[k].append(-(p * log_q).sum())
    assert all(terms)
    assert [(int(r.correct), int(r.accepted)) for r in counts_needed] == list(zip(right, accepted, strict=True))
    assert any(right)
    by_hand = sum(decay**k * torch.stack(found).mean() for k, found in enumerate(terms))
    torch.testing.assert_close(loss, by_hand)
    by_hand.backward()
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            # The draft's RoPE frequencies are float32, the reference's are not.
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_only_slots_whose_context_and_label_are_the_targets_own_words_count():
    #                     x₀ x₁ x₂ x₃ x₄ x₅ x₆ x₇ │ next document
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    document = torch.tensor([0] * 8 + [1] * 3)
    first, second, third = counted_slots(mask, document, 3)
    assert first.nonzero().flatten().tolist() == [2, 3, 8]  # reads x₃, x₄ or x₉; predicts x₄, x₅ or x₁₀
    assert second.nonzero().flatten().tolist() == [2]
    assert third.sum() == 0


def test_no_slot_counts_across_two_documents_that_are_all_answer():
    mask, document = torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1])
    (counted,) = counted_slots(mask, document, 1)
    assert counted.nonzero().flatten().tolist() == [0]


def test_documents_in_one_batch_do_not_see_each_other():
    draft, batch = make_draft(), make_batch([5, 6])
    both = list(unroll(draft, batch.input_ids, batch.aux, batch.position, [(0, 5), (5, 11)], 2))
    alone = list(unroll(draft, batch.input_ids[5:], batch.aux[5:], batch.position[5:], [(0, 6)], 2))
    for together, separate in zip(both, alone, strict=True):
        torch.testing.assert_close(together[5:], separate)


def test_a_later_step_sees_what_an_earlier_step_fed_back_for_its_own_slot_alone():
    draft, batch = make_draft(), make_batch([6])
    aux = batch.aux.clone().requires_grad_()
    *_, last = unroll(draft, batch.input_ids, aux, batch.position, [(0, 6)], 3)
    last[1].sum().backward()
    reached = aux.grad.flatten(1).abs().sum(-1) > 0
    assert reached.tolist() == [True, True, False, False, False, False]
