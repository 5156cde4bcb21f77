"""Writes a store: shards by a few threads, so that what captures the states need not wait for the disk.

A shard is written aside, synced, renamed, its folder synced, and only then, once all before it have been, entered in
the ledger. Whatever is cut short before that does not exist for readers, and the next writer sweeps it up.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from draftsmith.errors import RequestError, StoreError
from draftsmith.records import EncodedFeatures, Features
from draftsmith.store.codec import CODECS
from draftsmith.store.folder import file_system, shard_name, shard_number, shards_in, sole_writer
from draftsmith.store.ledger import LEDGER, Entry, Ledger, cut_torn_line, lost_shards, read_ledger, write_ledger
from draftsmith.store.manifest import (
    FORMAT,
    MANIFEST,
    NOTES,
    Manifest,
    read_manifest,
    refuse_differences,
    write_manifest,
)
from draftsmith.store.shard_file import misfit, taught, write_shard
from draftsmith.store.sizes import predict_bytes
from draftsmith.store.threads import THREADS, one_core_threads

SPARE_BYTES = 16 << 20  # left free on the disk, for the ledger, the manifest, and the run's other files
_MIB = 1 << 20


@dataclass(frozen=True)
class _Shard:
    name: str
    bytes: int  # about
    entry: Future[Entry]


class StoreWriter:
    """Adds samples to a store, one writer at a time. Use `StoreWriter.open`.

    Attributes:
        committed: tokens by id of the samples that are safely on disk, as of the last `add` or `flush`.
        lost: shards of the ledger that were found cut short or gone; their samples are to be added again.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_bytes: int) -> None:
        self.folder, self.manifest, self.shard_bytes = folder, manifest, shard_bytes
        self._ledger, self.lost = _recover(folder)
        entries = list(self._ledger.entries)
        self.committed = {
            id: length for entry in entries for id, length in zip(entry.sample_ids, entry.lengths, strict=True)
        }
        self._next_number = 1 + max((shard_number(entry.shard) or 0 for entry in entries), default=-1)
        self._added = set(self.committed)
        self._pending: list[Features | EncodedFeatures] = []
        self._pending_bytes = 0
        self._under_way: deque[_Shard] = deque()  # those that are not known to be in the ledger
        self._abandon = threading.Event()
        self._threads = one_core_threads("shard")

    @classmethod
    @contextmanager
    def open(cls, folder: Path, manifest: Manifest, shard_bytes: int) -> Iterator[Self]:
        """Begin a store, or go on with the one there.

        When the block ends well, everything added is committed. When it ends with an error, the shards that were full
        are; after KeyboardInterrupt those under way are given up.

        Args:
            folder: the store's folder, made if it is not there.
            manifest: what the samples to come are of; must agree with that of the store there.
            shard_bytes: size from which a shard is closed.

        Raises:
            RequestError: the codec cannot hold what the target computes.
            StoreError: another writer has the folder; the store there is of something else, naming the field; its
                manifest or ledger is damaged; or the file system refuses.
        """
        _refuse_rounding(manifest)
        with sole_writer(folder):
            with file_system(folder, "cannot be opened for writing"):
                writer = cls(folder, _begin_or_continue(folder, manifest), shard_bytes)
            try:
                yield writer
                writer.flush()
            except KeyboardInterrupt:
                writer._abandon.set()
                raise
            finally:
                writer._threads.shutdown()

    def record_parity(self, parity: dict[str, Any]) -> None:
        """Note in the manifest how the engine's states compare with the reference.

        What was noted when earlier samples were captured stays: under "later", by number, is what is not the same.
        """
        if first := self.manifest.parity:
            later = first.get("later", {})
            if parity in ({name: value for name, value in first.items() if name != "later"}, *later.values()):
                return
            parity = {**first, "later": {**later, str(len(later) + 1): parity}}
        self.manifest = replace(self.manifest, parity=parity)
        with self._writing(MANIFEST):
            write_manifest(self.folder, self.manifest)

    def add(self, samples: Sequence[Features | EncodedFeatures]) -> bool:
        """Take samples, none of them divided between shards, and begin to write a shard if it is full.

        States are encoded here, unless they are already, with the manifest's codec.
        Their tensors must stay as they are until they are committed. Waits only while `THREADS` shards are being
        written.

        Returns:
            Whether more is committed than there was after the last `add` or `flush`. That everything is, only `flush`
            makes sure of.

        Raises:
            StoreError: a sample's tensors do not fit the manifest, it is there already, or the file system refuses,
                perhaps what was added earlier.
        """
        before = len(self.committed)
        for sample in samples:
            self._refuse_misfit(sample)
            self._added.add(sample.id)
            self._pending.append(sample)
            self._pending_bytes += self._predict_bytes(sample)
        if self._pending_bytes >= self.shard_bytes:
            self._begin_shard()
        self._take_committed(THREADS)
        return len(self.committed) > before

    def flush(self) -> None:
        """Commit what is pending as a shard, however small, and wait until everything added is on disk."""
        if self._pending:
            self._begin_shard()
        self._take_committed(at_most=0)

    def _begin_shard(self) -> None:
        name = shard_name(self._next_number)
        self._refuse_to_fill_disk(name)
        before = self._under_way[-1].entry if self._under_way else None
        entry = self._threads.submit(self._commit, name, self._pending, before)
        self._under_way.append(_Shard(name, self._pending_bytes, entry))
        self._next_number += 1
        self._pending, self._pending_bytes = [], 0

    def _refuse_to_fill_disk(self, name: str) -> None:
        with self._writing(name):
            if self._free_bytes() < sum(shard.bytes for shard in self._under_way):
                self._take_committed(at_most=0)
            if self._free_bytes() < 0:
                raise OSError(
                    errno.ENOSPC, f"the disk is nearly full, and {self._pending_bytes / _MIB:,.0f} MiB are to come"
                )

    def _free_bytes(self) -> int:
        """What the disk has left once the pending shard is on it."""
        return shutil.disk_usage(self.folder).free - self._pending_bytes - SPARE_BYTES

    def _commit(self, name: str, samples: list[Features | EncodedFeatures], before: Future[Entry] | None) -> Entry:
        """In a thread: write a shard, and enter it in the ledger after the one before, unless that fails."""
        entry = write_shard(self.folder / name, samples, self.manifest.codec, self._abandon)
        if before is not None:
            before.result()
        self._ledger.append(entry)
        return entry

    def _take_committed(self, at_most: int) -> None:
        """Note which shards are in the ledger by now; wait until at most so many are not.

        Raises what kept the first of them from it, now and ever after.
        """
        while self._under_way and (len(self._under_way) > at_most or self._under_way[0].entry.done()):
            shard = self._under_way[0]
            with self._writing(shard.name):
                entry = shard.entry.result()
            self.committed.update(zip(entry.sample_ids, entry.lengths, strict=True))
            self._under_way.popleft()

    def _predict_bytes(self, sample: Features | EncodedFeatures) -> int:
        return predict_bytes(
            [(len(sample.input_ids), int(taught(sample.loss_mask).sum()))],
            aux_layers=len(self.manifest.aux_layer_ids),
            hidden_size=self.manifest.hidden_size,
            codec=self.manifest.codec,
        )

    def _refuse_misfit(self, sample: Features | EncodedFeatures) -> None:
        found = {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
        for name, states in (("aux", sample.aux), ("last", sample.last)):
            found[name] = states[""] if isinstance(states, dict) else states
        problem = misfit(found, len(sample.input_ids), len(sample.input_ids), self.manifest)
        if sample.id in self._added:
            problem = "is in the store already"
        if problem:
            raise StoreError(problem, where=f"{self.folder}, sample {sample.id}")

    def _writing(self, name: str) -> AbstractContextManager[None]:
        return file_system(self.folder, f"{name} cannot be written", safe=len(self.committed))


def _refuse_rounding(manifest: Manifest) -> None:
    dtype = CODECS[manifest.codec].dtype
    if dtype not in (None, manifest.dtype):
        raise RequestError(
            f"{manifest.codec} holds states in {dtype}, and the target computes in {manifest.dtype}",
            where="extract.codec",
            hint="choose bf16, int8, fp8 or fp32, or set target.dtype",
        )


def _begin_or_continue(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest that holds from here on: the one there, if it agrees."""
    if (folder / MANIFEST).exists():
        there = read_manifest(folder)
        refuse_differences(folder, there, {k: v for k, v in asdict(manifest).items() if k not in NOTES})
        if there.format != FORMAT:
            there = replace(there, format=FORMAT)
            write_manifest(folder, there)
        return there
    if shards_in(folder):
        raise StoreError(
            "holds shards, and no manifest that says what they are of",
            where=str(folder),
            hint=f"restore {MANIFEST} from a copy, or delete the folder",
        )
    write_ledger(folder, [])
    write_manifest(folder, manifest)
    return manifest


def _recover(folder: Path) -> tuple[Ledger, list[str]]:
    """Sweep up after a crash: the ledger as it stands, and the names of the shards that the disk no longer has."""
    ledger = read_ledger(folder)
    if (folder / LEDGER).stat().st_size > ledger.whole_bytes:
        cut_torn_line(ledger)
    lost = lost_shards(folder, ledger.entries)
    if lost:
        ledger = write_ledger(folder, [entry for entry in ledger.entries if entry.shard not in lost])
    names = {entry.shard for entry in ledger.entries}
    for path in folder.iterdir():
        if path.name.endswith(".partial") or (shard_number(path.name) is not None and path.name not in names):
            path.unlink()
    return ledger, lost
