"""A captured sequence on its way from the engine to the store: one file, there completely or not at all.

    length of input_ids, shape of states, dtype: [5] int64; then input_ids [T] int32, then states [T, L, Ht]

The spool is no record of anything: what is in it when a run ends is thrown away, and nothing is synced to disk. Its
files are ours alone, so that a write costs an engine's main thread, which shares the interpreter's lock with the
writer threads, a few microseconds.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

WRITER_THREADS = 4  # copies into page cache run at 2 to 4 GB/s each
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAPPED_BYTES = 1 << 16  # from which a file is mapped: a process may have some ten thousand mappings, not more
_HEADER = struct.Struct("<5q")


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


def write_sequence(path: Path, input_ids: torch.Tensor, states: torch.Tensor) -> None:
    """Put a sequence under its name.

    Args:
        input_ids: [T] int32, the tokens that the engine was given.
        states: [T, L, Ht] on the CPU, one for each layer id of this writer, ascending.
    """
    header = _HEADER.pack(len(input_ids), *states.shape, DTYPES.index(states.dtype))
    aside = f"{path}.partial"
    with open(aside, "wb", buffering=0) as file:
        for part in (header, _bytes(input_ids), _bytes(states)):
            written = 0
            while written < len(part):  # the system takes 2 GiB at once
                written += file.write(part[written:])
    os.rename(aside, path)


def take_sequence(folder: Path, number: int, parts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids [T] and states [T, L, Ht] of a sequence, mapped; its files are gone.

    Args:
        parts: the layer ids of each writer, ascending.

    Raises:
        ValueError: the writers were not given the same tokens.
    """
    found = []
    for ids in parts:
        path = spool_file(folder, number, ids[0])
        found.append(_read(path))
        path.unlink()
    input_ids, states = found[0]
    if any(not torch.equal(others, input_ids) for others, _ in found[1:]):
        raise ValueError("the stages of the pipeline were not given the same tokens")
    return input_ids, states if len(found) == 1 else torch.cat([states for _, states in found], dim=1)


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    raw = raw if size >= MAPPED_BYTES else raw.clone()
    tokens, *shape, dtype = raw[: _HEADER.size].view(torch.int64).tolist()
    rest = raw[_HEADER.size :]
    states = rest[4 * tokens :].view(DTYPES[dtype]).view(shape)
    return rest[: 4 * tokens].view(torch.int32), states


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class SpoolWriter:
    """Writes sequences from the device: at once on a CPU, through pinned buffers and threads elsewhere."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...]) -> None:
        self.folder, self.layer_ids = folder, layer_ids
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
        if not states.is_cuda:
            self._write(sequences, states)
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host_states = _to_pinned(states)
            host = [Ended(one.number, _to_pinned(one.input_ids), one.start) for one in sequences]
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        for tensor in (states, *(one.input_ids for one in sequences if one.input_ids.is_cuda)):
            tensor.record_stream(self._copies)
        self._writing.append(self._threads.submit(self._write, host, host_states, copied))

    def flush(self) -> None:
        """Wait until everything put is under its name. Raises what a write raised."""
        self._raise_failures(wait=True)

    def _write(self, sequences: Sequence[Ended], states: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        if copied is not None:
            copied.synchronize()
        for one in sequences:
            path = spool_file(self.folder, one.number, self.layer_ids[0])
            write_sequence(path, one.input_ids, states[one.start : one.start + len(one.input_ids)])

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
