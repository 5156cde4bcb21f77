"""One shard: a safetensors file of whole sequences back to back.

Written piece by piece from where the states are, and hashed on the way, so that nothing is laid out in memory first
and nothing is read back. Byte for byte what `safetensors.torch.save_file` would write.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from draftsmith.errors import StoreError
from draftsmith.records import EncodedFeatures, Features
from draftsmith.rundir import atomic_path
from draftsmith.store.codec import CODECS, Parts
from draftsmith.store.ledger import Entry
from draftsmith.store.manifest import Manifest

# Large: after each piece a thread asks for the interpreter's lock, which can take 5 ms while another computes.
PIECE_BYTES = 32 << 20
LAST_OFFSETS = "last_offsets"  # [sequences + 1]; without it, in formats 1 and 2, every token has its last state
READ_BYTES = 1 << 20  # so few that they are hashed where they were put: in the processor's cache
# Widest last: a file has its tensors in the reverse of this order (safetensors `Dtype`), so that each is aligned.
DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
}


class Abandoned(Exception):
    """A shard was given up before it was whole."""


@dataclass(frozen=True)
class Column:
    """A tensor of a shard, in the parts that the sequences bring, to follow one another along the first axis."""

    name: str
    parts: list[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def shape(self) -> list[int]:
        return [sum(len(part) for part in self.parts), *self.parts[0].shape[1:]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes in order."""
        row_bytes = max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        held: list[torch.Tensor] = []
        held_bytes = 0
        for part in chain.from_iterable(part.split(max(1, PIECE_BYTES // row_bytes)) for part in self.parts):
            if held and held_bytes + part.nbytes > PIECE_BYTES:
                yield _bytes(held)
                held, held_bytes = [], 0
            held.append(part)
            held_bytes += part.nbytes
        yield _bytes(held)


def write_shard(
    path: Path, samples: Sequence[Features | EncodedFeatures], codec: str, abandon: threading.Event
) -> Entry:
    """Write a shard so that it is on disk under its name, and return its line for the ledger.

    Raises:
        Abandoned: `abandon` was set before the shard was whole.
    """
    columns = _columns(samples, codec)
    digest = xxhash.xxh3_128()
    size = 0
    with atomic_path(path) as aside:
        with open(aside, "wb") as file:
            for piece in chain([_header(columns)], *(column.pieces() for column in columns)):
                if abandon.is_set():
                    raise Abandoned
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        return Entry(
            shard=path.name,
            bytes=size,
            digest=f"xxh3_128:{digest.hexdigest()}",
            sample_ids=[sample.id for sample in samples],
            domains=[sample.domain for sample in samples],
            splits=[sample.split for sample in samples],
            lengths=[len(sample.input_ids) for sample in samples],
        )


def map_shard(path: Path, entry: Entry, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a shard, mapped from disk, once they are proven to be what ledger and manifest say.

    Raises:
        StoreError: they are not; names the shard.
    """
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise _damaged(entry, path.parent, f"has {size:,} bytes, not {entry.bytes:,}")
        if file_digest(path, entry.digest.partition(":")[0]) != entry.digest:
            raise _damaged(entry, path.parent, "is not what was written: its checksum differs")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise _damaged(entry, path.parent, f"cannot be read: {error}") from error
    if tensors["offsets"].tolist() != list(accumulate(entry.lengths, initial=0)):
        raise _damaged(entry, path.parent, "holds sequences of other lengths than the ledger says")
    lasts = int(tensors[LAST_OFFSETS][-1]) if LAST_OFFSETS in tensors else sum(entry.lengths)
    if problem := misfit(tensors, sum(entry.lengths), lasts, manifest):
        raise _damaged(entry, path.parent, problem)
    return tensors


def misfit(tensors: dict[str, torch.Tensor], tokens: int, lasts: int, manifest: Manifest) -> str | None:
    """Why tensors are not those of so many tokens and last states; None if they are."""
    layers, width = len(manifest.aux_layer_ids), manifest.hidden_size
    due = {"input_ids": [tokens], "loss_mask": [tokens], "aux": [tokens, layers, width], "last": [lasts, width]}
    for name, shape in due.items():
        found = list(tensors[name].shape)
        if found != shape:
            return f"has `{name}` of shape {found}, where {shape} is due"
    return None


def file_digest(path: Path, name: str = "xxh3_128") -> str:
    """`name` and checksum of a file. XXH3 keeps up with memory, and tells damage; against forgery it is no help."""
    digest = {"xxh3_128": xxhash.xxh3_128, "blake2b": hashlib.blake2b}[name]
    found, buffer = digest(), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            found.update(buffer[:count])
    return f"{name}:{found.hexdigest()}"


def _columns(samples: Sequence[Features | EncodedFeatures], codec: str) -> list[Column]:
    """The tensors of a shard, in the order in which safetensors has them."""
    parts: dict[str, list[torch.Tensor]] = {
        "input_ids": [sample.input_ids.int() for sample in samples],
        "loss_mask": [sample.loss_mask.to(torch.uint8) for sample in samples],
        "offsets": [torch.tensor(list(accumulate((len(sample.input_ids) for sample in samples), initial=0)))],
    }
    for sample in samples:
        for name, values in _state_parts(sample, codec).items():
            parts.setdefault(name, []).append(values)
    ragged = [f"{states}.{part}" for states in ("aux", "last") for part in CODECS[codec].ragged]
    ends = {LAST_OFFSETS: "last", **{f"{name}.offsets": name for name in ragged}}
    parts |= {
        ends_name: [torch.tensor(list(accumulate(map(len, parts[of]), initial=0)))] for ends_name, of in ends.items()
    }
    order = list(DTYPES)
    columns = sorted((Column(*item) for item in parts.items()), key=lambda column: column.name)
    return sorted(columns, key=lambda column: order.index(column.dtype), reverse=True)


def _state_parts(sample: Features | EncodedFeatures, codec: str) -> Parts:
    """The states of a sample by the names that they have in a shard; the last ones only where they are needed."""
    own, encode = taught(sample.loss_mask).nonzero().squeeze(-1), CODECS[codec].encode
    if isinstance(sample, EncodedFeatures):
        aux, last = sample.aux, {part: _rows(values, own) for part, values in sample.last.items()}
    else:
        aux, last = encode(sample.aux), encode(_rows(sample.last, own))
    named = {"aux": aux, "last": last}
    return {f"{name}.{part}" if part else name: values for name in named for part, values in named[name].items()}


def taught(loss_mask: torch.Tensor) -> torch.Tensor:
    """The tokens whose last state the loss needs, which is what the target says after them: those before a token of the
    target's own. [T] bool → [T] bool"""
    found = torch.zeros_like(loss_mask)
    found[:-1] = loss_mask[1:]
    return found


def _rows(values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers, which ascend; no copy if they are back to back."""
    if len(own) and int(own[-1] - own[0]) + 1 == len(own):
        return values[int(own[0]) : int(own[-1]) + 1]
    return values[own]


def _header(columns: Sequence[Column]) -> memoryview:
    """The start of a safetensors file: eight bytes of length, then JSON, filled up so that the data is aligned."""
    ends = list(accumulate((column.bytes for column in columns), initial=0))
    described = {
        column.name: {"dtype": DTYPES[column.dtype], "shape": column.shape, "data_offsets": [start, end]}
        for column, start, end in zip(columns, ends[:-1], ends[1:], strict=True)
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(parts: list[torch.Tensor]) -> memoryview:
    whole = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    return whole.reshape(-1).view(torch.uint8).numpy().data


def _damaged(entry: Entry, folder: Path, problem: str) -> StoreError:
    return StoreError(
        problem,
        where=str(folder / entry.shard),
        hint=f"`draftsmith store repair {folder}` drops it; then `draftsmith extract RECIPE` makes its "
        f"{len(entry.sample_ids):,} samples, and only those, anew",
    )
