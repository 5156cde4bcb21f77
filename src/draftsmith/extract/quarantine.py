"""Samples that were set aside because they failed twice: one line each, with the reason of each attempt."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path

from draftsmith.errors import CaptureError, CheckFailed
from draftsmith.records import Sample
from draftsmith.rundir import append_line

QUARANTINE = "quarantine.jsonl"


def set_aside(folder: Path, sample: Sample, reasons: list[str]) -> None:
    """Enter a sample, on disk before this returns."""
    line = json.dumps({"id": sample.id, "tokens": len(sample.input_ids), "reasons": reasons})
    append_line(folder / QUARANTINE, line, durable=True)


def read_quarantine(folder: Path) -> dict[str, list[str]]:
    """The samples that were set aside, by id, each with the reason of each attempt."""
    path, found = folder / QUARANTINE, {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line that a crash cut short: the sample is tried again
            continue
        found[entry["id"]] = entry["reasons"]
    return found


def refuse_lost(folder: Path, captured: Collection[str], corpus: Collection[str]) -> None:
    """Raises CaptureError where a sample of the corpus is neither captured nor in the quarantine."""
    known = {*captured, *read_quarantine(folder)}
    if lost := [id for id in corpus if id not in known]:
        raise CaptureError(
            f"{len(lost):,} of {len(corpus):,} samples, such as {lost[0]}, are neither in the store nor set aside",
            where="extract",
            hint="the same command, without --redo, extracts them and nothing else",
        )


def refuse_many_set_aside(folder: Path, samples: int, allowed: float) -> None:
    """Raises CheckFailed where more than the allowed share of the samples is in the quarantine."""
    found = read_quarantine(folder)
    if len(found) <= allowed * samples:
        return
    id, reasons = next(iter(found.items()))
    raise CheckFailed(
        f"{len(found):,} of {samples:,} samples failed twice and were set aside; the first, {id}: "
        f"{reasons[-1].splitlines()[0]}",
        where="extract",
        hint=f"all else is done. {folder / QUARANTINE} has every reason: delete it to try those again, or go on "
        f"without them with extract.max_quarantined={_share_of(len(found), samples)}",
    )


def _share_of(part: int, whole: int) -> str:
    """As a fraction in few digits, rounded up."""
    return f"{math.ceil(1e4 * part / whole) / 1e4:g}"
