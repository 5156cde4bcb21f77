"""The folder of a store: whose it is to write in, the names in it, and what the file system says no to."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from draftsmith.errors import StoreError

LOCK = ".lock"
_SHARD = re.compile(r"shard-(\d+)\.safetensors")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """None if it is not the name of a shard."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def shards_in(folder: Path) -> list[str]:
    """The names of the shards that are there, sorted; whether the ledger has them is another matter."""
    return sorted(path.name for path in folder.iterdir() if shard_number(path.name) is not None)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the folder, made if it is not there, for as long as the block runs.

    Raises:
        StoreError: another process has it, or the file system refuses.
    """
    with file_system(folder, "cannot be opened for writing"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "ab+", buffering=0)  # noqa: SIM115 - held for as long as the block runs
    with lock:
        with file_system(folder, "cannot be opened for writing"):
            _take(lock, folder)
        yield


def being_written(folder: Path) -> bool:
    """Whether a process holds the folder."""
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


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


_ROOM = "make room, or raise the quota; the same command goes on from there"
_MOUNT = "see that the disk, or the network's mount, is there and answers; then the same command goes on from there"
_HINTS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "the process may not write files so large (`ulimit -f`), or the file system cannot hold them: set "
    "extract.shard_mib lower",
    errno.EROFS: "it is mounted read-only: mount it for writing, or set run_dir to another disk",
    errno.ENOTDIR: "a file is in the way: remove it, or set run_dir to another folder",
    errno.EEXIST: "a file is in the way: remove it, or set run_dir to another folder",
    errno.EACCES: "set its permissions right; the same command goes on from there",
    errno.EPERM: "set its permissions right; the same command goes on from there",
    errno.ENOENT: _MOUNT,
    errno.ESTALE: _MOUNT,
    errno.EIO: _MOUNT,
    errno.ENODEV: _MOUNT,
    errno.ENOTCONN: _MOUNT,
    errno.ETIMEDOUT: _MOUNT,
    errno.EHOSTDOWN: _MOUNT,
}


@contextmanager
def file_system(folder: Path, problem: str, safe: int | None = None) -> Iterator[None]:
    """Turn what the file system refuses into a StoreError that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        kept = "" if safe is None else f"; the {safe:,} samples in its ledger are safe"
        hint = _HINTS.get(error.errno or 0, "see what the system's log says of this disk")
        raise StoreError(f"{problem}: {error}{kept}", where=str(folder), hint=hint) from error
