"""vLLM's OpenAI-compatible server as a process of ours: started, waited for, asked, and always ended."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx

from draftsmith.errors import EngineError, MissingExtraError
from draftsmith.signals import check_stop

_POLL_SECONDS = 0.25
_END_SECONDS = 30.0  # for the engine to end by itself, before it is killed
_SETTLE_SECONDS = 0.1  # counters are brought up to date just after the last token is sent
_TAIL_LINES = 30

_EXCEPTION = re.compile(r"(?:^|[\s\])])((?:\w+\.)*\w*(?:Error|Exception|Interrupt))(?:: (.*))?$")
_OF_ANOTHER_PROCESS = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered")
_COUNTER = re.compile(
    r"^vllm:(spec_decode_num_\w+_total|request_decode_time_seconds_sum)(?:\{(.*)\})? (\S+)$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class EngineCounters:
    """What vLLM has counted since its start, over all engines (`v1/spec_decode/metrics.py`, `v1/metrics/stats.py`)."""

    drafts: int = 0  # rounds
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # as many as draft tokens in a round
    decode_seconds: float = 0.0  # from the first token to the last, of all requests, by the engine's own clock

    def since(self, before: EngineCounters) -> EngineCounters:
        """What was counted after `before`."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return EngineCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)),
            self.decode_seconds - before.decode_seconds,
        )


def parse_counters(metrics: str) -> EngineCounters:
    """From the text of /metrics; no rounds where the server does not draft."""
    totals: dict[str, float] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        if found := _POSITION.search(labels):
            positions[int(found[1])] = positions.get(int(found[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    return EngineCounters(
        int(totals.get("spec_decode_num_drafts_total", 0)),
        int(totals.get("spec_decode_num_draft_tokens_total", 0)),
        int(totals.get("spec_decode_num_accepted_tokens_total", 0)),
        tuple(positions[k] for k in sorted(positions)),
        totals.get("request_decode_time_seconds_sum", 0.0),
    )


def read_counters(url: str) -> EngineCounters:
    """What a server has counted so far. Raises EngineError."""
    return parse_counters(ask(url, "GET", "/metrics").text)


def settled_counters(url: str) -> EngineCounters:
    """What an idle server has counted, once that stands still. Raises EngineError."""
    found = read_counters(url)
    while True:
        time.sleep(_SETTLE_SECONDS)
        again = read_counters(url)
        if again == found:
            return found
        found = again


def served_model(url: str) -> str:
    """Name of the first model of a server. Raises EngineError."""
    models = ask(url, "GET", "/v1/models").json().get("data") or []
    if not models:
        raise EngineError("lists no model", where=f"{url}/v1/models")
    return str(models[0]["id"])


def ask(url: str, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 300.0) -> httpx.Response:
    """One request. Raises EngineError if there is no good answer."""
    try:
        response = httpx.request(method, url + path, json=body, timeout=timeout, verify=tls())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"{type(error).__name__} {error}".strip(), where=url + path) from error
    if response.status_code != 200:
        raise EngineError(f"HTTP {response.status_code}: {response.text[:500]}", where=url + path)
    return response


@cache
def tls() -> ssl.SSLContext:
    """One for all requests: httpx would read the certificates anew for each client, which takes longer than a burst."""
    return httpx.create_ssl_context()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def engine_server(
    command: Sequence[str], url: str, *, log: Path | None, start_seconds: float, where: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server of a `vllm serve` command until the block ends; in it, the server is healthy.

    It has a process group of its own: Ctrl-C reaches us alone, and we end it with all its workers.

    Args:
        url: where the command makes it listen, without a path.
        log: file to which all that it prints is added; None: our own stderr.

    Raises:
        MissingExtraError: vLLM is not installed.
        EngineError: it ended or did not come up in time; names the last exception of the log.
        Interrupted: a stop was asked for before it was up.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vLLM is not installed", where=where, hint="pip install 'draftsmith[vllm]'")
    if log is None:
        with _process(command, sys.stderr) as process:
            _wait_until_healthy(process, url, None, 0, start_seconds, where)
            yield process
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        begun = output.tell()
        with _process(command, output) as process:
            _wait_until_healthy(process, url, log, begun, start_seconds, where)
            try:
                yield process
            except EngineError as error:
                if process.poll() is None or error.detail:
                    raise
                raise _failure(process, log, begun, where) from error


@contextmanager
def _process(command: Sequence[str], output: IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        module_command(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
    )
    try:
        yield process
    finally:
        _end(process)


def module_command(command: Sequence[str]) -> list[str]:
    """`vllm serve MODEL …` by this interpreter: the vLLM that is installed beside us, on a CPU too, where its own
    `vllm` command does not start."""
    name, serve, model, *flags = command
    if (name, serve) != ("vllm", "serve"):
        raise ValueError(f"not a command of vLLM: {command}")
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path | None, begun: int, start_seconds: float, where: str
) -> None:
    deadline = time.monotonic() + start_seconds
    while True:
        if process.poll() is not None:
            raise _failure(process, log, begun, where)
        try:
            if httpx.get(f"{url}/health", timeout=10.0, verify=tls()).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        if time.monotonic() > deadline:
            raise EngineError(
                f"the engine is not up after {start_seconds:,.0f} seconds",
                where=where,
                hint="large weights take long to load: raise evaluate.served.start_seconds",
                detail=_tail(log, begun),
            )
        check_stop(where)
        time.sleep(_POLL_SECONDS)


def _failure(process: subprocess.Popen[bytes], log: Path | None, begun: int, where: str) -> EngineError:
    status = process.wait()
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    text = _read(log, begun)
    cause = last_exception(text)
    return EngineError(
        f"the engine ended with {ended}" + (f": {cause}" if cause else ""),
        where=where,
        hint=f"{log} is all it wrote" if log else "its own words are above",
        detail=None if cause else _tail(log, begun),
    )


def last_exception(log: str) -> str | None:
    """The last exception that a log names, but for those that only say that another process failed."""
    found = [match for line in log.splitlines() if (match := _EXCEPTION.search(line.rstrip()))]
    own = [match for match in found if not any(words in match[0] for words in _OF_ANOTHER_PROCESS)]
    for match in reversed(own or found):
        return f"{match[1]}: {match[2]}" if match[2] else match[1]
    return None


def _read(log: Path | None, begun: int) -> str:
    if log is None:
        return ""
    with open(log, "rb") as file:
        file.seek(begun)
        return file.read().decode(errors="replace")


def _tail(log: Path | None, begun: int) -> str | None:
    return "\n".join(_read(log, begun).splitlines()[-_TAIL_LINES:]) or None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process of its group, also those that outlive it; at once on another Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_END_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
    process.wait()
