"""What a run's files say, read as far as they can be: what is not there is absent, what is damaged is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.corpus import corpus_lengths
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.rundir import STAGES, RunPaths
from draftsmith.store.ledger import LEDGER, read_ledger
from draftsmith.store.manifest import MANIFEST, read_manifest

SHOWN = tuple(stage for stage in STAGES if stage != "report")
BEGUN, ENDED = ("started", "resumed"), ("done", "failed", "interrupted")


@dataclass(frozen=True)
class StageRecord:
    """One stage as stage.json and events.jsonl have it."""

    name: str
    status: str  # "done", "failed", "interrupted", "in work, or killed", "damaged", "not done", "not whole"
    report: dict[str, Any]  # empty until it is done
    settings: dict[str, Any]  # by section, as in the fingerprint
    version: str | None  # of draftsmith
    machine: dict[str, Any]
    stopped: int  # attempts that did not reach the end
    seconds: float | None  # of all attempts whose end is on record
    error: str | None  # of the last attempt


@dataclass(frozen=True)
class RunRecord:
    """A run as its files have it."""

    root: Path
    stages: dict[str, StageRecord]
    metrics: list[dict[str, Any]]  # lines of train/metrics.jsonl
    acceptance: dict[str, Any]
    served: dict[str, Any]  # evaluate/served.json
    why: dict[str, Any]  # evaluate/why.json
    manifest: dict[str, Any]  # of the store
    lengths_tokens: list[int]  # of the corpus, by sample
    rehearsal: dict[str, Any]
    damaged: list[str]  # a sentence each

    @property
    def done(self) -> int:
        return sum(stage.status == "done" for stage in self.stages.values())


def read_run(root: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        RequestError: it is not one.
    """
    paths = RunPaths(root)
    if not paths.events.exists() and not any(paths.stage_file(stage).exists() for stage in STAGES):
        raise RequestError(
            "is not the folder of a run: it has no events.jsonl and no stage",
            where=str(root),
            hint="give the folder that `draftsmith run` names, runs/NAME, or the recipe",
        )
    reader = _Reader(root)
    events = reader.lines(paths.events)
    stages = {stage: _stage(stage, reader, paths, events) for stage in SHOWN}
    return RunRecord(
        root=root,
        stages=stages,
        metrics=reader.lines(paths.stage("train") / "metrics.jsonl"),
        acceptance=reader.document(paths.acceptance) or stages["evaluate"].report,
        served=reader.document(paths.served),
        why=reader.document(paths.stage("evaluate") / "why.json"),
        manifest=reader.translated(paths.store / MANIFEST, lambda: vars(read_manifest(paths.store))) or {},
        lengths_tokens=reader.translated(paths.corpus, lambda: list(corpus_lengths(paths.corpus).values())) or [],
        rehearsal=reader.document(root / "rehearsal" / "rehearsal.json"),
        damaged=reader.damaged,
    )


@dataclass
class _Reader:
    """Reads files of a run and collects what is wrong with them."""

    root: Path
    damaged: list[str] = field(default_factory=list)

    def document(self, path: Path) -> dict[str, Any]:
        """A file that holds one JSON object; empty if it is absent or damaged."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.note(path, f"damaged: {error}")
            return {}
        if not isinstance(data, dict):
            self.note(path, f"damaged: a JSON object is expected, not {type(data).__name__}")
            return {}
        return data

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The whole lines of a file of JSON lines. One that a crash cut short is passed over and counted."""
        try:
            texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self.note(path, f"cannot be read: {error}")
            return []
        found = [line for text in texts if (line := _json_object(text)) is not None]
        if lost := len(texts) - len(found):
            self.note(path, f"{lost} of {len(texts)} lines are not whole; they are passed over")
        return found

    def translated(self, path: Path, read: Callable[[], Any]) -> Any:
        """What `read` makes of a file that has a reader of its own; None if it is absent or damaged."""
        if not path.exists():
            return None
        try:
            return read()
        except DraftsmithError as error:
            self.note(path, error.what)
        except (OSError, ValueError) as error:
            self.note(path, f"damaged: {error}")
        return None

    def note(self, path: Path, problem: str) -> None:
        self.damaged.append(f"{path.relative_to(self.root)}: {problem}")


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _stage(name: str, reader: _Reader, paths: RunPaths, events: list[dict[str, Any]]) -> StageRecord:
    noted = len(reader.damaged)
    state = reader.document(paths.stage_file(name))
    own = [event for event in events if event.get("stage") == name]
    own = [event for event in _of_what_is_there(own) if event.get("event") in (*BEGUN, *ENDED)]
    last = own[-1] if own else {}
    status = "damaged" if len(reader.damaged) > noted else _status(state, last.get("event"))
    if status == "done" and (gone := _gone(name, state, reader, paths)):
        status = "not whole"
        for file in gone:
            reader.note(file, f"is not there, and `{name}` wrote it")
    report = _dict(state.get("report"))
    ends = [event for event in own if event["event"] in ENDED]
    measured = [event["seconds"] for event in ends if isinstance(event.get("seconds"), int | float)]
    return StageRecord(
        name=name,
        status=status,
        report=report,
        settings=_dict(_dict(state.get("fingerprint")).get("settings")),
        version=state.get("version"),
        machine=_dict(state.get("machine")),
        stopped=len(own) - len(ends) - sum(event["event"] == "done" for event in ends),
        seconds=sum(measured) if measured else report.get("seconds"),
        error=last.get("error") if last.get("event") == "failed" else None,
    )


def _gone(name: str, state: dict[str, Any], reader: _Reader, paths: RunPaths) -> list[Path]:
    """What a finished stage wrote for others and is not there any more: a folder, where all of it is gone."""
    wrote = [paths.stage(name) / file for file in _dict(state.get("outputs"))]
    if name == "train":
        wrote.append(paths.checkpoints / "final" / "model.safetensors")
    if name == "extract":
        ledger = reader.translated(paths.store / LEDGER, lambda: read_ledger(paths.store))
        shards = [entry.shard for entry in ledger.entries] if ledger else []
        wrote += [paths.store / file for file in (MANIFEST, LEDGER, *shards)]
    return sorted({_topmost(file) for file in wrote if not file.exists()})


def _topmost(gone: Path) -> Path:
    while not gone.parent.exists():
        gone = gone.parent
    return gone


def _of_what_is_there(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stage's events without those of results that --redo deleted, or of a --redo of which nothing came."""
    before: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for event in events:
        if event.get("event") == "redo":
            before, there = there, []
        elif event.get("event") == "restored":
            there = before
        else:
            there.append(event)
    return there


def _status(state: dict[str, Any], last_event: str | None) -> str:
    if not state:
        return "not done"
    if state.get("status") == "done":
        return "done"
    return last_event if last_event in ("failed", "interrupted") else "in work, or killed"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
