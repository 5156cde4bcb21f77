"""Against a real sshd on loopback: every connection goes through ssh, a shell, and python3 at the other end."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError, RequestError, TargetError, TargetNotFoundError
from draftsmith.probe.engine_source import inspect_engine
from draftsmith.probe.facts import facts_from_evidence
from draftsmith.probe.gather import gather
from draftsmith.probe.remote import gather_over_ssh, split_remote

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs OpenSSH's ssh and sshd (package openssh-server)"
)
BANNER = '** Welcome to node17 **\nLast login: never\n{"not": "ours"}\nno newline at the end'
# Host of the ssh configuration -> the shell script that is the login there.
RUN = 'eval "$SSH_ORIGINAL_COMMAND"'
LOGINS = {
    "plain": RUN,
    "banner": f"printf %s {shlex.quote(BANNER)}; {RUN}; echo Goodbye",
    "bare": f"PATH=/nonexistent; {RUN}",
    "broken": f"python3() {{ echo 'python3: cannot open shared object file' >&2; return 1; }}; {RUN}",
    "hanging": "exec sleep 60",
    "menu": "echo Please choose: 1, 2, 3",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(file: Path) -> str:
    """Write a key pair; returns the public one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    return file.with_suffix(".pub").read_text().strip()


def write_script(file: Path, body: str) -> None:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a `ssh` that knows the hosts of LOGINS and some that fail, and of a `python3`; sshd runs meanwhile."""
    root = tmp_path_factory.mktemp("ssh")
    port, closed = free_port(), free_port()
    host_key = make_key(root / "host_key").split()[:2]
    commands = root / "bin"
    commands.mkdir()
    write_script(commands / "python3", f'exec {sys.executable} "$@"')  # a symlink would lose the virtual environment
    keys, hosts = [], []
    for name, login in LOGINS.items():
        write_script(root / f"login-{name}", f"PATH={commands}:$PATH\n{login}")
        keys.append(f'command="{root}/login-{name}" {make_key(root / name)}')
    make_key(root / "denied")
    (root / "authorized_keys").write_text("\n".join(keys) + "\n")
    (root / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
    (root / "stranger").write_text("")
    (root / "impostor").write_text(f"[127.0.0.1]:{port} {' '.join(make_key(root / 'other_key').split()[:2])}\n")
    for name in (*LOGINS, "denied", "stranger", "impostor", "closed"):
        hosts.append(
            f"Host {name}\n  HostName 127.0.0.1\n  Port {closed if name == 'closed' else port}\n"
            f"  IdentityFile {root / (name if name in (*LOGINS, 'denied') else 'plain')}\n"
            f"  UserKnownHostsFile {root / (name if name in ('stranger', 'impostor') else 'known_hosts')}\n"
        )
    hosts.append(f"Host 127.0.0.1\n  IdentityFile {root / 'plain'}\n  UserKnownHostsFile {root / 'known_hosts'}\n")
    (root / "config").write_text("".join(hosts) + "Host *\n  IdentitiesOnly yes\n  IdentityAgent none\n")
    (root / "issue").write_text("Authorised use only\n")
    (root / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {root / 'host_key'}\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {root / 'authorized_keys'}\nAllowUsers {getpass.getuser()}\nPermitRootLogin yes\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nBanner {root / 'issue'}\n"
    )
    write_script(commands / "ssh", f'exec {shutil.which("ssh")} -F {root / "config"} "$@"')
    (commands / "port").write_text(str(port))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd run by root insists on it
    log = root / "log"
    server = subprocess.Popen([str(SSHD), "-D", "-f", str(root / "sshd_config"), "-E", str(log)])
    try:
        await_port(port, server, log)
        yield commands
    finally:
        server.terminate()
        server.wait()


def await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, log.read_text()


@pytest.fixture
def ssh(sshd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{sshd}{os.pathsep}{os.environ['PATH']}")
    return sshd


@pytest.fixture
def model(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "model"))


@needs_sshd
@pytest.mark.parametrize("host", ["plain", "banner"])
def test_another_machine_tells_of_a_model_what_this_one_would(ssh: Path, model: Path, host: str) -> None:
    there = gather_over_ssh(host, str(model))
    here = json.loads(json.dumps(gather(str(model))))
    assert there["path"] == f"{host}:{model}"
    assert there["host"] == host
    moving = {"path", "disk_free_bytes", "host", "engine", "machine"}
    assert {k: v for k, v in there.items() if k not in moving} == {k: v for k, v in here.items() if k not in moving}
    assert facts_from_evidence(there).hidden_size == 32
    assert there["machine"]["cpus"] == os.cpu_count()


@needs_sshd
def test_the_engine_of_the_other_machine_is_inspected_there(ssh: Path, tmp_path: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    there = gather_over_ssh("plain", str(tmp_path))
    assert there["engine"] == inspect_engine("Mistral3ForConditionalGeneration", "mistral")


@needs_sshd
def test_the_command_reports_the_same_of_a_model_there_as_here(ssh: Path, model: Path, tmp_path: Path) -> None:
    moved = model.rename(tmp_path / "it's a model")

    def report(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "draftsmith", "probe", *arguments, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    here, there, by_option = report(str(moved)), report(f"banner:{moved}"), report(str(moved), "--ssh", "plain")
    assert there["facts"] == here["facts"] | {"path": f"banner:{moved}"}
    assert by_option["facts"] == here["facts"] | {"path": f"plain:{moved}"}
    changing = "store size"  # says how much is free
    checks = [[check for check in one["checks"] if check["name"] != changing] for one in (here, there, by_option)]
    assert checks[0] == checks[1] == checks[2]
    assert here["verdict"] == there["verdict"]


@needs_sshd
@pytest.mark.parametrize(
    "name",
    [
        "two words",
        'it\'s "quoted" `too`',
        "$HOME ${PATH} $(touch pwned)",
        "line\nbreak\ttab",
        "模型 — Größe ☃",
        "back\\slash * ? [a] {b,c} ~ & ; | < > # !",
        "-rf",
        "draftsmith-0 {request!r} %s {}",
    ],
)
def test_no_path_needs_quoting(ssh: Path, model: Path, tmp_path: Path, name: str) -> None:
    moved = model.rename(tmp_path / name)
    there = gather_over_ssh("plain", str(moved))
    assert there["path"] == f"plain:{moved}"
    assert there["config"]["hidden_size"] == 32
    assert there["problems"] == []


@needs_sshd
def test_a_url_gives_user_and_port(ssh: Path, model: Path) -> None:
    url = f"ssh://{getpass.getuser()}@127.0.0.1:{(ssh / 'port').read_text()}"
    there = gather_over_ssh(url, str(model))
    assert there["path"] == f"{url}{model}"
    assert there["config"]["hidden_size"] == 32


@needs_sshd
def test_a_home_is_the_one_over_there(ssh: Path) -> None:
    with pytest.raises(TargetNotFoundError) as caught:
        gather_over_ssh("plain", "~/no such model")
    assert str(caught.value).startswith(f"plain:{Path.home()}/no such model: there is no such folder")


@needs_sshd
def test_what_is_wrong_with_the_files_there_comes_back(ssh: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    there = gather_over_ssh("plain", str(model))
    assert [problem["kind"] for problem in there["problems"]] == ["truncated_shard"]


@needs_sshd
@pytest.mark.parametrize(
    ("host", "said", "hint"),
    [
        ("denied", "refused the login (", "ssh-add"),
        ("stranger", "has a host key that is not known", "`ssh stranger`"),
        ("impostor", "has another host key than before", "find out why"),
        ("closed", "refused the connection", "sshd runs there"),
        ("no-such-host.invalid", "has no such name", "check the name"),
        ("bare", "has no python3", "install Python"),
        ("broken", "exit code 1:\nAuthorised use only\npython3: cannot open shared object file", None),
        ("menu", "without the probe's report, but with: Please choose: 1, 2, 3", "its login shell"),
    ],
)
def test_each_failure_names_the_host_and_the_remedy(ssh: Path, model: Path, host: str, said: str, hint: str) -> None:
    with pytest.raises(TargetError) as caught:
        gather_over_ssh(host, str(model))
    assert caught.value.where == host
    assert said in caught.value.what
    assert hint is None or hint in str(caught.value.hint)


@needs_sshd
def test_a_login_that_hangs_is_given_up(ssh: Path, model: Path) -> None:
    with pytest.raises(TargetError, match="hanging: gave no answer within 2 seconds"):
        gather_over_ssh("hanging", str(model), timeout_seconds=2)


def test_a_machine_without_ssh_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="no ssh on this machine"):
        gather_over_ssh("node17", "/models/x")


@pytest.mark.parametrize("host", ["", "-oProxyCommand=touch pwned", "two words", "-V"])
def test_a_host_cannot_be_an_option_of_ssh(host: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        gather_over_ssh(host, "/models/x")
    assert caught.value.exit_code == 2


def test_remote_models_are_told_from_hub_ids_and_local_paths() -> None:
    assert split_remote("node17:/models/Kimi K2.5") == ("node17", "/models/Kimi K2.5")
    assert split_remote("me@node17:~/models/it's") == ("me@node17", "~/models/it's")
    assert split_remote("me@[fe80::1]:/m") == ("me@[fe80::1]", "/m")
    assert split_remote("ssh://me@node17:2222/models/a:b") == ("ssh://me@node17:2222", "/models/a:b")
    for local in ("moonshotai/Kimi-K2.5", "/models/a:/b", "./a:/b", "models/a:/b", "C:model", "gpt2", "org/name:rev"):
        assert split_remote(local) is None
