"""Memory that an engine's worker and the driver share and use again: files of the spool that both have mapped.

What is captured is copied by the device into a chunk, and read from there. Copied once more, by threads into new pages,
it slowed an engine's main thread by a third (docs/decisions/0017). A reader's mapping holds a shared lock of the file
for as long as anything refers to it, or until its process is killed; a chunk without one is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

import torch

PREFIX = "chunk-"
ROUNDED_BYTES = 1 << 20  # a chunk's size is a multiple of it
ALIGNMENT = 64


class Chunk:
    """A file, mapped by its writer.

    Attributes:
        bytes: [capacity] uint8, the mapping.
        pinned: whether a device copies into it without being waited for.
        names: the links that tell what is in it; their readers delete them once they have it mapped.
        told: whether these have been written.
    """

    def __init__(self, path: Path, capacity: int, pin: bool) -> None:
        self.path, self.names, self.told = path, frozenset[str](), True
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(self._file, 0, capacity)  # where there is no room, a write to the mapping would be a SIGBUS
        self.bytes = torch.frombuffer(mmap.mmap(self._file, capacity), dtype=torch.uint8)
        self.pinned = pin and _pin(self.bytes)

    def is_free(self, there: Collection[str]) -> bool:
        """Whether all that was in it has been read, and nobody has it mapped.

        Args:
            there: names of all that is in the spool.
        """
        if not self.told or not self.names.isdisjoint(there):
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def delete(self) -> None:
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))
        os.close(self._file)
        self.path.unlink(missing_ok=True)


class Chunks:
    """The chunks of one writer. There are as many as were in use at once.

    Args:
        name: tells them from those of the folder's other writers.
        pin: they are for a device's copies.
    """

    def __init__(self, folder: Path, name: str, pin: bool) -> None:
        self._folder, self._name, self._pin = folder, name, pin
        self._chunks: list[Chunk] = []  # the one taken longest ago first
        self._made = 0

    def take(self, size: int, names: Collection[str]) -> Chunk:
        """One with room for `size` bytes that nobody uses, for what these links will tell of.

        Raises:
            OSError: there is no room for another.
        """
        there = set(os.listdir(self._folder))
        chunk = next((one for one in self._chunks if len(one.bytes) >= size and one.is_free(there)), None)
        if chunk is None:
            for one in [one for one in self._chunks if one.is_free(there)]:
                self._chunks.remove(one)  # too small, as all that are free
                one.delete()
            chunk = self._make(size + size // 4)
        else:
            self._chunks.remove(chunk)
        self._chunks.append(chunk)
        chunk.names, chunk.told = frozenset(names), False
        return chunk

    def _make(self, size: int) -> Chunk:
        capacity = -(-size // ROUNDED_BYTES) * ROUNDED_BYTES
        self._made += 1
        return Chunk(self._folder / f"{PREFIX}{self._name}-{self._made}", capacity, self._pin)


_mapped: WeakValueDictionary[tuple[int, int], mmap.mmap] = WeakValueDictionary()  # by device and number of the file
_mapping = threading.Lock()


def map_chunk(path: Path) -> mmap.mmap:
    """A reader's mapping of a chunk. Its bytes stay as they are until nothing refers to the mapping any more.

    To be called while one of the chunk's names is still there.
    """
    with _mapping, open(path, "rb") as file:
        found = os.fstat(file.fileno())
        mapped = _mapped.get((found.st_dev, found.st_ino))
        if mapped is None:
            fcntl.flock(file, fcntl.LOCK_SH)
            mapped = mmap.mmap(  # which duplicates the descriptor, and with it keeps the lock
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
            _mapped[found.st_dev, found.st_ino] = mapped
        return mapped


def _pin(memory: torch.Tensor) -> bool:
    """Whether the device's driver takes it: memory does it take, pages of a disk's file some kernels refuse."""
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
    except RuntimeError as error:
        print(f"draftsmith: captured states are copied once more: {error}", flush=True)
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # the next launch would be told of the refusal
        return False
    return True
