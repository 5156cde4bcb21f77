"""The real vLLM server hands over the ids that the target read and wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from draftsmith import recipe as recipes
from draftsmith.corpus import read_corpus
from draftsmith.prepare import run
from draftsmith.rundir import RunPaths, write_json
from tests.conftest import build_tiny_target
from tests.prepare.chats import facts_of, share_gpt, write_lines

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

START_SECONDS = 400
STOPS = [2, *range(20, 50)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose heads have a size that vLLM's CPU attention knows, some of whose answers come to an end."""
    return build_tiny_target(tmp_path_factory.mktemp("target"), seed=2, head_dim=32, eos_token_id=STOPS)


@pytest.fixture(scope="module")
def vllm_url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enforce-eager", "--served-model-name", "tiny"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
    try:
        pause, deadline = threading.Event(), time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                pause.wait(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def test_vllm_gives_the_corpus_that_transformers_gives(target: Path, vllm_url: str, tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "talk.jsonl", *({"conversations": share_gpt(f"How many {i}?", "Some.", "Sure?")} for i in range(12))
    )
    rows = {}
    for using in ("server", "transformers"):
        recipe = recipes.parse(
            {
                "name": using,
                "run_dir": str(tmp_path / using),
                "target": {"model": str(target)},
                "prepare": {
                    "sources": [{"path": str(data)}],
                    "max_length_tokens": 200,
                    "regenerate": {"using": using, "url": vllm_url, "max_new_tokens": 48, "batch_size": 4},
                },
            }
        )
        paths = RunPaths(recipe.folder)
        write_json(paths.facts, facts_of(target).to_json())
        report = run(recipe, paths)
        assert report["answers"]["regenerated_share"] == 1.0
        rows[using] = [(sample.id, sample.input_ids, sample.loss_mask) for sample in read_corpus(paths.corpus)]
        answers = [json.loads(line) for line in paths.answers.read_text().splitlines()]
        assert {answer["finish_reason"] for answer in answers} == {"stop", "length"}
        assert all((answer["answer_ids"][-1] in STOPS) == (answer["finish_reason"] == "stop") for answer in answers)
    assert rows["server"] == rows["transformers"]
