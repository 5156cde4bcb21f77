"""The manifest of a store: what its states are of. A store that does not match is refused, naming the field."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import StoreError
from draftsmith.records import TargetFacts
from draftsmith.rundir import write_text
from draftsmith.store.ledger import canonical_json, checksum

MANIFEST = "manifest.json"
FORMAT = 3
READABLE = (1, 2, 3)  # 2 has other lines in the ledger than 1, 3 the last states of some tokens alone
_OTHER_RUN = "extract into another run_dir, or give `draftsmith extract RECIPE --redo` to replace it"


@dataclass(frozen=True)
class Manifest:
    """Every field but those in `NOTES` must agree before samples are added."""

    model: str
    revision: str | None
    config_sha256: str | None
    weights_sha256: str | None
    quantization: dict[str, Any] | None
    tokenizer_sha256: str | None
    template_sha256: str | None  # of the template that the corpus was rendered with
    num_hidden_layers: int
    hidden_size: int
    aux_layer_ids: tuple[int, ...]  # canonical, ascending
    dtype: str  # of the target's computation
    codec: str
    engine: str
    engine_version: str
    draftsmith_version: str
    rope_factors: str | None = None  # of LongRoPE: short or long
    parity: dict[str, Any] | None = None  # what was measured against the reference; "later": by runs that went on
    final_norm_applied: bool = False  # `last` is canonical id N
    format: int = FORMAT


NOTES = ("model", "draftsmith_version", "parity", "format")


def identity(facts: TargetFacts) -> dict[str, Any]:
    """The manifest's fields that say which target it is: what a consumer expects of a store at the least."""
    names = ("revision", "config_sha256", "weights_sha256", "quantization", "tokenizer_sha256")
    return {name: getattr(facts, name) for name in (*names, "num_hidden_layers", "hidden_size")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, _encode(dataclasses.asdict(manifest)))


def read_manifest(folder: Path) -> Manifest:
    """Raises StoreError if it is not there, damaged, or of a format that this version does not know."""
    where = str(folder / MANIFEST)
    again = "restore it from a copy, or give `draftsmith extract RECIPE --redo` to extract all again"
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        data = json.loads(text)
        whole = _encode({name: value for name, value in data.items() if name != "checksum"}) == text
    except FileNotFoundError as error:
        raise StoreError("there is no store here", where=where, hint=again) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error}", where=where) from error
    except (ValueError, AttributeError) as error:
        raise StoreError(f"is damaged: {error}", where=where, hint=again) from error
    if not whole:
        raise StoreError("is damaged: its checksum does not fit", where=where, hint=again)
    if data["format"] not in READABLE:
        raise StoreError(
            f"is of format {data['format']}, and this version of draftsmith reads up to format {FORMAT}",
            where=where,
            hint=f"use draftsmith {data['draftsmith_version']}, which wrote it",
        )
    del data["checksum"]
    return Manifest(**{**data, "aux_layer_ids": tuple(data["aux_layer_ids"])})


def refuse_differences(folder: Path, manifest: Manifest, expected: dict[str, Any], hint: str = _OTHER_RUN) -> None:
    """Raises StoreError naming each field of the manifest that is not as expected."""
    there = dataclasses.asdict(manifest)
    differing = [
        f"{name} is {_plain(there[name])}, and {_plain(value)} is needed"
        for name, value in expected.items()
        if _plain(there[name]) != _plain(value)
    ]
    if differing:
        raise StoreError(
            "was made for something else: " + "; ".join(differing),
            where=str(folder),
            hint=hint,
        )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _encode(data: dict[str, Any]) -> str:
    return canonical_json({"checksum": checksum(canonical_json(data)), **data}, indent=2) + "\n"
