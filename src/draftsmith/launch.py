"""A process's place among those that torchrun started, from the environment alone. No torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """Processes of the whole job; 1 where torchrun did not start this one."""
    return _read("WORLD_SIZE", 1)


def rank() -> int:
    """This process's number among all of them, over all machines. Data is divided by it."""
    return _read("RANK", 0)


def local_rank() -> int:
    """Its number among those of this machine. Devices are divided by it, and nothing else."""
    return _read("LOCAL_RANK", 0)


def _read(name: str, alone: int) -> int:
    started_by_torchrun = all(key in os.environ for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return int(os.environ[name]) if started_by_torchrun else alone
