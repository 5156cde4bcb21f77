"""Which samples go into which optimizer step, and how they become one flat batch. Derived from seed and step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.nn.functional import pad

from draftsmith.records import Batch, Features
from draftsmith.store.shards import Store

T = TypeVar("T")


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle samples and fill batches of at most `batch_tokens` tokens; a longer sample is a batch of its own.

    Args:
        lengths: tokens of each sample.

    Returns:
        Indexes into `lengths` by batch; each sample appears exactly once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    room = 0
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def flat_batch(samples: Sequence[Features]) -> Batch:
    """Samples back to back, without padding."""
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return Batch(
        sample_ids=tuple(sample.id for sample in samples),
        input_ids=torch.cat([sample.input_ids for sample in samples]).long(),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]).bool(),
        document=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        position=torch.cat([torch.arange(int(length)) for length in lengths]),
        aux=torch.cat([sample.aux for sample in samples]),
        last=torch.cat([sample.last for sample in samples]),
    )


def padded(batch: Batch, tokens: int) -> Batch:
    """The batch with one more document, of which nothing counts, so that it has so many tokens."""
    more = tokens - len(batch.input_ids)
    if not more:
        return batch
    return Batch(
        sample_ids=batch.sample_ids,
        input_ids=pad(batch.input_ids, (0, more)),
        loss_mask=pad(batch.loss_mask, (0, more)),
        document=pad(batch.document, (0, more), value=int(batch.document[-1]) + 1),
        position=torch.cat([batch.position, torch.arange(more, device=batch.position.device)]),
        aux=pad(batch.aux, (0, 0, 0, 0, 0, more)),
        last=pad(batch.last, (0, 0, 0, more)),
    )


def read_batches(store: Store, plan: Sequence[Sequence[int]], then: Callable[[Batch], T]) -> Iterator[T]:
    """The planned batches in order, each read, and prepared by `then`, while the one before is in use."""

    def read(indexes: Sequence[int]) -> T:
        return then(flat_batch([store[index] for index in indexes]))

    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = None
        for indexes in plan:
            coming = reader.submit(read, indexes)
            if ahead is not None:
                yield ahead.result()
            ahead = coming
        if ahead is not None:
            yield ahead.result()
