"""Stopping at a safe point: the first Ctrl-C or SIGTERM asks, the second insists.

So does a terminal that is closed (SIGHUP), unless the process was told to outlive it (nohup). Under torchrun none
insists: a scheduler signals every process, and torchrun hands the same signal on to each. It kills what has not ended
half a minute later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from draftsmith import launch
from draftsmith.errors import Interrupted

_requested = False


@contextmanager
def graceful_stop() -> Iterator[None]:
    """Within the block, SIGINT and SIGTERM set a flag that `check_stop` turns into an error at the next safe point."""
    global _requested
    _requested = False

    def request(number: int, frame: FrameType | None) -> None:
        global _requested
        alone = launch.world_size() == 1
        if _requested and alone:
            raise KeyboardInterrupt
        if not _requested:
            more = "; once more to stop at once" if alone else ""
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"stopping at the next safe point{more}\n".encode())  # print may be at work where this is
        _requested = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield
    finally:
        _requested = False
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    return _requested


def check_stop(where: str) -> None:
    """Call where everything done so far is safely on disk. Raises Interrupted if a stop was asked for."""
    if _requested:
        raise interrupted(where)


def interrupted(where: str, when: str = "") -> Interrupted:
    """The error of a stop. Args: when: how far the work had come, to follow on "stopped on request"."""
    return Interrupted(
        f"stopped on request{when and ' ' + when}; nothing is lost",
        where=where,
        hint="the same command, without --redo, goes on from here",
    )
