"""Stores made from stores: several of one identity in one, and one in another codec."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import RequestError, StoreError
from draftsmith.progress import progress
from draftsmith.rundir import atomic_folder
from draftsmith.signals import check_stop, stop_requested
from draftsmith.store.codec import CODECS
from draftsmith.store.folder import LOCK, file_system, shard_name, sole_writer
from draftsmith.store.ledger import Entry, write_ledger
from draftsmith.store.manifest import MANIFEST, NOTES, read_manifest, refuse_differences, write_manifest
from draftsmith.store.shards import Store
from draftsmith.store.writer import StoreWriter

SHARD_BYTES = 256 << 20
_NOT_LINKED = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)  # another disk, or no links there


def merge(folders: Sequence[Path], into: Path) -> dict[str, Any]:
    """Make one store of several, whose shards are linked where that is possible and else copied.

    Raises:
        StoreError: they are not of the same target, layers, codec…, naming the field; or two have the same sample.
        RequestError: there is something in `into`.
    """
    stores = [Store.open(folder) for folder in folders]
    first = stores[0]
    due = {name: value for name, value in asdict(first.manifest).items() if name not in NOTES}
    owner: dict[str, Path] = {}
    for store in stores:
        refuse_differences(store.folder, store.manifest, due, hint=f"leave it out; {first.folder} came first")
        for id in store.sample_ids:
            if id in owner:
                raise StoreError(f"has {id}, as {owner[id]} does", where=str(store.folder), hint="merge one of the two")
            owner[id] = store.folder
    entries: list[Entry] = []
    with sole_writer(into), file_system(into, "cannot be written"):
        if any(path.name != LOCK for path in into.iterdir()):
            raise RequestError("there is something in it", where=str(into), hint="name a folder that is not there yet")
        with atomic_folder(into) as aside:
            for store in stores:
                for entry in store.entries:
                    name = shard_name(len(entries))
                    _link_or_copy(store.folder / entry.shard, aside / name)
                    entries.append(replace(entry, shard=name))
            write_ledger(aside, entries)
            write_manifest(aside, first.manifest)
    size = sum(entry.bytes for entry in entries)
    return {
        "samples": len(owner),
        "shards": len(entries),
        "bytes": size,
        "summary": [f"merge: {len(owner):,} samples of {len(stores)} stores in {into}, {len(entries):,} shards"],
    }


def convert(folder: Path, into: Path, codec: str) -> dict[str, Any]:
    """Write a store's samples into another, as `codec` encodes them. Goes on where it was stopped.

    Raises:
        RequestError: there is no such codec, it cannot hold these states, or `into` is the store itself.
        StoreError: a shard is damaged, or `into` is a store of something else.
    """
    if codec not in CODECS:
        raise RequestError(f"there is no codec {codec}", where="--codec", hint=f"one of {', '.join(CODECS)}")
    if into.resolve() == folder.resolve():
        raise RequestError("is the store that is to be converted", where="--into", hint="name another folder")
    store = Store.open(folder)
    if CODECS[codec].dtype not in (None, store.manifest.dtype):
        raise RequestError(
            f"{codec} holds states in {CODECS[codec].dtype}, and these are in {store.manifest.dtype}",
            where="--codec",
            hint=f"choose {', '.join(name for name, other in CODECS.items() if other.dtype is None)}",
        )
    if (into / MANIFEST).exists():
        refuse_differences(into, read_manifest(into), {"codec": codec}, hint="name a folder that is not there yet")
    with (
        StoreWriter.open(into, replace(store.manifest, codec=codec), SHARD_BYTES) as writer,
        progress("convert", sum(store.lengths), "tokens", done=sum(writer.committed.values())) as bar,
    ):
        if writer.committed.keys() - set(store.sample_ids):
            raise StoreError(
                "has samples that are not in the store to convert",
                where=str(into),
                hint="name a folder that is not there yet",
            )
        for index, id in enumerate(store.sample_ids):
            if id not in writer.committed:
                sample = store[index]
                writer.add([sample])
                bar.advance(store.lengths[index])
            if stop_requested():
                writer.flush()
                check_stop("store convert")
    before = sum(entry.bytes for entry in store.entries)
    after = sum(entry.bytes for entry in Store.open(into).entries)
    return {
        "samples": len(store),
        "codec": codec,
        "bytes": after,
        "size_ratio": round(after / max(before, 1), 4),
        "summary": [
            f"convert: {len(store):,} samples from {store.manifest.codec} to {codec}, "
            f"{after / max(before, 1):.2f} of the bytes",
        ],
    }


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        shutil.copyfile(source, copy)
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
