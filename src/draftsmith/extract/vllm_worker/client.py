"""The driver's end of the engine process (`engine.py`): starts it, sends samples, hears what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from draftsmith.extract.vllm_worker.engine import Job
from draftsmith.extract.vllm_worker.failures import ENGINE, Failure, read_failures

STOP_SECONDS = 30.0  # for vLLM's own way out
TERMINATION_SECONDS = 5.0  # for what is left of its session, before it is killed


class EngineDied(Exception):
    """The engine process ended before it was told to.

    Attributes:
        failure: what went wrong first, if anything in the engine could still write it down.
        status: exit status of the process; -9 for signal 9.
    """

    def __init__(self, failure: Failure | None, status: int) -> None:
        super().__init__(failure.type if failure else f"exit status {status}")
        self.failure, self.status = failure, status


class EngineProcess:
    """A vLLM engine in a process, and a session, of its own. Use it as a context: it ends with the block.

    Attributes:
        capture, parts: how it captures and which worker writes which layer ids; known once it is ready.
    """

    def __init__(self, job: Mapping[str, Any], failures: Path, log: Path, environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self._failures, self._events, self._rest, self._ending = failures, reading, b"", False
        self.capture: str | None = None
        self.parts: list[list[int]] = []
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftsmith.extract.vllm_worker.engine"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env=dict(environment),
                start_new_session=True,  # a Ctrl-C is for the driver
            )
        os.close(writing)
        self._write(Job(**job, failures=str(failures), events=writing).to_line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it end by itself if it was told that no more samples come; then end what is left of its session."""
        if self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + TERMINATION_SECONDS
            while time.monotonic() < deadline:  # Python's resource tracker outlives the others, and frees their memory
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._events)

    def send(self, number: int, input_ids: list[int]) -> None:
        self._write(json.dumps({"number": number, "input_ids": input_ids}) + "\n")

    def end(self) -> None:
        """Say that no more samples come."""
        self._ending = True
        self._write('{"end": true}\n')

    def fileno(self) -> int:
        """For `select`: readable when there are events."""
        return self._events

    def receive(self) -> list[dict[str, Any]]:
        """The events that have come, or those that come next.

        Raises:
            EngineDied: the process ended.
        """
        data = os.read(self._events, 1 << 20)
        if not data:
            raise self._death()
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "ready":
                self.capture, self.parts = event["capture"], event["parts"]
        return events

    def _write(self, line: str) -> None:
        """A process that is gone is noticed by `receive`, which knows why."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _death(self) -> EngineDied:
        status = self._process.wait()
        found = read_failures(self._failures)
        in_workers = [failure for failure in found if failure.part != ENGINE]
        return EngineDied(next(iter([*in_workers, *found]), None), status)
