"""An engine's server as a process of ours: started, waited for, asked, and always ended."""

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
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx

from draftsmith.engine_api import Engine
from draftsmith.errors import EngineError, MissingExtraError, RequestError
from draftsmith.signals import check_stop

_POLL_SECONDS = 0.25
_END_SECONDS = 30.0  # for the engine to end by itself, before it is killed
_TAIL_LINES = 30

_EXCEPTION = re.compile(r"(?:^|[\s\])])((?:\w+\.)*\w*(?:Error|Exception|Interrupt))(?:: (.*))?$")
_OF_ANOTHER_PROCESS = (
    *("Engine core initialization failed", "EngineDeadError", "EngineCore encountered"),  # vLLM
    *("scheduler died during initialization", "Initialization failed. Please see"),  # SGLang
)
_OWN_MACHINE = re.compile(r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(?=[:/]|$)")
_NOBODY_THERE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


def ask(
    url: str, method: str, path: str, body: dict[str, Any] | None = None, api_key: str | None = None
) -> httpx.Response:
    """One request. Raises EngineError if there is no good answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    try:
        response = httpx.request(
            method, url + path, json=body, headers=headers, timeout=300.0, verify=tls(), trust_env=is_remote(url)
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "is an engine running, and is that its address?" if isinstance(error, _NOBODY_THERE) else None
        raise EngineError(f"{type(error).__name__} {error}".strip(), where=url + path, hint=hint) from error
    if response.status_code != 200:
        raise EngineError(f"HTTP {response.status_code}: {response.text[:500]}", where=url + path)
    return response


@cache
def tls() -> ssl.SSLContext:
    """One for all requests: httpx would read the certificates anew for each client, which takes longer than a burst."""
    return httpx.create_ssl_context()


def is_remote(url: str) -> bool:
    """Whether it is of another machine, so that a proxy of the environment's may be between; none is before our own."""
    return not _OWN_MACHINE.match(url)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def engine_server(
    engine: Engine, command: Sequence[str], url: str, *, log: Path | None, start_seconds: float, where: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server of an engine's command until the block ends; in it, the server is healthy.

    It has a process group of its own: Ctrl-C reaches us alone, and we end it with all its workers.

    Args:
        url: where the command makes it listen, without a path.
        log: file to which all that it prints is added; None: our own stderr.

    Raises:
        MissingExtraError: the engine is not installed.
        RequestError: something listens at `url` already, and would be taken for it.
        EngineError: it ended or did not come up in time; names the last exception of the log.
        Interrupted: a stop was asked for before it was up.
    """
    require_installed(engine, where)
    _refuse_taken(url, where)
    command = engine.own_command(command)
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


def _refuse_taken(url: str, where: str) -> None:
    try:
        httpx.get(url, timeout=10.0, verify=tls(), trust_env=is_remote(url))
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return
    except httpx.HTTPError:
        pass  # whatever it is, it listens
    raise RequestError("something listens there already", where=url, hint="stop it, or set another serve.port")


def require_installed(engine: Engine, where: str) -> None:
    """Raises MissingExtraError if it is not there to be started."""
    if importlib.util.find_spec(engine.NAME) is None:
        raise MissingExtraError(f"{engine.TITLE} is not installed", where=where, hint=engine.INSTALL)


@contextmanager
def _process(command: Sequence[str], output: IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
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


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path | None, begun: int, start_seconds: float, where: str
) -> None:
    deadline = time.monotonic() + start_seconds
    while True:
        if process.poll() is not None:
            raise _failure(process, log, begun, where)
        try:
            health = httpx.get(f"{url}/health", timeout=10.0, verify=tls(), trust_env=is_remote(url))
            if health.status_code == 200:
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
        hint=(f"{log} is all it wrote" if log else "its own words are above")
        + ("; serve.engine_args are flags of the engine, and this one may not have them" if status == 2 else ""),
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
