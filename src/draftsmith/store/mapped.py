"""A committed shard in mapped memory, and where in it each sequence's states are."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from draftsmith.store.codec import CODECS, Codec, Parts
from draftsmith.store.ledger import Entry
from draftsmith.store.manifest import Manifest
from draftsmith.store.shard_file import LAST_OFFSETS, map_shard

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class States:
    """The aux or the last states of all sequences of a shard, as the codec has them."""

    codec: Codec
    parts: Parts  # of all sequences, back to back
    ends: dict[str, list[int]] = field(default_factory=dict)  # of a ragged part: where each sequence's bytes are

    def read(self, place: int, start: int, stop: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Some rows of sequence `place`, all where the codec is ragged. With `into`: there, in its dtype."""
        parts = {name: part[start:stop] for name, part in self.parts.items() if name not in self.ends}
        for name, ends in self.ends.items():
            parts[name] = self.parts[name][ends[place] : ends[place + 1]]
        if into is None or into.dtype == self.codec.decoded:
            return self.codec.decode(parts, into)
        return into.copy_(self.codec.decode(parts))


class MappedShard:
    """Its sequences are told by their place in it.

    Where their states are is worked out once, as plain numbers: training reads hundreds of sequences a second in
    several threads, which share one interpreter.

    Raises StoreError if the shard is damaged; names it.
    """

    def __init__(self, folder: Path, entry: Entry, manifest: Manifest) -> None:
        tensors, codec = map_shard(folder / entry.shard, entry, manifest), CODECS[manifest.codec]
        self.input_ids, self.loss_mask = tensors["input_ids"], tensors["loss_mask"]
        self.aux, self.last = _states(tensors, "aux", codec), _states(tensors, "last", codec)
        self._offsets: list[int] = tensors["offsets"].tolist()
        self._last_offsets: list[int] | None = tensors[LAST_OFFSETS].tolist() if LAST_OFFSETS in tensors else None
        self._runs = _runs_taught(self.loss_mask, self._offsets)

    def span(self, place: int) -> tuple[int, int]:
        """A sequence's tokens: the first, and the end."""
        return self._offsets[place], self._offsets[place + 1]

    def last_span(self, place: int) -> tuple[int, int]:
        """Its rows among the last states: the first, and the end."""
        ends = self._offsets if self._last_offsets is None else self._last_offsets
        return ends[place], ends[place + 1]

    def read_aux(self, place: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """[T, A, Ht]"""
        return self.aux.read(place, *self.span(place), into)

    def read_last(self, place: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """[T, Ht], zeros where none was kept."""
        row, end_row = self.last_span(place)
        if self._last_offsets is None:
            return self.last.read(place, row, end_row, into)
        start, stop = self.span(place)
        runs, done = self._runs[place], 0
        several = self.last.read(place, row, end_row) if len(runs) > 1 else None
        if into is None:
            into = torch.empty(stop - start, self.last.parts[""].shape[-1], dtype=self.last.codec.decoded)
        for begin, end in runs:
            into[done:begin].zero_()
            if several is None:
                self.last.read(place, row, end_row, into[begin:end])
            else:
                into[begin:end].copy_(several[: end - begin])
                several = several[end - begin :]
            done = end
        into[done:].zero_()
        return into


def _states(tensors: dict[str, torch.Tensor], name: str, codec: Codec) -> States:
    """Of the tensors `name`, `name.part` and, where a part is ragged, `name.part.offsets`."""
    parts = {"": tensors[name]}
    for key, tensor in tensors.items():
        stem, _, part = key.partition(".")
        if stem == name and part and not part.endswith(".offsets"):
            parts[part] = tensor
    return States(codec, parts, {part: tensors[f"{name}.{part}.offsets"].tolist() for part in codec.ragged})


def _runs_taught(loss_mask: torch.Tensor, offsets: list[int]) -> list[Runs]:
    """By sequence: from where to where, in its tokens, their last state was kept (`shard_file.taught`)."""
    kept = np.zeros(len(loss_mask) + 1, dtype=np.int8)
    kept[: max(0, len(loss_mask) - 1)] = loss_mask.numpy()[1:] != 0
    kept[np.array(offsets[1:], dtype=np.int64) - 1] = 0  # the next token is another sequence's
    edges = np.flatnonzero(np.diff(kept, prepend=np.int8(0)))
    firsts, ends = edges[0::2], edges[1::2]
    bounds = np.searchsorted(firsts, offsets).tolist()
    found = []
    for start, (low, high) in zip(offsets, pairwise(bounds), strict=False):
        found.append(list(zip((firsts[low:high] - start).tolist(), (ends[low:high] - start).tolist(), strict=True)))
    return found
