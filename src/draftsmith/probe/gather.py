"""What a model folder says about itself, read with the standard library alone.

This file is also sent over ssh to machines where draftsmith is not installed: it imports nothing of the package and
runs on Python 3.8. It reads JSON files and safetensors headers, no weights but the ends of each shard that go into
their identity, and runs no code of the model's.
"""

from __future__ import annotations

import gc
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

EDGE_BYTES = 64 * 1024  # hashed at both ends of a shard's data: other weights of the same shapes differ there
MAX_HEADER_BYTES = 100 * 1024 * 1024  # the safetensors library's own limit
DEEPEST = 50  # lists and objects of a configuration in one another; Python can walk some hundred
LFS_POINTER = b"version https://git-lfs"
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# Parts of a model that are not its text decoder, by words in the names of their tensors.
NOT_TEXT = ("vision", "visual", "image", "audio", "speech", "talker", "code2wav", "mtp", "nextn", "projector")
_LAYER = re.compile(r"^((?:.*?\.)?(?:layers|blocks|block|h))\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


class _Unusable(Exception):
    """A file of the folder cannot be used; `kind` is for programs, the message for people."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def gather(path: str) -> dict[str, Any]:
    """Evidence about the model in a local folder, as JSON values.

    What is missing or damaged becomes an entry {kind, file, detail} of `problems`, not an exception.
    """
    root = os.path.abspath(os.path.expanduser(path))
    problems: list[dict[str, str]] = []
    evidence: dict[str, Any] = {"path": root, "problems": problems}
    if not os.path.isdir(root):
        detail = "is a file: give the folder that it is in" if os.path.exists(root) else "there is no such folder"
        problems.append(_problem("no_folder", root, detail))
        return evidence
    config = _read_json(root, "config.json", problems)
    if _nests(config, DEEPEST):
        problems.append(_problem("bad_json", "config.json", f"nests lists and objects more than {DEEPEST} deep"))
        config = None
    if config is None and not problems:
        problems.append(_problem("no_config", "config.json", "is not in the folder"))
    evidence["config"] = config
    evidence["config_sha256"] = _hash_json(config) if config is not None else None
    evidence["generation_config"] = _read_json(root, "generation_config.json", problems)
    evidence.update(_part(_tokenizer, "tokenizer_config.json", root, problems))
    evidence["python_files"] = _names(root, "*.py")
    evidence["disk_free_bytes"] = shutil.disk_usage(root).free
    collecting = gc.isenabled()
    gc.disable()  # a trillion parameters have 200,000 tensors, whose entries the collector would walk again and again
    try:
        evidence.update(_part(_weights, "model.safetensors.index.json", root, problems))
    finally:
        if collecting:
            gc.enable()
    return evidence


def _part(
    read: Callable[[str, list[dict[str, str]]], dict[str, Any]], file: str, root: str, problems: list[dict[str, str]]
) -> dict[str, Any]:
    """What a part's files say; a problem, and what no files say, where they hold what no such file does."""
    try:
        return read(root, problems)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        detail = f"or a file beside it holds what no such file does: {type(error).__name__}: {error}"
        problems.append(_problem("bad_json", file, detail))
        return read(os.devnull, [])


def _problem(kind: str, file: str, detail: str) -> dict[str, str]:
    return {"kind": kind, "file": file, "detail": detail}


def _names(root: str, pattern: str) -> list[str]:
    return sorted(os.path.basename(file) for file in glob.glob(os.path.join(glob.escape(root), pattern)))


def _hash_json(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _read_json(root: str, name: str, problems: list[dict[str, str]]) -> dict[str, Any] | None:
    """A JSON object of the folder; None if it is not there, None and a problem if it cannot be read."""
    try:
        with open(os.path.join(root, name), "rb") as file:
            content = file.read()
        if content.startswith(LFS_POINTER):
            problems.append(_problem("lfs_pointer", name, "is a Git LFS pointer, not the file itself"))
            return None
        data = json.loads(content.decode("utf-8-sig"))
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(_problem("unreadable", name, f"cannot be read: {error.strerror}"))
        return None
    except (ValueError, RecursionError) as error:
        problems.append(_problem("bad_json", name, f"is not valid JSON: {error}"))
        return None
    if not isinstance(data, dict):
        problems.append(_problem("bad_json", name, "is not a JSON object"))
        return None
    return data


def _nests(data: Any, levels: int) -> bool:
    """Whether lists and objects are in one another for more than so many levels."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return levels == 0 or any(_nests(item, levels - 1) for item in inner)


# ---- Tokenizer ----


def _tokenizer(root: str, problems: list[dict[str, str]]) -> dict[str, Any]:
    """Identity of tokenizer and chat template, the number of token ids, and the added tokens."""
    settings = _read_json(root, "tokenizer_config.json", problems) or {}
    template = _template(root, settings, problems)
    hashes = {}
    for name in TOKENIZER_FILES:
        try:
            with open(os.path.join(root, name), "rb") as file:
                hashes[name] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            continue
    if "tokenizer_config.json" in hashes:  # the template has a hash of its own
        hashes["tokenizer_config.json"] = _hash_json({k: v for k, v in settings.items() if k != "chat_template"})
    largest, added = _vocabulary(root, settings)
    pad = settings.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    return {
        "tokenizer_files": hashes,
        "tokenizer_sha256": _hash_json(hashes) if hashes else None,
        "tokenizer_size": largest + 1 if largest >= 0 else None,
        "added_tokens": added,
        "pad_token": pad,
        "tokenizer_auto_map": settings.get("auto_map"),
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template is not None else None,
    }


def _template(root: str, settings: dict[str, Any], problems: list[dict[str, str]]) -> str | None:
    """The default chat template, from where transformers looks for it, in its order."""
    try:
        with open(os.path.join(root, "chat_template.jinja"), encoding="utf-8") as file:
            return file.read()
    except OSError:
        legacy = _read_json(root, "chat_template.json", problems) or settings
    template = legacy.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _vocabulary(root: str, settings: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Largest token id, -1 where no file tells it, and the ids of added tokens.

    Of tokenizer.json only vocabulary and added tokens are decoded: the merges are several times their size.
    """
    added = {entry["content"]: int(i) for i, entry in (settings.get("added_tokens_decoder") or {}).items()}
    try:
        with open(os.path.join(root, "tokenizer.json"), encoding="utf-8") as file:
            text = file.read()
        entries = _value_in(text, r'"added_tokens"\s*:\s*(?=\[)')
        added.update({entry["content"]: entry["id"] for entry in entries or ()})
        vocabulary = _value_in(text, r'"vocab"\s*:\s*')
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
        largest = int(max(ids, default=-1))
    except (OSError, ValueError, KeyError, TypeError):
        largest = _vocabulary_without_tokenizer_json(root)
    return max([largest, *added.values()]) if largest >= 0 else -1, added


def _value_in(text: str, key: str) -> Any:
    """The first JSON value after `key`; a quoted key cannot occur within a JSON string, where quotes are escaped."""
    found = re.search(key, text)
    return json.JSONDecoder().raw_decode(text, found.end())[0] if found else None


def _vocabulary_without_tokenizer_json(root: str) -> int:
    """Largest id in the files of tiktoken, GPT-2 and Mistral tokenizers; -1 where there are none."""
    try:
        with open(os.path.join(root, "tiktoken.model"), "rb") as file:
            return int(file.read().split()[-1])  # lines of token and rank
    except (OSError, ValueError, IndexError):
        pass
    vocabulary = _read_json(root, "vocab.json", [])
    if vocabulary:
        return max(vocabulary.values())
    tekken = _read_json(root, "tekken.json", []) or {}
    return int(tekken.get("config", {}).get("default_vocab_size", 0)) - 1


# ---- Weights ----


def _weights(root: str, problems: list[dict[str, str]]) -> dict[str, Any]:
    """Files, sizes, tensors and identity of the safetensors checkpoint."""
    indices = _names(root, "*.safetensors.index.json")
    index_name = "model.safetensors.index.json" if "model.safetensors.index.json" in indices else "".join(indices[:1])
    index = (_read_json(root, index_name, problems) if index_name else None) or {}
    placed = index.get("weight_map")  # tensor -> file
    placed = placed if isinstance(placed, dict) else {}
    names = sorted(set(placed.values())) or _loose_shards(root)
    if not names:
        others = _names(root, "*.bin") + _names(root, "*.gguf") + _names(root, "*.pt*")
        detail = "has no safetensors files" + (f", only {', '.join(others)}" if others else "")
        problems.append(_problem("no_weights", root, detail))
    identity = hashlib.sha256()
    headers: dict[str, dict[str, Any]] = {}
    shards = []
    for name in names:
        shard: dict[str, Any] = {"name": name, "bytes": 0}
        headers[name] = {}
        try:
            headers[name] = _read_shard(os.path.join(root, name), shard, identity)
        except _Unusable as error:
            problems.append(_problem(error.kind, name, str(error)))
            shard["problem"] = error.kind
        shards.append({**shard, "tensors": len(headers[name])})
    whole = bool(shards) and not any("problem" in shard for shard in shards)
    lost = [name for name, file in placed.items() if name not in headers[file]] if whole else []
    if lost:
        detail = f"names {len(lost)} tensors that their files do not hold, such as {lost[0]} in {placed[lost[0]]}"
        problems.append(_problem("lost_tensors", index_name, detail))
    return {
        "index_file": index_name or None,
        "shards": shards,
        "declared_bytes": int((index.get("metadata") or {}).get("total_size") or 0) or None,
        "weights_sha256": identity.hexdigest() if whole else None,
        **summarize(headers),
    }


def _loose_shards(root: str) -> list[str]:
    """Weight files of a folder without an index; Mistral ships the same weights under two names."""
    names = _names(root, "*.safetensors")
    return [name for name in names if name.startswith("model")] or names


def _read_shard(file: str, shard: dict[str, Any], identity: Any) -> dict[str, Any]:
    """The header of one weight file, tensor -> {dtype, shape, data_offsets}.

    Sets the size in `shard`; feeds name, size, header and both ends of the data to the hash `identity`.
    """
    try:
        with open(file, "rb") as stream:
            size = shard["bytes"] = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if not start:
                raise _Unusable("empty_shard", "is empty")
            if LFS_POINTER.startswith(start):
                raise _Unusable("lfs_pointer", f"is a Git LFS pointer of {size} bytes, not the weights")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 0 < length <= MAX_HEADER_BYTES:
                raise _Unusable("bad_header", "is not a safetensors file")
            raw = stream.read(length)
            if len(raw) < length:
                raise _Unusable("truncated_shard", f"is cut off within its header, after {size} bytes")
            header = json.loads(raw.decode("utf-8"))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if end != size:
                kind = "truncated_shard" if size < end else "bad_header"
                raise _Unusable(kind, f"has {size} bytes where its header says {end}")
            identity.update(f"{shard['name']}\0{size}\0".encode() + raw + stream.read(EDGE_BYTES))
            stream.seek(max(8 + length, size - EDGE_BYTES))
            identity.update(stream.read(EDGE_BYTES))
            return header
    except FileNotFoundError:
        raise _Unusable("missing_shard", "is named in the index and not in the folder") from None
    except OSError as error:
        raise _Unusable("unreadable", f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _Unusable("bad_header", f"has a header that safetensors does not allow: {error}") from error


def summarize(headers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a report needs of the tensors of all files, in bounded size.

    Args:
        headers: file -> tensor -> {dtype, shape, data_offsets}

    Returns:
        tensors: name -> {dtype, shape, file} for all outside numbered layers, and for the first layer with experts
            and the first without, of experts number 0 only.
        dtype_bytes: dtype -> bytes.
        expert_bytes: bytes of routed experts.
        layers: name of a stack of layers -> layers that it has in the files.
    """
    kept = []  # (tensor, file)
    bytes_of: dict[tuple[str, bool], int] = {}  # (dtype, of an expert)
    stacks: dict[str, dict[str, list[tuple[str, str]]]] = {}  # stack -> layer -> (tensor, file)
    for file, header in headers.items():
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            expert = ".experts." in name
            kind = entry["dtype"], expert
            bytes_of[kind] = bytes_of.get(kind, 0) + end - begin
            if expert and ".experts.0." not in name and _EXPERT.search(name):
                continue
            layer = _LAYER.match(name)
            if layer is None:
                kept.append((name, file))
            else:
                stacks.setdefault(layer.group(1), {}).setdefault(layer.group(2), []).append((name, file))
    for stack, layers in stacks.items():
        if not any(word in stack for word in NOT_TEXT):
            kept += _examples(layers)
    dtype_bytes: dict[str, int] = {}
    for (dtype, _), size in bytes_of.items():
        dtype_bytes[dtype] = dtype_bytes.get(dtype, 0) + size
    return {
        "tensors": {
            name: {"dtype": headers[file][name]["dtype"], "shape": headers[file][name]["shape"], "file": file}
            for name, file in sorted(kept)
        },
        "dtype_bytes": dtype_bytes,
        "expert_bytes": sum(size for (_, expert), size in bytes_of.items() if expert),
        "layers": {stack: len(layers) for stack, layers in stacks.items()},
    }


def _examples(layers: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The tensors of the first layer with experts and of the first without."""
    found: dict[bool, list[tuple[str, str]]] = {}
    for number in sorted(layers, key=int):
        found.setdefault(any(".experts." in name for name, _ in layers[number]), layers[number])
    return [tensor for tensors in found.values() for tensor in tensors]
