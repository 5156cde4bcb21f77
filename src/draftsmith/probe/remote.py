"""Probing a model on another machine, where nothing of draftsmith is installed.

One Python program goes over ssh's standard input to `python3 -` there: the sources of `gather`, `engine_source` and
`machine`, and the request as JSON, all as one ASCII literal, so that no shell sees anything to quote. One JSON
document comes back between two markers that nothing else prints, whatever a login shell has to say around them.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

from draftsmith.errors import RequestError, TargetError, TargetNotFoundError
from draftsmith.probe.facts import TEXT_CONFIGS

MODULES = ("gather", "engine_source", "machine")
CONNECT_SECONDS = 15

# Runs on Python 3.8; the engine's source is read by Python 3.10, which any vLLM that we support needs anyway.
PROGRAM = """
import json, sys, types
request = json.loads({request!r})
if sys.version_info < (3, 8):
    sys.exit("python3 is %d.%d there, and 3.8 is needed" % sys.version_info[:2])

def load(name):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(request["sources"][name], name + ".py", "exec"), module.__dict__)
    return module

evidence = load("gather").gather(request["path"])
evidence["machine"] = load("machine").inspect_machine()
evidence["engine"] = None
config = inner = evidence.get("config") or {{}}
while any(isinstance(inner.get(key), dict) for key in request["text_configs"]):
    inner = next(inner[key] for key in request["text_configs"] if isinstance(inner.get(key), dict))
architectures = config.get("architectures") or inner.get("architectures") or [None]
if sys.version_info >= (3, 10):
    evidence["engine"] = load("engine_source").inspect_engine(architectures[0], inner.get("model_type"))
sys.stdout.write("\\n" + request["marker"] + json.dumps(evidence) + request["marker"] + "\\n")
"""

# What ssh says when it fails, the more special first, and what to do about it.
FAILURES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "has another host key than before", "find out why, with `ssh {host}`"),
    ("Host key verification failed", "has a host key that is not known", "connect once by hand with `ssh {host}`"),
    ("Permission denied", "refused the login", "ssh must log in without a password: load your key with ssh-add"),
    ("Could not resolve hostname", "has no such name", "check the name, or ~/.ssh/config"),
    ("Connection refused", "refused the connection", "check that sshd runs there and on which port"),
    ("timed out", "did not answer", "check the address, the port and the firewall"),
    ("No route to host", "cannot be reached", "check the network or VPN"),
)


def split_remote(model: str) -> tuple[str, str] | None:
    """(host, path) of `host:/path`, `user@host:~/path` or `ssh://user@host:port/path`; None for anything else."""
    url = re.fullmatch(r"(ssh://[^/]+)(/.*)", model, re.DOTALL)
    if url:
        return url[1], url[2]
    scp = re.fullmatch(r"((?:[^@/:\s]+@)?(?:[^/:\s]+|\[[^\]/\s]+\])):([/~].*)", model, re.DOTALL)
    return (scp[1], scp[2]) if scp else None


def gather_over_ssh(ssh: str, path: str, *, timeout_seconds: float = 120.0) -> dict[str, Any]:
    """Evidence about a model folder on another machine, as `gather` finds it there.

    Args:
        ssh: `host`, `user@host` or `ssh://user@host:port`, or a name of ~/.ssh/config.
        path: the folder there; `~` is the home there.

    Returns:
        What `gather` returns, and `engine` (of `inspect_engine`, None if that python3 has no vLLM), `machine` (of
        `inspect_machine`) and `host`. `path` is written `host:path`, since it is none of this machine's.

    Raises:
        RequestError: the host's name is not one, or there is no ssh here.
        TargetNotFoundError: the folder is not there.
        TargetError: no connection, no login, no python3, no answer in time; names the host.
    """
    if not ssh or ssh.startswith("-") or any(character.isspace() for character in ssh):
        raise RequestError(f"{ssh!r} is not a host to connect to", where="--ssh", hint="give user@host")
    marker = f"draftsmith-{uuid.uuid4().hex}"
    answer = _run(ssh, _program(path, marker), timeout_seconds)
    parts = answer.stdout.split(marker.encode())
    if answer.returncode or len(parts) != 3:
        raise _failure(ssh, answer)
    evidence: dict[str, Any] = json.loads(parts[1])
    separator = "" if ssh.startswith("ssh://") else ":"
    evidence.update(host=ssh, path=f"{ssh}{separator}{evidence['path']}")
    for problem in evidence["problems"]:
        if problem["kind"] == "no_folder":
            raise TargetNotFoundError(problem["detail"], where=evidence["path"], hint=f"look there with `ssh {ssh}`")
    return evidence


def _program(path: str, marker: str) -> bytes:
    request = {
        "path": path,
        "marker": marker,
        "text_configs": TEXT_CONFIGS,
        "sources": {name: Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in MODULES},
    }
    return PROGRAM.format(request=json.dumps(request)).encode("ascii")


def _run(host: str, program: bytes, timeout_seconds: float) -> subprocess.CompletedProcess[bytes]:
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=15")
    command = ["ssh", "-T", *(part for option in options for part in ("-o", option)), "--", host, "python3 -"]
    try:
        return subprocess.run(command, input=program, capture_output=True, timeout=timeout_seconds)
    except FileNotFoundError as error:
        raise RequestError("there is no ssh on this machine", where=host, hint="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise TargetError(
            f"gave no answer within {timeout_seconds:g} seconds",
            where=host,
            hint=f"try `ssh {host} python3 -V`; a shell waiting for input or a hanging file system does this",
        ) from error


def _failure(host: str, answer: subprocess.CompletedProcess[bytes]) -> TargetError:
    said = answer.stderr.decode(errors="replace").strip()
    if answer.returncode == 127:
        return TargetError(
            "has no python3 in the path of an ssh command", where=host, hint="install Python 3.8 or newer"
        )
    if answer.returncode == 255:
        for symptom, what, hint in FAILURES:
            if symptom in said:
                return TargetError(f"{what} ({said.splitlines()[-1]})", where=host, hint=hint.format(host=host))
        return TargetError(f"ssh failed: {said or 'it says nothing'}", where=host, hint=f"try `ssh {host} python3 -V`")
    if answer.returncode:
        return TargetError(f"the probe failed there, with exit code {answer.returncode}:\n{said}", where=host)
    heard = answer.stdout.decode(errors="replace").strip()[-500:]
    return TargetError(
        f"answered without the probe's report, but with: {heard or 'nothing'}",
        where=host,
        hint=f"its login shell must run the command that ssh gives it; try `ssh {host} python3 -V`",
    )
