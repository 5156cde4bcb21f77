"""The JSON of a draft's folder as engines take it. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import CheckpointError

CONFIG, MANIFEST = "config.json", "draftsmith.json"
_HINT = "export it anew, or fetch it again"


def read_mapping(file: Path) -> dict[str, Any]:
    """Raises CheckpointError if the file cannot be read, or is no object."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file), hint=_HINT) from error
    if not isinstance(data, dict):
        raise CheckpointError("is not a mapping", where=str(file), hint=_HINT)
    return data


def section(of: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    """A copy; empty where there is none. Raises CheckpointError if it is no object."""
    found = of.get(name)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{name} is not a mapping", where=str(file), hint=_HINT)
    return dict(found or {})
