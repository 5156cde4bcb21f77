"""Work item by item, with each result on disk before the next begins: a kill loses at most one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.progress import progress
from draftsmith.signals import check_stop


def work_through(
    file: Path, what: str, unit: str, ids: Sequence[str], work: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The result of `work` for each id, in their order; those already in the JSON-lines `file` are taken from it."""
    done = _read(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with progress(what, len(ids), unit, done=sum(id in done for id in ids)) as bar:
        for id in ids:
            if id not in done:
                done[id] = work(id)
                _append(file, {"id": id, "result": done[id]})
                bar.advance(1)
                check_stop("evaluate")
    return [done[id] for id in ids]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Every whole line, after cutting off the one that a crash left unfinished."""
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))
    return {line["id"]: line["result"] for line in map(json.loads, whole.splitlines())}


def _append(file: Path, line: dict[str, Any]) -> None:
    with open(file, "ab") as opened:
        opened.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        opened.flush()
        os.fsync(opened.fileno())
