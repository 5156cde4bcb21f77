"""The files of a run: their names, how they are written, and what a stage's result depends on.

RUN/
  events.jsonl            one line for everything that happened, with its time
  STAGE/stage.json        fingerprint, status (running, done), report
  probe/facts.json        TargetFacts
  prepare/corpus.parquet  Samples          prepare/draft_vocab.json
  extract/store/          shards, ledger, manifest
  train/checkpoints/      step-00000500/ …, complete or absent
  evaluate/acceptance.json                           evaluate/served.json
  export/vllm/ export/sglang/
  report/report.html      and recipe.yaml, the settings on record
  .STAGE.before-redo/     what the stage left before --redo, until it is done anew
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import DataError, MissingInputError, RequestError
from draftsmith.records import TargetFacts

STAGES = ("probe", "prepare", "extract", "train", "evaluate", "export", "serve", "report")

# What each stage reads of the earlier ones. The target itself reaches every stage through the probe.
INPUTS: dict[str, tuple[str, ...]] = {
    "probe": (),
    "prepare": ("probe",),
    "extract": ("probe", "prepare"),
    "train": ("probe", "prepare", "extract"),
    "evaluate": ("probe", "prepare", "extract", "train"),
    "export": ("probe", "prepare", "train"),
    "serve": ("probe", "export"),
    "report": (),  # it shows what there is
}

# What they read where it is there.
ALSO_READ: dict[str, tuple[str, ...]] = {"export": ("evaluate",), "serve": ("evaluate",)}

# The files of a stage that others read. The store, and the weights of checkpoints, have checksums of their own.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "probe": ("facts.json",),
    "prepare": ("corpus.parquet", "draft_vocab.json"),
    "train": ("checkpoints/final/config.json",),
    "evaluate": ("acceptance.json", "served.json"),
    "export": ("vllm/*", "sglang/*"),
}


@dataclass(frozen=True)
class RunPaths:
    """Where things are in a run's folder."""

    root: Path

    def stage(self, name: str) -> Path:
        return self.root / name

    def stage_file(self, name: str) -> Path:
        return self.root / name / "stage.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def facts(self) -> Path:
        return self.root / "probe" / "facts.json"

    @property
    def answers(self) -> Path:
        return self.root / "prepare" / "answers.jsonl"

    @property
    def corpus(self) -> Path:
        return self.root / "prepare" / "corpus.parquet"

    @property
    def draft_vocab(self) -> Path:
        return self.root / "prepare" / "draft_vocab.json"

    @property
    def store(self) -> Path:
        return self.root / "extract" / "store"

    @property
    def checkpoints(self) -> Path:
        return self.root / "train" / "checkpoints"

    @property
    def acceptance(self) -> Path:
        return self.root / "evaluate" / "acceptance.json"

    @property
    def served(self) -> Path:
        return self.root / "evaluate" / "served.json"

    def export(self, format: str) -> Path:
        return self.root / "export" / format

    def require(self, path: Path, stage: str) -> Path:
        """The path, if the stage that makes it has done so."""
        if not path.exists():
            raise MissingInputError(
                f"{path} is not there, which `{stage}` makes",
                hint=f"run `draftsmith {stage} RECIPE`, with --redo if it says that it is done already; or "
                "`draftsmith run RECIPE` for everything in order",
            )
        return path

    def read_facts(self) -> TargetFacts:
        """What the probe found of the target. Raises DataError if the file is damaged."""
        file = self.require(self.facts, "probe")
        try:
            return TargetFacts.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(
                f"is damaged: {error}",
                where=str(file),
                hint="`draftsmith probe RECIPE --redo` writes it anew, and nothing else is lost",
            ) from error


@contextmanager
def sole_process(paths: RunPaths, stage: str) -> Iterator[None]:
    """Hold a stage of a run for as long as the block runs.

    Raises:
        RequestError: another process is at work on it.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with open(paths.root / f".{stage}.lock", "ab+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however the process ends
        except BlockingIOError as error:
            lock.seek(0)
            raise RequestError(
                f"{lock.read().decode() or 'another process'} is at work on it in {paths.root}",
                where=stage,
                hint="wait for it, or stop it; what it has done stays",
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()}".encode())
        lock.flush()
        yield


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the name of `path` once the block ends well.

    The file is on disk under its own name completely or not at all, also after a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to fill; it takes the name of `path`, and the place of what was there, once the block
    ends well. Under its own name it is complete or absent."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        sync_folder(aside)
        if path.exists():
            shutil.rmtree(path)
        os.rename(aside, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_event(paths: RunPaths, stage: str, event: str, **details: Any) -> None:
    """Add a line to events.jsonl."""
    paths.root.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": round(time.time(), 3), "stage": stage, "event": event, **details}, default=str)
    append_line(paths.events, line)


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Add a line to a file. A line that a crash cut short ends before this one starts.

    Args:
        durable: it is on disk before this returns.
    """
    with open(path, "ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode() + b"\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_events(paths: RunPaths) -> list[dict[str, Any]]:
    """Every whole event of the run, in order."""
    events = []
    if paths.events.exists():
        for line in paths.events.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:  # the line that a crash cut short
                continue
    return events


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_outputs(paths: RunPaths, stage: str) -> dict[str, str]:
    """Of each file of a stage that others read, by its path in the stage's folder."""
    folder = paths.stage(stage)
    files = [file for pattern in OUTPUTS.get(stage, ()) for file in sorted(folder.glob(pattern)) if file.is_file()]
    return {str(file.relative_to(folder)): hash_file(file) for file in files}


def digest_draft(folder: Path) -> str:
    """Of an exported draft's weights: tells whether a figure is of this draft."""
    return hash_json([hash_file(file) for file in sorted(folder.glob("*.safetensors"))])


def hash_json(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
