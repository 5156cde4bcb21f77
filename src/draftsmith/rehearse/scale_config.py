"""A target's configuration with the same shape and small numbers: which settings shrink, and to what.

The target's own JSON is edited, so that its dialect, its absent settings and its wrapper stay as they are. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from draftsmith.errors import TargetError
from draftsmith.probe.facts import TEXT_CONFIGS

LAYERS = 7  # the fewest for which the default layer ids (2, N // 2, N - 3) are distinct
MOST_LAYERS = 16
ORDINARY_TOKENS = 512  # ids below are nobody's special tokens, but for those that the target has there itself
VOCABULARY = ORDINARY_TOKENS + 64
HIDDEN, INTERMEDIATE, EXPERT_INTERMEDIATE = 256, 256, 128  # whole blocks of every layout: 128 x 128, groups of 32
Q_LORA_RANK = 128
HEADS, KEY_VALUE_HEADS, MLA_HEADS = 4, 2, 2
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_GROUPS = 8, 2, 2
TOWER = 64  # width of the towers of other modalities
REACH = 64  # tokens after which a window or a scale by position sets in: short sequences must meet it
CACHE_BLOCK = 128  # tokens in a block of vLLM's cache on a CPU; on a GPU it has fewer
MOST_POSITIONS = 1 << 18  # an engine keeps the rotation of each in memory: 5 GB for Llama-4's ten million

NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")
NUM_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# Every how many layers another kind comes; so many layers and one more show both.
PERIODS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "full_attention_interval",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "no_rope_layer_interval",
    "attn_layer_period",
    "expert_layer_period",
    "moe_layer_freq",
)
# Settings that hold numbers of layers, not one entry per layer.
LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
# Layers that predict tokens further ahead, which transformers does not build.
PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_SPECIAL = re.compile(r"(_token_ids?|_token_index|_token_indices)$")
_NOT_MODELS = ("quantization_config", "compression_config", "generation_config")


@dataclass
class Shrunk:
    """A configuration made small.

    Attributes:
        config: the edited JSON.
        changes: dotted setting -> (target's, scale model's).
        kept_layers: numbers of the target's layers whose kinds the scale model's layers have.
    """

    config: dict[str, Any]
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    kept_layers: tuple[int, ...] = ()


def shrink(config: dict[str, Any], effective: dict[str, Any], *, width: str, num_hidden_layers: int | None) -> Shrunk:
    """Shrink a target's configuration.

    Args:
        config: its config.json.
        effective: the same with the defaults of transformers' class filled in, where wrappers nest their parts.
        width: "small", or "full", which shrinks the number of layers alone.
        num_hidden_layers: of the scale model; by default as few as show every kind of layer.

    Raises:
        TargetError: it does not say how many layers, heads or hidden units it has.
    """
    shrunk = Shrunk(deepcopy(config))
    path, text = _text_part(shrunk.config)
    _, full_text = _text_part(effective)
    shrunk.kept_layers = _layers_to_keep(text, full_text, num_hidden_layers)
    _apply(shrunk, path, text, full_text, _layer_settings(text, full_text, shrunk.kept_layers))
    if width == "small":
        _apply(shrunk, path, text, full_text, _text_widths(text, full_text))
        hidden = next(value for key in HIDDEN_SIZE if (value := text.get(key)) is not None)
        _apply(shrunk, "", shrunk.config, effective, {"projection_hidden_size": TOWER})
        for name, tower, full_tower in _towers(shrunk.config, effective):
            _apply(shrunk, name, tower, full_tower, _tower_widths(tower, full_tower, hidden))
        _shrink_reach(shrunk, path, text, full_text)
        _move_special_tokens(shrunk, effective)
    return shrunk


def _text_part(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The innermost text configuration and its dotted place, "" for the whole."""
    path = ""
    while key := next((key for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), None):
        config, path = config[key], f"{path}{key}."
    return path, config


def _towers(
    config: dict[str, Any], effective: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Configurations of the parts that are no text model: dotted place, the JSON's, the effective one."""
    for key, full in effective.items():
        if not key.endswith("_config") or key in _NOT_MODELS or not isinstance(full, dict):
            continue
        if key not in TEXT_CONFIGS:
            part = config.setdefault(key, {})
            yield f"{path}{key}.", part, full
            yield from _towers(part, full, f"{path}{key}.")
        elif isinstance(config.get(key), dict):
            yield from _towers(config[key], full, f"{path}{key}.")


def _apply(shrunk: Shrunk, path: str, part: dict[str, Any], effective: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Set what the part has, by itself or by default, to what is wanted; note what that changes."""
    for key, new in wanted.items():
        old = part.get(key, effective.get(key))
        if old is not None and old != new:
            part[key] = new
            shrunk.changes[f"{path}{key}"] = (old, new)


# ---- Layers ----


def _layers_to_keep(text: dict[str, Any], effective: dict[str, Any], count: int | None) -> tuple[int, ...]:
    """Numbers of the target's layers that show each kind.

    The first ones, if few of them do and end as the target ends: engines derive kinds from numbers too.
    """
    total = _first(text, effective, NUM_LAYERS)
    if total is None:
        raise TargetError("its configuration does not say how many decoder layers it has", where="config.json")
    kinds = list(zip(*_per_layer(text, total).values(), strict=True)) or [()] * total
    if count is None:
        periods = [value for key in PERIODS if isinstance(value := text.get(key, effective.get(key)), int)]
        dense = _first(text, effective, ("first_k_dense_replace",)) or 0
        count = min(total, max(LAYERS, *(period + 1 for period in periods), dense + 2))
        for longer in range(count, min(total, MOST_LAYERS) + 1):
            if set(kinds[:longer]) == set(kinds) and kinds[longer - 1] == kinds[-1]:
                return tuple(range(longer))
    first_of_kind = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first_of_kind.values())[:count]
    rest = [number for number in range(total) if number not in chosen]
    return tuple(sorted([*chosen, *rest[: count - len(chosen)]]))


def _per_layer(text: dict[str, Any], total: int) -> dict[str, Any]:
    """The settings with one entry for each layer: lists, and Nemotron-H's pattern of letters."""
    return {
        key: value
        for key, value in text.items()
        if (isinstance(value, list) or (isinstance(value, str) and key.endswith("_pattern")))
        and len(value) == total
        and key not in LAYER_NUMBERS
    }


def _layer_settings(text: dict[str, Any], effective: dict[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    """All settings that count or list layers, for the layers that are kept."""
    total = _first(text, effective, NUM_LAYERS)
    wanted: dict[str, Any] = dict.fromkeys(PREDICTION_LAYERS, 0)
    for key in NUM_LAYERS:
        if text.get(key, effective.get(key) if not _has(text, NUM_LAYERS) else None) is not None:
            wanted[key] = len(kept)
    for key, value in _per_layer(text, total).items():
        chosen = [value[number] for number in kept]
        wanted[key] = "".join(chosen) if isinstance(value, str) else chosen
    for key in LAYER_NUMBERS:
        if isinstance(numbers := text.get(key), list):
            wanted[key] = [place for place, number in enumerate(kept) if number in numbers]
    dense = text.get("first_k_dense_replace")
    if dense and dense >= len(kept):
        wanted["first_k_dense_replace"] = 1
    if text.get("max_window_layers") is not None:
        wanted["max_window_layers"] = min(text["max_window_layers"], len(kept))
    if _first(text, effective, ("num_kv_shared_layers",)):
        wanted["num_kv_shared_layers"] = 2
    return wanted


# ---- Widths ----


def _text_widths(text: dict[str, Any], effective: dict[str, Any]) -> dict[str, Any]:
    """Widths of the text model. Head sizes stay: an engine's kernels take some and not others."""
    heads, hidden = _first(text, effective, NUM_HEADS), _first(text, effective, HIDDEN_SIZE)
    if not heads or not hidden:
        raise TargetError("its configuration does not say how many heads and hidden units it has", where="config.json")
    mla = bool(text.get("kv_lora_rank"))
    new_heads = MLA_HEADS if mla else min(heads, HEADS)
    experts_alone = _first(text, effective, NUM_EXPERTS) and "moe_intermediate_size" not in text
    if not mla and text.get("head_dim") is None and effective.get("head_dim") in (None, hidden // heads):
        new_hidden = new_heads * (hidden // heads)
    else:
        new_hidden = min(hidden, HIDDEN)
    key_value_heads = _first(text, effective, NUM_KEY_VALUE_HEADS) or heads
    new_key_value_heads = new_heads if key_value_heads == heads else min(key_value_heads, KEY_VALUE_HEADS)
    limits = {
        "intermediate_size": EXPERT_INTERMEDIATE if experts_alone else INTERMEDIATE,
        "intermediate_size_mlp": INTERMEDIATE,
        "n_inner": INTERMEDIATE,
        "ffn_hidden_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "shared_expert_intermediate_size": EXPERT_INTERMEDIATE,
        "moe_shared_expert_intermediate_size": EXPERT_INTERMEDIATE,
        "expert_ffn_hidden_size": EXPERT_INTERMEDIATE,
        "q_lora_rank": Q_LORA_RANK,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_topk": EXPERTS_PER_TOKEN,
        "zero_expert_num": EXPERTS,
        "n_group": EXPERT_GROUPS,
        "topk_group": 1,
        "num_global_key_value_heads": KEY_VALUE_HEADS,
        "hidden_size_per_layer_input": 32,
        "mamba_num_heads": 8,
        "n_groups": 2,
    }
    wanted = {key: _at_most(new, old) for key, new in limits.items() if (old := _first(text, effective, (key,)))}
    if expand := _first(text, effective, ("mamba_expand",)):
        wanted["mamba_n_heads"] = expand * new_hidden // (_first(text, effective, ("mamba_d_head",)) or new_hidden)
    for names, new in (
        (HIDDEN_SIZE, new_hidden),
        (NUM_HEADS, new_heads),
        (NUM_KEY_VALUE_HEADS, new_key_value_heads),
        (("vocab_size",), VOCABULARY),
        (("vocab_size_per_layer_input",), VOCABULARY),
        *(((name,), EXPERTS) for name in NUM_EXPERTS if _first(text, effective, (name,))),
    ):
        place = text if _has(text, names) else effective
        wanted |= {name: new for name in names if place.get(name) is not None}
    return wanted | _linear_attention(text, effective)


def _at_most(limit: int, value: int | list[int]) -> int | list[int]:
    """The setting limited; it may be one for each layer."""
    return [min(limit, one) for one in value] if isinstance(value, list) else min(limit, value)


def _linear_attention(text: dict[str, Any], effective: dict[str, Any]) -> dict[str, Any]:
    """Heads of gated delta nets: two for keys, and for values as many times more as the target has."""
    keys = _first(text, effective, ("linear_num_key_heads",))
    values = _first(text, effective, ("linear_num_value_heads",))
    if not keys or not values:
        return {}
    return {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * values // keys}


def _tower_widths(tower: dict[str, Any], effective: dict[str, Any], hidden: int) -> dict[str, Any]:
    """The smallest tower of another modality: an engine builds it, and text alone never runs it."""
    merged = TOWER / effective.get("pixel_shuffle_ratio", 1) ** 2  # Llama-4's MLP reads patches that were put together
    return {
        **dict.fromkeys((*NUM_LAYERS, "depth", "vt_num_hidden_layers"), 1),
        **dict.fromkeys(("hidden_size", "vt_hidden_size", "embed_dim"), TOWER),
        **dict.fromkeys(("vision_input_dim", "vision_output_dim"), TOWER),
        **dict.fromkeys(("projector_input_dim", "projector_output_dim"), TOWER),
        **dict.fromkeys(("intermediate_size", "vt_intermediate_size"), int(merged)),
        **dict.fromkeys((*NUM_HEADS, "vt_num_attention_heads", "num_key_value_heads"), 2),
        **dict.fromkeys(("out_hidden_size", "text_hidden_size"), hidden),
        **dict.fromkeys(("pos_emb_height", "pos_emb_width"), 8),
        "head_dim": 32,
        "num_position_embeddings": 64,
        "fullatt_block_indexes": [0],
        "deepstack_visual_indexes": [0],
    }


def _shrink_reach(shrunk: Shrunk, path: str, text: dict[str, Any], effective: dict[str, Any]) -> None:
    """Windows and scales by position set in within a short sequence."""
    limits = {
        "sliding_window": REACH,
        "attention_chunk_size": CACHE_BLOCK,  # whole blocks of the engine's cache
        "max_position_embeddings": MOST_POSITIONS,
    }
    for key, limit in limits.items():
        if isinstance(old := text.get(key, effective.get(key)), int) and old > limit:
            _apply(shrunk, path, text, effective, {key: limit})
    for key in ("llama_4_scaling", "rope_parameters", "rope_scaling"):
        part = text.get(key)
        if isinstance(part, dict) and (key == "llama_4_scaling" or part.get("llama_4_scaling_beta")):
            _apply(shrunk, f"{path}{key}.", part, {}, {"original_max_position_embeddings": REACH})


# ---- Special tokens ----


def _move_special_tokens(shrunk: Shrunk, effective: dict[str, Any]) -> None:
    """Give each special token that the vocabulary lost an id of its own above the ordinary ones."""
    part, full = shrunk.config, effective
    while True:  # those that transformers' class has by default, and the configuration does not state
        part |= {
            key: value
            for key, value in full.items()
            if key not in part and _SPECIAL.search(key) and isinstance(value, int) and value >= VOCABULARY
        }
        key = next((key for key in TEXT_CONFIGS if isinstance(part.get(key), dict)), None)
        if key is None:
            break
        part, full = part[key], full[key]
    places = list(_special_tokens(shrunk.config, ""))
    numbers = {n for _, _, _, value in places for n in (value if isinstance(value, list) else [value])}
    moved = {old: ORDINARY_TOKENS + rank for rank, old in enumerate(sorted(n for n in numbers if n >= ORDINARY_TOKENS))}
    if len(moved) > VOCABULARY - ORDINARY_TOKENS:
        raise TargetError(f"its configuration names {len(moved)} special tokens", where="config.json")
    for path, part, key, value in places:
        new = [moved.get(n, n) for n in value] if isinstance(value, list) else moved.get(value, value)
        _apply(shrunk, path, part, {}, {key: new})


def _special_tokens(part: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Dotted place, the configuration there, key and value of each setting that holds ids of special tokens."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from _special_tokens(value, f"{path}{key}.")
        elif _SPECIAL.search(key) and (isinstance(value, int) or (isinstance(value, list) and value)):
            yield path, part, key, value


def _first(text: dict[str, Any], effective: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((place[name] for place in (text, effective) for name in names if place.get(name) is not None), None)


def _has(part: dict[str, Any], names: tuple[str, ...]) -> bool:
    return any(part.get(name) is not None for name in names)
