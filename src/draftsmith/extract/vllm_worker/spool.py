"""A captured sequence on its way from the engine to the store: a link that tells where it is, there once it is whole.

A symbolic link whose target is JSON, and no path: it is made whole by one call to the system. Each call lets go of the
interpreter's lock, which the engine's own thread then has to wait for.

    chunk: name of the file in shared memory (`chunks.py`) that it lies in, with the others of its step
    tensors: name, dtype, shape, first byte of each: input_ids [T] int32, and the states as the store's codec encodes
        them, each part [T, L, …]; or the one part "", [T, L, Ht], as the engine computes them

The spool is no record of anything: what is in it when a run ends is thrown away, and nothing is synced to disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from draftsmith.extract.vllm_worker.chunks import ALIGNMENT, Chunk, Chunks, map_chunk
from draftsmith.store.codec import CODECS, Parts

WRITER_THREADS = 4  # where the device cannot copy into a chunk, one moves 2 to 4 GB/s


@dataclass(frozen=True)
class Ended:
    """A sequence whose states are all there.

    Attributes:
        input_ids: [T] int32, the tokens that the engine was given.
        start: its first row in the states that it comes with.
    """

    number: int
    input_ids: torch.Tensor
    start: int


def spool_link(folder: Path, number: int, first_id: int) -> Path:
    """With pipeline parallelism, each stage writes the layers that it has, named by the first of them."""
    return folder / f"{number}.{first_id}"


def take_sequence(folder: Path, number: int, writers: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Parts]:
    """Input ids [T] and the states' parts [T, L, …] of a sequence, mapped; its links are gone.

    Args:
        writers: the layer ids of each, ascending.

    Raises:
        ValueError: the writers were not given the same tokens.
    """
    found = []
    for ids in writers:
        path = spool_link(folder, number, ids[0])
        found.append(_read(path))
        path.unlink()
    input_ids, states = found[0]
    if any(not torch.equal(others, input_ids) for others, _ in found[1:]):
        raise ValueError("the stages of the pipeline were not given the same tokens")
    if len(found) > 1:
        states = {name: torch.cat([parts[name] for _, parts in found], dim=1) for name in states}
    return input_ids, states


def _read(path: Path) -> tuple[torch.Tensor, Parts]:
    told = json.loads(os.readlink(path))
    mapped, tensors = map_chunk(path.parent / told["chunk"]), {}
    for name, dtype_name, shape, start in told["tensors"]:
        dtype = getattr(torch, dtype_name)
        tensors[name] = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
    return tensors.pop("input_ids"), tensors


class SpoolWriter:
    """Writes sequences from the device: at once on a CPU, beside its next step elsewhere.

    Args:
        layer_ids: of the states that it is given.
        codec: which the states are encoded with, on the device: fewer bytes to bring from it; None: with none.
    """

    def __init__(self, folder: Path, layer_ids: tuple[int, ...], codec: str | None = None) -> None:
        self.folder, self.layer_ids, self.codec = folder, layer_ids, codec
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="spool")
        self._writing: list[Future[None]] = []
        self._copies: torch.cuda.Stream | None = None
        self._chunks: Chunks | None = None

    def put(self, sequences: Sequence[Ended], states: torch.Tensor) -> None:
        """Write sequences, or begin to. The caller may overwrite what `states` was computed from, not itself.

        One copy for all of them, which the engine's own stream does not wait for: it runs beside the next step.

        Args:
            states: [rows, L, Ht], those of each sequence from its start.

        Raises what an earlier write raised.
        """
        self._raise_failures(wait=False)
        parts = CODECS[self.codec].encode(states) if self.codec else {"": states}
        tensors = [*parts.values(), *(one.input_ids for one in sequences)]
        *starts, size = accumulate((-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in tensors), initial=0)
        links = [spool_link(self.folder, one.number, self.layer_ids[0]) for one in sequences]
        if self._chunks is None:
            self._chunks = Chunks(self.folder, str(self.layer_ids[0]), pin=states.is_cuda)
        chunk = self._chunks.take(size, [link.name for link in links])
        places = [_view(chunk.bytes, one, start) for one, start in zip(tensors, starts, strict=True)]
        told = _tell(chunk, parts, sequences, starts)
        if not states.is_cuda:
            _copy(tensors, places)
            _link(chunk, links, told)
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host = places if chunk.pinned else [_pinned_like(one) for one in tensors]
            _copy(tensors, host)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._copies)

        def finish() -> None:
            copied.synchronize()
            if not chunk.pinned:
                _copy(host, places)
            _link(chunk, links, told)

        self._writing.append(self._threads.submit(finish))

    def flush(self) -> None:
        """Wait until everything put is under its name. Raises what a write raised."""
        self._raise_failures(wait=True)

    def _raise_failures(self, wait: bool) -> None:
        pending = []
        for write in self._writing:
            if wait or write.done():
                write.result()
            else:
                pending.append(write)
        self._writing = pending


def _tell(chunk: Chunk, parts: Parts, sequences: Sequence[Ended], starts: Sequence[int]) -> list[str]:
    """What the link of each sequence says."""
    said = []
    for one, ids_start in zip(sequences, starts[len(parts) :], strict=True):
        tensors: list[Any] = [("input_ids", "int32", one.input_ids.shape, ids_start)]
        for (name, part), start in zip(parts.items(), starts, strict=False):
            rows = part[one.start : one.start + len(one.input_ids)]
            first = start + one.start * math.prod(part.shape[1:]) * part.itemsize
            tensors.append((name, str(part.dtype).removeprefix("torch."), rows.shape, first))
        said.append(json.dumps({"chunk": chunk.path.name, "tensors": tensors}))
    return said


def _link(chunk: Chunk, links: Sequence[Path], told: Sequence[str]) -> None:
    for link, text in zip(links, told, strict=True):
        os.symlink(text, link)
    chunk.told = True


def _view(memory: torch.Tensor, like: torch.Tensor, start: int) -> torch.Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _copy(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    for one, place in zip(tensors, into, strict=True):
        place.copy_(one, non_blocking=True)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
