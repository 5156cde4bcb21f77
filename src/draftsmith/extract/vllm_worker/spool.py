"""A captured sequence on its way from the engine to the store: one file, there completely or not at all.

    bytes of the head: int64; the head, JSON: name, dtype, shape of each tensor; their bytes, widest dtype first:
    input_ids [T] int32, and the states as the store's codec encodes them, each part [T, L, …]; or the one part "",
    [T, L, Ht], as the engine computes them

The spool is no record of anything: what is in it when a run ends is thrown away, and nothing is synced to disk. Its
files are ours alone, so that a write costs an engine's main thread, which shares the interpreter's lock with the
writer threads, a few microseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.store.codec import CODECS, Parts

WRITER_THREADS = 4  # copies into page cache run at 2 to 4 GB/s each
MAPPED_BYTES = 1 << 16  # from which a file is mapped: a process may have some ten thousand mappings, not more


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


def spool_file(folder: Path, number: int, first_id: int) -> Path:
    """With pipeline parallelism, each stage writes the layers that it has, named by the first of them."""
    return folder / f"{number}.{first_id}"


def write_sequence(path: Path, input_ids: torch.Tensor, states: Parts) -> None:
    """Put a sequence under its name.

    Args:
        input_ids: [T] int32, the tokens that the engine was given.
        states: parts [T, L, …] on the CPU, one state for each layer id of this writer, ascending.
    """
    tensors = sorted({"input_ids": input_ids, **states}.items(), key=lambda item: -item[1].itemsize)
    head = json.dumps([(name, str(one.dtype).removeprefix("torch."), one.shape) for name, one in tensors]).encode()
    head += b" " * (-len(head) % 8)
    aside = f"{path}.partial"
    with open(aside, "wb", buffering=0) as file:
        parts = [memoryview(len(head).to_bytes(8, "little") + head), *(_bytes(one) for _, one in tensors)]
        for part in parts:
            written = 0
            while written < len(part):  # the system takes 2 GiB at once
                written += file.write(part[written:])
    os.rename(aside, path)


def take_sequence(folder: Path, number: int, writers: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Parts]:
    """Input ids [T] and the states' parts [T, L, …] of a sequence, mapped; its files are gone.

    Args:
        writers: the layer ids of each, ascending.

    Raises:
        ValueError: the writers were not given the same tokens.
    """
    found = []
    for ids in writers:
        path = spool_file(folder, number, ids[0])
        found.append(_read(path))
        path.unlink()
    input_ids, states = found[0]
    if any(not torch.equal(others, input_ids) for others, _ in found[1:]):
        raise ValueError("the stages of the pipeline were not given the same tokens")
    if len(found) > 1:
        states = {name: torch.cat([parts[name] for _, parts in found], dim=1) for name in states}
    return input_ids, states


def _read(path: Path) -> tuple[torch.Tensor, Parts]:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    raw = raw if size >= MAPPED_BYTES else raw.clone()
    start = 8 + int(raw[:8].view(torch.int64))
    tensors = {}
    for name, dtype_name, shape in json.loads(raw[8:start].numpy().tobytes()):
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        tensors[name] = raw[start:end].view(dtype).view(shape)
        start = end
    return tensors.pop("input_ids"), tensors


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class SpoolWriter:
    """Writes sequences from the device: at once on a CPU, through pinned buffers and threads elsewhere.

    Args:
        layer_ids: of the states that it is given.
        codec: which the states are encoded with, on the device: fewer bytes to bring from it; None: with none.
    """

    def __init__(self, folder: Path, layer_ids: tuple[int, ...], codec: str | None = None) -> None:
        self.folder, self.layer_ids, self.codec = folder, layer_ids, codec
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="spool")
        self._writing: list[Future[None]] = []
        self._copies: torch.cuda.Stream | None = None

    def put(self, sequences: Sequence[Ended], states: torch.Tensor) -> None:
        """Write sequences, or begin to. The caller may overwrite what `states` was computed from, not itself.

        One copy for all of them, which the engine's own stream does not wait for: it runs beside the next step. Pinned
        memory is PyTorch's, which keeps what it has once pinned; there is no more of it than samples under way.

        Args:
            states: [rows, L, Ht], those of each sequence from its start.

        Raises what an earlier write raised.
        """
        self._raise_failures(wait=False)
        parts = CODECS[self.codec].encode(states) if self.codec else {"": states}
        if not states.is_cuda:
            self._write(sequences, parts)
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host_parts = {name: _to_pinned(part) for name, part in parts.items()}
            host = [Ended(one.number, _to_pinned(one.input_ids), one.start) for one in sequences]
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        for tensor in (*parts.values(), *(one.input_ids for one in sequences if one.input_ids.is_cuda)):
            tensor.record_stream(self._copies)
        self._writing.append(self._threads.submit(self._write, host, host_parts, copied))

    def flush(self) -> None:
        """Wait until everything put is under its name. Raises what a write raised."""
        self._raise_failures(wait=True)

    def _write(self, sequences: Sequence[Ended], parts: Parts, copied: torch.cuda.Event | None = None) -> None:
        if copied is not None:
            copied.synchronize()
        for one in sequences:
            path = spool_file(self.folder, one.number, self.layer_ids[0])
            rows = slice(one.start, one.start + len(one.input_ids))
            write_sequence(path, one.input_ids, {name: part[rows] for name, part in parts.items()})

    def _raise_failures(self, wait: bool) -> None:
        pending = []
        for write in self._writing:
            if wait or write.done():
                write.result()
            else:
                pending.append(write)
        self._writing = pending


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
