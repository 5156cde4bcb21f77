from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.draft import fast_loss
from draftsmith.draft.fast_attention import Documents
from draftsmith.draft.fast_loss import (
    ChunkedLoss,
    LossInputs,
    Slots,
    fast_unrolled_loss,
    find_targets,
    head_of_draft_vocabulary,
    loss_rows,
    teacher_rows,
)
from draftsmith.draft.loss import slot_losses, spans_of, teacher_of, total_loss, unrolled_loss
from draftsmith.draft.model import Draft
from draftsmith.draft.unroll import counted_slots
from draftsmith.store.shard_file import taught
from tests.draft.builders import (
    DRAFT_IDS,
    HIDDEN,
    TARGET_VOCAB,
    Recomputed,
    make_batch,
    make_config,
    make_draft,
    make_head,
)

KINDS = ["soft_cross_entropy", "forward_kl", "lk", "lk_hybrid"]
STEPS, DECAY = 3, 0.8
CPU = torch.device("cpu")


def find(draft, head, batch, kind, *, mask):
    slots = Slots.of(batch.loss_mask, batch.document, STEPS)
    targets = find_targets(draft, head, batch.last, slots, top1=True, mass=kind.startswith("lk"), mask=mask)
    return targets, DECAY ** torch.arange(STEPS, dtype=torch.float64) / targets.counts.clamp_min(1)


def documents_of(batch):
    return Documents.of(spans_of(batch.document))


def gradients(draft, loss):
    draft.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [True, False])
def test_the_fast_loss_has_the_values_and_gradients_of_the_plain_one(kind, mask):
    draft, head, batch = make_draft(), make_head(), make_batch([7, 1, 5, 2, 9])
    plain = unrolled_loss(draft, batch, teacher_of(draft, head, batch.last), STEPS, mask, kind)
    expected = total_loss(plain, [result.loss_count for result in plain], DECAY)
    targets, weights = find(draft, head, batch, kind, mask=mask)
    loss, results = fast_unrolled_loss(draft, head, batch, documents_of(batch), targets, weights, kind)
    torch.testing.assert_close(loss, expected)
    for fast, slow in zip(results, plain, strict=True):
        torch.testing.assert_close(fast.loss_sum, slow.loss_sum.detach())
        for name in ("loss_count", "correct", "accepted", "counted"):
            assert int(getattr(fast, name)) == int(getattr(slow, name)), name
    expected_gradients = gradients(draft, expected)
    for name, gradient in gradients(draft, loss).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [True, False])
def test_the_last_states_that_a_store_keeps_are_all_that_the_loss_needs(kind, mask):
    draft, head, batch = make_draft(), make_head(), make_batch([7, 1, 5, 2, 9])
    kept = torch.cat([taught(batch.loss_mask[start:end]) for start, end in spans_of(batch.document)])
    found = []
    for other in (batch.last, batch.last * 0):
        stored = replace(batch, last=torch.where(kept[:, None], batch.last, other))
        plain = unrolled_loss(draft, stored, teacher_of(draft, head, stored.last), STEPS, mask, kind)
        loss = total_loss(plain, [result.loss_count for result in plain], DECAY)
        targets, weights = find(draft, head, stored, kind, mask=mask)
        fast, results = fast_unrolled_loss(draft, head, stored, documents_of(stored), targets, weights, kind)
        counts = [(int(one.correct), int(one.accepted), int(one.counted)) for one in (*plain, *results)]
        found.append((counts, loss, gradients(draft, loss), fast, gradients(draft, fast)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_vocabulary_needs_no_map(kind):
    head, batch = make_head(), make_batch([7, 6])
    draft = Draft(make_config(draft_vocab_size=TARGET_VOCAB)).double()
    draft.initialise(head, None, seed=0)
    plain = unrolled_loss(draft, batch, teacher_of(draft, head, batch.last), STEPS, True, kind)
    targets, weights = find(draft, head, batch, kind, mask=True)
    _, results = fast_unrolled_loss(draft, head, batch, documents_of(batch), targets, weights, kind)
    for fast, slow in zip(results, plain, strict=True):
        torch.testing.assert_close(fast.loss_sum, slow.loss_sum.detach())
        assert int(fast.accepted) == int(slow.accepted)


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "forward_kl", "lk"])  # the hybrid's λ has no gradient by design
def test_the_chunked_losss_gradient_is_the_slope_of_its_value(kind):
    draft, head, batch = make_draft(), make_head(), make_batch([4, 3])
    targets, weights = find(draft, head, batch, kind, mask=False)
    inputs = LossInputs(targets, head_of_draft_vocabulary(head, draft), batch.last, weights, kind, rows=9)
    run = functools.partial(
        Recomputed.apply, lambda states, lm_head: ChunkedLoss.apply(states.clone(), lm_head, inputs)[0]
    )
    states = torch.randn(STEPS, len(batch.last) + STEPS, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (states, draft.lm_head.weight.detach().requires_grad_()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_logits_becomes_the_gradient_that_autograd_finds(kind):
    torch.manual_seed(0)
    student = torch.randn(2, 5, 11, dtype=torch.float64, requires_grad=True)
    teacher, weight, mass = torch.randn(5, 11).double(), torch.rand(2, 5).double(), torch.rand(5).double()
    probs = teacher.softmax(-1)
    expected = torch.stack([slot_losses(rows, probs, mass, kind) for rows in student])
    (expected * weight).sum().backward()
    memory = student.detach().clone()
    rows = teacher.clone()
    entropy, teacher_best = teacher_rows(rows)
    losses, best = loss_rows(memory, rows, entropy, mass, weight, kind)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(memory, student.grad)
    assert torch.equal(best, student.argmax(-1))
    assert torch.equal(teacher_best, teacher.argmax(-1))


def outcome(run, draft, head, batch, kind):
    """Sums of every step and all gradients, by the plain or the fast computation."""
    if run == "plain":
        results = unrolled_loss(draft, batch, teacher_of(draft, head, batch.last), STEPS, False, kind)
        loss = total_loss(results, [result.loss_count for result in results], DECAY)
    else:
        targets, weights = find(draft, head, batch, kind, mask=False)
        loss, results = fast_unrolled_loss(draft, head, batch, documents_of(batch), targets, weights, kind)
    return {"sums": torch.stack([result.loss_sum.detach() for result in results]), **gradients(draft, loss)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision_the_fast_loss_is_as_near_to_float64_as_the_plain_one(kind, dtype):
    truth = outcome("plain", make_draft(), make_head(), make_batch([17, 1, 9]), kind)
    plain, fast = (
        outcome(run, make_draft().to(dtype), make_head().to(dtype), make_batch([17, 1, 9]).to(CPU, dtype), kind)
        for run in ("plain", "fast")
    )
    assert fast["sums"].dtype == torch.float32
    for name, value in truth.items():
        distance_of_plain, distance_of_fast = ((x[name].double() - value).norm() / value.norm() for x in (plain, fast))
        assert distance_of_fast < 2 * distance_of_plain + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_bfloat16_have_the_loss_of_the_same_numbers_in_float64(kind):
    """Whatever they are rounded to, nothing is rounded so coarsely after them."""
    draft, head, last = make_draft().bfloat16(), make_head().bfloat16(), make_batch([40]).last.bfloat16()
    slots = Slots.of(torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.int64), STEPS)
    mass = find_targets(draft, head, last, slots, top1=True, mass=True, mask=False).mass[slots.positions]
    whole = head.logits(last[slots.positions])
    expected_mass = whole.double().softmax(-1)[:, DRAFT_IDS].sum(-1)
    torch.testing.assert_close(mass.double(), expected_mass, rtol=1e-5, atol=1e-6)
    rows, probs = whole[:, DRAFT_IDS].clone(), whole[:, DRAFT_IDS].double().softmax(-1)
    entropy, _ = teacher_rows(rows)
    torch.testing.assert_close(entropy.double(), torch.special.entr(probs).sum(-1), rtol=1e-5, atol=1e-6)
    student = torch.randn(STEPS, *rows.shape).bfloat16()
    exact = [slot_losses(step, rows.double(), mass.double(), kind) for step in student.double()]
    entropy = torch.special.entr(rows.double()).sum(-1)
    losses, _ = loss_rows(student, rows, entropy.float(), mass, torch.ones(STEPS, len(rows)), kind)
    torch.testing.assert_close(losses.double(), torch.stack(exact), rtol=1e-5, atol=1e-6)


def test_a_chunk_of_logits_is_no_larger_for_a_large_vocabulary():
    sizes = {vocab: fast_loss.student_rows("cuda", vocab, 2) for vocab in (16_384, 32_000, 128_256, 10**9)}
    assert sizes == {16_384: 7680, 32_000: 7680, 128_256: 1920, 10**9: 320}


def test_the_size_of_a_chunk_changes_nothing():
    draft, head, batch = make_draft(), make_head(), make_batch([7, 5, 9])
    targets, weights = find(draft, head, batch, "lk_hybrid", mask=True)
    states = torch.randn(STEPS, len(batch.last) + STEPS, HIDDEN, dtype=torch.float64)
    draft_head = head_of_draft_vocabulary(head, draft)
    outcomes = []
    for rows in (1, 13, 1000):
        leaf = states.clone().requires_grad_()
        inputs = LossInputs(targets, draft_head, batch.last, weights, "lk_hybrid", rows)
        loss, sums, right = ChunkedLoss.apply(leaf.clone(), draft.lm_head.weight, inputs)
        outcomes.append((loss, sums, right, *torch.autograd.grad(loss, (leaf, draft.lm_head.weight))))
    for other in outcomes[1:]:
        for one, two in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(one, two)


def test_positions_are_the_counted_slots_moved_to_what_they_learn_from():
    batch = make_batch([9, 4])
    found = Slots.of(batch.loss_mask, batch.document, STEPS)
    for k, slots in enumerate(counted_slots(batch.loss_mask, batch.document, STEPS)):
        assert (slots.nonzero() + 1 + k).tolist() == found.counted[k].nonzero().tolist()
    assert found.positions.tolist() == found.counted.any(0).nonzero().flatten().tolist()
    assert sorted([*found.positions.tolist(), *found.others.tolist()]) == list(range(13 + STEPS))


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient():
    draft, head, batch = make_draft(), make_head(), make_batch([3, 3])
    batch.loss_mask.zero_()
    targets, weights = find(draft, head, batch, "soft_cross_entropy", mask=True)
    loss, _ = fast_unrolled_loss(draft, head, batch, documents_of(batch), targets, weights, "soft_cross_entropy")
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(draft, loss).values())


class LargestLogits(TorchDispatchMode):
    """Remembers the largest tensor whose last dimension is a vocabulary."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] in (len(DRAFT_IDS), TARGET_VOCAB):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_in_memory_do_not_grow_with_the_batch(kind, monkeypatch):
    monkeypatch.setitem(fast_loss.STUDENT_ROWS, "cpu", 16)
    monkeypatch.setitem(fast_loss.TARGET_ROWS, "cpu", 16)
    draft, head = make_draft(), make_head()
    largest = []
    for documents in (8, 32):
        batch = make_batch([9] * documents)
        with LargestLogits() as seen:
            targets, weights = find(draft, head, batch, kind, mask=True)
            loss, _ = fast_unrolled_loss(draft, head, batch, documents_of(batch), targets, weights, kind)
            loss.backward()
        largest.append(seen.numbers)
    assert largest[0] == largest[1] <= 16 * TARGET_VOCAB
