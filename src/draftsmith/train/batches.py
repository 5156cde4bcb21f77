"""Which samples go into which optimizer step, and how they become flat batches.

epoch ── plan_epoch ──→ batches, from seed and epoch alone
batch ── share_out ───→ passes of each rank, which add up to the batch whatever their number
pass ─── flat_batch ──→ one flat sequence
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.nn.functional import pad

from draftsmith.draft.attention import Spans
from draftsmith.records import Batch, Features

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


def silent_batch(aux_layers: int, hidden_size: int) -> Batch:
    """One token of which nothing counts: what a rank without samples works on, to meet the others."""
    nothing = torch.zeros(1, dtype=torch.int64)
    states = torch.zeros(1, aux_layers, hidden_size)
    return Batch((), nothing, nothing.bool(), nothing.clone(), nothing.clone(), states, states[:, 0])


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


def read_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each job returns, in order, the next one running in a thread while the one before is in use."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = None
        for job in jobs:
            coming = reader.submit(job)
            if ahead is not None:
                yield ahead.result()
            ahead = coming
        if ahead is not None:
            yield ahead.result()
