"""A store in object storage, through fsspec: s3://, gs://, az://, and whatever else has a package for it.

Objects appear whole or not at all. Shards go first, then the ledger, and the manifest last, so that a store that is
half there is not taken for one. Training reads mapped files: it reads a copy on a disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.errors import MissingExtraError, RequestError, StoreError
from draftsmith.progress import progress
from draftsmith.rundir import atomic_path
from draftsmith.store.folder import file_system, sole_writer
from draftsmith.store.ledger import LEDGER, Entry, read_ledger, write_ledger
from draftsmith.store.manifest import MANIFEST, NOTES, Manifest, read_manifest, refuse_differences, write_manifest
from draftsmith.store.shard_file import file_digest, map_shard
from draftsmith.store.threads import one_core_threads

_GIB = 1 << 30


def upload(folder: Path, url: str) -> dict[str, Any]:
    """Copy a store to object storage, each shard checked before. What is there already is not sent again.

    Raises:
        StoreError: the store is damaged, `url` has another, or the service refuses.
        MissingExtraError: no package for this kind of address is installed.
    """
    manifest, entries = read_manifest(folder), read_ledger(folder).entries
    files, root = _open(url)
    with _service(url):
        sizes = _sizes(files, root)
        if MANIFEST in sizes:
            _refuse_another(*_read_remote(files, root), url, manifest, entries)
        missing = [entry for entry in entries if sizes.get(entry.shard) != entry.bytes]

        def send(entry: Entry) -> None:
            map_shard(folder / entry.shard, entry, manifest)
            files.put_file(str(folder / entry.shard), f"{root}/{entry.shard}")
            if files.size(f"{root}/{entry.shard}") != entry.bytes:
                raise StoreError(
                    f"{entry.shard} did not arrive whole", where=url, hint="the same command sends it again"
                )

        _for_each("upload", missing, send)
        for name in (LEDGER, MANIFEST):
            files.put_file(str(folder / name), f"{root}/{name}")
    return _report("upload", f"{folder} to {url}", entries, missing)


def download(url: str, folder: Path) -> dict[str, Any]:
    """Copy a store from object storage to a folder, each shard checked. What is there already is not fetched again.

    Raises:
        StoreError: there is none, a shard is damaged, the folder has another store, or the service refuses.
        MissingExtraError: no package for this kind of address is installed.
    """
    files, root = _open(url)
    with _service(url):
        manifest, entries = _read_remote(files, root)
    with sole_writer(folder), file_system(folder, "cannot be written"):
        if (folder / MANIFEST).exists():
            _refuse_another(read_manifest(folder), read_ledger(folder).entries, str(folder), manifest, entries)
        missing = [entry for entry in entries if not _is_whole(folder / entry.shard, entry)]

        def fetch(entry: Entry) -> None:
            with atomic_path(folder / entry.shard) as aside:
                with _service(url):
                    files.get_file(f"{root}/{entry.shard}", str(aside))
                if not _is_whole(aside, entry):
                    raise StoreError(
                        f"{entry.shard} is not what was written",
                        where=url,
                        hint="upload the store again, from a whole copy",
                    )

        _for_each("download", missing, fetch)
        write_ledger(folder, entries)
        write_manifest(folder, manifest)
    return _report("download", f"{url} to {folder}", entries, missing)


def _open(url: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(str(error), where=url, hint="install the package that it names") from error
    except ValueError as error:
        raise RequestError(str(error), where=url, hint="such as s3://bucket/folder") from error
    return files, str(root).rstrip("/")


def _sizes(files: Any, root: str) -> dict[str, int]:
    """By name, of what is there."""
    files.invalidate_cache()
    try:
        return {Path(found["name"]).name: found["size"] for found in files.ls(root, detail=True)}
    except FileNotFoundError:
        return {}


def _read_remote(files: Any, root: str) -> tuple[Manifest, list[Entry]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in (MANIFEST, LEDGER):
            if files.exists(f"{root}/{name}"):
                files.get_file(f"{root}/{name}", f"{folder}/{name}")
        if not (Path(folder) / MANIFEST).exists():
            raise StoreError("there is no store here, or not all of it", where=root, hint="upload it (again)")
        return read_manifest(Path(folder)), read_ledger(Path(folder)).entries


def _refuse_another(there: Manifest, theirs: list[Entry], where: str, manifest: Manifest, entries: list[Entry]) -> None:
    """A store may be added to; it may not be replaced by another one."""
    refuse_differences(Path(where), there, {k: v for k, v in asdict(manifest).items() if k not in NOTES})
    if theirs != entries[: len(theirs)]:
        raise StoreError("has other samples than these", where=where, hint="name another place")


def _is_whole(path: Path, entry: Entry) -> bool:
    if not path.exists() or path.stat().st_size != entry.bytes:
        return False
    return file_digest(path, entry.digest.partition(":")[0]) == entry.digest


def _for_each(what: str, entries: Iterable[Entry], work: Callable[[Entry], None]) -> None:
    entries = list(entries)
    with progress(what, sum(entry.bytes for entry in entries), "bytes") as bar, one_core_threads(what) as threads:
        for entry, _ in zip(entries, threads.map(work, entries), strict=True):
            bar.advance(entry.bytes)


def _client_errors() -> tuple[type[Exception], ...]:
    """Of S3's client, which are no OSErrors: no credentials, no connection."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return ()
    return (BotoCoreError,)


@contextmanager
def _service(url: str) -> Iterator[None]:
    """Turn what the service refuses into a StoreError."""
    refusals: tuple[type[Exception], ...] = (OSError, *_client_errors())
    try:
        yield
    except refusals as error:
        raise StoreError(
            f"{type(error).__name__}: {error}",
            where=url,
            hint="see the address and the credentials; what arrived stays there",
        ) from error


def _report(verb: str, between: str, entries: list[Entry], sent: list[Entry]) -> dict[str, Any]:
    size = sum(entry.bytes for entry in sent)
    return {
        "samples": sum(len(entry.sample_ids) for entry in entries),
        "shards": len(entries),
        "copied_shards": len(sent),
        "copied_bytes": size,
        "summary": [f"{verb}: {between}; {len(sent):,} of {len(entries):,} shards copied, {size / _GIB:,.2f} GiB"],
    }
