"""What is known of a target model from its configuration and its weight files' headers: `TargetFacts`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from draftsmith.errors import TargetError, TargetNotFoundError
from draftsmith.layers import default_aux_layer_ids
from draftsmith.probe.hub import read_evidence
from draftsmith.probe.rope import read_rope
from draftsmith.probe.tensors import Keys, find_keys, stored_head
from draftsmith.records import TargetFacts

# Where wrappers of several modalities keep the text model's configuration; one may hold another.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
MLA_DIMS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # Nemotron-H's hybrid_override_pattern


def read_facts(model: str, *, revision: str | None = None) -> TargetFacts:
    """Facts of a local folder, or of a hub id from the hub's cache or, if it is not there, from the network.

    Raises:
        TargetNotFoundError: no such folder, hub id or revision, or no right to read it, or no network.
        TargetError: there is no readable config.json.
    """
    return facts_from_evidence(read_evidence(model, revision=revision))


class _Reading:
    """Looks settings up, the text model's before the wrapper's, and keeps note of what is not there."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.outer = self.inner = config
        self.wrapper: str | None = None
        self.missing: list[str] = []
        self.derived: list[str] = []
        while key := next((k for k in TEXT_CONFIGS if isinstance(self.inner.get(k), dict)), None):
            self.inner, self.wrapper = self.inner[key], f"{self.wrapper}.{key}" if self.wrapper else key

    def get(self, *keys: str) -> Any:
        places = (self.inner, self.outer)
        return next((place[k] for place in places for k in keys if place.get(k) is not None), None)

    def fact(self, name: str, *aliases: str) -> Any:
        """The setting; if no key for it exists, None and a note in `missing`. A null is a statement, not an absence."""
        keys = (name, *aliases)
        if not any(key in place for place in (self.inner, self.outer) for key in keys):
            self.missing.append(name)
        return self.get(*keys)

    def count(self, name: str, *aliases: str) -> int | None:
        """A fact that is a whole number."""
        value = self.fact(name, *aliases)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TargetError(f"{name} is {value!r}, not a whole number", where="config.json")
        return value

    def size(self, name: str, *aliases: str) -> int | None:
        """A count that no model has none of."""
        value = self.count(name, *aliases)
        if value is not None and value < 1:
            hint = "take config.json from where the model was published"
            raise TargetError(f"{name} is {value}, and must be 1 or more", where="config.json", hint=hint)
        return value

    def derive(self, name: str, value: int | None) -> int | None:
        """A fact that is not written down but follows; None stays missing."""
        if value is not None:
            self.derived.append(name)
            self.missing = [other for other in self.missing if other != name]
        return value


def facts_from_evidence(evidence: dict[str, Any]) -> TargetFacts:
    """Facts from what `gather` found, on this machine or another.

    Raises:
        TargetNotFoundError: the folder is not there.
        TargetError: it has no readable config.json, or one with a value of the wrong kind.
    """
    reading = _Reading(_config(evidence))
    tensors = evidence.get("tensors") or {}
    vocab_size = reading.size("vocab_size", "n_vocab", "padded_vocab_size")
    tied = _tied(reading, tensors)
    keys = find_keys(tensors, vocab_size, tied) if tensors else Keys(None, None, None, {})
    rows, width = tensors[keys.embedding]["shape"] if keys.embedding else (None, None)
    hidden_size = reading.size("hidden_size", "n_embd", "d_model", "dim") or reading.derive("hidden_size", width)
    num_hidden_layers = reading.size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    attention = _attention(reading, tensors, hidden_size)
    mla = {dim: reading.get(dim) for dim in MLA_DIMS} if attention["attention"] == "mla" else None
    rope = read_rope({**reading.outer, **reading.inner}, attention["head_dim"])
    generation = evidence.get("generation_config") or {}
    eos = generation.get("eos_token_id")
    facts = TargetFacts(
        path=evidence["path"],
        revision=evidence.get("revision"),
        architecture=next(iter(reading.outer.get("architectures") or reading.inner.get("architectures") or ()), None),
        model_type=reading.outer.get("model_type"),
        text_model_type=reading.inner.get("model_type"),
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(reading, tensors),
        vocab_size=vocab_size or reading.derive("vocab_size", rows),
        **attention,
        hidden_act=reading.fact("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
        rms_norm_eps=reading.fact(
            "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon", "layernorm_epsilon"
        ),
        max_position_embeddings=reading.count("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=tied,
        num_experts=reading.count("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        scoring_func=reading.fact("scoring_func"),
        topk_method=reading.fact("topk_method"),
        llama_4_scaling=rope.llama_4_scaling,
        dtype=reading.fact("dtype", "torch_dtype"),
        quantization=reading.fact("quantization", "quantization_config", "compression_config"),
        auto_map=reading.outer.get("auto_map") or reading.inner.get("auto_map"),
        bos_token_id=reading.count("bos_token_id"),
        eos_token_ids=_ids(eos if eos is not None else reading.get("eos_token_id")),
        weight_bytes=_weight_bytes(evidence),
        weight_files=len(evidence.get("shards") or ()) or None,
        aux_layer_ids=_aux_layer_ids(num_hidden_layers),
        embedding_key=keys.embedding,
        lm_head_key=keys.lm_head,
        final_norm_key=keys.final_norm,
        config_sha256=evidence.get("config_sha256"),
        weights_sha256=evidence.get("weights_sha256"),
        tokenizer_sha256=evidence.get("tokenizer_sha256"),
        template_sha256=evidence.get("template_sha256"),
        wrapper=reading.wrapper,
        partial_rotary_factor=rope.partial_factor,
        rope_local_theta=rope.local_theta,
        layer_types=_layer_types(reading, num_hidden_layers),
        mla=mla,
        pad_token_id=reading.get("pad_token_id"),
        tokenizer_size=evidence.get("tokenizer_size"),
        embedding_rows=rows,
        lm_head_dtype=tensors[keys.lm_head]["dtype"] if keys.lm_head else None,
        derived=tuple(reading.derived),
    )
    facts = replace(facts, missing=_missing(facts, {*reading.missing, *rope.missing}))
    try:
        return TargetFacts.from_json(json.dumps(facts.to_json()))
    except ValueError as error:
        raise TargetError(
            f"has a setting of a kind that no model has: {error}",
            where=evidence["path"],
            hint="correct it in config.json or generation_config.json",
        ) from error


def _missing(facts: TargetFacts, absent: set[str]) -> tuple[str, ...]:
    """The facts that the target does not state, in the order of the record."""
    stated_elsewhere = ("architecture", "model_type", "weight_bytes", "weight_files", "aux_layer_ids")
    absent |= {name for name in stated_elsewhere if getattr(facts, name) is None}
    return tuple(field.name for field in fields(facts) if field.name in absent)


# What a setting is in every dialect, where another kind of value would be read amiss; null is allowed everywhere.
_KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "an object": (
        lambda value: isinstance(value, dict),
        (*TEXT_CONFIGS, "rope_scaling", "rope_parameters", "quantization", "quantization_config", "compression_config",
         "auto_map", "linear_attn_config"),
    ),
    "a list of names": (
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        ("architectures", "layer_types", "layers_block_type"),
    ),
    "a list": (lambda value: isinstance(value, list), ("attn_type_list", "full_attn_layers", "kda_layers")),
    "a text": (lambda value: isinstance(value, str), ("hybrid_override_pattern", "rope_type", "type")),
    "true or false": (lambda value: isinstance(value, bool), ("tie_word_embeddings",)),
    "a whole number above 0": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        ("full_attention_interval", "n_embd"),
    ),
}  # fmt: skip
_INSIDE = (*TEXT_CONFIGS, "rope_scaling", "rope_parameters", "linear_attn_config")


def _refuse_misshapen(config: dict[str, Any]) -> None:
    """Raises TargetError where a setting is of another kind than in every dialect."""
    for kind, (fits, keys) in _KINDS.items():
        for key in keys:
            value = config.get(key)
            if value is not None and not fits(value):
                raise TargetError(f"{key} is {json.dumps(value)[:60]}, not {kind}", where="config.json")
    for key in _INSIDE:
        part = config.get(key) or {}
        by_layer_type = part.values() if key.startswith("rope") else ()
        for inner in (part, *by_layer_type):
            if isinstance(inner, dict) and inner:
                _refuse_misshapen(inner)


def _config(evidence: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] | None = evidence.get("config")
    if config is not None:
        _refuse_misshapen(config)
        return config
    problem = evidence["problems"][0]
    if problem["kind"] == "no_folder":
        raise TargetNotFoundError(
            problem["detail"], where=evidence["path"], hint="give a model folder, or a hub id such as Qwen/Qwen3-8B"
        )
    raise TargetError(
        f"{problem['file']} {problem['detail']}",
        where=evidence["path"],
        hint="a model folder holds config.json, safetensors files and a tokenizer; `git lfs pull` fetches pointers",
    )


def _tied(reading: _Reading, tensors: dict[str, Any]) -> bool | None:
    """`tie_word_embeddings`; where a wrapper and its text model contradict each other, the weights decide."""
    said = {place.get("tie_word_embeddings") for place in (reading.inner, reading.outer)}
    if tensors and {True, False} <= said:
        reading.derived.append("tie_word_embeddings")
        return stored_head(tensors) is None
    return reading.fact("tie_word_embeddings")


def _attention(reading: _Reading, tensors: dict[str, Any], hidden_size: int | None) -> dict[str, Any]:
    """Heads, their width and the kind of attention; what is not configured is measured in a layer's projections.

    MLA has no one head width: its queries and values differ, and hidden size over heads is neither.
    """
    heads = reading.size("num_attention_heads", "n_head", "num_heads", "n_heads")
    key_value_heads = reading.size("num_key_value_heads", "n_head_kv", "num_kv_heads")
    head_dim = reading.size("head_dim")
    if reading.get("kv_lora_rank"):
        return _heads(heads, key_value_heads, head_dim, "mla")
    out_columns = _projection(tensors, "o_proj", 1)
    key_rows = _projection(tensors, "k_proj", 0)
    if head_dim is None:
        measured = out_columns // heads if out_columns and heads else _projection(tensors, "q_norm", 0)
        if measured is None and heads and hidden_size and hidden_size % heads == 0:
            measured = hidden_size // heads
        head_dim = reading.derive("head_dim", measured)
    if heads is None and out_columns and head_dim:
        heads = reading.derive("num_attention_heads", out_columns // head_dim)
    if key_value_heads is None:
        one = reading.get("multi_query") and not reading.get("new_decoder_architecture")  # Falcon
        measured = key_rows // head_dim if key_rows and head_dim else 1 if one else heads
        key_value_heads = reading.derive("num_key_value_heads", measured)
    if heads is None or key_value_heads is None:
        reading.missing.append("attention")
        return _heads(heads, key_value_heads, head_dim, None)
    kind = "mha" if key_value_heads == heads else "mqa" if key_value_heads == 1 else "gqa"
    return _heads(heads, key_value_heads, head_dim, kind)


def _heads(heads: int | None, key_value_heads: int | None, head_dim: int | None, kind: str | None) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "attention": kind,
    }


def _projection(tensors: dict[str, Any], module: str, dimension: int) -> int | None:
    """Size of an unpacked weight in the first layer that has such a module."""
    for name, entry in tensors.items():
        if name.endswith(f".{module}.weight") and entry["dtype"] in ("BF16", "F16", "F32", "F8_E4M3"):
            return entry["shape"][dimension] if len(entry["shape"]) > dimension else None
    return None


def _intermediate_size(reading: _Reading, tensors: dict[str, Any]) -> int | None:
    value = reading.fact("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
    if isinstance(value, list) and value and all(isinstance(size, int) for size in value):  # by layer
        return reading.derive("intermediate_size", max(value))
    if value is None and (width := reading.get("n_embd")):  # GPT-2 and its kin, where n_inner is null
        return reading.derive("intermediate_size", 4 * width)
    return value if value is not None else reading.derive("intermediate_size", _projection(tensors, "down_proj", 1))


def _layer_types(reading: _Reading, num_hidden_layers: int | None) -> dict[str, int] | None:
    """How many layers there are of each kind, where the configuration tells kinds apart."""
    written = reading.get("layer_types", "layers_block_type")
    if written:
        return dict(Counter(written))
    if pattern := reading.get("hybrid_override_pattern"):
        return dict(Counter(_PATTERN.get(letter, letter) for letter in pattern))
    if flags := reading.get("attn_type_list"):  # MiniMax-01
        return dict(Counter("full_attention" if flag else "linear_attention" for flag in flags))
    if linear := reading.get("linear_attn_config"):  # Kimi-Linear
        lists = {"full_attention": "full_attn_layers", "linear_attention": "kda_layers"}
        return {kind: len(linear.get(key) or ()) for kind, key in lists.items()}
    interval = reading.get("full_attention_interval")
    if interval and num_hidden_layers:
        full = num_hidden_layers // interval
        return {"full_attention": full, "linear_attention": num_hidden_layers - full}
    return None


def _aux_layer_ids(num_hidden_layers: int | None) -> tuple[int, ...] | None:
    try:
        return default_aux_layer_ids(num_hidden_layers) if num_hidden_layers else None
    except TargetError:  # too shallow: the checks say so
        return None


def _ids(value: Any) -> tuple[Any, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _weight_bytes(evidence: dict[str, Any]) -> int | None:
    """Of the files, or, where some are not there, what the index declares."""
    shards = evidence.get("shards") or []
    if shards and not any(problem["kind"].endswith("_shard") for problem in evidence["problems"]):
        return sum(shard["bytes"] for shard in shards)
    return evidence.get("declared_bytes")
