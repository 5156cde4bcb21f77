from __future__ import annotations

import pytest
import torch

from draftsmith.train.batches import flat_batch, plan_epoch, read_batches
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


def test_a_flat_batch_numbers_documents_and_restarts_positions(tiny_target):
    one, two = features_of(tiny_target, [2, 4])
    batch = flat_batch([one, two])
    assert batch.document.tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.position.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch.sample_ids == ("s0", "s1")
    assert torch.equal(batch.aux[2:], two.aux)


def test_batches_come_in_the_planned_order_with_their_own_states(tmp_path, tiny_target):
    samples = features_of(tiny_target, [4, 6, 5])
    store = build_store(tmp_path / "store", tiny_target, samples)
    batches = list(read_batches(store, [[2], [0, 1]], lambda batch: batch))
    assert [batch.sample_ids for batch in batches] == [("s2",), ("s0", "s1")]
    assert torch.equal(batches[0].last, samples[2].last)
