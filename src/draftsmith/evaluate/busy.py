"""How much of the machine something else uses, just before an engine starts: steps of a millisecond wait for the
processor, and what shares it slows them by as much as a draft makes up."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SECONDS = 1.0
_SHARE, _CORES = 0.05, 0.5  # from which it is said: of all cores, and at the least


def busy_cores() -> float | None:
    """Cores at work during one second; None where the system does not say."""
    if not _STAT.exists():
        return None
    before = _STAT.read_text(encoding="ascii")
    time.sleep(_SECONDS)
    return cores_between(before, _STAT.read_text(encoding="ascii"))


def cores_between(before: str, after: str) -> float:
    """From two states of /proc/stat (proc_stat(5))."""
    spent = [now - then for now, then in zip(_ticks(after), _ticks(before), strict=True)]
    worked = sum(spent) - spent[3] - spent[4]  # not idle; and waiting for a disk is no work
    cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    return cores * worked / max(sum(spent), 1)


def warning(busy: dict[str, float]) -> str | None:
    """For people, of the engine before whose start the most was at work."""
    cores = os.cpu_count() or 1
    name, most = max(busy.items(), key=lambda item: item[1], default=("", 0.0))
    if most < max(_CORES, _SHARE * cores):
        return None
    return (
        f"{most:.1f} of {cores} cores were at work before the engine {name} was started: speeds are lower than they "
        "would be, and not all alike; measure on a machine that does nothing else"
    )


def _ticks(stat: str) -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal of all cores; a guest's are in user's."""
    return [int(word) for word in stat.splitlines()[0].split()[1:9]]
