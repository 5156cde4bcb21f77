"""Rotary position embedding in every dialect of configuration, as one set of facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_THETA = ("rope_theta", "rotary_emb_base", "rope_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_OWN_FACTS = ("rope_type", "type", *_THETA, *_PARTIAL, "llama_4_scaling_beta")
_RENAMED = {"su": "longrope"}  # Phi-3's first name for it


@dataclass(frozen=True)
class Rope:
    """`missing` names what the configuration does not have; a scaling that it denies (null, "default") is None only."""

    theta: float | None
    scaling: dict[str, Any] | None
    local_theta: float | None
    partial_factor: float | None
    llama_4_scaling: dict[str, Any] | None  # Mistral's scale of queries by position, {beta, original_max_position_…}
    missing: tuple[str, ...]


def read_rope(config: dict[str, Any], head_dim: int | None) -> Rope:
    """RoPE of a text configuration.

    Understands `rope_theta` with `rope_scaling` (whose kind is `rope_type` or `type`), `rope_parameters` of
    transformers 5, flat or by layer type, where the full-attention layers' are the model's, GPT-NeoX's
    `rotary_emb_base` and `rotary_pct`, MiniMax's `rotary_dim`, Gemma 3's `rope_local_base_freq`, and
    `llama_4_scaling` of its own or as Ministral's `llama_4_scaling_beta`.
    """
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = {kind: value for kind, value in written.items() if isinstance(value, dict)}
    local = by_layer_type.get("sliding_attention", {})
    if by_layer_type:
        written = by_layer_type.get("full_attention") or next(iter(by_layer_type.values()))
    theta = _first_number(_THETA, written, config)
    stated = written or "rope_scaling" in config or "rope_parameters" in config
    llama_4_scaling = _llama_4_scaling(written, config)
    missing = {
        "rope_theta": theta is None,
        "rope_scaling": not stated,
        "llama_4_scaling": llama_4_scaling is None and "llama_4_scaling" not in config,
    }
    return Rope(
        theta=theta,
        scaling=_scaling(written, config),
        local_theta=_first_number(("rope_theta", "rope_local_base_freq"), local, {**config, "rope_theta": None}),
        partial_factor=_partial(written, config, head_dim),
        llama_4_scaling=llama_4_scaling,
        missing=tuple(name for name, absent in missing.items() if absent),
    )


def _first_number(keys: tuple[str, ...], *places: dict[str, Any]) -> float | None:
    """Zero is a number too; a list by layer is none."""
    for place in places:
        for key in keys:
            if isinstance(place.get(key), int | float) and not isinstance(place[key], bool):
                return float(place[key])
    return None


def _scaling(written: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling with its kind under `rope_type`; None if it is plain RoPE. Phi-3 has the original length outside."""
    kind = written.get("rope_type") or written.get("type") or "default"
    rest = {key: value for key, value in written.items() if key not in _OWN_FACTS}
    name, original = _RENAMED.get(kind, kind), config.get("original_max_position_embeddings")
    if name == "longrope" and original is not None:
        rest = {"original_max_position_embeddings": original, **rest}
    return {"rope_type": name, **rest} if rest or kind != "default" else None


def _partial(written: dict[str, Any], config: dict[str, Any], head_dim: int | None) -> float | None:
    """The share of each head that is rotated, where the configuration tells."""
    factor = _first_number(_PARTIAL, written, config)
    rotary_dim = _first_number(("rotary_dim",), config)
    return rotary_dim / head_dim if factor is None and rotary_dim and head_dim else factor


def _llama_4_scaling(written: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    beta = written.get("llama_4_scaling_beta")
    if config.get("llama_4_scaling") or beta is None:
        return config.get("llama_4_scaling")
    return {"beta": beta, "original_max_position_embeddings": written.get("original_max_position_embeddings")}
