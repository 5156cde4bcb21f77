"""The store: hidden states on disk, which all of training stands on.

    manifest.json            what the states are of (manifest.py)
    ledger.jsonl             one line per committed shard (ledger.py)
    shard-00000.safetensors  whole sequences back to back:
                             aux [tokens, A, Ht] and last [taught, Ht], as the codec encodes them,
                             input_ids [tokens] int32, loss_mask [tokens] uint8, offsets [sequences + 1] int64,
                             last_offsets [sequences + 1] int64

The last state is kept where the loss needs it: before each token of the target's own. Elsewhere it is read as zeros.

`writer.py` writes them, `shard_file.py` has one shard's file, `mapped.py` one that is read.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Self

import torch

from draftsmith.errors import StoreError
from draftsmith.records import Features
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import Entry, read_ledger
from draftsmith.store.manifest import Manifest, read_manifest, refuse_differences
from draftsmith.store.mapped import MappedShard
from draftsmith.store.threads import THREADS, one_core_threads

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
        self.shards = [number for number, entry in enumerate(entries) for _ in entry.lengths]
        self._places = [place for entry in entries for place in range(len(entry.lengths))]
        self._shards: dict[int, MappedShard] = {}
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
            hint = "`draftsmith extract RECIPE --redo` extracts all again"
            raise StoreError("its ledger has a sample twice", where=str(folder), hint=hint)
        return store

    @property
    def dtype(self) -> torch.dtype:
        """Of the states, as they are read."""
        return CODECS[self.manifest.codec].decoded

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[Features]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Features:
        """Raises StoreError if the shard that holds the sequence is damaged; names it."""
        shard, place = self._shard(self.shards[index]), self._places[index]
        tokens = slice(*shard.span(place))
        return Features(
            id=self.sample_ids[index],
            domain=self.domains[index],
            split=self.splits[index],
            input_ids=shard.input_ids[tokens].long(),
            loss_mask=shard.loss_mask[tokens].bool(),
            aux=shard.read_aux(place),
            last=shard.read_last(place),
        )

    def read_into(
        self, indexes: Sequence[int], aux: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several sequences back to back, checked, decoded and copied by several threads. Raises as `__getitem__` does.

        Args:
            aux: [tokens, A, Ht], memory of the CPU where the states are laid out, in its dtype.
            last: [tokens, Ht], likewise.

        Returns:
            Their input ids [tokens] int64, and loss masks [tokens] bool.
        """
        tokens = len(aux)
        input_ids, loss_mask = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)

        def lay_out(some: list[tuple[int, int]]) -> None:
            for index, start in some:
                shard, place = self._shard(self.shards[index]), self._places[index]
                there, here = slice(*shard.span(place)), slice(start, start + self.lengths[index])
                input_ids[here] = shard.input_ids[there]
                loss_mask[here] = shard.loss_mask[there]
                shard.read_aux(place, aux[here])
                shard.read_last(place, last[here])

        starts = accumulate((self.lengths[index] for index in indexes), initial=0)
        of_threads = groupby(zip(indexes, starts, strict=False), lambda one: one[1] * THREADS // max(tokens, 1))
        for _ in self._readers.map(lay_out, [list(some) for _, some in of_threads]):
            pass
        return input_ids, loss_mask

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
        for index in indexes:
            shard, place = self._shard(self.shards[index]), self._places[index]
            spans = ((shard.aux, shard.span(place)), (shard.last, shard.last_span(place)))
            for tensor in (states.parts[""][slice(*span)] for states, span in spans):
                begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                for advice in (mmap.MADV_WILLNEED, MADV_POPULATE_READ):
                    _madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, advice)

    def _shard(self, number: int) -> MappedShard:
        """Checked the first time."""
        with self._opening[number]:
            if number not in self._shards:
                self._shards[number] = MappedShard(self.folder, self.entries[number], self.manifest)
            return self._shards[number]
