"""`draftsmith extract` with vLLM on a real target in bfloat16, as a user sees it on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.extract.from_transformers import TOLERANCE
from draftsmith.pipeline import run_stage
from draftsmith.recipe import load
from draftsmith.rundir import RunPaths
from draftsmith.store.shards import Store
from tests.conftest import SENTENCES
from tests.extract.vllm_runs import REPOSITORY

pytestmark = [pytest.mark.vllm, pytest.mark.real_model]


def write_recipe(folder: Path, model: Path) -> Path:
    """40 conversations with others' answers, and a worker that never writes the states of the last."""
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"{SENTENCES[number % 4]} Number {number}?"},
                {"role": "assistant", "content": f"{SENTENCES[(number + 1) % 4]} So it is {number}."},
            ]
        }
        for number in range(40)
    ]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps(one) for one in conversations))
    recipe = {
        "name": "t",
        "run_dir": str(folder / "run"),
        "target": {"model": str(model), "dtype": "bfloat16"},
        "prepare": {"sources": [{"path": str(folder / "chat.jsonl")}], "regenerate": {"using": "none"}},
        "extract": {
            "engine": "vllm",
            "max_num_batched_tokens": 128,
            "engine_args": {"worker_cls": "tests.extract.vllm_faults.DroppingWorker"},
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "recipe.yaml"


def on_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, and what a terminal got of standard error."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *arguments], stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    screen = b""
    try:
        while piece := os.read(ours, 1 << 16):
            screen += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.stdout is not None
    output = process.stdout.read().decode()
    return process.wait(), output, screen.decode(errors="replace")


def test_a_run_shows_rate_and_time_left_and_keeps_the_engines_log_and_says_what_it_set_aside(
    smollm2: Path, tmp_path: Path
) -> None:
    file = write_recipe(tmp_path, smollm2)
    for stage in ("probe", "prepare"):
        run_stage(stage, load(file, []))
    code, output, screen = on_a_terminal("extract", str(file))
    assert code == 1, screen
    assert "1 of 40 samples failed twice and were set aside" in screen, screen
    assert dropped_id(tmp_path) in screen
    assert "max_quarantined=0.025" in screen
    assert "tokens/s" in screen
    assert re.search(r"\d:\d\d:\d\d", screen), "time left"
    log = (tmp_path / "run" / "extract" / "engine.log").read_text()
    assert "vllm" in log
    assert "INFO" in log
    assert not any(noise in screen + output for noise in ("INFO", "vllm.py", "Loading safetensors"))

    parity = Store.open(RunPaths(tmp_path / "run").store).manifest.parity
    assert parity is not None
    assert parity["against"] == "transformers"
    assert parity["capture"] == "native"
    medians = [figures["median"] for figures in parity["by_layer"].values()]
    assert 0 < max(medians) < TOLERANCE[torch.bfloat16]
    assert parity["next_token_agreement"] > 0.9

    code, output, screen = on_a_terminal("extract", str(file), "extract.max_quarantined=0.025")
    assert code == 0, screen
    assert "extract: 39 samples" in output
    assert "captured by vLLM's own method" in output
    assert "1 samples set aside, which failed twice" in output


def dropped_id(folder: Path) -> str:
    (line,) = (folder / "run" / "extract" / "quarantine.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert len(entry["reasons"]) == 2
    assert all("without its states" in reason for reason in entry["reasons"])
    return str(entry["id"])
