"""The ledger of a store: one line per committed shard. What is not in it does not exist.

A line is JSON that carries the checksum of its own entry, in one canonical spelling, so that every flipped bit shows.
A last line without its newline is what a crash cut short: readers pass over it, and the next writer cuts it off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import StoreError
from draftsmith.rundir import atomic_path

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """One shard; the lists run over its sequences, in order."""

    shard: str  # file name
    bytes: int
    blake2b: str
    sample_ids: list[str]
    domains: list[str]
    splits: list[str]
    lengths: list[int]  # tokens


def read_ledger(folder: Path) -> tuple[list[Entry], int]:
    """The entries in the order committed, and the size in bytes of the part of the file that is whole.

    Raises:
        StoreError: there is no ledger, or a line of it is damaged.
    """
    try:
        data = (folder / LEDGER).read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            "is not there, so nothing beside it can be trusted",
            where=str(folder / LEDGER),
            hint="restore the file from a copy, or delete the whole folder and extract again",
        ) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error}", where=str(folder / LEDGER)) from error
    *lines, torn = data.split(b"\n")
    entries = [_decode(line) for line in lines]
    damaged = [number for number, entry in enumerate(entries, start=1) if entry is None]
    if _decode(torn[:-1]) is not None:  # a whole line, of which only the newline is not what it was
        damaged.append(len(lines) + 1)
    if damaged:
        raise StoreError(
            f"line {damaged[0]} is damaged",
            where=str(folder / LEDGER),
            hint="restore the file from a copy, or delete that line: only the samples of its shard are extracted again",
        )
    return [entry for entry in entries if entry is not None], len(data) - len(torn)


def append_entry(folder: Path, entry: Entry) -> None:
    """Add one line and wait until it is on disk. The file must exist and end with a whole line."""
    with open(folder / LEDGER, "ab") as file:
        file.write(_encode(dataclasses.asdict(entry)))
        file.flush()
        os.fsync(file.fileno())


def write_ledger(folder: Path, entries: list[Entry]) -> None:
    """Replace the whole ledger at once."""
    with atomic_path(folder / LEDGER) as aside:
        aside.write_bytes(b"".join(_encode(dataclasses.asdict(entry)) for entry in entries))


def cut_torn_line(folder: Path, whole_bytes: int) -> None:
    """Drop what follows the first `whole_bytes` of the ledger."""
    with open(folder / LEDGER, "rb+") as file:
        file.truncate(whole_bytes)
        os.fsync(file.fileno())


def canonical_json(data: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent)


def checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encode(entry: dict[str, Any]) -> bytes:
    body = canonical_json(entry)
    return f'{{"checksum": "{checksum(body)}", "entry": {body}}}\n'.encode()


def _decode(line: bytes) -> Entry | None:
    """The entry of a line without its newline; None unless the line is what `_encode` writes, byte for byte."""
    try:
        entry = json.loads(line)["entry"]
        return Entry(**entry) if _encode(entry) == line + b"\n" else None
    except (ValueError, KeyError, TypeError):
        return None
