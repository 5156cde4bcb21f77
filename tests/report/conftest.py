from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from draftsmith import recipe as recipes
from draftsmith.evaluate import why
from draftsmith.pipeline import run_all
from draftsmith.rundir import RunPaths
from tests.report.pages import HOSTILE


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A run that was driven to its end, with a domain, ids, a folder and a rehearsal that mean the page no good."""
    folder = tmp_path_factory.mktemp("report")
    rows = [{"id": f"{HOSTILE}{i}", "messages": [{"role": "user", "content": f"Sort {i} foxes?"}]} for i in range(24)]
    rows.append({"id": f"{HOSTILE}dropped", "messages": []})
    data = folder / "conversations.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    settings = {
        "name": "tiny",
        "run_dir": str(folder / "a <b>&'run'"),
        "target": {"model": str(tiny_target), "dtype": "float32"},
        "prepare": {
            "sources": [
                {"path": str(data), "domain": HOSTILE, "limit": 14},
                {"path": str(data), "domain": "plain", "skip": 14},
            ],
            "regenerate": {"max_new_tokens": 16},
            "draft_vocab_size": 200,
            "validation_fraction": 0.4,
        },
        "extract": {"codec": "fp32"},
        "train": {"unroll_steps": 2, "max_steps": 8, "batch_tokens": 128, "log_every_steps": 1, "trackers": []},
        "evaluate": {"prompts": 4, "max_new_tokens": 12, "num_speculative_tokens": 2, "temperature": 0.7},
        "export": {"dtype": "float32"},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    loaded = recipes.load(file)
    run_all(loaded)
    rehearsal = {
        "verdict": "fail",
        "checks": [
            {"name": "scale model", "status": "ok", "detail": "7 of 61 layers", "hint": None},
            {"name": "capture", "status": "fail", "detail": HOSTILE, "hint": f"hint {HOSTILE}"},
        ],
        "seconds": 36.8,
        "failure": f"Traceback {HOSTILE}",
    }
    (loaded.folder / "rehearsal").mkdir()
    (loaded.folder / "rehearsal/rehearsal.json").write_text(json.dumps(rehearsal))
    why(loaded, RunPaths(loaded.folder))
    return loaded.folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "copy", ignore=shutil.ignore_patterns("report"))
