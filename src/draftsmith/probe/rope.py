"""Rotary position embedding in every dialect of configuration, as one set of facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_THETA = ("rope_theta", "rotary_emb_base", "rope_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_RENAMED = {"su": "longrope"}  # Phi-3's first name for it


@dataclass(frozen=True)
class Rope:
    """`missing` names what the configuration does not have; a scaling that it denies (null, "default") is None only."""

    theta: float | None
    scaling: dict[str, Any] | None
    local_theta: float | None
    partial_factor: float | None
    missing: tuple[str, ...]


def read_rope(config: dict[str, Any], head_dim: int | None) -> Rope:
    """RoPE of a text configuration.

    Understands `rope_theta` with `rope_scaling` (whose kind is `rope_type` or `type`), `rope_parameters` of
    transformers 5, flat or by layer type, where the full-attention layers' are the model's, GPT-NeoX's
    `rotary_emb_base` and `rotary_pct`, MiniMax's `rotary_dim`, Gemma 3's `rope_local_base_freq`.
    """
    parameters = config.get("rope_parameters") or {}
    by_layer_type = {kind: value for kind, value in parameters.items() if isinstance(value, dict)}
    local = by_layer_type.get("sliding_attention", {})
    if by_layer_type:
        parameters = by_layer_type.get("full_attention") or next(iter(by_layer_type.values()))
    theta = _number(parameters.get("rope_theta"))
    if theta is None:
        theta = next((t for t in (_number(config.get(key)) for key in _THETA) if t is not None), None)
    local_theta = _number(local.get("rope_theta"))
    missing = [] if theta is not None else ["rope_theta"]
    if not (parameters or "rope_scaling" in config or "rope_parameters" in config):
        missing.append("rope_scaling")
    return Rope(
        theta=theta,
        scaling=_scaling(parameters or config.get("rope_scaling")),
        local_theta=local_theta if local_theta is not None else _number(config.get("rope_local_base_freq")),
        partial_factor=_partial(parameters, config, head_dim),
        missing=tuple(missing),
    )


def _number(value: Any) -> float | None:
    """Zero is a number too; a list by layer is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _scaling(written: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling with its kind under `rope_type`; None if it is plain RoPE."""
    if not written:
        return None
    kind = written.get("rope_type") or written.get("type") or "default"
    kind = _RENAMED.get(kind, kind)
    rest = {k: v for k, v in written.items() if k not in ("rope_type", "type", *_THETA, *_PARTIAL)}
    return {"rope_type": kind, **rest} if rest or kind != "default" else None


def _partial(parameters: dict[str, Any], config: dict[str, Any], head_dim: int | None) -> float | None:
    """The share of each head that is rotated, where the configuration tells."""
    for place in (parameters, config):
        for key in _PARTIAL:
            if _number(place.get(key)) is not None:
                return _number(place[key])
    rotary_dim = _number(config.get("rotary_dim"))
    return rotary_dim / head_dim if rotary_dim and head_dim else None
