"""The corpus file: one Parquet row per sample, written by `prepare`, read by every later stage.

Columns `id`, `conversation_id`, `domain`, `split` (text), `input_ids` (list of int32), `loss_mask` (list of uint8);
the file's metadata hold one JSON document under the key `draftsmith`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.errors import DataError
from draftsmith.records import Sample
from draftsmith.rundir import atomic_path

_ROWS_PER_GROUP = 1024
_METADATA_KEY = b"draftsmith"
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
    ]
)


def write_corpus(path: Path, samples: Iterable[Sample], metadata: dict[str, Any]) -> int:
    """Write samples in the order given; the file is there completely or not at all. Returns their number.

    Raises:
        DataError: a sample is empty, has a mask of another length, or an id that was there before.
    """
    schema = _SCHEMA.with_metadata({_METADATA_KEY: json.dumps(metadata, ensure_ascii=False)})
    seen: set[str] = set()
    remaining = iter(samples)
    with atomic_path(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        while group := list(islice(remaining, _ROWS_PER_GROUP)):
            for sample in group:
                _check(sample, seen)
            writer.write_table(
                pa.table({name: [getattr(sample, name) for sample in group] for name in schema.names}, schema=schema)
            )
    return len(seen)


def read_corpus(path: Path) -> Iterator[Sample]:
    """Every sample, in the order written. Raises DataError if the file is not a corpus."""
    for batch in _open(path).iter_batches(batch_size=_ROWS_PER_GROUP):
        for row in batch.to_pylist():
            yield Sample(**row)


def corpus_lengths(path: Path) -> dict[str, int]:
    """Tokens of each sample by id, in the order written, without making lists of the tokens."""
    lengths: dict[str, int] = {}
    for batch in _open(path).iter_batches(columns=["id", "input_ids"]):
        tokens = pc.list_value_length(batch.column("input_ids"))
        lengths.update(zip(batch.column("id").to_pylist(), tokens.to_pylist(), strict=True))
    return lengths


def corpus_taught(path: Path) -> dict[str, int]:
    """By id, how many of a sample's tokens stand before one of the target's own: the store keeps their last states."""
    found: dict[str, int] = {}
    for batch in _open(path).iter_batches(columns=["id", "loss_mask"]):
        masks = batch.column("loss_mask")
        before = np.concatenate([[0], np.cumsum(masks.values.to_numpy() != 0)])  # own tokens before each place
        ends = masks.offsets.to_numpy()
        own = before[ends[1:]] - before[np.minimum(ends[:-1] + 1, ends[1:])]
        found.update(zip(batch.column("id").to_pylist(), own.tolist(), strict=True))
    return found


def corpus_conversations(path: Path) -> dict[str, str]:
    """The conversation of each sample by id, in the order written."""
    table = _open(path).read(columns=["id", "conversation_id"])
    return dict(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))


def corpus_metadata(path: Path) -> dict[str, Any]:
    """What `write_corpus` was given as metadata."""
    return json.loads(_open(path).schema_arrow.metadata[_METADATA_KEY])


def _check(sample: Sample, seen: set[str]) -> None:
    if not sample.input_ids or len(sample.input_ids) != len(sample.loss_mask):
        raise DataError(
            f"has {len(sample.input_ids)} tokens and a loss mask of {len(sample.loss_mask)}",
            where=f"sample {sample.id}",
        )
    if sample.id in seen:
        raise DataError("two samples have this id", where=f"sample {sample.id}")
    seen.add(sample.id)


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"is not a readable corpus: {error}", where=str(path), hint="run `draftsmith prepare RECIPE --redo`"
        ) from error
    schema = file.schema_arrow
    if not schema.equals(_SCHEMA) or _METADATA_KEY not in (schema.metadata or {}):
        raise DataError(
            f"is not a corpus: its columns are {', '.join(schema.names)}",
            where=str(path),
            hint=f"`draftsmith prepare` writes {', '.join(_SCHEMA.names)}",
        )
    return file
