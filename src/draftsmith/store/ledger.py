"""The ledger of a store: one line per committed shard. What is not in it does not exist.

    {"checksum": …, "line": 1, "after": null, "entry": {…}}

A line is JSON in one canonical spelling that carries its number, the checksum of the line before it, and its own, of
all that: every flipped bit shows, and so does a line removed, doubled, moved or edited. A last line without its
newline is what a crash cut short: readers pass over it, and the next writer cuts it off. That whole lines are gone
from the end shows in shards that no line names, which is also what a crash leaves: `check.py` reports them.

In format 1, a line has its entry and the checksum of that alone, and the entry has `blake2b` in place of `digest`. The
first line of format 2 comes after the last of those.
"""

from __future__ import annotations

import dataclasses
import errno
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
    digest: str  # "xxh3_128:…", or "blake2b:…" as format 1 had it
    sample_ids: list[str]
    domains: list[str]
    splits: list[str]
    lengths: list[int]  # tokens


@dataclass(frozen=True)
class _Line:
    checksum: str
    number: int | None  # None in format 1
    after: str | None
    entry: Entry


@dataclass
class Ledger:
    """What is in the file.

    Attributes:
        entries: in the order committed.
        whole_bytes: of the part of the file that is whole.
        last_checksum: of the last line.
    """

    folder: Path
    entries: list[Entry]
    whole_bytes: int = 0
    last_checksum: str | None = None

    def append(self, entry: Entry) -> None:
        """Add one line and wait until it is on disk.

        Raises OSError if the file is not there, or not as it was left: the disk may be another than before.
        """
        line, checksum = _encode(entry, len(self.entries) + 1, self.last_checksum)
        with open(self.folder / LEDGER, "rb+") as file:
            if file.seek(0, os.SEEK_END) != self.whole_bytes:
                raise OSError(errno.ESTALE, "the ledger is not as it was left", str(self.folder / LEDGER))
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)
        self.whole_bytes += len(line)
        self.last_checksum = checksum


def read_ledger(folder: Path) -> Ledger:
    """Raises StoreError if there is no ledger, or a line of it is damaged."""
    lines, torn = _lines(folder)
    entries: list[Entry] = []
    last: str | None = None
    for number, text in enumerate(lines, start=1):
        line = _decode(text)
        if line is None:
            raise _damaged(folder, f"line {number} is damaged")
        if line.number is not None and (line.number, line.after) != (number, last):
            raise _damaged(folder, f"line {number} does not follow the one before: some were removed, doubled or moved")
        entries.append(line.entry)
        last = line.checksum
    if _decode(torn[:-1]) is not None:  # a whole line, of which only the newline is not what it was
        raise _damaged(folder, f"line {len(lines) + 1} is damaged")
    return Ledger(folder, entries, sum(len(line) + 1 for line in lines), last)


def salvage_ledger(folder: Path) -> tuple[list[Entry], list[str]]:
    """The entry of every line that is whole, each shard once, and what is wrong with the rest."""
    lines, torn = _lines(folder)
    entries: dict[str, Entry] = {}
    problems = []
    for number, text in enumerate(lines, start=1):
        line = _decode(text)
        if line is None:
            problems.append(f"line {number} is damaged")
        elif line.entry.shard in entries:
            problems.append(f"line {number} is there twice")
        else:
            entries[line.entry.shard] = line.entry
    return list(entries.values()), [*problems, *(["the last line was cut short"] if torn else [])]


def write_ledger(folder: Path, entries: list[Entry]) -> Ledger:
    """Replace the whole ledger at once."""
    ledger = Ledger(folder, list(entries))
    text = b""
    for number, entry in enumerate(entries, start=1):
        line, ledger.last_checksum = _encode(entry, number, ledger.last_checksum)
        text += line
    ledger.whole_bytes = len(text)
    with atomic_path(folder / LEDGER) as aside:
        aside.write_bytes(text)
    return ledger


def lost_shards(folder: Path, entries: list[Entry]) -> list[str]:
    """Names of the shards that were cut short or are gone. Reads none of them."""
    return [entry.shard for entry in entries if _size(folder / entry.shard) != entry.bytes]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def cut_torn_line(ledger: Ledger) -> None:
    """Drop what follows the part of the file that is whole."""
    with open(ledger.folder / LEDGER, "rb+") as file:
        file.truncate(ledger.whole_bytes)
        os.fsync(file.fileno())


def canonical_json(data: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent)


def checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lines(folder: Path) -> tuple[list[bytes], bytes]:
    """The lines, and what follows the last newline."""
    try:
        *lines, torn = (folder / LEDGER).read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise StoreError(
            "is not there, so nothing beside it can be trusted",
            where=str(folder / LEDGER),
            hint="restore the file from a copy, or give `draftsmith extract RECIPE --redo` to extract all again",
        ) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error}", where=str(folder / LEDGER)) from error
    return lines, torn


def _damaged(folder: Path, problem: str) -> StoreError:
    return StoreError(
        problem,
        where=str(folder / LEDGER),
        hint=f"`draftsmith store repair {folder}` keeps the shards whose lines are whole; the rest is extracted again",
    )


def _encode(entry: Entry, number: int, after: str | None) -> tuple[bytes, str]:
    """A line, and its checksum."""
    body = canonical_json({"line": number, "after": after, "entry": dataclasses.asdict(entry)})
    return f'{{"checksum": "{checksum(body)}", {body[1:]}\n'.encode(), checksum(body)


def _decode(text: bytes) -> _Line | None:
    """A line without its newline; None unless it is, byte for byte, what is written."""
    try:
        data = json.loads(text)
        entry = data["entry"]
        if "blake2b" in entry:
            whole = canonical_json({"checksum": checksum(canonical_json(entry)), "entry": entry}).encode() == text
            digest = entry.pop("blake2b")
            line = _Line(data["checksum"], None, None, Entry(**entry, digest=f"blake2b:{digest}"))
        else:
            line = _Line(data["checksum"], data["line"], data["after"], Entry(**entry))
            whole = _encode(line.entry, data["line"], line.after) == (text + b"\n", line.checksum)
    except (ValueError, KeyError, TypeError):
        return None
    return line if whole else None
