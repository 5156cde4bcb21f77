"""Is a store what was written, and if not, which samples are to be extracted again?"""

from __future__ import annotations

import json
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import StoreError
from draftsmith.progress import progress
from draftsmith.rundir import write_json
from draftsmith.store.folder import being_written, file_system, shards_in, sole_writer
from draftsmith.store.ledger import Entry, read_ledger, salvage_ledger, write_ledger
from draftsmith.store.manifest import Manifest, read_manifest
from draftsmith.store.shard_file import map_shard
from draftsmith.store.threads import one_core_threads

_GIB = 1 << 30


@dataclass(frozen=True)
class Findings:
    """What is wrong with a store.

    Attributes:
        entries: of the ledger's whole lines.
        damaged: problem by name of the shard.
        ledger: problems of the ledger.
        unlisted: shards that the ledger does not have: a crash left them, or their lines were removed.
    """

    entries: list[Entry]
    damaged: dict[str, str]
    ledger: list[str]
    unlisted: list[str]

    @property
    def sound(self) -> bool:
        return not (self.damaged or self.ledger or self.unlisted)

    @property
    def standing(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.shard not in self.damaged]

    @property
    def lost_ids(self) -> list[str]:
        """Samples of damaged shards. Those of damaged lines and unlisted shards are not known by name."""
        return [id for entry in self.entries if entry.shard in self.damaged for id in entry.sample_ids]


def verify(folder: Path) -> dict[str, Any]:
    """Check every shard against its checksum, and the ledger and the manifest against theirs; report what is wrong.

    Raises StoreError if there is no store, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    findings = _examine(folder, manifest, ignore_unlisted=being_written(folder))
    return _report(findings, folder, "verify")


def repair(folder: Path) -> dict[str, Any]:
    """Drop damaged shards, and lines of the ledger, so that extraction makes their samples, and only those, anew.

    Raises StoreError if there is no store, its manifest is damaged, or a writer is at work.
    """
    manifest = read_manifest(folder)
    with sole_writer(folder), file_system(folder, "cannot be repaired"):
        findings = _examine(folder, manifest, ignore_unlisted=False)
        if not findings.sound:
            _take_up_again(folder.parent / "stage.json")  # first, so that a crash leaves nothing that passes for done
            write_ledger(folder, findings.standing)
            for name in [*findings.damaged, *findings.unlisted]:
                (folder / name).unlink(missing_ok=True)
    return _report(findings, folder, "repair")


def _examine(folder: Path, manifest: Manifest, ignore_unlisted: bool) -> Findings:
    entries, problems = salvage_ledger(folder)
    try:
        read_ledger(folder)
    except StoreError as error:
        problems = problems or [error.what]
    if not problems and (problem := _shortened(folder, sum(len(entry.sample_ids) for entry in entries))):
        problems = [problem]
    listed = {entry.shard for entry in entries}
    unlisted = [] if ignore_unlisted else [name for name in shards_in(folder) if name not in listed]
    damaged: dict[str, str] = {}
    with (
        progress("verify", sum(entry.bytes for entry in entries), "bytes") as bar,
        one_core_threads("verify") as threads,
    ):
        checks = {threads.submit(map_shard, folder / entry.shard, entry, manifest): entry for entry in entries}
        for check in as_completed(checks):
            entry = checks.pop(check)
            try:
                check.result()
            except StoreError as error:
                damaged[entry.shard] = error.what
            bar.advance(entry.bytes)
    return Findings(entries, dict(sorted(damaged.items())), problems, unlisted)


def refuse_shortened(folder: Path, samples: int) -> None:
    """Raises StoreError if a store has fewer samples than the stage left that filled it."""
    if problem := _shortened(folder, samples):
        raise StoreError(
            problem,
            where=str(folder),
            hint=f"`draftsmith store repair {folder}`, then `draftsmith extract RECIPE` makes what is missing",
        )


def _shortened(folder: Path, samples: int) -> str | None:
    stage_file = folder.parent / "stage.json"
    if not stage_file.is_file():  # a store that was merged or copied has none
        return None
    left = (json.loads(stage_file.read_text(encoding="utf-8")).get("report") or {}).get("samples", 0)
    return f"has {samples:,} samples of the {left:,} that were extracted" if samples < left else None


def _take_up_again(stage_file: Path) -> None:
    """Let the stage that filled the store, if it is done, go on."""
    if stage_file.exists():
        state = json.loads(stage_file.read_text(encoding="utf-8"))
        write_json(
            stage_file, {name: value for name, value in state.items() if name != "report"} | {"status": "running"}
        )


def _report(findings: Findings, folder: Path, verb: str) -> dict[str, Any]:
    samples = sum(len(entry.sample_ids) for entry in findings.standing)
    size = sum(entry.bytes for entry in findings.standing)
    summary = [f"{verb}: {samples:,} samples in {len(findings.standing):,} whole shards, {size / _GIB:,.2f} GiB"]
    summary += [f"  {name}: {problem}" for name, problem in findings.damaged.items()]
    summary += [f"  ledger: {problem}" for problem in findings.ledger]
    summary += [f"  {name}: the ledger does not have it" for name in findings.unlisted]
    if findings.lost_ids:
        shown = ", ".join(findings.lost_ids[:10]) + (" …" if len(findings.lost_ids) > 10 else "")
        summary.append(f"  to be extracted again: {len(findings.lost_ids):,} samples: {shown}")
    if not findings.sound:
        then = "`draftsmith extract RECIPE` makes what is missing, and only that"
        summary.append(then if verb == "repair" else f"`draftsmith store repair {folder}` drops this; then {then}")
    return {
        "sound": findings.sound,
        "samples": samples,
        "shards": len(findings.standing),
        "bytes": size,
        "damaged": findings.damaged,
        "ledger": findings.ledger,
        "unlisted": findings.unlisted,
        "extract_again": findings.lost_ids,
        "summary": summary,
    }
