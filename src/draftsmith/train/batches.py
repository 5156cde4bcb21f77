"""Which samples go into which optimizer step, and how they become flat batches.

epoch ── plan_epoch ──→ batches, from seed and epoch alone
batch ── share_out ───→ passes of each rank, which add up to the batch whatever their number
pass ─── read_batch ──→ one flat sequence
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from draftsmith.draft.attention import Spans
from draftsmith.records import Batch, Features
from draftsmith.store.shards import Store
from draftsmith.store.threads import one_core_threads

OPEN_SHARDS = 32  # 8 GiB, of shards as large as extraction makes them
T = TypeVar("T")


def plan_epoch(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, shards: Sequence[int] | None = None
) -> list[list[int]]:
    """Shuffle samples and fill batches of at most `batch_tokens` tokens; a longer sample is a batch of its own.

    With more than `OPEN_SHARDS` shards, those are shuffled, and the samples of the n-th of them come at times drawn
    evenly from n to n + `OPEN_SHARDS`, when a shard's worth of samples takes one unit of time. So shards are read one
    after another, and at most `OPEN_SHARDS` of them have to stay in memory, however large the store. That is random
    enough: a batch draws on `OPEN_SHARDS` shards, on about sqrt(2 · `OPEN_SHARDS`) at an epoch's very beginning and
    end, of which every epoch has others together. With fewer it is the plain shuffle, which does not ask into which
    shards an extraction that was stopped and went on divided the samples.

    Args:
        lengths: tokens of each sample.
        shards: number of the shard that has each sample; None: any order reads equally well.

    Returns:
        Indexes into `lengths` by batch; each sample appears exactly once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    room = 0
    for index in _shuffled(len(lengths), shards, generator):
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def _shuffled(count: int, shards: Sequence[int] | None, generator: torch.Generator) -> list[int]:
    if shards is None or len(set(shards)) <= OPEN_SHARDS:
        return torch.randperm(count, generator=generator).tolist()
    turns = torch.randperm(max(shards) + 1, generator=generator)[torch.tensor(shards)]
    turns = torch.unique(turns, return_inverse=True)[1]  # shards without samples take no time
    times = turns + OPEN_SHARDS * torch.rand(count, generator=generator, dtype=torch.float64)
    return times.argsort(stable=True).tolist()


def share_out(
    batch: Sequence[int], lengths: Sequence[int], ranks: int, pass_tokens: int | None
) -> list[list[list[int]]]:
    """Divide a batch over ranks, and what a rank gets over passes of at most `pass_tokens`, if that is not None.

    The longest samples are dealt first, each to the pass with the fewest tokens. Every rank gets as many passes as the
    others, so that all meet in every collective; a pass may be empty. A sample longer than a pass has one to itself.

    Args:
        batch: indexes into `lengths`, which are tokens of each sample.

    Returns:
        Samples by rank and pass, in the batch's order.
    """
    total = sum(lengths[index] for index in batch)
    passes = 1 if pass_tokens is None else max(1, -(-total // (ranks * pass_tokens)))
    while True:
        bins: list[list[int]] = [[] for _ in range(ranks * passes)]
        fewest = [(0, number) for number in range(len(bins))]  # a heap of tokens and bin
        for place in sorted(range(len(batch)), key=lambda place: -lengths[batch[place]]):
            tokens, number = fewest[0]
            bins[number].append(place)
            heapq.heapreplace(fewest, (tokens + lengths[batch[place]], number))
        if pass_tokens is None or all(tokens <= pass_tokens or len(bins[number]) < 2 for tokens, number in fewest):
            break
        passes += 1
    shares = [[batch[place] for place in sorted(places)] for places in bins]
    return [shares[rank::ranks] for rank in range(ranks)]


class BatchMemory:
    """Where the states of a batch are laid out, and those of a later one again: new memory costs the processor several
    times what copying into it does. Pinned memory is torch's own, which keeps it until no copy from it is under way."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._blocks: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory with anything in it. Unless it is pinned, what was taken under this name before is given up."""
        if self.pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        size, block = math.prod(shape), self._blocks.get((name, dtype))
        if block is None or len(block) < size:
            block = self._blocks[name, dtype] = torch.empty(size, dtype=dtype)
        return block[:size].view(shape)


def read_batch(store: Store, indexes: Sequence[int], memory: BatchMemory, dtype: torch.dtype, name: str = "") -> Batch:
    """Sequences of the store as `flat_batch` has them, their states in `dtype` and laid out in `memory`."""
    tokens, manifest = sum(store.lengths[index] for index in indexes), store.manifest
    aux = memory.take(f"aux {name}", (tokens, len(manifest.aux_layer_ids), manifest.hidden_size), dtype)
    last = memory.take(f"last {name}", (tokens, manifest.hidden_size), dtype)
    input_ids, loss_mask = store.read_into(indexes, aux, last)
    ids, lengths = zip(*((store.sample_ids[index], store.lengths[index]) for index in indexes), strict=True)
    return _flat(ids, lengths, input_ids, loss_mask, aux, last)


def flat_batch(samples: Sequence[Features]) -> Batch:
    """Samples back to back, without padding."""
    ids, lengths = zip(*((sample.id, len(sample.input_ids)) for sample in samples), strict=True)
    parts = ([getattr(sample, name) for sample in samples] for name in ("input_ids", "loss_mask", "aux", "last"))
    return _flat(ids, lengths, *map(torch.cat, parts))


def _flat(
    ids: tuple[str, ...],
    lengths: tuple[int, ...],
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    aux: torch.Tensor,
    last: torch.Tensor,
) -> Batch:
    document = torch.from_numpy(np.repeat(np.arange(len(ids)), lengths))  # torch's wakes all cores for a few numbers
    starts = torch.tensor(list(accumulate(lengths, initial=0)))
    return Batch(
        sample_ids=ids,
        input_ids=input_ids,
        loss_mask=loss_mask,
        document=document,
        position=torch.arange(len(document)) - starts[document],
        aux=aux,
        last=last,
    )


def silent_batch(aux_layers: int, hidden_size: int) -> Batch:
    """One token of which nothing counts: what a rank without samples works on, to meet the others."""
    nothing = torch.zeros(1, dtype=torch.int64)
    states = torch.zeros(1, aux_layers, hidden_size)
    return Batch((), nothing, nothing.bool(), nothing.clone(), nothing.clone(), states, states[:, 0])


def padded(batch: Batch, tokens: int) -> Batch:
    """The batch with one more document, of which nothing counts, so that it has so many tokens; its states, which are
    many bytes, as they are: `pad_states`, once they are where they are computed with."""
    more = tokens - len(batch.input_ids)
    if not more:
        return batch
    return dataclasses.replace(
        batch,
        input_ids=pad(batch.input_ids, (0, more)),
        loss_mask=pad(batch.loss_mask, (0, more)),
        document=pad(batch.document, (0, more), value=int(batch.document[-1]) + 1),
        position=torch.cat([batch.position, torch.arange(more, device=batch.position.device)]),
    )


def pad_states(batch: Batch) -> Batch:
    """The batch with states of zero for those tokens that `padded` added."""
    more = len(batch.input_ids) - len(batch.aux)
    if not more:
        return batch
    return dataclasses.replace(batch, aux=pad(batch.aux, (0, 0, 0, 0, 0, more)), last=pad(batch.last, (0, 0, 0, more)))


def with_noise(batch: Batch, spans: Spans, share: float, seed: str) -> Batch:
    """The batch with uniform noise on its auxiliary states, of at most `share` of each state's root mean square.

    A document's noise follows from seed and sample id alone, whatever stands beside it.
    """
    aux = batch.aux.clone()
    generator = torch.Generator(aux.device)
    for id, (start, end) in zip(batch.sample_ids, spans, strict=False):  # what padding added has no id
        digest = hashlib.sha256(f"{seed} {id}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        states = aux[start:end].float()
        size = share * states.square().mean(-1, keepdim=True).sqrt()
        noise = torch.rand(states.shape, generator=generator, device=aux.device)
        aux[start:end] = (states + size * (2 * noise - 1)).to(aux.dtype)
    return dataclasses.replace(batch, aux=aux)


def fetched_ahead(items: Iterable[T], fetch: Callable[[T], None], count: int) -> Iterator[T]:
    """The items, `fetch` called with each when the one that comes `count` before it is due."""
    coming: deque[T] = deque()
    for item in items:
        fetch(item)
        coming.append(item)
        if len(coming) > count:
            yield coming.popleft()
    yield from coming


def read_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each job returns, in order, the next one running in a thread, on one core, while the one before is in use.

    A job begins only when what the one before the last returned is no longer in use: two memories suffice.
    """
    with one_core_threads("read ahead", count=1) as reader:
        ahead = None
        for job in jobs:
            coming = reader.submit(job)
            if ahead is not None:
                yield ahead.result()
            ahead = coming
        if ahead is not None:
            yield ahead.result()
