"""`serve --run` as a command, with a small server in the place of the engine's: the processes and signals are real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import export
from draftsmith import recipe as recipes
from draftsmith.pipeline import settings_of
from draftsmith.rundir import write_json
from tests.export.builders import PLAIN
from tests.export.test_run import trained_run

STAND_IN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
open(os.environ["STAND_IN_FILE"], "w").write(json.dumps({"arguments": sys.argv[1:], "worker": worker.pid}))
if os.environ["STAND_IN"] == "dies":
    raise ValueError("this draft does not fit")
rounds = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": "", "/v1/models": '{"data": [{"id": "m"}]}', "/metrics": METRICS.format(rounds, 3 * rounds)}
        self.answer(known[self.path])

    def do_POST(self):
        global rounds
        self.rfile.read(int(self.headers["Content-Length"]))
        rounds += 8 if os.environ["STAND_IN"] == "drafts" else 0
        drafted = {"spec_verify_ct": 8, "spec_num_proposed_drafts": 24, "spec_num_correct_drafts": 0}
        drafted["spec_correct_drafts_histogram"] = [8]
        answers = {
            "/v1/completions": {"choices": [{"text": " jumps"}]},
            "/generate": {"text": " jumps", "meta_info": drafted if rounds else {}},
        }
        self.answer(json.dumps(answers[self.path]))

    def answer(self, text):
        asked = self.path in ("/health", "/metrics") or self.headers.get("Authorization") == KEY
        self.send_response(200 if asked else 401)
        self.end_headers()
        self.wfile.write(text.encode())

METRICS = "vllm:spec_decode_num_drafts_total {}\\\\nvllm:spec_decode_num_draft_tokens_total {}\\\\n"
KEY = f"Bearer {sys.argv[sys.argv.index('--api-key') + 1]}" if "--api-key" in sys.argv else None
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


MODULES = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}


@pytest.fixture(params=MODULES)
def command(request: pytest.FixtureRequest, tmp_path: Path, tiny_target: Path) -> dict[str, Any]:
    """Arguments and environment of a `serve --run` on an exported run."""
    module = tmp_path / "stand-in" / MODULES[request.param]
    module.parent.mkdir(parents=True)
    for folder in module.relative_to(tmp_path / "stand-in").parents[:-1]:
        (tmp_path / "stand-in" / folder / "__init__.py").touch()
    module.write_text(STAND_IN.replace("\\\\", "\\"))
    paths = trained_run(tmp_path / "run", tiny_target, **PLAIN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tree = {"name": "t", "run_dir": str(paths.root), "target": {"model": str(tiny_target)}}
    tree["serve"] = {"port": port, "engine": request.param}
    recipe = recipes.parse(dict(tree))
    export.run(recipe, paths)
    for stage in ("probe", "export"):
        fingerprint = {"settings": settings_of(stage, recipe), "inputs": {}}
        write_json(paths.stage_file(stage), {"status": "done", "fingerprint": fingerprint, "report": {}})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    python_path = os.pathsep.join([str(tmp_path / "stand-in"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path, "STAND_IN_FILE": str(tmp_path / "started")}
    arguments = [sys.executable, "-m", "draftsmith", "serve", str(tmp_path / "recipe.yaml"), "--run", "--json"]
    started = tmp_path / "started"
    return {"args": arguments, "env": environment, "paths": paths, "started": started, "engine": request.param}


def start(command: dict[str, Any], how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command["args"], env=command["env"] | {"STAND_IN": how}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip  # under nohup it would be ignored, as it should be


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_that_the_engine_drafts_and_a_signal_ends_engine_and_workers(command, number):
    process = start(command, "drafts")
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "Ctrl-C ends it" in line:
            process.send_signal(number)
            break
    output, more = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(lines) + more
    found = json.loads(output)
    assert (found["drafts"], found["draft_tokens"], found["text"]) == (8, 24, " jumps")
    begins, draft = {
        "vllm": ("vllm serve", "--speculative-config"),
        "sglang": ("python -m sglang.launch_server", "--speculative-draft-model-path"),
    }[command["engine"]]
    assert any(line.startswith(begins) for line in lines)
    assert any("is healthy and drafts" in line for line in lines)
    started = json.loads(command["started"].read_text())
    assert started["arguments"][0] in ("--model", "--model-path")
    assert draft in started["arguments"]
    assert not runs(started["worker"])


def test_an_engine_with_an_api_key_is_asked_with_it_and_nobody_is_told(command):
    command["args"] += ["serve.engine_args.api_key=open-sesame"]
    process = start(command, "drafts")
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "Ctrl-C ends it" in line:
            process.send_signal(signal.SIGINT)
            break
    output, more = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(lines) + more
    assert "open-sesame" in json.loads(command["started"].read_text())["arguments"]
    assert "open-sesame" not in "".join(lines) + output + more
    assert "open-sesame" not in (command["paths"].events).read_text()


def test_a_stranger_that_listens_there_already_is_not_taken_for_the_engine(command):
    port = yaml.safe_load((command["started"].parent / "recipe.yaml").read_text())["serve"]["port"]
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True).start()
        _, errors = start(command, "drafts").communicate(timeout=60)
    assert "something listens there already" in errors
    assert "serve.port" in errors
    assert not command["started"].exists(), "no engine was started"


def test_an_engine_that_does_not_draft_is_ended_with_a_check_that_says_so(command):
    process = start(command, "serves")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert "has drafted nothing" in errors
    assert not runs(json.loads(command["started"].read_text())["worker"])


def test_an_engine_that_does_not_come_up_is_an_error_and_its_workers_end(command):
    process = start(command, "dies")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "this draft does not fit" in errors
    assert "error: serve: the engine ended with exit status 1" in errors
    assert not runs(json.loads(command["started"].read_text())["worker"])


def test_an_engine_that_dies_later_is_an_error(command):
    process = start(command, "drafts")
    for line in process.stderr:
        if "Ctrl-C ends it" in line:
            break
    (engine,) = (
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if entry.read_text().split("\0")[1:3]
        == ["-m", MODULES[command["engine"]].removesuffix(".py").replace("/", ".")]
        and str(command["paths"].root) in entry.read_text()
    )
    os.kill(engine, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended by itself with status -9" in errors
    assert not runs(json.loads(command["started"].read_text())["worker"])
