"""Verdicts on a target, from its facts and the evidence that they rest on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """One verdict: `warn` is what to know before going on, `fail` is what the work would die of."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
