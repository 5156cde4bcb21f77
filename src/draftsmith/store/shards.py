"""The store: hidden states on disk, which all of training stands on.

    manifest.json            what the states are of (manifest.py)
    ledger.jsonl             one line per committed shard (ledger.py)
    shard-00000.safetensors  whole sequences back to back:
                             aux [tokens, A, Ht], last [tokens, Ht], as the codec encodes them,
                             input_ids [tokens] int32, loss_mask [tokens] uint8, offsets [sequences + 1] int64

A shard is written aside, synced, renamed, its folder synced, and only then entered in the ledger. Whatever is cut
short before that does not exist for readers, and the next writer sweeps it up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from io import FileIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.errors import StoreError
from draftsmith.records import Features
from draftsmith.rundir import atomic_path
from draftsmith.store.codec import CODECS
from draftsmith.store.ledger import LEDGER, Entry, append_entry, cut_torn_line, read_ledger, write_ledger
from draftsmith.store.manifest import MANIFEST, NOTES, Manifest, read_manifest, refuse_differences, write_manifest

LOCK = ".lock"
_SHARD = re.compile(r"shard-(\d+)\.safetensors")


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
        entries, _ = read_ledger(folder)
        store = cls(folder, manifest, entries)
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
            try:
                self._shards[number] = _map_shard(self.folder / entry.shard, entry, self.manifest)
            except (OSError, SafetensorError) as error:
                raise _damaged(entry, self.folder, f"cannot be read: {error}") from error
        return self._shards[number]


class StoreWriter:
    """Adds samples to a store, one writer at a time. Use `StoreWriter.open`.

    Attributes:
        committed: tokens by id of the samples that are safely on disk.
        lost: shards of the ledger that were found cut short or gone; their samples are to be added again.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_bytes: int) -> None:
        self.folder, self.manifest, self.shard_bytes = folder, manifest, shard_bytes
        entries, self.lost = _recover(folder)
        self.committed = {
            id: length for entry in entries for id, length in zip(entry.sample_ids, entry.lengths, strict=True)
        }
        self._next_number = 1 + max((_shard_number(entry.shard) for entry in entries), default=-1)
        self._pending: dict[str, _Encoded] = {}

    @classmethod
    @contextmanager
    def open(cls, folder: Path, manifest: Manifest, shard_bytes: int) -> Iterator[Self]:
        """Begin a store, or go on with the one there; what is pending is committed when the block ends well.

        Args:
            folder: the store's folder, made if it is not there.
            manifest: what the samples to come are of; must agree with that of the store there.
            shard_bytes: size from which a shard is closed.

        Raises:
            StoreError: another writer has the folder; the store there is of something else, naming the field; its
                manifest or ledger is damaged; or the file system refuses.
        """
        with _file_system(folder, "cannot be opened for writing"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "ab+", buffering=0)  # noqa: SIM115 - held for as long as the block runs
        with lock:
            with _file_system(folder, "cannot be opened for writing"):
                _take(lock, folder)
                writer = cls(folder, _begin_or_continue(folder, manifest), shard_bytes)
            yield writer
            writer.flush()

    def record_parity(self, parity: dict[str, Any]) -> None:
        """Note in the manifest how the engine's states compare with the reference."""
        self.manifest = replace(self.manifest, parity=parity)
        with self._writing(MANIFEST):
            write_manifest(self.folder, self.manifest)

    def add(self, samples: Sequence[Features]) -> bool:
        """Take samples, none of them divided between shards, and commit a shard if it is full.

        Returns:
            Whether a shard was committed, so that everything added so far is on disk.

        Raises:
            StoreError: a sample's tensors do not fit the manifest, it is there already, or the file system refuses.
        """
        for sample in samples:
            self._refuse_misfit(sample)
            self._pending[sample.id] = _Encoded(sample.domain, sample.split, _encode(sample, self.manifest.codec))
        if sum(encoded.bytes for encoded in self._pending.values()) < self.shard_bytes:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Commit what is pending as a shard, however small."""
        if not self._pending:
            return
        name = f"shard-{self._next_number:05d}.safetensors"
        with self._writing(name):
            entry = _write_shard(self.folder / name, self._pending)
            append_entry(self.folder, entry)
        self.committed.update(zip(entry.sample_ids, entry.lengths, strict=True))
        self._next_number += 1
        self._pending = {}

    def _refuse_misfit(self, sample: Features) -> None:
        found = {name: getattr(sample, name) for name in ("input_ids", "loss_mask", "aux", "last")}
        problem = _misfit(found, len(sample.input_ids), self.manifest)
        if sample.id in self.committed or sample.id in self._pending:
            problem = "is in the store already"
        if problem:
            raise StoreError(problem, where=f"{self.folder}, sample {sample.id}")

    def _writing(self, name: str) -> AbstractContextManager[None]:
        return _file_system(self.folder, f"{name} cannot be written", safe=len(self.committed))


@dataclass(frozen=True)
class _Encoded:
    """A sample as it goes into a shard."""

    domain: str
    split: str
    tensors: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _encode(sample: Features, codec: str) -> dict[str, torch.Tensor]:
    tensors = {"input_ids": sample.input_ids.int(), "loss_mask": sample.loss_mask.to(torch.uint8)}
    for name in ("aux", "last"):
        for part, values in CODECS[codec].encode(getattr(sample, name)).items():
            tensors[f"{name}.{part}" if part else name] = values
    return tensors


def _write_shard(path: Path, samples: dict[str, _Encoded]) -> Entry:
    """Write a shard so that it is on disk under its name, and return its line for the ledger."""
    columns = [encoded.tensors for encoded in samples.values()]
    lengths = [len(tensors["input_ids"]) for tensors in columns]
    tensors = {name: torch.cat([column[name] for column in columns]) for name in columns[0]}
    tensors["offsets"] = torch.tensor(list(accumulate(lengths, initial=0)))
    with atomic_path(path) as aside:
        save_file(tensors, aside)
        return Entry(
            shard=path.name,
            bytes=aside.stat().st_size,
            blake2b=_digest(aside),
            sample_ids=list(samples),
            domains=[encoded.domain for encoded in samples.values()],
            splits=[encoded.split for encoded in samples.values()],
            lengths=lengths,
        )


def _map_shard(path: Path, entry: Entry, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a shard, mapped from disk, once they are proven to be what ledger and manifest say."""
    size = path.stat().st_size
    if size != entry.bytes:
        raise _damaged(entry, path.parent, f"has {size:,} bytes, not {entry.bytes:,}")
    if _digest(path) != entry.blake2b:
        raise _damaged(entry, path.parent, "is not what was written: its checksum differs")
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if tensors["offsets"].tolist() != list(accumulate(entry.lengths, initial=0)):
        raise _damaged(entry, path.parent, "holds sequences of other lengths than the ledger says")
    if problem := _misfit(tensors, sum(entry.lengths), manifest):
        raise _damaged(entry, path.parent, problem)
    return tensors


def _misfit(tensors: dict[str, torch.Tensor], tokens: int, manifest: Manifest) -> str | None:
    """Why tensors are not those of so many tokens; None if they are."""
    layers, width = len(manifest.aux_layer_ids), manifest.hidden_size
    due = {"input_ids": [tokens], "loss_mask": [tokens], "aux": [tokens, layers, width], "last": [tokens, width]}
    for name, shape in due.items():
        found = list(tensors[name].shape)
        if found != shape:
            return f"has `{name}` of shape {found}, where {shape} is due"
    return None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _damaged(entry: Entry, folder: Path, problem: str) -> StoreError:
    return StoreError(
        problem,
        where=str(folder / entry.shard),
        hint=f"delete this file and {folder.parent / 'stage.json'}, then run `draftsmith extract RECIPE`: only the "
        f"{len(entry.sample_ids):,} samples of this shard are extracted again",
    )


def _begin_or_continue(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest that holds from here on: the one there, if it agrees."""
    if (folder / MANIFEST).exists():
        there = read_manifest(folder)
        refuse_differences(folder, there, {k: v for k, v in asdict(manifest).items() if k not in NOTES})
        return there
    if any(_SHARD.fullmatch(path.name) for path in folder.iterdir()):
        raise StoreError(
            "holds shards, and no manifest that says what they are of",
            where=str(folder),
            hint=f"restore {MANIFEST} from a copy, or delete the folder",
        )
    write_ledger(folder, [])
    write_manifest(folder, manifest)
    return manifest


def _recover(folder: Path) -> tuple[list[Entry], list[str]]:
    """Sweep up after a crash: the entries that stand, and the names of the shards that the disk no longer has."""
    entries, whole_bytes = read_ledger(folder)
    if (folder / LEDGER).stat().st_size > whole_bytes:
        cut_torn_line(folder, whole_bytes)
    standing = [entry for entry in entries if _size(folder / entry.shard) == entry.bytes]
    if len(standing) < len(entries):
        write_ledger(folder, standing)
    names = {entry.shard for entry in standing}
    for path in folder.iterdir():
        if path.name.endswith(".partial") or (_SHARD.fullmatch(path.name) and path.name not in names):
            path.unlink()
    return standing, [entry.shard for entry in entries if entry.shard not in names]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _shard_number(name: str) -> int:
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else -1


def _take(lock: FileIO, folder: Path) -> None:
    """Hold the folder for this process; the system lets go of it when the process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise StoreError(
            f"is being written by {lock.read().decode().strip() or 'another process'}",
            where=str(folder),
            hint="wait for it, or stop it; what it has committed stays",
        ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


@contextmanager
def _file_system(folder: Path, problem: str, safe: int | None = None) -> Iterator[None]:
    """Turn what the file system refuses into a StoreError that says what is safe."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = "" if safe is None else f"; the {safe:,} samples in its ledger are safe"
        raise StoreError(
            f"{problem}: {error}{kept}",
            where=str(folder),
            hint="make room or set its permissions right; the same command goes on from there",
        ) from error
