"""A captured sequence on its way from the engine to the store: one file, there completely or not at all.

The spool is no record of anything: what is in it when a run ends is thrown away, and nothing is synced to disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WRITER_THREADS = 4  # copies into page cache run at 2 to 4 GB/s each


def spool_file(folder: Path, number: int, first_id: int) -> Path:
    """With pipeline parallelism, each stage writes the layers that it has, named by the first of them."""
    return folder / f"{number}.{first_id}.safetensors"


def write_sequence(path: Path, input_ids: torch.Tensor, states: torch.Tensor) -> None:
    """Put a sequence under its name.

    Args:
        input_ids: [T] int32, the tokens that the engine was given.
        states: [T, L, Ht] on the CPU, one for each layer id of this writer, ascending.
    """
    aside = path.with_suffix(".partial")
    save_file({"input_ids": input_ids, "states": states}, aside)
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
        with safe_open(path, framework="pt") as file:
            found.append((file.get_tensor("input_ids"), file.get_tensor("states")))
        path.unlink()
    input_ids, states = found[0]
    if any(not torch.equal(others, input_ids) for others, _ in found[1:]):
        raise ValueError("the stages of the pipeline were not given the same tokens")
    return input_ids, states if len(found) == 1 else torch.cat([states for _, states in found], dim=1)


class SpoolWriter:
    """Writes sequences from the device: at once on a CPU, through pinned buffers and threads elsewhere."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...]) -> None:
        self.folder, self.layer_ids = folder, layer_ids
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="spool")
        self._writing: list[Future[None]] = []
        self._copies: torch.cuda.Stream | None = None

    def put(self, number: int, input_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Write a sequence, or begin to. The caller may overwrite what `states` was computed from, not itself.

        Raises what an earlier write raised.
        """
        self._raise_failures(wait=False)
        path = spool_file(self.folder, number, self.layer_ids[0])
        if not states.is_cuda:
            write_sequence(path, input_ids, states)
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host_ids, host_states = _to_pinned(input_ids), _to_pinned(states)
            copied = torch.cuda.Event()
            copied.record()
        states.record_stream(self._copies)
        self._writing.append(self._threads.submit(_write_copied, path, host_ids, host_states, copied))

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


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _write_copied(path: Path, input_ids: torch.Tensor, states: torch.Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    write_sequence(path, input_ids, states)
