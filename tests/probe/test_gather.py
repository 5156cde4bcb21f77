"""What a folder says about itself: read from headers, damage found, nothing executed."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.probe import gather as module
from draftsmith.probe.gather import gather
from tests.probe.folders import (
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    TENSORS,
    header_of,
    write_model,
    write_shard,
    write_sharded,
)

SHARDS = {
    "model-00001-of-00002.safetensors": {**EMBEDDING, **LAYERS},
    "model-00002-of-00002.safetensors": {**HEAD, **NORM},
}


def kinds(folder: Path) -> list[str]:
    return [problem["kind"] for problem in gather(str(folder))["problems"]]


def test_a_whole_checkpoint_has_no_problems(tmp_path: Path) -> None:
    for folder in (write_model(tmp_path / "one"), write_sharded(tmp_path / "two", SHARDS)):
        evidence = gather(str(folder))
        assert evidence["problems"] == []
        assert evidence["tensors"]["lm_head.weight"]["shape"] == [32, 8]
        assert evidence["layers"] == {"model.layers": 8}
        assert sum(shard["bytes"] for shard in evidence["shards"]) == sum(
            file.stat().st_size for file in folder.glob("*.safetensors")
        )


def test_gather_agrees_with_the_safetensors_library(tiny_target: Path) -> None:
    from safetensors import safe_open

    evidence = gather(str(tiny_target))
    with safe_open(tiny_target / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name, entry in evidence["tensors"].items():
            assert list(file.get_slice(name).get_shape()) == entry["shape"]
    assert {name for name in names if ".layers." not in name} <= set(evidence["tensors"])
    assert evidence["shards"][0]["tensors"] == len(names)


def test_weights_are_never_read(tmp_path: Path) -> None:
    """A file of two terabytes, of which only the header exists on disk."""
    folder = write_model(tmp_path / "model")
    start, size = header_of({**TENSORS, "model.layers.0.mlp.up_proj.weight": ("BF16", [2**20, 2**20])})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(start)
        file.truncate(len(start) + size)
    evidence = gather(str(folder))
    assert evidence["problems"] == []
    assert evidence["shards"][0]["bytes"] > 2 * 2**40


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "model", SHARDS)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (problem,) = gather(str(folder))["problems"]
    assert problem["kind"] == "missing_shard"
    assert problem["file"] == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("cut", [1, 4, 60])
def test_a_shard_cut_off_in_its_data_is_found(tmp_path: Path, cut: int) -> None:
    folder = write_model(tmp_path / "model")
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - cut)
    assert kinds(folder) == ["truncated_shard"]


def test_a_shard_cut_off_in_its_header_is_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    os.truncate(folder / "model.safetensors", 100)
    assert kinds(folder) == ["truncated_shard"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty_shard"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "lfs_pointer"),
        (b"abc", "bad_header"),
        (b"<html>not found</html>", "bad_header"),
        ((12).to_bytes(8, "little") + b'{"a": [1,2]}', "bad_header"),
        ((2).to_bytes(8, "little") + b"[]", "bad_header"),
        ((10000).to_bytes(8, "little") + b"[" * 10000, "bad_header"),
        ((2).to_bytes(8, "little") + b"{}trailing", "bad_header"),
    ],
)
def test_a_file_that_is_not_safetensors_is_called_what_it_is(tmp_path: Path, content: bytes, kind: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    evidence = gather(str(folder))
    assert [problem["kind"] for problem in evidence["problems"]] == [kind]
    assert evidence["weights_sha256"] is None


def test_an_index_that_names_tensors_elsewhere_is_found(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "model", SHARDS)
    write_shard(folder / "model-00002-of-00002.safetensors", NORM)
    (problem,) = gather(str(folder))["problems"]
    assert problem["kind"] == "lost_tensors"
    assert "lm_head.weight" in problem["detail"]


def test_pickles_alone_are_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (problem,) = gather(str(folder))["problems"]
    assert problem["kind"] == "no_weights"
    assert "pytorch_model.bin" in problem["detail"]


def test_the_same_weights_under_two_names_count_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert [shard["name"] for shard in gather(str(folder))["shards"]] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["with space", "quote'\"$(x)", "glob [a-z]*", "ünïcode"])
def test_paths_are_taken_literally(tmp_path: Path, name: str) -> None:
    assert gather(str(write_model(tmp_path / name)))["problems"] == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"[" * 10000, "bad_json"),
        (b'{"a":' * 700 + b"1" + b"}" * 700, "bad_json"),
        (b"[1]", "bad_json"),
        (b"\xff\xfe{}", "bad_json"),
        (None, "no_config"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_a_problem(tmp_path: Path, content: bytes | None, kind: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    assert kinds(folder)[0] == kind


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 5}}),
        ("vocab.json", {"a": "x"}),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}),
        ("model.safetensors.index.json", {"metadata": {"total_size": "x"}}),
    ],
)
def test_a_file_that_holds_what_no_such_file_does_is_a_problem_and_not_a_traceback(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / file).write_text(json.dumps(content))
    found = gather(str(folder))
    (problem,) = found["problems"]
    assert problem["kind"] == "bad_json"
    assert problem["file"] in (file, "tokenizer_config.json")
    assert found["config"]["hidden_size"]


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert kinds(tmp_path / "nowhere") == ["no_folder"]
    assert kinds(write_model(tmp_path / "model") / "config.json") == ["no_folder"]


# ---- Identity ----


def test_identity_survives_a_copy_and_a_reformatted_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    before, after = gather(str(folder)), gather(str(copy))
    assert before["weights_sha256"] == after["weights_sha256"] is not None
    assert before["config_sha256"] == after["config_sha256"]


@pytest.mark.parametrize("position", [0, -1])
def test_other_weights_of_the_same_shapes_are_another_model(tmp_path: Path, position: int) -> None:
    big = {**TENSORS, "model.layers.0.mlp.up_proj.weight": ("BF16", [512, 512])}
    folder = write_model(tmp_path / "model", big)
    before = gather(str(folder))["weights_sha256"]
    content = bytearray((folder / "model.safetensors").read_bytes())
    start = len(header_of(big)[0])
    content[start if position == 0 else -1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert gather(str(folder))["weights_sha256"] != before


def test_other_names_of_tensors_or_files_are_another_model(tmp_path: Path) -> None:
    first = gather(str(write_model(tmp_path / "a")))["weights_sha256"]
    renamed = {name.replace("norm", "ln"): entry for name, entry in TENSORS.items()}
    assert gather(str(write_model(tmp_path / "b", renamed)))["weights_sha256"] != first
    folder = write_model(tmp_path / "c")
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    assert gather(str(folder))["weights_sha256"] != first


def test_tokenizer_and_template_have_identities_of_their_own(tiny_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    before, after = gather(str(tiny_target)), gather(str(copy))
    assert before["template_sha256"] != after["template_sha256"]
    assert before["tokenizer_sha256"] == after["tokenizer_sha256"]


def test_the_template_is_found_wherever_transformers_looks(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "A"}))
    inside = gather(str(folder))["template_sha256"]
    settings.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]})
    )
    assert gather(str(folder))["template_sha256"] == inside
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    legacy = gather(str(folder))["template_sha256"]
    (folder / "chat_template.jinja").write_text("A")
    assert gather(str(folder))["template_sha256"] == inside != legacy


# ---- Tokenizer ----


def test_the_tokenizers_size_is_the_one_that_transformers_counts(tiny_target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    evidence = gather(str(tiny_target))
    assert evidence["tokenizer_size"] == len(tokenizer)
    assert evidence["added_tokens"] == {token: i for token, i in tokenizer.added_tokens_encoder.items()}


def test_a_token_called_vocab_does_not_mislead(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tokenizer = {
        "added_tokens": [{"id": 9, "content": '"vocab": {'}, {"id": 3, "content": "merges"}],
        "model": {"vocab": {"vocab": 0, '"vocab":{': 7}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert gather(str(folder))["tokenizer_size"] == 10
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"added_tokens": 4, "a": 5}}}))
    assert gather(str(folder))["tokenizer_size"] == 6


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("tiktoken.model", b"AA== 0\nAQ== 1\nAg== 2\n", 3),
        ("vocab.json", b'{"a": 0, "b": 4}', 5),
        ("tekken.json", b'{"config": {"default_vocab_size": 131072}}', 131072),
        ("tokenizer.json", b'{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}', 2),
        ("tokenizer.json", b"not JSON", None),
    ],
)
def test_other_tokenizers_have_sizes_too(tmp_path: Path, name: str, content: bytes, size: int | None) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).write_bytes(content)
    assert gather(str(folder))["tokenizer_size"] == size


# ---- Scale, and other machines ----


def test_evidence_of_many_experts_is_as_small_as_of_few(tmp_path: Path) -> None:
    def evidence(experts: int) -> dict:
        packed = {
            f"model.layers.{layer}.mlp.experts.{expert}.up_proj.{part}": ("I32", [4, 4])
            for layer in (1, 2)
            for expert in range(experts)
            for part in ("weight_packed", "weight_scale", "weight_shape")
        }
        dense = {"model.layers.0.mlp.up_proj.weight": ("BF16", [16, 8])}
        return gather(str(write_model(tmp_path / str(experts), {**EMBEDDING, **HEAD, **NORM, **dense, **packed})))

    few, many = evidence(2), evidence(200)
    assert set(few["tensors"]) == set(many["tensors"])
    assert "model.layers.0.mlp.up_proj.weight" in many["tensors"]
    assert "model.layers.1.mlp.experts.0.up_proj.weight_packed" in many["tensors"]
    assert many["expert_bytes"] == 100 * few["expert_bytes"]
    assert many["dtype_bytes"]["I32"] == many["expert_bytes"]


def test_gather_needs_the_standard_library_alone() -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_gather_gives_the_same_evidence_under_python_3_8(tiny_target: Path) -> None:
    old = shutil.which("python3.8")
    program = Path(module.__file__).read_text(encoding="utf-8") + f"\nprint(json.dumps(gather({str(tiny_target)!r})))"
    if old is None or subprocess.run([old, "-V"], capture_output=True).returncode:
        pytest.skip("there is no Python 3.8")
    done = subprocess.run([old, "-"], input=program, capture_output=True, text=True, check=True)
    there, here = json.loads(done.stdout), gather(str(tiny_target))
    assert {**there, "disk_free_bytes": 0} == {**here, "disk_free_bytes": 0}
