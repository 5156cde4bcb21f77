"""What became of an engine, for people: what went wrong, where, over which samples, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from draftsmith.errors import EngineError
from draftsmith.extract.vllm_worker.client import EngineDied
from draftsmith.extract.vllm_worker.failures import ENGINE, Failure

_LOGGED_ERROR = re.compile(r"ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?(.*)")

# What an error says, and the setting that helps; the first that fits. A device that others share wants a lower share
# of its memory, and one where the weights leave nothing for the cache a higher one.
_REMEDIES = (
    (
        ("OutOfMemoryError",),
        "lower extract.max_num_batched_tokens, or extract.gpu_memory_utilization to leave more memory beside it",
    ),
    (
        ("is less than desired", "memory utilization"),
        "others hold a part of the device's memory: end them, or lower extract.gpu_memory_utilization to what is free",
    ),
    (
        ("No available memory for the cache blocks",),
        "the weights leave no memory for the cache: raise extract.gpu_memory_utilization or "
        "extract.tensor_parallel_size",
    ),
    (
        ("can't allocate memory",),
        "the machine has no memory left: end other processes, or lower extract.kv_cache_memory_bytes or "
        "extract.max_num_batched_tokens",
    ),
    (
        ("No space left on device",),
        "make room in /dev/shm, where captured states wait (a container's is set by `docker run --shm-size`), and on "
        "the disks of run_dir and of the engine's caches",
    ),
    (
        ("KV cache", "memory"),
        "raise extract.gpu_memory_utilization or extract.kv_cache_memory_bytes, or take shorter samples",
    ),
)


def explain_death(death: EngineDied, log: Path, start: int, ids: Callable[[Iterable[int]], list[str]]) -> EngineError:
    """What, where, over which samples, and the whole traceback, once.

    Args:
        log: of the engine, which began `start` bytes into it.
        ids: sample ids of numbers.
    """
    failure = death.failure
    if failure is None:
        return EngineError(
            f"the engine process ended with {_status(death.status)} and could not say why",
            where="extract",
            hint=f"{log} is all it wrote; signal 9 mostly means that the machine had no memory left",
            detail=log_tail(log, start),
        )
    where = ["extract", failure.part, f"in {failure.during}", *([failure.module] if failure.module else [])]
    if found := ids(failure.numbers):
        where.append(f"samples {', '.join(found)}")
    lines = failure.message.strip().splitlines()
    # What ends the engine outside of our workers is told to the log alone.
    logged = _logged_errors(log, start) if failure.part == ENGINE else ""
    return EngineError(
        f"{failure.type}: {lines[0]}" if lines else f"{failure.type}, with no message",
        where=", ".join(where),
        hint=_hint(failure, logged),
        detail=failure.traceback + logged,
    )


def stalled(seconds: float, ready: bool, log: Path, start: int) -> EngineError:
    doing = "with samples under way" if ready else "and is not ready yet"
    return EngineError(
        f"the engine has said nothing for {seconds:,.0f} seconds, {doing}",
        where="extract",
        hint="the same command, without --redo, goes on from the last shard; extract.stall_seconds allows longer steps",
        detail=log_tail(log, start),
    )


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _hint(failure: Failure, logged: str) -> str | None:
    """The setting that helps, where the error is one that a setting helps against."""
    text = f"{failure.traceback} {logged}"
    if "OutOfMemoryError" in text and failure.during in ("init_device", "load_model"):
        return "the weights need more devices: raise extract.tensor_parallel_size"
    return next((hint for words, hint in _REMEDIES if all(word in text for word in words)), None)


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """The last lines that an engine wrote, `start` bytes into its log."""
    with open(log, "rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _logged_errors(log: Path, start: int) -> str:
    """What vLLM's processes logged as errors, without the prefix of each line."""
    found = [match[1] for line in log_tail(log, start, 10_000).splitlines() if (match := _LOGGED_ERROR.search(line))]
    return "\n".join(["", "from the engine's log:", *found]) if found else ""
