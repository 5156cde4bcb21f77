"""A draft by itself is served as its folder says, and never by an engine that would read it as another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import export
from draftsmith.errors import CheckpointError, RequestError
from draftsmith.serve.folder import serve_folder
from tests.export.builders import PLAIN
from tests.export.test_run import trained_run
from tests.serve.test_commands import make_recipe, option, speculative_config


@pytest.fixture
def draft(tmp_path: Path, tiny_target: Path) -> Path:
    """Of the vLLM format, away from its run."""
    paths = trained_run(tmp_path / "run", tiny_target, **PLAIN)
    export.run(make_recipe(tiny_target, revision="abc", evaluated_tokens=4), paths)
    shutil.copytree(paths.export("sglang"), tmp_path / "flat")
    return Path(shutil.copytree(paths.export("vllm"), tmp_path / "draft"))


def test_target_and_draft_tokens_are_those_of_the_export_unless_others_are_named(draft, tiny_target):
    arguments = serve_folder(draft, [])[1]["arguments"]
    assert arguments[:3] == ["vllm", "serve", str(tiny_target.resolve())]
    assert speculative_config(arguments) == {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": 4,
    }
    others = ["target.model=org/other", "serve.num_speculative_tokens=2", "serve.port=9000"]
    arguments = serve_folder(draft, others)[1]["arguments"]
    assert arguments[2] == "org/other"
    assert "--revision" not in arguments, "the revision is of the target that it was trained for"
    assert speculative_config(arguments)["num_speculative_tokens"] == 2
    assert option(arguments, "--port") == "9000"


def test_the_target_is_loaded_as_in_the_run_from_whatever_folder(tmp_path, tiny_target, monkeypatch):
    """Its path was relative in the recipe."""
    paths = trained_run(tmp_path / "run", tiny_target, **PLAIN)
    shutil.copytree(tiny_target, tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    export.run(make_recipe("target", dtype="float16"), paths)
    monkeypatch.chdir(tmp_path / "run")
    for format in ("vllm", "sglang"):
        arguments = serve_folder(paths.export(format), [])[1]["arguments"]
        assert str(tmp_path / "target") in arguments
        assert option(arguments, "--dtype") == "float16"
    arguments = serve_folder(paths.export("vllm"), ["target.dtype=bfloat16"])[1]["arguments"]
    assert option(arguments, "--dtype") == "bfloat16"


def test_a_published_draft_without_our_manifest_names_its_target_itself_or_is_asked_for_it(draft, tiny_target):
    (draft / "draftsmith.json").unlink()
    arguments = serve_folder(draft, [])[1]["arguments"]
    assert arguments[2] == str(tiny_target.resolve())
    assert speculative_config(arguments)["num_speculative_tokens"] == 4
    config = json.loads((draft / "config.json").read_text())
    del config["speculators_config"]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="which target") as caught:
        serve_folder(draft, [])
    assert "target.model=" in (caught.value.hint or "")
    assert serve_folder(draft, ["target.model=org/x"])[1]["arguments"][2] == "org/x"


def test_a_folder_in_a_format_is_served_by_the_engine_that_reads_it(draft):
    assert serve_folder(draft.parent / "flat", [])[1]["engine"] == "sglang"
    assert serve_folder(draft.parent / "flat", ["serve.engine=vllm"])[1]["engine"] == "vllm"
    with pytest.raises(RequestError, match="vLLM's format"):
        serve_folder(draft, ["serve.engine=sglang"])


def test_what_is_no_draft_is_refused(draft):
    for folder in (draft.parent, draft.parent / "run/train/checkpoints/final"):
        with pytest.raises(CheckpointError) as caught:
            serve_folder(folder, [])
        assert "export/vllm" in (caught.value.hint or "")
    (draft / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="cannot be read"):
        serve_folder(draft, [])


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("draftsmith.json", {"target": 7}, "draftsmith.json: target is not a mapping"),
        ("config.json", {"speculators_config": 5}, "config.json: speculators_config is not a mapping"),
        ("config.json", {"transformer_layer_config": [1]}, "config.json: transformer_layer_config is not a mapping"),
    ],
)
def test_a_folder_whose_files_are_of_another_form_is_refused_by_name(draft, file, changes, said):
    (draft / file).write_text(json.dumps(json.loads((draft / file).read_text()) | changes))
    with pytest.raises(CheckpointError, match=said) as caught:
        serve_folder(draft, [])
    assert "fetch it again" in (caught.value.hint or "")


def test_more_devices_than_divide_its_heads_are_refused(draft):
    with pytest.raises(RequestError, match="attention heads"):
        serve_folder(draft, ["serve.tensor_parallel_size=3"])


def test_the_command_line_takes_a_folder(draft):
    command = [sys.executable, "-m", "draftsmith", "serve", str(draft), "serve.num_speculative_tokens=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm serve ")
    assert '"num_speculative_tokens": 1' in done.stdout
