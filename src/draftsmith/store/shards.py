"""The store: hidden states on disk, which all of training stands on.

    manifest.json            what the states are of (manifest.py)
    ledger.jsonl             one line per committed shard (ledger.py)
    shard-00000.safetensors  whole sequences back to back:
                             aux [tokens, A, Ht] and last [taught, Ht], as the codec encodes them,
                             input_ids [tokens] int32, loss_mask [tokens] uint8, offsets [sequences + 1] int64,
                             last_offsets [sequences + 1] int64

The last state is kept where the loss needs it: before each token of the target's own. Elsewhere it is read as zeros.

`writer.py` writes them, `shard_file.py` has one shard.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import torch

from draftsmith.errors import StoreError
from draftsmith.records import Features
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import Entry, read_ledger
from draftsmith.store.manifest import Manifest, read_manifest, refuse_differences
from draftsmith.store.shard_file import LAST_OFFSETS, map_shard, taught
from draftsmith.store.threads import one_core_threads

# Linux 5.14, `madvise(2)`: map what is in memory all at once, which costs a fraction of doing so page by page when it
# is touched. What the system says to advice does not matter: without it, reading is slower.
MADV_POPULATE_READ = 22
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Store:
    """Reads a store: `store[i]` is sequence `i` in the order committed.

    Its states may be views of the mapped file: do not write into them. A shard is checked against its checksum when it
    is first touched. What is committed after opening is not seen. May be used by several threads.

    Attributes:
        manifest: what the states are of.
        sample_ids, domains, splits, lengths, shards: by sequence; from the ledger, so that no tensor is read for them.
    """

    def __init__(self, folder: Path, manifest: Manifest, entries: list[Entry]) -> None:
        self.folder, self.manifest, self.entries = folder, manifest, entries
        self.sample_ids = [id for entry in entries for id in entry.sample_ids]
        self.domains = [domain for entry in entries for domain in entry.domains]
        self.splits = [split for entry in entries for split in entry.splits]
        self.lengths = [length for entry in entries for length in entry.lengths]
        self._spans = [  # shard, place in it, first token, end
            (number, place, start, stop)
            for number, entry in enumerate(entries)
            for place, (start, stop) in enumerate(pairwise(accumulate(entry.lengths, initial=0)))
        ]
        self.shards = [number for number, *_ in self._spans]
        self._shards: dict[int, dict[str, torch.Tensor]] = {}
        self._opening = [threading.Lock() for _ in entries]
        self._readers, self._fetchers = one_core_threads("read"), one_core_threads("fetch")

    @classmethod
    def open(cls, folder: Path, expect: dict[str, Any] | None = None) -> Self:
        """Open a store for reading.

        Args:
            folder: the store's folder.
            expect: fields of the manifest with the values that they must have, such as `identity(facts)`.

        Raises:
            StoreError: there is no store, its manifest or ledger is damaged, or a field differs: names it.
        """
        manifest = read_manifest(folder)
        refuse_differences(folder, manifest, expect or {})
        store = cls(folder, manifest, read_ledger(folder).entries)
        if len(set(store.sample_ids)) < len(store.sample_ids):
            raise StoreError("its ledger has a sample twice", where=str(folder), hint="delete the store; extract again")
        return store

    @property
    def dtype(self) -> torch.dtype:
        """Of the states, as they are read."""
        return CODECS[self.manifest.codec].decoded

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Features]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Features:
        """Raises StoreError if the shard that holds the sequence is damaged; names it."""
        return self._read(index)

    def _read(self, index: int, aux: torch.Tensor | None = None, last: torch.Tensor | None = None) -> Features:
        """With its states in the memory that is given, [T, A, Ht] and [T, Ht]."""
        number, place, start, stop = self._spans[index]
        shard = self._shard(number)
        return Features(
            id=self.sample_ids[index],
            domain=self.domains[index],
            split=self.splits[index],
            input_ids=shard["input_ids"][start:stop].long(),
            loss_mask=shard["loss_mask"][start:stop].bool(),
            aux=self._states(shard, "aux", place, start, stop, aux),
            last=self._last(shard, place, start, stop, last),
        )

    def read_into(self, indexes: Sequence[int], aux: torch.Tensor, last: torch.Tensor) -> list[Features]:
        """Several sequences, checked, decoded and copied by several threads. Raises as `store[index]` does.

        Args:
            aux: [tokens, A, Ht], memory of the CPU where the states are laid out back to back, in its dtype.
            last: [tokens, Ht], likewise.

        Returns:
            The sequences, whose states are views of that memory.
        """

        def lay_out(index: int, start: int) -> Features:
            stop = start + self.lengths[index]
            return self._read(index, aux[start:stop], last[start:stop])

        starts = accumulate((self.lengths[index] for index in indexes), initial=0)
        return list(self._readers.map(lay_out, indexes, starts))

    def prefetch(self, indexes: Iterable[int]) -> None:
        """Begin to check the shards of sequences that will be read soon, and to bring those into memory.

        Returns at once. A shard that is damaged is an error when it is read, not here.
        """
        by_shard: dict[int, list[int]] = {}
        for index in indexes:
            by_shard.setdefault(self.shards[index], []).append(index)
        for of_shard in by_shard.values():  # one thread for each, since they would wait for one another
            self._fetchers.submit(self._bring_into_memory, of_shard)

    def _bring_into_memory(self, indexes: list[int]) -> None:
        for number, place, start, stop in (self._spans[index] for index in indexes):
            shard = self._shard(number)
            first, end = shard[LAST_OFFSETS][place : place + 2].tolist() if LAST_OFFSETS in shard else (start, stop)
            for tensor in (shard["aux"][start:stop], shard["last"][first:end]):
                begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                for advice in (mmap.MADV_WILLNEED, MADV_POPULATE_READ):
                    _madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, advice)

    def _last(
        self, shard: dict[str, torch.Tensor], place: int, start: int, stop: int, into: torch.Tensor | None
    ) -> torch.Tensor:
        """The last states, and zeros where there are none."""
        if LAST_OFFSETS not in shard:
            return self._states(shard, "last", place, start, stop, into)
        first, end = shard[LAST_OFFSETS][place : place + 2].tolist()
        found = self._states(shard, "last", place, first, end, None)
        last = found.new_empty(stop - start, found.shape[-1]) if into is None else into
        kept = taught(shard["loss_mask"][start:stop].bool())
        rows = kept.nonzero().squeeze(-1)
        if len(rows) and int(rows[-1] - rows[0]) + 1 == len(rows):  # one answer: no rows to be found one by one
            at, after = int(rows[0]), int(rows[-1]) + 1
            last[:at].zero_()
            last[at:after].copy_(found)
            last[after:].zero_()
        else:
            last.index_fill_(0, (~kept).nonzero().squeeze(-1), 0)
            last.index_copy_(0, rows, found.to(last.dtype))
        return last

    def _states(
        self, shard: dict[str, torch.Tensor], name: str, place: int, start: int, stop: int, into: torch.Tensor | None
    ) -> torch.Tensor:
        codec, parts = CODECS[self.manifest.codec], {"": shard[name][start:stop]}
        for key, tensor in shard.items():
            stem, _, part = key.partition(".")
            if stem == name and part in codec.ragged:
                ends = shard[f"{key}.offsets"]
                parts[part] = tensor[ends[place] : ends[place + 1]]
            elif stem == name and part and not part.endswith(".offsets"):
                parts[part] = tensor[start:stop]
        if into is not None and into.dtype != codec.decoded:
            return into.copy_(codec.decode(parts))
        return codec.decode(parts, into)

    def _shard(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a shard, mapped; checked the first time."""
        with self._opening[number]:
            if number not in self._shards:
                entry = self.entries[number]
                self._shards[number] = map_shard(self.folder / entry.shard, entry, self.manifest)
            return self._shards[number]
