"""Which tensors of a checkpoint are its embedding, its head and its final norm, by their real names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.probe.gather import NOT_TEXT

EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "embed_in",
    "word_embeddings",
    "embeddings",  # Mamba backbones
    "embedding",
    "embed",
)
HEADS = ("lm_head", "output", "embed_out", "output_layer", "head")
NORMS = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm")
DENSE = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Keys:
    """Names in the weight files; what is None is explained in `problems`, by the name of the field."""

    embedding: str | None
    lm_head: str | None
    final_norm: str | None
    problems: dict[str, str]


def find_keys(tensors: dict[str, dict[str, Any]], vocab_size: int | None, tied: bool | None) -> Keys:
    """Resolve the three dense tensors that a draft and its teacher need of the target.

    Args:
        tensors: those outside numbered layers at least.
        tied: `tie_word_embeddings` of the configuration, None if it does not say. The weights decide then: a stored
            head is the head, otherwise the embedding is. True means the embedding, as in the engines, also where a
            redundant head is stored.
    """
    outside = {name: entry for name, entry in tensors.items() if _is_text(name)}
    problems: dict[str, str] = {}
    embedding = _embedding(outside, vocab_size, problems)
    if embedding is not None and outside[embedding]["dtype"] not in DENSE:
        problems["embedding"] = f"is quantised: {embedding} is {outside[embedding]['dtype']}"
        embedding = None
    module = _head_module(outside)
    if tied or (module is None and tied is None):
        lm_head = embedding
        if embedding is None:
            problems["lm_head"] = f"tied to the embedding, which is not found: {problems['embedding']}"
    elif module is None:
        lm_head = None
        problems["lm_head"] = "tie_word_embeddings is false and no lm_head.weight is stored"
    else:
        lm_head = _dense_head(module, outside, problems)
    norm = _final_norm(outside, embedding)
    if norm is None:
        problems["final_norm"] = "no tensor is named like a final norm"
    return Keys(embedding, lm_head, norm, problems)


def stored_head(tensors: dict[str, dict[str, Any]]) -> str | None:
    """Module of the head whose weights are stored, dense or packed, tied or not."""
    return _head_module({name: entry for name, entry in tensors.items() if _is_text(name)})


def _is_text(name: str) -> bool:
    """Outside numbered layers, vision and audio towers, and heads that predict several tokens."""
    parts = name.split(".")
    return not any(part.isdigit() for part in parts) and not any(word in part for part in parts for word in NOT_TEXT)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    """The module's own name: `embed_tokens` of `model.embed_tokens.weight`."""
    return _module(name).rpartition(".")[2]


def _embedding(tensors: dict[str, dict[str, Any]], vocab_size: int | None, problems: dict[str, str]) -> str | None:
    matrices = {n: t for n, t in tensors.items() if n.endswith(".weight") and len(t["shape"]) == 2}
    for alias in EMBEDDINGS:
        named = [n for n, t in matrices.items() if _leaf(n) == alias and t["shape"][0] >= (vocab_size or 0)]
        if named:
            return min(named, key=len)
    shaped = [n for n, t in matrices.items() if t["shape"][0] == vocab_size and _leaf(n) not in HEADS]
    if len(shaped) == 1:
        return shaped[0]
    candidates = ", ".join(f"{n} {t['shape']}" for n, t in matrices.items()) or "none at all"
    problems["embedding"] = f"no embedding of {vocab_size} rows by name or by shape; matrices: {candidates}"
    return None


def _head_module(tensors: dict[str, dict[str, Any]]) -> str | None:
    """A head by its name; also `lm_head.linear`."""
    for alias in HEADS:
        modules = {_module(n) for n in tensors if alias in _module(n).split(".")[-2:]}
        if modules:
            return min(modules, key=len)
    return None


def _dense_head(module: str, tensors: dict[str, dict[str, Any]], problems: dict[str, str]) -> str | None:
    key = module + ".weight"
    entry = tensors.get(key)
    stored = sorted(n for n in tensors if _module(n) == module)
    if entry is None:
        problems["lm_head"] = f"is packed: {', '.join(stored)}"
    elif entry["dtype"] not in DENSE:
        problems["lm_head"] = f"is quantised: {key} is {entry['dtype']}, stored with {', '.join(stored)}"
    else:
        return key
    return None


def _final_norm(tensors: dict[str, dict[str, Any]], embedding: str | None) -> str | None:
    """The norm beside the embedding, or the one with the shortest name."""
    named = [n for n in tensors if n.endswith(".weight") and _leaf(n) in NORMS]
    beside = [n for n in named if embedding and _module(_module(n)) == _module(_module(embedding))]
    return min(beside or named, key=len, default=None)
