"""Model folders on disk for the probe's tests: real files in the real formats, with the fewest bytes that serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}
CONFIGS = Path(__file__).parent / "configs"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
EMBEDDING = {"model.embed_tokens.weight": ("BF16", [32, 8])}
HEAD = {"lm_head.weight": ("BF16", [32, 8])}
NORM = {"model.norm.weight": ("BF16", [8])}
LAYERS = {f"model.layers.{i}.input_layernorm.weight": ("BF16", [8]) for i in range(8)}
TENSORS = {**EMBEDDING, **HEAD, **NORM, **LAYERS}

Tensors = dict[str, tuple[str, list[int]]]


def header_of(tensors: Tensors) -> tuple[bytes, int]:
    """The header of a safetensors file with its length before it, and the size of the data that follows."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        end += BYTES[dtype] * (shape[0] if len(shape) == 1 else shape[0] * shape[1])
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return len(raw).to_bytes(8, "little") + raw, end


def write_shard(file: Path, tensors: Tensors, fill: bytes = b"\0") -> Path:
    start, size = header_of(tensors)
    file.write_bytes(start + fill * size)
    return file


def write_model(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A one-file checkpoint with its configuration. A setting given as `...` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))
    write_shard(folder / "model.safetensors", TENSORS if tensors is None else tensors)
    return folder


def write_sharded(folder: Path, shards: dict[str, Tensors], **config: Any) -> Path:
    """A checkpoint of several files with its index."""
    write_model(folder, **config)
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        write_shard(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def evidence_of(config: dict[str, Any], tensors: Tensors | None = None) -> dict[str, Any]:
    """Evidence that `gather` would give of a folder with this configuration, and of these tensors."""
    named = {name: {"dtype": dtype, "shape": shape, "file": "m"} for name, (dtype, shape) in (tensors or {}).items()}
    return {"path": "model", "problems": [], "config": config, "tensors": named}
