from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.store.shard_file import taught
from draftsmith.train.batches import (
    OPEN_SHARDS,
    BatchMemory,
    fetched_ahead,
    flat_batch,
    plan_epoch,
    read_ahead,
    read_batch,
    share_out,
    with_noise,
)
from tests.train.builders import build_store, features_of

LENGTHS = [5, 9, 1, 14, 30, 2, 8]


@pytest.mark.parametrize("budget", [1, 10, 31, 1000])
def test_every_sample_comes_once_an_epoch_within_the_budget(budget):
    for epoch in range(3):
        plan = plan_epoch(LENGTHS, budget, seed=7, epoch=epoch)
        assert sorted(index for rows in plan for index in rows) == list(range(len(LENGTHS)))
        assert all(len(rows) == 1 or sum(LENGTHS[i] for i in rows) <= budget for rows in plan)


def test_the_order_follows_from_seed_and_epoch_alone():
    assert plan_epoch(LENGTHS, 20, 1, 0) == plan_epoch(LENGTHS, 20, 1, 0)
    assert plan_epoch(LENGTHS, 20, 1, 0) != plan_epoch(LENGTHS, 20, 1, 1)
    assert plan_epoch(LENGTHS, 20, 1, 0) != plan_epoch(LENGTHS, 20, 2, 0)


@pytest.mark.parametrize("shards", [list(range(100)), [5, 1] + [number % 70 for number in range(98)]])
def test_every_sample_comes_once_an_epoch_by_shards_as_well(shards):
    lengths = [1 + number % 13 for number in range(100)]
    for epoch in range(3):
        plan = plan_epoch(lengths, 20, 7, epoch, shards)
        assert sorted(index for rows in plan for index in rows) == list(range(100))
        assert plan == plan_epoch(lengths, 20, 7, epoch, shards)


@pytest.mark.parametrize("shards", [[3] * 7, [0, 0, 1, 2, 4, 4, 4]])
def test_a_store_in_other_shards_is_learned_from_in_the_same_order(shards):
    assert plan_epoch(LENGTHS, 20, 7, 0, shards) == plan_epoch(LENGTHS, 20, 7, 0)


def test_few_shards_are_read_from_at_a_time_and_every_batch_draws_on_many():
    shards = [number // 16 for number in range(16 * 200)]
    orders = []
    for epoch in range(2):
        plan = plan_epoch([1] * len(shards), 16, 0, epoch, shards)
        orders.append([shards[index] for rows in plan for index in rows])
        begins = {shard: orders[-1].index(shard) for shard in range(200)}
        ends = {shard: len(shards) - orders[-1][::-1].index(shard) for shard in range(200)}
        open_at = [sum(begins[s] <= place < ends[s] for s in range(200)) for place in range(0, len(shards), 100)]
        assert max(open_at) <= OPEN_SHARDS + 1
        drawn_on = [len({shards[index] for index in rows}) for rows in plan]
        assert sum(drawn_on[20:-20]) / len(drawn_on[20:-20]) > 11  # of 16 samples; of all shards at once it is 15
        assert drawn_on[0] >= 5
    assert orders[0] != orders[1]


def test_memory_is_used_again_for_what_fits_and_made_anew_for_what_does_not():
    memory = BatchMemory()
    first = memory.take("aux", (6, 2), torch.float32)
    assert memory.take("aux", (3, 4), torch.float32).data_ptr() == first.data_ptr()
    assert memory.take("last", (6, 2), torch.float32).data_ptr() != first.data_ptr()
    assert memory.take("aux", (6, 2), torch.bfloat16).data_ptr() != first.data_ptr()
    larger = memory.take("aux", (7, 2), torch.float32)
    assert larger.shape == (7, 2)
    assert memory.take("aux", (6, 2), torch.float32).data_ptr() == larger.data_ptr()


def test_a_batch_read_into_memory_used_before_is_the_samples_batch(tiny_target, tmp_path):
    samples = [
        replace(one, last=one.last * taught(one.loss_mask)[:, None]) for one in features_of(tiny_target, [5, 3, 4])
    ]  # what a store keeps of them
    store, memory = build_store(tmp_path, tiny_target, samples), BatchMemory()
    for order in ([0, 1, 2], [2], [1, 0]):
        ours = read_batch(store, order, memory, samples[0].aux.dtype)
        exact = flat_batch([samples[index] for index in order])
        assert ours.sample_ids == exact.sample_ids
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), exact.tensors(), strict=True))


def test_items_are_fetched_so_many_before_they_are_due():
    fetched = []
    for number in fetched_ahead(range(6), fetched.append, 2):
        assert fetched == list(range(min(6, number + 3)))
    assert list(fetched_ahead([], fetched.append, 2)) == []


def test_a_flat_batch_numbers_documents_and_restarts_positions(tiny_target):
    one, two = features_of(tiny_target, [2, 4])
    batch = flat_batch([one, two])
    assert batch.document.tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.position.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch.sample_ids == ("s0", "s1")
    assert torch.equal(batch.aux[2:], two.aux)


def test_what_is_read_ahead_comes_in_order_one_job_ahead_of_its_use():
    begun = [threading.Event() for _ in range(5)]

    def job(number):
        begun[number].set()
        return number

    seen = []
    for number in read_ahead(lambda n=n: job(n) for n in range(5)):
        seen.append(number)
        assert number == 4 or begun[number + 1].wait(10), "the next is read while this one is in use"
        assert number >= 3 or not begun[number + 2].is_set()
    assert seen == [0, 1, 2, 3, 4]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    ranks=st.integers(1, 5),
    most=st.none() | st.integers(5, 80),
)
def test_ranks_and_passes_add_up_to_the_batch_whatever_their_number(lengths, ranks, most):
    batch = list(range(len(lengths)))[::-1]
    shares = share_out(batch, lengths, ranks, most)
    passes = [rows for of_rank in shares for rows in of_rank]
    assert sorted(index for rows in passes for index in rows) == sorted(batch)
    assert len(shares) == ranks
    assert len({len(of_rank) for of_rank in shares}) == 1, "every rank meets the others as often"
    assert all(rows == sorted(rows, reverse=True) for rows in passes), "the batch's own order"
    if most is not None:
        assert all(len(rows) == 1 or sum(lengths[i] for i in rows) <= most for rows in passes)
    if ranks == 1 and most is None:
        assert shares == [[batch]]


@given(seed=st.integers(0, 99), ranks=st.integers(1, 4))
def test_every_step_has_the_same_samples_on_any_number_of_ranks(seed, ranks):
    plan = plan_epoch(LENGTHS, 20, seed, epoch=3)
    of_ranks = [sorted(i for passes in share_out(b, LENGTHS, ranks, 10) for rows in passes for i in rows) for b in plan]
    assert of_ranks == [sorted(batch) for batch in plan]
    assert sorted(i for batch in of_ranks for i in batch) == list(range(len(LENGTHS)))


def test_ranks_get_about_as_many_tokens_each():
    lengths = [100, 90, 50, 40, 30, 20, 20, 10]
    tokens = [sum(lengths[i] for i in rows) for (rows,) in share_out(range(8), lengths, 3, None)]
    assert max(tokens) - min(tokens) <= 20


def test_noise_follows_from_seed_and_sample_alone_and_is_no_larger_than_its_share(tiny_target):
    samples = features_of(tiny_target, [4, 6, 5])
    whole, part = flat_batch(samples), flat_batch(samples[1:2])
    noised = with_noise(whole, [(0, 4), (4, 10), (10, 15)], 0.2, "0 7")
    assert torch.equal(noised.aux[4:10], with_noise(part, [(0, 6)], 0.2, "0 7").aux)
    assert not torch.equal(noised.aux[4:10], with_noise(part, [(0, 6)], 0.2, "0 8").aux)
    size = whole.aux.square().mean(-1, keepdim=True).sqrt()
    assert (noised.aux - whole.aux).abs().max() > 0.19 * size.min()
    assert ((noised.aux - whole.aux).abs() <= 0.2 * size + 1e-6).all()
    assert torch.equal(noised.last, whole.last)
