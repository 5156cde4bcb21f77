"""The store: hidden states on disk, which all of training stands on.

    manifest.json            what the states are of (manifest.py)
    ledger.jsonl             one line per committed shard (ledger.py)
    shard-00000.safetensors  whole sequences back to back:
                             aux [tokens, A, Ht], last [tokens, Ht], as the codec encodes them,
                             input_ids [tokens] int32, loss_mask [tokens] uint8, offsets [sequences + 1] int64

`writer.py` writes them, `shard_file.py` has one shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import torch

from draftsmith.errors import StoreError
from draftsmith.records import Features
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import Entry, read_ledger
from draftsmith.store.manifest import Manifest, read_manifest, refuse_differences
from draftsmith.store.shard_file import map_shard


def predict_bytes(lengths: Iterable[int], *, aux_layers: int, hidden_size: int, codec: str) -> int:
    """Bytes on disk of sequences of so many tokens; headers and ledger, well under 1 % of it, are not counted."""
    per_token = (aux_layers + 1) * CODECS[codec].vector_bytes(hidden_size) + 4 + 1  # states, input id, mask
    return sum(length * per_token + 8 for length in lengths)


class Store:
    """Reads a store: `store[i]` is sequence `i` in the order committed.

    Its states are views of the mapped file: do not write into them. A shard is checked against its checksum when it is
    first touched. What is committed after opening is not seen.

    Attributes:
        manifest: what the states are of.
        sample_ids, domains, splits, lengths: by sequence; from the ledger, so that no tensor is read for them.
    """

    def __init__(self, folder: Path, manifest: Manifest, entries: list[Entry]) -> None:
        self.folder, self.manifest, self.entries = folder, manifest, entries
        self.sample_ids = [id for entry in entries for id in entry.sample_ids]
        self.domains = [domain for entry in entries for domain in entry.domains]
        self.splits = [split for entry in entries for split in entry.splits]
        self.lengths = [length for entry in entries for length in entry.lengths]
        self._spans = [  # shard, first token, end
            (number, start, stop)
            for number, entry in enumerate(entries)
            for start, stop in pairwise(accumulate(entry.lengths, initial=0))
        ]
        self._shards: dict[int, dict[str, torch.Tensor]] = {}

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

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Features]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Features:
        """Raises StoreError if the shard that holds the sequence is damaged; names it."""
        number, start, stop = self._spans[index]
        shard = self._shard(number)
        return Features(
            id=self.sample_ids[index],
            domain=self.domains[index],
            split=self.splits[index],
            input_ids=shard["input_ids"][start:stop].long(),
            loss_mask=shard["loss_mask"][start:stop].bool(),
            aux=self._states(shard, "aux", start, stop),
            last=self._states(shard, "last", start, stop),
        )

    def _states(self, shard: dict[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
        parts = {}
        for key, tensor in shard.items():
            stem, _, part = key.partition(".")
            if stem == name:
                parts[part] = tensor[start:stop]
        return CODECS[self.manifest.codec].decode(parts)

    def _shard(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a shard, mapped; checked the first time."""
        if number not in self._shards:
            entry = self.entries[number]
            self._shards[number] = map_shard(self.folder / entry.shard, entry, self.manifest)
        return self._shards[number]
